"""A small GPT in flax linen, trained on the Python standard library's own sources, byte by byte.

Its layers are scanned, so that one is compiled and gathered at a time, and recomputed in the backward
pass. The state is made on the mesh: no device ever holds a whole of what the layout splits.

    python examples/train_gpt.py --layout fsdp --mesh data=4,model=2
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Layouts, Run, standard_library, training_options
from flax.training.train_state import TrainState

from pypto_spmd import spmd
from pypto_spmd.training import (
    Batches,
    data_parallel,
    fsdp,
    prefetch,
    tensor_parallel,
    zero1,
)

VOCABULARY = 256  # bytes
WIDTH, HEADS, LAYERS, CONTEXT = 128, 8, 3, 64
DROPOUT = 0.05
BATCH = 32
SEED = 0

LAYOUTS: Layouts = {
    "dp": lambda *axes: data_parallel(axes),
    "zero1": lambda *axes: zero1(axes),
    "fsdp": lambda *axes: fsdp(axes),
    "tp": lambda *axes: tensor_parallel(axis=axes),
    "2d": lambda data, *model: data_parallel(data) | tensor_parallel(axis=model),
}
"""All but `2d` use every axis of the mesh for one purpose. Tensor parallelism goes by layers' names."""

schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, 200, 3e-4)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


class Block(nn.Module):
    """Attention and a two-layer network, each behind a layer norm and beside a residual."""

    training: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Maps (batch, time, width) to the same; as `nn.scan` wants it, beside a result of each layer."""
        dropout = nn.Dropout(DROPOUT, deterministic=not self.training)
        y = nn.LayerNorm(name="norm_1")(x)
        mask = nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(num_heads=HEADS, name="attention")
        x = x + dropout(attention(y, y, mask=mask))
        y = nn.LayerNorm(name="norm_2")(x)
        y = nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(4 * WIDTH, name="up")(y)))
        return x + dropout(y), None


class GPT(nn.Module):
    """Predicts each byte from those before it."""

    @nn.compact
    def __call__(self, tokens: jax.Array, training: bool = False) -> jax.Array:
        """Maps tokens (batch, time) to logits (batch, time, vocabulary)."""
        position = nn.Embed(CONTEXT, WIDTH, name="position")(jnp.arange(tokens.shape[1]))
        x = nn.Embed(VOCABULARY, WIDTH, name="token")(tokens) + position
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
        )
        x, _ = blocks(training, name="blocks")(x, None)
        return nn.Dense(VOCABULARY, name="head")(nn.LayerNorm(name="norm")(x))


class State(TrainState):
    """What is trained, and the key of the dropout, which each step folds its number into."""

    key: jax.Array


model = GPT()


def init(key: jax.Array) -> State:
    """A new state."""
    key, dropout = jax.random.split(key)
    params = model.init(key, jnp.zeros((1, CONTEXT), jnp.int32))["params"]
    return State.create(apply_fn=model.apply, params=params, tx=optimizer, key=dropout)


def train_step(state: State, text: jax.Array) -> tuple[State, jax.Array]:
    """A serial step on bytes, (batch, context + 1); its loss is in nats a byte."""
    tokens = text.astype(jnp.int32)
    rngs = {"dropout": jax.random.fold_in(state.key, state.step)}

    def loss_of(params: Any) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens[:, :-1], training=True, rngs=rngs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def continued(params: Any, prompt: jax.Array, key: jax.Array) -> jax.Array:
    """The prompt and what the model writes after it, as far as its context goes."""

    def write(place: jax.Array, text: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, text[None])
        drawn = jax.random.categorical(jax.random.fold_in(key, place), logits[0, place - 1])
        return text.at[place].set(drawn)

    text = jnp.zeros(CONTEXT, jnp.int32).at[: prompt.size].set(prompt)
    return jax.lax.fori_loop(prompt.size, CONTEXT, write, text)


def main() -> None:
    """Trains, lets the model write, and compares the first losses with the serial function's."""
    options = training_options(
        "Train a small GPT on Python's sources.", LAYOUTS, layout="2d", steps=200, check=20
    )
    mesh, layout = options.mesh, options.layout

    start = spmd(init, mesh=mesh, parameter_shardings=layout)
    step = spmd(train_step, mesh=mesh, parameter_shardings=layout, donate_argnames="state")
    state = start(jax.random.key(SEED))
    text = standard_library(CONTEXT + 1)
    with (
        prefetch(Batches(text, BATCH, drop_last=True), layout.batch, mesh=mesh) as batches,
        Run(options) as run,
    ):
        state = run.resumed(state, batches)
        serial = jax.device_get(state)
        count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        print(f"layout {options.layout_name} on {mesh}: {count:,} parameters, {text.size:,} bytes")
        print(step.plan(state, text[:BATCH]).summary())
        for number in run.steps():
            state, loss = step(state, next(batches))
            run.done(number, loss, state, batches)
        run.compare(jax.jit(train_step), serial, batches)

    prompt = np.frombuffer(b"def ", np.uint8).astype(np.int32)
    written = continued(jax.device_get(state.params), prompt, jax.random.key(SEED))
    print(f"it writes: {bytes(np.asarray(written, np.uint8))!r}")
    print(f"last loss {loss:.4f} nats a byte; without training it is log 256 = {np.log(256):.4f}")


if __name__ == "__main__":
    main()
