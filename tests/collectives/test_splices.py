"""Rolls, shifts and padded stencils: only the rows that change owner move, whatever the slices' sizes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pypto_spmd import DeviceMesh, PartitionSpec, spmd
from pypto_spmd.collectives.rules.splice import splice_p
from pypto_spmd.testing.rule_truth import check_rule

MESH = DeviceMesh.simulate((2, 4), ("x", "y"))
SPLIT = PartitionSpec("x", "y")
ROWS, COLUMNS, FLOAT_BYTES = 16, 24, 4
COLUMN = ROWS // 2 * FLOAT_BYTES
"""Bytes of one device's part of a column."""
ROW = COLUMNS // 4 * FLOAT_BYTES


def shift(x: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros((ROWS, 1)), x[:, :-1]], 1)


def stencil(x: jax.Array) -> jax.Array:
    padded = jnp.pad(x, ((0, 0), (1, 1)))
    return padded[:, 2:] - 2 * padded[:, 1:-1] + padded[:, :-2]


def periodic_stencil(x: jax.Array) -> jax.Array:
    padded = jnp.pad(x, ((0, 0), (1, 1)), mode="wrap")
    return padded[:, 2:] - 2 * padded[:, 1:-1] + padded[:, :-2]


def rolled_in_a_loop(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: (jnp.roll(c, 1, 1), None), x, None, length=3)[0]


CASES: dict[str, tuple[Callable[..., Any], int, int]] = {
    "roll": (lambda x: jnp.roll(x, 1, 1), 1, COLUMN),
    "roll back": (lambda x: jnp.roll(x, -5, 1), 1, 5 * COLUMN),
    "roll by blocks": (lambda x: jnp.roll(x, 12, 1), 1, 6 * COLUMN),
    "roll in two dims": (lambda x: jnp.roll(x, (1, 2), (0, 1)), 2, ROW + 2 * COLUMN),
    "gradient of a roll": (
        jax.grad(lambda x: (jnp.roll(x, 1, 1) * x**2).sum()),
        2,
        2 * COLUMN,
    ),
    "shift": (shift, 1, COLUMN),
    "stencil": (stencil, 2, 2 * COLUMN),
    "periodic stencil": (periodic_stencil, 2, 2 * COLUMN),
    "loop": (rolled_in_a_loop, 1, 3 * COLUMN),
    "nothing moves": (lambda x: jnp.pad(x, ((1, 1), (0, 0)))[1:-1] * 2, 0, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_only_rows_that_change_owner_move(name: str):
    function, permutes, sent = CASES[name]
    x = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    decorated = spmd(mesh=MESH, in_shardings=(SPLIT,), out_shardings=SPLIT)(function)
    np.testing.assert_allclose(decorated(x), function(x), rtol=1e-5, atol=1e-5)
    plan = decorated.plan(x)
    plan.assert_counts(collective_permute=permutes)
    assert plan.wire_bytes == sent
    decorated.verify(x)


SEGMENTS = {
    "roll": ((0, 23, 1), (0, 0, 23)),
    "shift": ((-1, 0, 3), (0, 0, 21)),
    "two sources": ((0, 3, 9), (-1, 0, 5), (1, 14, 10)),
    "shuffled": ((1, 0, 3), (0, 8, 2), (0, 1, 7), (1, 13, 11), (0, 2, 1)),
}


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_against_the_truth(segments: tuple[tuple[int, int, int], ...]):
    array = jax.ShapeDtypeStruct((24, 2), jnp.int32)
    report = check_rule(lambda a, b: splice_p.bind(a, b, dim=0, segments=segments), array, array)
    assert report.checked
    assert not report.wrong, str(report)


def test_different_sizes():
    report = check_rule(
        lambda a, b: splice_p.bind(a, b, dim=0, segments=((0, 20, 4), (1, 0, 2), (0, 0, 10))),
        jax.ShapeDtypeStruct((32, 2), jnp.float32),
        jax.ShapeDtypeStruct((8, 2), jnp.float32),
    )
    assert not report.wrong, str(report)


def test_slices_of_few_rows_are_read():
    ends = lambda x: jnp.concatenate([x[:, :1], x[:, -1:]], 1)  # noqa: E731
    decorated = spmd(mesh=MESH, in_shardings=(SPLIT,), out_shardings=PartitionSpec("x"))(ends)
    x = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    np.testing.assert_array_equal(decorated(x), ends(x))
    assert decorated.plan(x).wire_bytes < x.nbytes / 8


def test_operands_of_few_rows_are_whole():
    params = {"dim": 0, "segments": ((1, 0, 1), (0, 1, 20), (1, 1, 2), (2, 0, 1)), "whole": (1, 2)}
    report = check_rule(
        lambda a, b, c: splice_p.bind(a, b, c, **params),
        *(jax.ShapeDtypeStruct((rows, 2), jnp.int32) for rows in (24, 3, 1)),
    )
    assert report.checked
    assert not report.wrong, str(report)


def test_ends_of_their_own():
    def edges(x):
        padded = jnp.pad(x, ((1, 1), (0, 0)), mode="edge")
        return padded[2:] - 2 * x + padded[:-2]

    rows = PartitionSpec(("x", "y"))
    x = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    decorated = spmd(mesh=MESH, in_shardings=rows, out_shardings=rows)(edges)
    decorated.plan(x).assert_counts(collective_permute=2, all_reduce=1)
    np.testing.assert_allclose(decorated(x), edges(x), rtol=1e-5, atol=1e-5)
    decorated.verify(x)
