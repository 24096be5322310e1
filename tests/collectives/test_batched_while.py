"""Loops that `vmap` has batched: each element of the batch ends on its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pypto_spmd import DeviceMesh, PartitionSpec, spmd
from pypto_spmd.testing import assert_spmd_equal

MESH = DeviceMesh.simulate((2, 4), ("data", "model"))
X = np.random.default_rng(0).uniform(0.1, 3, (8, 16)).astype(np.float32)


def grown(x: Any) -> Any:
    return lax.while_loop(lambda c: c.sum() < 90, lambda c: c * 1.5 + 0.1, x)


def counted(x: Any) -> Any:
    """Newton's steps to a root, and how many there were."""

    def step(state: Any) -> Any:
        root, count = state
        return (root + x / root) / 2, count + 1

    return lax.while_loop(lambda s: jnp.abs(s[0] ** 2 - x).max() > 1e-3, step, (x, 0))


def drawn(seed: Any) -> Any:
    """A number above a bound, drawn as often as it takes."""

    def again(state: Any) -> Any:
        key, _ = state
        key, used = jax.random.split(key)
        return key, jax.random.uniform(used)

    return lax.while_loop(lambda s: s[1] < 0.8, again, (jax.random.key(seed), 0.0))[1]


LOOPS = {
    "one carry": (jax.vmap(grown), X, PartitionSpec("data", "model"), {"all_reduce": 3}),
    "two carries": (jax.vmap(counted), X, PartitionSpec("data"), {"all_reduce": 1}),
    "two batch dims": (jax.vmap(jax.vmap(counted)), X, PartitionSpec("data"), {"all_reduce": 1}),
    "keys": (jax.vmap(drawn), np.arange(8), PartitionSpec("data"), {"all_reduce": 1}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_elements_end_on_their_own(name: str):
    function, x, split, counts = LOOPS[name]
    call = spmd(lambda x: function(x), mesh=MESH, in_shardings=split)
    call.plan(x).assert_counts(**counts)
    assert_spmd_equal(call, x)
    call.verify(x)


def test_inside_of_another_loop_in_64_bits():
    def function(x):
        return lax.scan(lambda c, row: (jax.vmap(grown)(c / 9) + row, None), x, x[:3])[0]

    with jax.enable_x64(True):
        call = spmd(function, mesh=MESH, in_shardings=PartitionSpec("data"))
        assert call(X.astype(np.float64)).dtype == np.float64
        assert_spmd_equal(call, X.astype(np.float64))
