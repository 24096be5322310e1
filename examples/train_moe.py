"""A small mixture of experts in flax nnx, trained on the Python standard library's own sources.

Each token goes to its best expert. With `--layout 2d` every device has its own tokens and its own
experts: tokens travel to their experts and back by AllToAll.

    python examples/train_moe.py --layout 2d --mesh data=2,model=4
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Layouts, Run, standard_library, training_options
from flax import nnx

from pypto_spmd import PartitionSpec, spmd
from pypto_spmd.training import (
    Batches,
    data_parallel,
    expert_parallel,
    fsdp,
    prefetch,
    tensor_parallel,
    zero1,
)

VOCABULARY = 256  # bytes
WIDTH, HEADS, LAYERS, CONTEXT = 64, 8, 2, 64
EXPERTS, HIDDEN = 8, 256
CAPACITY = 12  # tokens of a row that an expert takes: 1.5 times its share
DROPOUT = 0.05
BATCH = 32
SEED = 0

LAYOUTS: Layouts = {
    "dp": lambda *axes: data_parallel(axes),
    "zero1": lambda *axes: zero1(axes),
    "fsdp": lambda *axes: fsdp(axes),
    "tp": lambda *axes: tensor_parallel(axis=axes),
    "ep": lambda *axes: expert_parallel([("experts", PartitionSpec(axes))], axis=axes),
    "2d": lambda data, *model: (
        data_parallel(data) | expert_parallel([("experts", PartitionSpec(model))], axis=model)
    ),
}
"""All but `2d` use every axis of the mesh for one purpose; `tp` splits each expert, `ep` their number."""

optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))


class Experts(nnx.Module):
    """Two-layer networks side by side: (experts, tokens, width) to the same."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.lecun_normal(batch_axis=0)
        self.up = nnx.Param(normal(rngs.params(), (EXPERTS, WIDTH, HIDDEN)))
        self.down = nnx.Param(normal(rngs.params(), (EXPERTS, HIDDEN, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies each expert to its own tokens, (batch, experts, capacity, width)."""
        hidden = nnx.gelu(jnp.einsum("becw,ewh->bech", x, self.up[...]))
        return jnp.einsum("bech,ehw->becw", hidden, self.down[...])


class Mixture(nnx.Module):
    """Sends each token to the expert that its router likes best, while there is room in its row."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.experts = Experts(rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps (batch, time, width) to the same; and how uneven the experts' loads are, 1 at best."""
        scores = nnx.softmax(self.router(x))
        chosen = jax.nn.one_hot(scores.argmax(axis=-1), EXPERTS, dtype=jnp.int32)
        # The place of each token in the queue of its expert; for all other experts it is -1, no place.
        place = jnp.cumsum(chosen, axis=1) * chosen - 1
        dispatch = jax.nn.one_hot(place, CAPACITY)
        out = self.experts(jnp.einsum("btec,btw->becw", dispatch, x))
        out = jnp.einsum("btec,bte,becw->btw", dispatch, scores, out)
        uneven = EXPERTS * jnp.mean(
            jnp.sum(chosen.mean(axis=1, dtype=x.dtype) * scores.mean(axis=1), axis=-1)
        )
        return out, uneven


class Block(nnx.Module):
    """Attention and a mixture of experts, each behind a layer norm and beside a residual."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm_1, self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.mixture = Mixture(rngs)
        self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps (batch, time, width) to the same; and how uneven the experts' loads are."""
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.dropout(self.attention(self.norm_1(x), mask=mask))
        y, uneven = self.mixture(self.norm_2(x))
        return x + self.dropout(y), uneven


class Model(nnx.Module):
    """Predicts each byte from those before it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.position = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps tokens (batch, time) to logits (batch, time, vocabulary); and the mean unevenness."""
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[1]))
        uneven = jnp.zeros(())
        for block in self.blocks:
            x, of_block = block(x)
            uneven += of_block / LAYERS
        return self.head(self.norm(x)), uneven


def init(key: jax.Array) -> tuple[Model, nnx.Optimizer]:
    """A new model, and its optimizer."""
    model = Model(nnx.Rngs(key))
    return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)


def train_step(model: Model, optimizer: nnx.Optimizer, text: jax.Array) -> tuple[Any, Any]:
    """A serial step on bytes, (batch, context + 1); gives nats a byte, and the experts' unevenness."""
    tokens = text.astype(jnp.int32)

    def loss_of(model: Model) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        logits, uneven = model(tokens[:, :-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return loss + 0.01 * uneven, (loss, uneven)

    grads, figures = nnx.grad(loss_of, has_aux=True)(model)
    optimizer.update(model, grads)
    return figures


def main() -> None:
    """Trains, and compares the first losses with the serial function's."""
    options = training_options(
        "Train a mixture of experts on Python's sources.",
        LAYOUTS,
        layout="2d",
        steps=200,
        check=20,
    )
    mesh, layout = options.mesh, options.layout

    start = spmd(init, mesh=mesh, parameter_shardings=layout)
    step = spmd(
        train_step,
        mesh=mesh,
        parameter_shardings=layout,
        donate_argnames=("model", "optimizer"),
    )
    model, optimizer = start(jax.random.key(SEED))
    state = nnx.Dict(model=model, optimizer=optimizer)  # what is saved
    text = standard_library(CONTEXT + 1)
    with (
        prefetch(Batches(text, BATCH, drop_last=True), layout.batch, mesh=mesh) as batches,
        Run(options) as run,
    ):
        run.resumed(state, batches)
        graph, arrays = nnx.split(state)
        serial = nnx.merge(graph, jax.device_get(arrays))
        count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
        print(f"layout {options.layout_name} on {mesh}: {count:,} parameters, {text.size:,} bytes")
        print(step.plan(model, optimizer, text[:BATCH]).summary())
        for number in run.steps():
            loss, uneven = step(model, optimizer, next(batches))
            run.done(number, loss, state, batches)

        @nnx.jit
        def serial_step(state: Any, text: Any) -> tuple[Any, jax.Array]:
            loss, _ = train_step(state.model, state.optimizer, text)
            return state, loss

        run.compare(serial_step, serial, batches)

    print(f"unevenness of the experts' loads {uneven:.3f}; 1 is even, {EXPERTS} all to one")
    print(f"last loss {loss:.4f} nats a byte; without training it is log 256 = {np.log(256):.4f}")


if __name__ == "__main__":
    main()
