"""The train step that benchmarks plan: GPT-2 in flax, gradients clipped by their global norm, AdamW.

Every parameter, and its two moments, is split over both axes of a `data` × `model` mesh: tensor
parallel over `model`, fully sharded over `data`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from pypto_spmd import PartitionSpec

SPECS = (
    (r"(query|key|value)/kernel", PartitionSpec("data", "model", None)),
    (r"(query|key|value)/bias", PartitionSpec("model", "data")),
    (r"attention/out/kernel", PartitionSpec("model", None, "data")),
    (r"up/kernel", PartitionSpec("data", "model")),
    (r"up/bias", PartitionSpec(("model", "data"))),
    (r"down/kernel", PartitionSpec("model", "data")),
    (r"token/embedding", PartitionSpec("data", "model")),
    (r"position/embedding", PartitionSpec(None, "data")),
    (r"head/kernel", PartitionSpec("data", "model")),
    (r"bias|scale", PartitionSpec("data")),
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of a batch; those of GPT-2 small by default."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304
    context: int = 256
    batch: int = 32


class Block(nn.Module):
    """One layer."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Maps (batch, time, width) to the same."""
        y = nn.LayerNorm()(x)
        attend = nn.MultiHeadDotProductAttention(num_heads=self.sizes.heads, name="attention")
        x = x + attend(y, y, mask=mask)
        y = nn.Dense(4 * self.sizes.width, name="up")(nn.LayerNorm()(x))
        return x + nn.Dense(self.sizes.width, name="down")(nn.gelu(y))


class GPT(nn.Module):
    """Maps tokens (batch, time) to logits (batch, time, vocabulary)."""

    sizes: Sizes

    @nn.compact
    def __call__(self, tokens: jax.Array) -> Any:
        """The logits."""
        sizes = self.sizes
        position = nn.Embed(sizes.context, sizes.width, name="position")(
            jnp.arange(tokens.shape[1])
        )
        x = nn.Embed(sizes.vocabulary, sizes.width, name="token")(tokens) + position
        mask = nn.make_causal_mask(tokens)
        for layer in range(sizes.layers):
            x = Block(sizes, name=f"block_{layer}")(x, mask)
        return nn.Dense(sizes.vocabulary, use_bias=False, name="head")(nn.LayerNorm()(x))


@dataclass(frozen=True)
class TrainStep:
    """A serial train step, and how its arguments lie.

    Args:
        function: maps parameters, optimizer state, tokens and labels to the next state and the loss.
        arguments: descriptions of its arguments.
        initial: makes the first parameters and optimizer state.
        in_specs: specs of the arguments.
        out_specs: specs of the results.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    initial: Callable[[jax.Array], Any]
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]


def gpt_train_step(sizes: Sizes) -> TrainStep:
    """The train step of a GPT."""
    model = GPT(sizes)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.context), jnp.int32)

    def initial(key: jax.Array) -> Any:
        params = model.init(key, jnp.zeros(tokens.shape, tokens.dtype))
        return params, optimizer.init(params)

    def train_step(params: Any, opt_state: Any, tokens: jax.Array, labels: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            logits: Any = model.apply(params, tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    state = jax.eval_shape(initial, jax.eval_shape(jax.random.key, 0))
    specs = jax.tree_util.tree_map_with_path(_spec_of, state)
    batch = PartitionSpec("data")
    return TrainStep(
        train_step, (*state, tokens, tokens), initial,
        (*specs, batch, batch), (*specs, PartitionSpec()),
    )  # fmt: skip


def _spec_of(path: Any, leaf: Any) -> PartitionSpec:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return next((spec for pattern, spec in SPECS if re.search(pattern, name)), PartitionSpec())
