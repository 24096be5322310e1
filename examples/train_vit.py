"""A small vision transformer in flax linen, trained on scikit-learn's digits, in mixed precision if asked.

Its parameters carry flax's own annotations, logical names of their dims. The layouts `tp` and `2d` say
which of these names a mesh axis splits; the others split by size, and pass the annotations over.

    python examples/train_vit.py --layout 2d --mesh data=4,model=2 --precision mixed_bfloat16
"""

import argparse
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Layouts, Run, training_options
from digits import digits
from flax.training.train_state import TrainState

from pypto_spmd import spmd
from pypto_spmd.training import (
    Batches,
    Layout,
    Policy,
    data_parallel,
    flax_metadata,
    fsdp,
    prefetch,
    zero1,
)

PATCH, TOKENS = 2, 16  # pixels a side of a patch, and patches of an image
WIDTH, HEADS, LAYERS = 64, 8, 3
BATCH = 128
STEPS = 300
SEED = 0


def split(axes: tuple[str, ...]) -> Layout:
    """Tensor parallelism: heads and hidden features are split, the other dims with names are whole."""
    return flax_metadata([("heads", axes), ("hidden", axes), ("features", None), ("token", None)])


LAYOUTS: Layouts = {
    "dp": lambda *axes: data_parallel(axes),
    "zero1": lambda *axes: zero1(axes),
    "fsdp": lambda *axes: fsdp(axes),
    "tp": lambda *axes: split(axes),
    "2d": lambda data, *model: data_parallel(data) | split(model),
}
"""All but `2d` use every axis of the mesh for one purpose."""

schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, 20, STEPS, 2e-5)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.05))


def named(initializer: Any, *names: str | None) -> Any:
    """The initializer of an array whose dims have logical names."""
    return nn.with_logical_partitioning(initializer, names)


def dense(features: int, inputs: str, outputs: str) -> nn.Dense:
    """A layer whose dims have logical names, which is its name too."""
    return nn.Dense(
        features,
        kernel_init=named(nn.initializers.lecun_normal(), inputs, outputs),
        bias_init=named(nn.initializers.zeros, outputs),
        name=f"{inputs}_to_{outputs}",
    )


class Block(nn.Module):
    """Attention and a two-layer network, each behind a layer norm and beside a residual."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, tokens, width) to the same."""
        attention = nn.MultiHeadDotProductAttention(
            HEADS,
            kernel_init=named(nn.initializers.lecun_normal(), "features", "heads", None),
            bias_init=named(nn.initializers.zeros, "heads", None),
            out_kernel_init=named(nn.initializers.lecun_normal(), "heads", None, "features"),
            out_bias_init=named(nn.initializers.zeros, "features"),
        )
        x = x + attention(nn.LayerNorm()(x))
        hidden = nn.gelu(dense(4 * WIDTH, "features", "hidden")(nn.LayerNorm()(x)))
        return x + dense(WIDTH, "hidden", "features")(hidden)


class ViT(nn.Module):
    """Classifies images by their patches."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images (batch, 8, 8, 1) to logits (batch, 10)."""
        x = nn.Conv(WIDTH, (PATCH, PATCH), strides=PATCH, name="patches")(images)
        x = x.reshape(x.shape[0], TOKENS, WIDTH)
        position = named(nn.initializers.normal(0.02), "token", "features")
        x = x + self.param("position", position, (TOKENS, WIDTH))
        for layer in range(LAYERS):
            x = Block(name=f"block_{layer}")(x)
        x = nn.LayerNorm()(x)
        return nn.Dense(10, name="head")(x.reshape(x.shape[0], TOKENS * WIDTH))


model = ViT()


def init(key: jax.Array) -> TrainState:
    """A new state; its arrays are in the boxes that hold the logical names."""
    params = model.init(key, jnp.zeros((1, 8, 8, 1)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def make_train_step(policy: Policy) -> Callable[..., tuple[TrainState, jax.Array]]:
    """A serial step over the whole batch, in the precision of a policy."""

    def train_step(
        state: TrainState, images: jax.Array, labels: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, policy.cast_to_compute(images))
            logits = policy.cast_to_output(logits)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = policy.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step


def classify(params: Any, images: jax.Array) -> jax.Array:
    """The likeliest class of each image."""
    logits: Any = model.apply({"params": params}, images)
    return logits.argmax(axis=-1)


def main() -> None:
    """Trains, compares the first losses with the serial function's, and tests."""
    parser = argparse.ArgumentParser(description="Train a small vision transformer on digits.")
    choices = ("float32", "mixed_bfloat16")
    text = "in which types it computes (default: float32)"
    parser.add_argument("--precision", choices=choices, default="float32", help=text)
    options = training_options(parser, LAYOUTS, layout="2d", steps=STEPS, check=20)
    mesh, layout = options.mesh, options.layout
    train, test = digits()

    lies: dict[str, Any] = {"mesh": mesh, "parameter_shardings": layout}
    train_step = make_train_step(Policy.named(options.precision))
    state = spmd(init, **lies)(jax.random.key(SEED))
    step = spmd(train_step, in_shardings=[layout.batch] * 2, donate_argnames="state", **lies)
    with (
        prefetch(Batches(train, BATCH, drop_last=True), layout.batch, mesh=mesh) as batches,
        Run(options) as run,
    ):
        state = run.resumed(state, batches)
        serial = jax.device_get(state)
        count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        print(f"layout {options.layout_name} on {mesh}: {count:,} parameters, {options.precision}")
        print(step.plan(state, *(array[:BATCH] for array in train)).summary())
        for number in run.steps():
            state, loss = step(state, *next(batches))
            run.done(number, loss, state, batches)
        jitted = jax.jit(train_step)
        run.compare(lambda state, batch: jitted(state, *batch), serial, batches)

    predict = spmd(classify, in_shardings=[layout.batch], **lies)
    print(f"test accuracy {np.mean(np.asarray(predict(state.params, test[0])) == test[1]):.1%}")


if __name__ == "__main__":
    main()
