"""Rules of reshapes, transposes, broadcasts, iota and the like: notation, and the truth on shards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pypto_spmd.collectives.rules import Aval, rule_for
from pypto_spmd.collectives.rules.shape import common_factors
from pypto_spmd.testing.rule_truth import check_rule


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def boolean(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "broadcast": (lambda a: lax.broadcast_in_dim(a, (8, 24, 3), (0, 2)), (f32(8, 1),)),
    "broadcast of a scalar": (lambda a: lax.broadcast_in_dim(a, (8, 24), ()), (f32(),)),
    "zeros": (lambda: lax.full((8, 24), np.float32(0)), ()),
    "broadcast of bools": (lambda a: lax.broadcast_in_dim(a, (8, 2), (0,)), (boolean(8),)),
    "merged dims": (lambda a: lax.reshape(a, (24, 40)), (f32(8, 3, 5, 8),)),
    "split dims": (lambda a: lax.reshape(a, (8, 3, 1, 5, 8)), (f32(24, 40),)),
    "dims cut across": (lambda a: lax.reshape(a, (8, 24)), (f32(24, 8),)),
    "dims with a common part": (lambda a: lax.reshape(a, (40, 3)), (f32(24, 5),)),
    "reshape of the transpose": (
        lambda a: lax.reshape(a, (3, 64), dimensions=(1, 0)),
        (f32(8, 24),),
    ),
    "transpose": (lambda a: lax.transpose(a, (2, 0, 1)), (f32(8, 3, 24),)),
    "squeeze": (lambda a: lax.squeeze(a, [1]), (f32(8, 1, 24),)),
    "rev": (lambda a: lax.rev(a, [0, 2]), (f32(24, 2, 8),)),
    "iota of integers": (lambda: lax.broadcasted_iota(jnp.int32, (8, 24), 1), ()),
    "iota of bytes": (lambda: lax.broadcasted_iota(jnp.uint8, (8, 24), 0), ()),
    "iota of floats": (lambda: lax.broadcasted_iota(jnp.bfloat16, (8, 24), 1), ()),
    "split": (lambda a: lax.split(a, [8, 16, 24], 1), (f32(3, 48),)),
    "split in odd pieces": (lambda a: lax.split(a, [5, 3], 1), (f32(8, 8),)),
    "concatenate": (lambda a, b: lax.concatenate([a, b], 0), (f32(8, 3), f32(24, 3))),
    "concatenate three": (
        lambda a, b, c: lax.concatenate([a, b, c], 1),
        (i32(2, 16), i32(2, 8), i32(2, 8)),
    ),
    "concatenate odd pieces": (lambda a, b: lax.concatenate([a, b], 0), (f32(3, 8), f32(5, 8))),
    "concatenate with nothing": (
        lambda a, b: lax.concatenate_p.bind(a, b, dimension=0),
        (f32(8, 3), f32(0, 3)),
    ),
    "split off nothing": (lambda a: lax.split(a, [0, 16], 1), (f32(3, 16),)),
    "stack": (lambda a, b: jnp.stack([a, b], 1), (f32(8, 24), f32(8, 24))),
    "unstack": (lambda a: jnp.unstack(a, axis=1), (f32(8, 3, 24),)),
    "tile": (lambda a: jnp.tile(a, (8, 1, 2)), (f32(2, 24, 8),)),
}


@pytest.mark.parametrize("name", CASES)
def test_against_the_truth(name: str):
    function, args = CASES[name]
    report = check_rule(function, *args, most_nested=12)
    assert report.checked
    assert not report.wrong, str(report)


@pytest.mark.parametrize(
    ("left", "right", "notation"),
    [
        ((6, 4), (3, 8), "(f0 f1) f2 -> f0 (f1 f2)"),
        ((24,), (2, 3, 4), "(f0 f1 f2) -> f0 f1 f2"),
        ((4, 1, 6), (1, 24), "f0 _ f1 -> _ (f0 f1)"),
        ((6, 5), (10, 3), "(f0 rest0) _ -> (f0 rest1) _"),
        ((4, 3, 7), (3, 4, 7), "_ _ f0 -> _ _ f0"),
        ((0, 3), (3, 0), "_ _ -> _ _"),
        ((), (1, 1), " -> _ _"),
    ],
)
def test_common_factors(left: tuple[int, ...], right: tuple[int, ...], notation: str):
    before, after, _, _ = common_factors(left, right)
    assert f"{' '.join(before)} -> {' '.join(after)}" == notation


def test_a_zero_may_be_partial():
    dtype = np.dtype("float32")
    params = {"shape": (8,), "broadcast_dimensions": (), "sharding": None}
    zero = rule_for("broadcast_in_dim", params, (Aval((), dtype, 0.0),), (Aval((8,), dtype),))
    one = rule_for("broadcast_in_dim", params, (Aval((), dtype, 1.0),), (Aval((8,), dtype),))
    assert frozenset() in {group.operands for group in zero.linear}
    assert frozenset() not in {group.operands for group in one.linear}
