"""The vision transformer: its annotations split it, mixed precision sends less, and it learns."""

import jax
import numpy as np
import pytest

from pypto_spmd import PartitionSpec, spmd
from pypto_spmd.training import Policy, parameter_specs


@pytest.fixture
def vit(example):
    return example("train_vit")


@pytest.fixture
def state(vit):
    return jax.eval_shape(vit.init, jax.random.key(0))


def specs_of(state, layout, mesh):
    """The spec of each parameter of the first block and of the head, by its path; whole ones left out."""
    specs = jax.tree_util.tree_leaves_with_path(parameter_specs(state.params, layout, mesh))
    paths = {jax.tree_util.keystr(path, simple=True, separator="/"): s for path, s in specs}
    return {
        path: s for path, s in paths.items() if any(s) and "_1" not in path and "_2" not in path
    }


def test_the_annotations_split_it(spmd_mesh, vit, state):
    specs = specs_of(state, vit.LAYOUTS["2d"]("data", "model"), spmd_mesh)
    block, model = "block_0/", "model"
    attention = f"{block}MultiHeadDotProductAttention_0/"
    projections = {
        f"{attention}{name}/{part}/value": PartitionSpec(*dims)
        for name in ("query", "key", "value")
        for part, dims in (("kernel", (None, model)), ("bias", (model,)))
    }
    assert {path: PartitionSpec(*spec) for path, spec in specs.items()} == {
        **projections,
        f"{attention}out/kernel/value": PartitionSpec(model),
        f"{block}features_to_hidden/kernel/value": PartitionSpec(None, model),
        f"{block}features_to_hidden/bias/value": PartitionSpec(model),
        f"{block}hidden_to_features/kernel/value": PartitionSpec(model),
    }


def test_mixed_precision_gathers_half_the_bytes(spmd_mesh, example, vit, state):
    layout = vit.LAYOUTS["fsdp"]("data", "model")
    (images, labels), _ = example("digits").digits()
    gathered, scattered = [], []
    for precision in ("float32", "mixed_bfloat16"):
        step = spmd(
            vit.make_train_step(Policy.named(precision)),
            mesh=spmd_mesh, in_shardings=[layout.batch] * 2, parameter_shardings=layout,
        )  # fmt: skip
        steps = step.plan(state, images[:64], labels[:64]).steps
        for found, kind in ((gathered, "all_gather"), (scattered, "reduce_scatter")):
            found.append(sum(s.wire_bytes for s in steps if s.kind == kind))
    np.testing.assert_allclose(gathered[1], gathered[0] / 2)
    np.testing.assert_allclose(scattered[1], scattered[0])  # gradients are reduced in float32


@pytest.mark.slow
def test_it_learns(run, figure):
    output = run("train_vit.py")
    assert figure(r"of 20 losses from the serial ones: (\S+)\n", output) < 1e-4
    assert figure(r"test accuracy (\S+)%", output) >= 97


@pytest.mark.slow
def test_it_learns_in_mixed_precision(run, figure):
    output = run("train_vit.py", "--precision", "mixed_bfloat16", "--layout", "fsdp")
    assert figure(r"test accuracy (\S+)%", output) >= 97
