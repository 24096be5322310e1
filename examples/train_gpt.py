"""A small GPT in flax, trained on the Python standard library's own sources, byte by byte.

The batch is split over the mesh axis `data`, heads and hidden features over `model`, as in Megatron:
column and row parallel layers in turn. Specs are chosen by the parameters' paths.

    python examples/train_gpt.py --mesh data=2,model=4
"""

import argparse
import re
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import mesh_argument, mesh_of

from pypto_spmd import PartitionSpec, spmd

VOCABULARY = 256  # bytes
WIDTH, HEADS, LAYERS, CONTEXT = 128, 4, 2, 128
BATCH = 16
SEED = 0

SPECS = (
    (r"attention/(query|key|value)/kernel", PartitionSpec(None, "model", None)),
    (r"attention/(query|key|value)/bias", PartitionSpec("model", None)),
    (r"attention/out/kernel", PartitionSpec("model", None, None)),
    (r"up/kernel", PartitionSpec(None, "model")),
    (r"up/bias", PartitionSpec("model")),
    (r"down/kernel", PartitionSpec("model", None)),
)
"""The spec of each parameter whose path matches; all others, and what has no dims, are whole."""


class Block(nn.Module):
    """Attention and a two-layer network, each behind a layer norm and beside a residual."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, time, width) to the same."""
        y = nn.LayerNorm(name="norm_1")(x)
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS, name="attention")(y, y, mask=mask)
        y = nn.LayerNorm(name="norm_2")(x)
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(4 * WIDTH, name="up")(y)))


class GPT(nn.Module):
    """Predicts each byte from those before it."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens (batch, time) to logits (batch, time, vocabulary)."""
        position = nn.Embed(CONTEXT, WIDTH, name="position")(jnp.arange(tokens.shape[1]))
        x = nn.Embed(VOCABULARY, WIDTH, name="token")(tokens) + position
        for layer in range(LAYERS):
            x = Block(name=f"block_{layer}")(x)
        return nn.Dense(VOCABULARY, name="head")(nn.LayerNorm(name="norm")(x))


model = GPT()


def logits_of(params: Any, tokens: jax.Array) -> Any:
    """The model's logits, (batch, time, vocabulary)."""
    return model.apply(params, tokens)


def make_train_step(
    optimizer: optax.GradientTransformation,
) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """A serial step on `text`, (batch, context + 1); its loss is in nats a byte."""

    def train_step(params: Any, opt_state: Any, text: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            logits = logits_of(params, text[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


def spec_of(path: Any, leaf: Any) -> PartitionSpec:
    """The spec of a parameter, or of an optimizer's moment of it, by its path."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return next((spec for pattern, spec in SPECS if re.search(pattern, name)), PartitionSpec())


def standard_library() -> np.ndarray:
    """The sources of the standard library's modules, in a row."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)


def batches(text: np.ndarray, count: int) -> np.ndarray:
    """Random windows, (count, batch, context + 1)."""
    starts = np.random.default_rng(SEED).integers(0, len(text) - CONTEXT, (count, BATCH, 1))
    return text[starts + np.arange(CONTEXT + 1)].astype(np.int32)


@jax.jit
def continued(params: Any, prompt: jax.Array, key: jax.Array) -> jax.Array:
    """The prompt and what the model writes after it, as far as its context goes."""

    def write(place: jax.Array, text: jax.Array) -> jax.Array:
        logits = logits_of(params, text[None])[0, place - 1]
        return text.at[place].set(
            jax.random.categorical(jax.random.fold_in(key, place), 1.5 * logits)
        )

    text = jnp.zeros(CONTEXT, jnp.int32).at[: prompt.size].set(prompt)
    return jax.lax.fori_loop(prompt.size, CONTEXT, write, text)


def main() -> None:
    """Trains, compares the first losses with the serial function's, and lets the model write."""
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's sources.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--check", type=int, default=20, help="steps to run serially too")
    mesh_argument(parser, "data=2,model=4")
    options = parser.parse_args()
    mesh = mesh_of(options.mesh)

    text = standard_library()
    batch_of = batches(text, options.steps)
    warmup = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, max(options.steps, 21))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(warmup))
    train_step = make_train_step(optimizer)
    params = model.init(jax.random.key(SEED), batch_of[0, :, :-1])
    opt_state = optimizer.init(params)

    state = jax.tree_util.tree_map_with_path(spec_of, (params, opt_state))
    step = spmd(
        mesh=mesh,
        in_shardings=(*state, PartitionSpec("data")),
        out_shardings=(*state, PartitionSpec()),
        donate_argnames=("params", "opt_state"),
    )(train_step)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{count:,} parameters on {mesh}; {len(text):,} bytes of text")
    print(step.plan(params, opt_state, batch_of[0]).summary())

    serial, losses = jax.device_get((params, opt_state)), []
    start = time.perf_counter()
    for number, batch in enumerate(batch_of, 1):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
        if number % 25 == 0 or number == options.steps:
            seconds = time.perf_counter() - start
            print(
                f"step {number:4d} of {options.steps}: {loss:.4f} nats a byte, {seconds:.0f} s",
                flush=True,
            )

    prompt = np.frombuffer(b"def ", np.uint8).astype(np.int32)
    written = continued(jax.device_get(params), prompt, jax.random.key(SEED))
    print(f"it writes: {bytes(np.asarray(written, np.uint8))!r}")

    jitted = jax.jit(train_step)
    for number, batch in enumerate(batch_of[: options.check]):
        *serial, loss = jitted(*serial, batch)
        if number + 1 == min(options.check, options.steps):
            error = abs(losses[number] - float(loss))
            print(
                f"loss of step {number + 1}: {losses[number]:.6f}, serial {loss:.6f}, difference {error:.1e}"
            )
    print(f"final loss {losses[-1]:.4f} nats a byte (log 256 = {np.log(256):.4f} at the start)")


if __name__ == "__main__":
    main()
