"""Data parallelism by its usual name: buckets of gradients, and results as serial ones."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from pypto_spmd import DeviceMesh, ShardingError
from pypto_spmd.training import DistributedDataParallel

OPTIMIZER = optax.sgd(0.1, momentum=0.9)
WIDTHS = (16, 32, 32, 4)


def state_of():
    keys = jax.random.split(jax.random.key(0), len(WIDTHS))
    params = [
        {"w": jax.random.normal(key, (n, m)) / n**0.5, "b": jnp.zeros(m)}
        for key, n, m in zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=False)
    ]
    return {"params": params, "opt": OPTIMIZER.init(params)}


def train_step(state, x, y):
    def loss_of(params):
        h = x
        for layer in params:
            h = jnp.tanh(h @ layer["w"] + layer["b"])
        return jnp.mean((h - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def batch():
    random = np.random.default_rng(0)
    return random.standard_normal((8, 16), np.float32), random.standard_normal((8, 4), np.float32)


def gradient_steps(step):
    plan = step.plan(state_of(), *batch())
    assert plan.counts()["all_reduce"] == len(plan.steps)
    return [s for s in plan.steps if s.elements > 1]


def test_a_step_is_the_serial_one():
    state, (x, y) = state_of(), batch()
    step = DistributedDataParallel(
        train_step, device_ids=[0, 1, 2, 3], bucket_cap_mb=0.003, donate_argnames="state"
    )
    serial = jax.jit(train_step)
    wanted = state
    for _ in range(3):
        wanted, loss = serial(wanted, x, y)
        state, found = step(state, x, y)
        np.testing.assert_allclose(found, loss, rtol=1e-5)
    for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    assert state["params"][0]["w"].sharding.is_fully_replicated
    step.verify(state, x, y)


def test_gradients_travel_in_buckets_of_at_most_the_cap():
    sizes = [(n * m + m) * 4 for n, m in itertools.pairwise(WIDTHS)]
    one = gradient_steps(DistributedDataParallel(train_step, [0, 1]))
    assert [s.tensors for s in one] == [6]
    assert one[0].bytes == sum(sizes)
    cap = 4352  # bytes
    several = gradient_steps(DistributedDataParallel(train_step, [0, 1], bucket_cap_mb=cap / 2**20))
    assert len(several) > 1
    assert sum(s.bytes for s in several) == sum(sizes)
    assert all(s.bytes <= cap for s in several)
    assert several[0].bytes < several[1].bytes  # the last layer's gradients are there first
    tiny = gradient_steps(DistributedDataParallel(train_step, [0, 1], bucket_cap_mb=1e-9))
    assert [s.tensors for s in tiny] == [1] * 6


def test_without_overlap_all_travels_at_once():
    step = DistributedDataParallel(train_step, [0, 1], bucket_cap_mb=1e-9, overlap_allreduce=False)
    assert [s.tensors for s in gradient_steps(step)] == [6]


def test_a_mesh_may_be_given_and_all_devices_are_usual():
    mesh = DeviceMesh([0, 1], ["batch"])
    assert len(gradient_steps(DistributedDataParallel(train_step, mesh=mesh))) == 1
    plan = DistributedDataParallel(train_step).plan(state_of(), *batch())
    assert dict(plan.mesh) == {"data": jax.device_count()}


def test_what_can_not_be():
    with pytest.raises(ShardingError) as error:
        DistributedDataParallel(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    assert str(error.value) == (
        "DistributedDataParallel: it was given a value of type Linear.\n"
        "  The gradients are reduced in the train step, which a model alone does not have.\n"
        "  Fix: pass the step: DistributedDataParallel(train_step), with train_step(state, batch)."
    )
    with pytest.raises(ShardingError, match="bucket_cap_mb is 0"):
        DistributedDataParallel(train_step, [0, 1], bucket_cap_mb=0)
    two = DeviceMesh.simulate((2, 4), ("data", "model"))
    with pytest.raises(ShardingError, match="Data parallelism has one axis"):
        DistributedDataParallel(train_step, mesh=two)
    with pytest.raises(ShardingError, match="both device_ids and mesh"):
        DistributedDataParallel(train_step, [0, 1], mesh=two)
