"""One optax training step, five layouts: a classifier of scikit-learn's digits, trained on a mesh.

The step is written once, for whole arrays. A layout says only where parameters, optimizer state and
batch lie; the losses are the same in all of them.

    python examples/train_mlp.py --layout fsdp --mesh data=4,model=2
"""

import argparse
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import mesh_argument, mesh_of
from sklearn.datasets import load_digits

from pypto_spmd import DeviceMesh, PartitionSpec, spmd

SIZES = (64, 256, 128, 10)
BATCH = 128
TEST_IMAGES = 360
SEED = 0

Params = list[dict[str, jax.Array]]
optimizer = optax.sgd(0.1, momentum=0.9)


def init_params(key: jax.Array) -> Params:
    """One dict of weights and biases a layer."""
    keys = jax.random.split(key, len(SIZES) - 1)
    return [
        {"w": jax.random.normal(k, (n, m)) * (2 / n) ** 0.5, "b": jnp.zeros(m)}
        for k, n, m in zip(keys, SIZES[:-1], SIZES[1:], strict=True)
    ]


def forward(params: Params, images: jax.Array) -> jax.Array:
    """The logits, (batch, 10)."""
    for layer in params[:-1]:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ params[-1]["w"] + params[-1]["b"]


def train_step(
    params: Params, opt_state: Any, images: jax.Array, labels: jax.Array
) -> tuple[Any, Any, jax.Array]:
    """One step over the whole batch, as one would write it for one device."""

    def loss_of(params: Params) -> jax.Array:
        logits = forward(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


@dataclass(frozen=True)
class Layout:
    """Where everything lies; `moments` is for the optimizer's copies of the parameters."""

    params: list[dict[str, PartitionSpec]]
    moments: list[dict[str, PartitionSpec]]
    batch: PartitionSpec


def layout_named(name: str, mesh: DeviceMesh) -> Layout:
    """The textbook layouts; all but `2d` use every axis of the mesh for one purpose."""
    P, every = PartitionSpec, mesh.axis_names
    whole = [{"w": P(), "b": P()}] * 3
    # Ten classes can't be split over eight devices, so the last layer is split by its inputs.
    split = [{"w": P(None, every), "b": P(every)}] * 2 + [{"w": P(every), "b": P()}]
    if name == "dp":
        return Layout(whole, whole, P(every))
    if name == "zero1":
        return Layout(whole, split, P(every))
    if name == "fsdp":
        return Layout(split, split, P(every))
    axes = every if name == "tp" else "model"
    columns, rows = {"w": P(None, axes), "b": P(axes)}, {"w": P(axes), "b": P()}
    tensor_parallel = [columns, rows, {"w": P(), "b": P()}]
    return Layout(tensor_parallel, tensor_parallel, P() if name == "tp" else P("data"))


def main() -> None:
    """Trains, and compares every step's loss with the serial function's."""
    parser = argparse.ArgumentParser(description="Train a classifier of digits on a mesh.")
    parser.add_argument("--layout", choices=("dp", "zero1", "fsdp", "tp", "2d"), default="2d")
    parser.add_argument("--steps", type=int, default=200)
    mesh_argument(parser, "data=4,model=2")
    options = parser.parse_args()
    mesh = mesh_of(options.mesh)
    layout = layout_named(options.layout, mesh)

    images, labels = load_digits(return_X_y=True)
    random = np.random.default_rng(SEED)
    order = random.permutation(len(labels))
    images = (images[order] / 16).astype(np.float32)
    labels = labels[order].astype(np.int32)
    train = len(labels) - TEST_IMAGES
    batches = random.integers(0, train, (options.steps, BATCH))

    params = init_params(jax.random.key(SEED))
    opt_state = optimizer.init(params)
    moments = optax.tree_map_params(
        optimizer, lambda _, spec: spec, opt_state, layout.moments,
        transform_non_params=lambda _: PartitionSpec(),
    )  # fmt: skip
    step = spmd(
        mesh=mesh,
        in_shardings=(layout.params, moments, layout.batch, layout.batch),
        out_shardings=(layout.params, moments, PartitionSpec()),
        donate_argnames=("params", "opt_state"),
    )(train_step)
    print(f"layout {options.layout} on {mesh}")
    print(step.plan(params, opt_state, images[:BATCH], labels[:BATCH]).summary())

    serial_step, serial = jax.jit(train_step), jax.device_get((params, opt_state))
    error = 0.0
    for number, batch in enumerate(batches, 1):
        params, opt_state, loss = step(params, opt_state, images[batch], labels[batch])
        *serial, serial_loss = serial_step(*serial, images[batch], labels[batch])
        error = max(error, abs(float(loss) - float(serial_loss)))
        if number % 50 == 0 or number == options.steps:
            print(f"step {number:4d} of {options.steps}: loss {loss:.6f}", flush=True)

    guesses = forward(jax.device_get(params), jnp.asarray(images[train:])).argmax(axis=1)
    accuracy = float((guesses == labels[train:]).mean())
    print(f"largest difference of a loss from the serial function's: {error:.1e}")
    print(f"final loss {loss:.6f}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
