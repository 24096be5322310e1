"""The ResNet example: its statistics and dropout are those of the serial function, and it learns."""

import jax
import numpy as np
import pytest
from flax import nnx

from pypto_spmd import PartitionSpec, spmd


@pytest.fixture
def resnet(example):
    return example("train_resnet")


@pytest.fixture
def batch(example):
    (images, labels), _ = example("digits").digits()
    return images[:64], labels[:64]


def test_statistics_and_dropout_are_the_serial_ones(spmd_mesh, resnet, batch, monkeypatch):
    monkeypatch.setattr(resnet, "STAGES", resnet.STAGES[:1])
    layout = resnet.LAYOUTS["2d"](*spmd_mesh.axis_names)
    lies = {"mesh": spmd_mesh, "parameter_shardings": layout}
    model, serial = resnet.init(jax.random.key(0)), resnet.init(jax.random.key(0))
    step = spmd(resnet.train_step, in_shardings=[layout.batch], donate_argnames="model", **lies)
    serial_step = nnx.jit(resnet.train_step)
    for _ in range(3):
        np.testing.assert_allclose(step(model, *batch), serial_step(serial, *batch), rtol=1e-5)
    for kind in (nnx.BatchStat, nnx.RngCount):
        states = (jax.tree.leaves(nnx.state(m, kind)) for m in (model, serial))
        for ours, theirs in zip(*states, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    kernel = model.blocks[0].conv_1.kernel[...]
    assert kernel.sharding.spec == PartitionSpec(None, None, None, "model")


@pytest.mark.slow
def test_it_learns(run, figure):
    output = run("train_resnet.py")
    assert figure(r"of 20 losses from the serial ones: (\S+)\n", output) < 1e-4
    assert figure(r"test accuracy (\S+)%", output) >= 97
