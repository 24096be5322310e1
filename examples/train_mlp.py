"""One optax training step, five layouts: a classifier of scikit-learn's digits, trained on a mesh.

The step is written once, for whole arrays. A layout says only where parameters, optimizer state and
batch lie; the losses are the same in all of them.

    python examples/train_mlp.py --layout fsdp --mesh data=4,model=2
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Layouts, Run, training_options
from sklearn.datasets import load_digits

from pypto_spmd import spmd
from pypto_spmd.training import (
    Batches,
    data_parallel,
    fsdp,
    prefetch,
    tensor_parallel,
    zero1,
)

SIZES = (64, 256, 128, 10)
BATCH = 128
TEST_IMAGES = 360
SEED = 0

LAYOUTS: Layouts = {
    "dp": lambda *axes: data_parallel(axes),
    "zero1": lambda *axes: zero1(axes, min_size=0),
    "fsdp": lambda *axes: fsdp(axes, min_size=0),
    "tp": lambda *axes: tensor_parallel(axis=axes),
    "2d": lambda data, *model: data_parallel(data) | tensor_parallel(axis=model),
}
"""All but `2d` use every axis of the mesh for one purpose."""

optimizer = optax.sgd(0.1, momentum=0.9)


def init(key: jax.Array) -> dict[str, Any]:
    """The parameters, and the optimizer's state that mirrors them."""
    keys = jax.random.split(key, len(SIZES) - 1)
    params = {
        f"layer_{i}": {"w": jax.random.normal(k, (n, m)) * (2 / n) ** 0.5, "b": jnp.zeros(m)}
        for i, (k, n, m) in enumerate(zip(keys, SIZES[:-1], SIZES[1:], strict=True))
    }
    return {"params": params, "opt_state": optimizer.init(params)}


def forward(params: Any, images: jax.Array) -> jax.Array:
    """The logits, (batch, 10)."""
    *layers, last = params.values()
    for layer in layers:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ last["w"] + last["b"]


def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    """One step over the whole batch, as one would write it for one device."""

    def loss_of(params: Any) -> jax.Array:
        logits = forward(params, batch["images"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = optimizer.update(grads, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def main() -> None:
    """Trains, and compares the losses with the serial function's."""
    options = training_options(
        "Train a classifier of digits on a mesh.", LAYOUTS, layout="2d", steps=200, check=200
    )
    mesh, layout = options.mesh, options.layout

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(labels))
    data = {"images": (images[order] / 16).astype(np.float32), "labels": labels[order]}
    test = {name: array[:TEST_IMAGES] for name, array in data.items()}
    train = {name: array[TEST_IMAGES:] for name, array in data.items()}

    start = spmd(init, mesh=mesh, parameter_shardings=layout)
    step = spmd(train_step, mesh=mesh, parameter_shardings=layout, donate_argnames="state")
    state = start(jax.random.key(SEED))
    with (
        prefetch(Batches(train, BATCH, drop_last=True), layout.batch, mesh=mesh) as batches,
        Run(options) as run,
    ):
        state = run.resumed(state, batches)
        serial = jax.device_get(state)
        print(f"layout {options.layout_name} on {mesh}")
        print(step.plan(state, jax.tree.map(lambda a: a[:BATCH], train)).summary())
        for number in run.steps():
            state, loss = step(state, next(batches))
            run.done(number, loss, state, batches)
        run.compare(jax.jit(train_step), serial, batches)

    guesses = forward(jax.device_get(state["params"]), test["images"]).argmax(axis=1)
    print(f"test accuracy {(guesses == test['labels']).mean():.1%}")


if __name__ == "__main__":
    main()
