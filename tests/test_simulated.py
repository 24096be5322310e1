"""Programs on simulated devices start when the last one is through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pypto_spmd import DeviceMesh, simulated, spmd


class Result:
    """Stands for an array that a program will have made."""

    def __init__(self, waits: list[str], deleted: bool = False) -> None:
        self._waits, self._deleted = waits, deleted

    def is_deleted(self) -> bool:
        return self._deleted

    def block_until_ready(self) -> None:
        self._waits.append("waited")


@pytest.fixture
def waits(monkeypatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(simulated, "_last", [Result(found)])
    return found


def test_a_program_waits_for_the_last_one(spmd_mesh: DeviceMesh, waits):
    double = spmd(lambda x: (x * 2, x.sum()), mesh=spmd_mesh, in_shardings=P("data"))
    x = jnp.arange(8.0)
    for _ in range(3):  # the second and third call are hot
        out, total = double(x)
        assert simulated._last == [total]  # the smallest of its results
    assert waits == ["waited"]
    np.testing.assert_array_equal(out, np.arange(8) * 2)


def test_what_was_donated_is_not_waited_for(spmd_mesh: DeviceMesh, waits, monkeypatch):
    monkeypatch.setattr(simulated, "_last", [Result(waits, deleted=True)])
    state = jnp.arange(8.0)
    step = spmd(lambda s: s + 1, mesh=spmd_mesh, in_shardings=P("data"), donate_argnums=0)
    for _ in range(3):
        state = step(state)
    assert waits == []
    np.testing.assert_array_equal(state, np.arange(8) + 3)


def test_one_device_waits_for_nobody(waits):
    mesh = DeviceMesh([0], ["data"])
    assert not mesh.is_simulated
    spmd(lambda x: x + 1, mesh=mesh)(jnp.arange(8.0))
    assert waits == []
    assert all(isinstance(last, Result) for last in simulated._last)


def test_a_long_loop_that_looks_at_nothing(spmd_mesh: DeviceMesh):
    step = spmd(
        lambda w: w - 0.1 * jnp.tanh(w @ w.sum(0)),
        mesh=spmd_mesh,
        in_shardings=P("data", "model"),
        out_shardings=P("data", "model"),
    )
    w = jax.random.normal(jax.random.key(0), (8, 8))
    for _ in range(200):
        w = step(w)
    assert bool(jnp.isfinite(w).all())
