"""Random numbers on shards are bit for bit the serial ones, and nothing is sent."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pypto_spmd.collectives.rules import registered
from pypto_spmd.collectives.rules.random import _indices
from pypto_spmd.testing.rule_truth import check_rule

PRIMITIVES = tuple(n for n in registered() if n.startswith(("random_", "threefry")))


def bits(dtype: Any) -> Callable[..., Any]:
    return lambda seed: jax.random.bits(jax.random.key(seed), (8, 3, 24), dtype)


def batched(function: Callable[..., Any], impl: str = "threefry2x32") -> Callable[..., Any]:
    return lambda seed: jax.vmap(function)(jax.random.split(jax.random.key(seed, impl=impl), 8))


CASES: dict[str, Callable[..., Any]] = {
    "8 bits": bits(jnp.uint8),
    "16 bits": bits(jnp.uint16),
    "32 bits": bits(jnp.uint32),
    "split": lambda seed: jax.random.split(jax.random.key(seed), (8, 24)),
    "bits of batched keys": batched(lambda key: jax.random.bits(key, (3, 24))),
    "split of batched keys": batched(lambda key: jax.random.split(key, 24)),
    "fold_in of batched keys": batched(lambda key: jax.random.fold_in(key, 3)),
    "fold_in of batched data": lambda seed: jax.vmap(
        lambda data: jax.random.fold_in(jax.random.key(seed), data)
    )(jnp.arange(8)),
    "words of batched keys": batched(
        lambda key: jax.random.wrap_key_data(jax.random.key_data(key))
    ),
    "gamma of batched keys": batched(lambda key: jax.random.gamma(key, jnp.ones(3))),
    "rbg": lambda seed: jax.random.bits(jax.random.key(seed, impl="rbg"), (8, 24)),
    "unsafe_rbg": batched(lambda key: jax.random.fold_in(key, 3), "unsafe_rbg"),
}


@pytest.mark.parametrize("name", CASES)
def test_against_the_truth(name: str):
    report = check_rule(CASES[name], 7, primitives=PRIMITIVES, most_nested=12)
    assert report.checked
    assert not report.wrong, str(report)


def test_64_bits():
    with jax.enable_x64(True):
        report = check_rule(bits(jnp.uint64), 7, primitives=PRIMITIVES, most_nested=12)
    assert not report.wrong, str(report)


def test_older_counters():
    with jax.threefry_partitionable(False):
        report = check_rule(bits(jnp.uint32), 7, primitives=PRIMITIVES, most_nested=12)
        assert not report.wrong, str(report)


@pytest.mark.parametrize("start", [(0, 0, 0), (69998, 89990, 1), (12345, 70000, 0)])
def test_indices_beyond_32_bits(start: tuple[int, ...]):
    shape, local = (70000, 90001, 3), (2, 7, 2)
    high, low = _indices(shape, local, [jnp.int32(s) for s in start])
    found = np.asarray(high).astype(np.uint64) << np.uint64(32) | np.asarray(low).astype(np.uint64)
    places = np.meshgrid(
        *[np.arange(s, s + n) for s, n in zip(start, local, strict=True)], indexing="ij"
    )
    assert np.array_equal(found, np.ravel_multi_index(places, shape).astype(np.uint64))
