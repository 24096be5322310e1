"""Ragged contractions on shards: groups that straddle blocks, empty groups, rows of no group."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pypto_spmd.testing.rule_truth import check_rule


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


SIZES = jnp.array([3, 0, 7, 1, 2, 5, 0, 2], jnp.int32)
"""Twenty of twenty-four rows, in eight groups."""

BY_GROUP = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
BATCHED = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "rows by their group's matrix": (lax.ragged_dot, (f32(24, 8), f32(8, 8, 16), SIZES)),
    "a matrix for each group": (
        lambda a, b, s: lax.ragged_dot_general(a, b, s, BY_GROUP),
        (f32(24, 8), f32(24, 16), SIZES),
    ),
    "ragged batch": (
        lambda a, b, s: lax.ragged_dot_general(a, b, s, BATCHED),
        (f32(8, 3, 16), f32(8, 16, 5), jnp.array([3, 5], jnp.int32)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_against_the_truth(name: str):
    function, args = CASES[name]
    report = check_rule(function, *args, primitives=("ragged_dot_general",), most_nested=16)
    assert report.checked
    assert not report.wrong, str(report)
