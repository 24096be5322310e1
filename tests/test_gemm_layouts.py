"""Every layout of a matrix product: all combinations of how A, B and C lie on a 2 x 4 mesh."""

import itertools
import random

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pypto_spmd import spmd
from pypto_spmd.collectives.reconcile import reconcile
from pypto_spmd.mesh import DeviceMesh

M, K, N = 16, 24, 40

SPECS = [
    PartitionSpec(rows, columns)
    for rows, columns in itertools.product([None, "data", "model", ("data", "model")], repeat=2)
    if not set(np.atleast_1d(rows or [])) & set(np.atleast_1d(columns or []))
]
"""Each axis splits the rows, the columns or nothing."""

COMBINATIONS = list(itertools.product(SPECS, repeat=3))


def check(
    mesh: DeviceMesh, a_spec: PartitionSpec, b_spec: PartitionSpec, c_spec: PartitionSpec
) -> None:
    draw = np.random.default_rng(0)
    a = draw.normal(size=(M, K)).astype(np.float32)
    b = draw.normal(size=(K, N)).astype(np.float32)
    gemm = spmd(lambda a, b: a @ b, mesh=mesh, in_shardings=[a_spec, b_spec], out_shardings=c_spec)
    plan = gemm.plan(a, b)
    compiled = gemm.lower(a, b).compile()
    reconcile(plan.steps, compiled.as_text(), dict(mesh.shape)).check()
    placed = jax.device_put((a, b), compiled.input_shardings[0])
    result = compiled(*placed)
    np.testing.assert_allclose(np.asarray(result), a @ b, rtol=1e-5, atol=1e-5)
    wanted = NamedSharding(mesh.jax_mesh, c_spec)
    assert result.sharding.is_equivalent_to(wanted, 2)


def test_there_are_729() -> None:
    assert len(COMBINATIONS) == 729


def test_a_sample_of_layouts(spmd_mesh: DeviceMesh) -> None:
    for specs in random.Random(0).sample(COMBINATIONS, 60):
        check(spmd_mesh, *specs)


@pytest.mark.slow
@pytest.mark.parametrize("a_spec", SPECS, ids=str)
def test_all_layouts(spmd_mesh: DeviceMesh, a_spec: PartitionSpec) -> None:
    for b_spec, c_spec in itertools.product(SPECS, repeat=2):
        check(spmd_mesh, a_spec, b_spec, c_spec)
