"""Plans of programs whose spatial dims, vocabularies or edges are split: exact counts, run and verified."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as Spec

from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.spmd import spmd
from pypto_spmd.testing import assert_spmd_equal

IMAGES = np.random.default_rng(0).standard_normal((4, 16, 16, 3), np.float32)
KERNEL = np.random.default_rng(1).standard_normal((3, 3, 3, 8), np.float32)
TABLE = np.random.default_rng(2).standard_normal((64, 32), np.float32)
TOKENS = np.random.default_rng(3).integers(0, 64, (8, 16))


def conv(stride: int = 1) -> Callable[..., Any]:
    layout = ("NHWC", "HWIO", "NHWC")
    return lambda x, w: lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=layout
    )


def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *args: (function(*args) ** 2).sum(), argnums=(0, 1))


def weight_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda x, w: (function(x, w) ** 2).sum(), argnums=1)


def max_pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


ROWS = Spec("data", "model")
COLUMNS = Spec("data", None, "model")
BOTH = Spec(None, "data", "model")
CASES = {
    "conv": (conv(), (ROWS, Spec()), ROWS, (IMAGES, KERNEL), {"collective_permute": 2}),
    "conv, two dims": (conv(), (BOTH, Spec()), BOTH, (IMAGES, KERNEL), {"collective_permute": 4}),
    # The weight's gradient needs the halo that the forward pass has fetched already.
    "gradients of conv": (
        gradients(conv()),
        (ROWS, Spec()),
        (ROWS, Spec()),
        (IMAGES, KERNEL),
        {"collective_permute": 4, "all_reduce": 1},
    ),
    "gradients of strided conv": (
        gradients(conv(2)),
        (ROWS, Spec()),
        (ROWS, Spec()),
        (IMAGES, KERNEL),
        {"collective_permute": 2, "all_reduce": 1},
    ),
    # A dim that is whole has no halo that could differ; two split ones have the same corners.
    "gradient of conv, columns split": (
        weight_gradient(conv()),
        (COLUMNS, Spec()),
        Spec(),
        (IMAGES, KERNEL),
        {"collective_permute": 2, "all_reduce": 1},
    ),
    "gradient of conv, both split": (
        weight_gradient(conv()),
        (BOTH, Spec()),
        Spec(),
        (IMAGES, KERNEL),
        {"collective_permute": 4, "all_reduce": 1},
    ),
    "pooling": (max_pool, (ROWS,), ROWS, (IMAGES,), {}),
    "gradient of pooling": (
        jax.grad(lambda x: (max_pool(x) ** 2).sum()),
        (ROWS,),
        ROWS,
        (IMAGES,),
        {},
    ),
    "embedding": (
        lambda table, tokens: table[tokens],
        (Spec("model"), Spec("data")),
        Spec("data"),
        (TABLE, TOKENS),
        {"all_reduce": 1},
    ),
    "segment sum over split edges": (
        lambda values, segments: jax.ops.segment_sum(values, segments, 8),
        (Spec("data"), Spec("data")),
        Spec(),
        (TABLE, np.arange(64) % 7),
        {"all_reduce": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_plan_and_result(name: str):
    function, ins, outs, arguments, counts = CASES[name]
    mesh = DeviceMesh.simulate((2, 4), ("data", "model"))
    decorated = spmd(mesh=mesh, in_shardings=list(ins), out_shardings=outs)(function)
    decorated.plan(*arguments).assert_counts(**counts)
    assert_spmd_equal(decorated, *arguments)
    decorated.verify(*arguments)


def overlapping_pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


@pytest.mark.parametrize(("split", "permutes"), [(ROWS, 2), (BOTH, 4)], ids=["rows", "both"])
def test_gradient_of_overlapping_pool(split: Spec, permutes: int):
    """The halo that the forward pass has fetched serves the gradient, which gives sums back."""
    mesh = DeviceMesh.simulate((2, 4), ("data", "model"))
    gradient = jax.grad(lambda x: (overlapping_pool(x) ** 2).sum())
    decorated = spmd(gradient, mesh=mesh, in_shardings=split, out_shardings=split)
    decorated.plan(IMAGES).assert_counts(collective_permute=permutes)
    assert_spmd_equal(decorated, IMAGES)
    decorated.verify(IMAGES)
