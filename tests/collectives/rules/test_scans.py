"""Cumulative primitives, argmax, top_k and sort on shards, with ties, NaNs and infinities."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pypto_spmd.testing.rule_truth import check_rule

RANDOM = np.random.default_rng(3)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ties(dtype: Any, *shape: int) -> jax.Array:
    return jnp.asarray(RANDOM.integers(0, 3, shape), dtype)


def special() -> jax.Array:
    """Rows of NaNs, infinities and equal numbers."""
    rows = RANDOM.normal(size=(8, 24)).astype(np.float32)
    rows[0, [5, 20]] = np.nan
    rows[1, 3:] = np.nan
    rows[2] = -np.inf
    rows[3] = np.inf
    rows[4, ::5] = -np.inf
    rows[5] = 1.0
    return jnp.asarray(rows)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "cumsum": (lambda a: lax.cumsum(a, 1), (f32(8, 24),)),
    "cumsum, backward": (lambda a: lax.cumsum(a, 1, reverse=True), (f32(8, 24),)),
    "cumsum of integers": (lambda a: lax.cumsum(a, 0), (ties(jnp.int32, 24, 2),)),
    "cumprod": (lambda a: lax.cumprod(a, 0, reverse=True), (f32(24, 2),)),
    "cummax": (lambda a: lax.cummax(a, 0), (f32(24, 2),)),
    "cummax of bytes": (lambda a: lax.cummax(a, 0), (ties(jnp.uint8, 24, 2),)),
    "cummin": (lambda a: lax.cummin(a, 0, reverse=True), (f32(24, 2),)),
    "cumlogsumexp": (lambda a: lax.cumlogsumexp(a, 0), (f32(24, 2),)),
    "argmax": (lambda a: lax.argmax(a, 1, jnp.int32), (f32(8, 24),)),
    "argmax of specials": (lambda a: lax.argmax(a, 1, jnp.int32), (special(),)),
    "argmin of specials": (lambda a: lax.argmin(a, 1, jnp.int32), (special(),)),
    "argmax of ties": (lambda a: lax.argmax(a, 0, jnp.uint8), (ties(jnp.int32, 24, 2),)),
    "argmin of halves": (lambda a: lax.argmin(a, 0, jnp.int32), (ties(jnp.bfloat16, 24, 2),)),
    "argmin of bytes": (lambda a: lax.argmin(a, 0, jnp.int32), (ties(jnp.int8, 24, 2),)),
    "top_k": (lambda a: lax.top_k(a, 3), (f32(8, 24),)),
    "top_k of specials": (lambda a: lax.top_k(a, 3), (special(),)),
    "top_k of ties": (lambda a: lax.top_k(a, 3), (ties(jnp.bfloat16, 2, 24),)),
    "top_k of most": (lambda a: lax.top_k(a, 5), (ties(jnp.int32, 2, 24),)),
    "sort": (lambda a, b: lax.sort((a, b), dimension=0), (f32(3, 8), f32(3, 8))),
    "approx_max_k": (lambda a: lax.approx_max_k(a, 2), (f32(8, 24),)),
    "exclusive or": (
        lambda a: lax.reduce_xor_p.bind(a, axes=(0, 2)),
        (ties(jnp.int32, 8, 3, 24),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_against_the_truth(name: str):
    function, args = CASES[name]
    report = check_rule(function, *args, most_nested=12)
    assert report.checked
    assert not report.wrong, str(report)


def test_doubles():
    with jax.enable_x64(True):
        numbers = jnp.asarray(RANDOM.normal(size=24))
        report = check_rule(
            lambda a: (lax.argmax(a, 0, jnp.int64), lax.top_k(a, 2)), numbers, most_nested=12
        )
    assert not report.wrong, str(report)
