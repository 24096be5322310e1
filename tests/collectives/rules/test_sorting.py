"""Sorting and selecting along split dims: blocks merged in rounds, candidates exchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pypto_spmd import DeviceMesh, PartitionSpec, spmd
from pypto_spmd.testing import assert_spmd_equal, check_rule

RANDOM = np.random.default_rng(0)
ORDER = RANDOM.permutation(8 * 16).reshape(8, 16).astype(np.float32)
TIES = ORDER % 5
SPECIAL = np.where(ORDER % 7 == 0, np.nan, np.where(ORDER % 5 == 0, -0.0, ORDER % 3))

SORTS = {
    "values": (jnp.sort, ORDER),
    "equal values": (jnp.argsort, TIES),
    "first dim": (lambda x: jnp.argsort(x, 0), TIES.astype(jnp.bfloat16)),
    "descending": (lambda x: jnp.argsort(x, descending=True), TIES),
    "NaNs and zeros": (jnp.argsort, SPECIAL.astype(np.float32)),
    "two keys": (lambda a, b: jnp.lexsort((a, b)), TIES, (ORDER % 3).astype(np.int8)),
    "bools": (lambda a, b: lax.sort((a, b), num_keys=1), TIES > 2, ORDER),
    "not stably": (lambda a, b: lax.sort((a, b), num_keys=1, is_stable=False), ORDER, TIES),
    "complex": (lambda x: jnp.sort(x), (TIES + 1j * ORDER).astype(np.complex64)),
    "one dim": (jnp.sort, ORDER.ravel()),
}


@pytest.mark.parametrize(("function", "args"), [(f, a) for f, *a in SORTS.values()], ids=SORTS)
def test_sorts(function, args):
    report = check_rule(function, *args, primitives=["sort"], most_nested=8)
    report.check()
    assert report.checked > 3


@pytest.mark.parametrize("shape", [(8,), (6,), (2, 3), (5,)])
def test_other_numbers_of_devices(shape):
    x = RANDOM.permutation(240).astype(np.int16) % 50
    report = check_rule(jnp.argsort, x, primitives=["sort"], mesh_shapes=[shape])
    report.check()
    assert report.checked > 1


def test_64_bits():
    with jax.enable_x64(True):
        x = TIES.astype(np.float64)
        check_rule(jnp.argsort, x, primitives=["sort"], most_nested=4).check()


def test_a_sorted_dim_stays_split():
    mesh = DeviceMesh.simulate((8,), ("x",))
    split = PartitionSpec("x")
    call = spmd(jnp.sort, mesh=mesh, in_shardings=split, out_shardings=split)
    x = RANDOM.permutation(4096).astype(np.float32)
    plan = call.plan(x)
    plan.assert_counts(collective_permute=6)
    assert plan.wire_bytes == 6 * 4 * 4096 // 8  # gathering would send 7 blocks
    assert_spmd_equal(call, x)
    call.verify(x)


APPROXIMATE = {
    "largest": lambda x: lax.approx_max_k(x, 2),
    "smallest of the first dim": lambda x: lax.approx_min_k(x, 2, reduction_dimension=0),
    "not aggregated": lambda x: lax.approx_max_k(x, 2, aggregate_to_topk=False),
}


@pytest.mark.parametrize("function", APPROXIMATE.values(), ids=APPROXIMATE)
def test_approximate_selections(function):
    report = check_rule(function, ORDER, primitives=["approx_top_k"], most_nested=8)
    report.check()
    assert report.checked > 2


def test_only_candidates_are_exchanged():
    mesh = DeviceMesh.simulate((8,), ("x",))
    call = spmd(lambda x: lax.approx_max_k(x, 2), mesh=mesh, in_shardings=PartitionSpec(None, "x"))
    x = RANDOM.permutation(4 * 64).reshape(4, 64).astype(np.float32)
    call.plan(x).assert_counts(all_gather=1)
    assert call.plan(x).wire_bytes == 7 * 4 * 2 * 8
    assert_spmd_equal(call, x)
    call.verify(x)
