"""A small ResNet in flax nnx, trained on scikit-learn's digits: batch norm, dropout, a stateful optimizer.

The step is a serial one that changes its model in place, as under `nnx.jit`. Statistics of the batch norms
are those of the whole batch, however it is split, and dropout drops the same in every layout. Activations
are smooth, so that losses agree to rounding: a ReLU's gradient jumps where rounding decides a sign.

    python examples/train_resnet.py --layout fsdp --mesh data=4,model=2
"""

from typing import Any

import jax
import numpy as np
import optax
from common import Layouts, Run, training_options
from digits import digits
from flax import nnx

from pypto_spmd import PartitionSpec, spmd
from pypto_spmd.training import (
    Batches,
    data_parallel,
    fsdp,
    prefetch,
    tensor_parallel,
    zero1,
)

STEM, STAGES = (
    16,
    ((16, 1), (32, 2), (64, 2)),
)  # features, and the stride of each stage's first conv
DROPOUT = 0.1
BATCH = 128
STEPS = 300
SEED = 0


def channels(axes: tuple[str, ...]) -> list[tuple[str, PartitionSpec]]:
    """Inside of each block features are split, between blocks whole: as columns and rows of matrices."""
    return [
        ("conv_1/kernel", PartitionSpec(None, None, None, axes)),
        ("norm_1", PartitionSpec(axes)),
        ("conv_2/kernel", PartitionSpec(None, None, axes)),
    ]


LAYOUTS: Layouts = {
    "dp": lambda *axes: data_parallel(axes),
    "zero1": lambda *axes: zero1(axes),
    "fsdp": lambda *axes: fsdp(axes),
    "tp": lambda *axes: tensor_parallel(channels(axes), axis=axes),
    "2d": lambda data, *model: data_parallel(data) | tensor_parallel(channels(model), axis=model),
}
"""All but `2d` use every axis of the mesh for one purpose."""


class Block(nnx.Module):
    """Two convolutions with batch norms, beside a shortcut."""

    def __init__(self, inputs: int, features: int, stride: int, rngs: nnx.Rngs) -> None:
        conv = lambda n, size, stride: nnx.Conv(  # noqa: E731
            n, features, (size, size), strides=stride, use_bias=False, rngs=rngs
        )
        self.conv_1, self.conv_2 = conv(inputs, 3, stride), conv(features, 3, 1)
        self.norm_1, self.norm_2 = norm(features, rngs), norm(features, rngs)
        self.shortcut = None if inputs == features else conv(inputs, 1, stride)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, height, width, inputs) to (batch, height / stride, width / stride, features)."""
        y = nnx.silu(self.norm_1(self.conv_1(x)))
        y = self.norm_2(self.conv_2(y))
        return nnx.silu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    """Classifies images; it holds its optimizer, so that one object is all that is trained."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        inputs = (STEM, *(features for features, _ in STAGES))
        self.stem = nnx.Conv(1, STEM, (3, 3), use_bias=False, rngs=rngs)
        self.norm = norm(STEM, rngs)
        self.blocks = nnx.List(
            [Block(n, *stage, rngs) for n, stage in zip(inputs, STAGES, strict=False)]
        )
        self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)
        self.head = nnx.Linear(inputs[-1], 10, rngs=rngs)
        schedule = optax.cosine_decay_schedule(3e-3, STEPS, alpha=0.01)
        self.optimizer = nnx.Optimizer(self, optax.adamw(schedule), wrt=nnx.Param)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images (batch, height, width, 1) to logits (batch, 10)."""
        x = nnx.silu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x.mean(axis=(1, 2))))


def norm(features: int, rngs: nnx.Rngs) -> nnx.BatchNorm:
    """A batch norm; a tenth of its running statistics is new in each step."""
    return nnx.BatchNorm(features, momentum=0.9, rngs=rngs)


def init(key: jax.Array) -> ResNet:
    """A new model."""
    return ResNet(nnx.Rngs(key))


def train_step(model: ResNet, data: jax.Array, labels: jax.Array) -> jax.Array:
    """One step over the whole batch, as one would write it for one device."""

    def loss_of(model: ResNet) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(data), labels).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    model.optimizer.update(model, grads)
    return loss


def classify(model: ResNet, data: jax.Array) -> jax.Array:
    """The likeliest class of each image."""
    return model(data).argmax(axis=-1)


def main() -> None:
    """Trains, compares the first losses with the serial function's, and tests."""
    options = training_options(
        "Train a small ResNet on digits.", LAYOUTS, layout="2d", steps=STEPS, check=20
    )
    mesh, layout = options.mesh, options.layout
    train, test = digits()

    lies = {"mesh": mesh, "parameter_shardings": layout}
    model = spmd(init, **lies)(jax.random.key(SEED))
    step = spmd(train_step, in_shardings=[layout.batch], donate_argnames="model", **lies)
    with (
        prefetch(Batches(train, BATCH, drop_last=True), layout.batch, mesh=mesh) as batches,
        Run(options) as run,
    ):
        model = run.resumed(model, batches)
        graph, state = nnx.split(model)
        serial = nnx.merge(graph, jax.device_get(state))
        count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
        print(f"layout {options.layout_name} on {mesh}: {count:,} parameters")
        print(step.plan(model, *(array[:BATCH] for array in train)).summary())
        for number in run.steps():
            loss = step(model, *next(batches))
            run.done(number, loss, model, batches)
        jitted = nnx.jit(train_step)
        run.compare(lambda model, batch: (model, jitted(model, *batch)), serial, batches)

    model.eval()
    classes: Any = spmd(classify, in_shardings=[layout.batch], **lies)(model, test[0])
    print(f"test accuracy {np.mean(np.asarray(classes) == test[1]):.1%}")


if __name__ == "__main__":
    main()
