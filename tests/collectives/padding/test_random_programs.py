"""Random programs on matrices of random sizes, split in random ways: SPMD equals serial."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

from pypto_spmd import DeviceMesh, PartitionSpec, spmd
from pypto_spmd.collectives.padding import boundary
from pypto_spmd.testing import assert_spmd_equal

P = PartitionSpec
LINE = DeviceMesh.simulate((8,), ("x",))
MESH = DeviceMesh.simulate((2, 4), ("x", "y"))
CUBE = DeviceMesh.simulate((2, 2, 2), ("x", "y", "z"))


@pytest.fixture(params=[False, True], ids=["zeros", "garbage"])
def padding(request, monkeypatch):
    monkeypatch.setattr(boundary, "GARBAGE", request.param)


@st.composite
def programs(draw):
    """A chain of steps on a matrix, from the sizes of its dims on."""
    steps = [
        lambda x: x - x.mean(0), lambda x: jax.nn.softmax(x, 1), lambda x: jnp.sort(x, 0),
        lambda x: jnp.cumsum(x, 0)[::-1], lambda x: x.T @ x, lambda x: x / (1 + x.max()),
        lambda x: 1 / x, lambda x: jnp.roll(x, 3, 1), lambda x: x[1:] if x.shape[0] > 1 else x,
        lambda x: jnp.concatenate([x, x[:2]]), lambda x: x.reshape(-1, 1), lambda x: x.T,
        lambda x: jnp.where(x > 0, x, x.min(0)), lambda x: x * jnp.argmax(x, 1)[:, None],
        lambda x: x[jnp.argsort(x[:, 0])], lambda x: x.at[0].set(x.max(0)),
        lambda x: lax.scan(lambda c, r: (c + r, c * r), x[0], x)[1], lambda x: jnp.tanh(x).repeat(2, 0),
        lambda x: jnp.linalg.norm(x, axis=1, keepdims=True) * x, lambda x: jnp.pad(x, ((2, 0), (0, 1))),
        lambda x: x.reshape(1, *x.shape).sum(0), lambda x: lax.cummax(x, 1, reverse=True),
        lambda x: jax.grad(lambda x: (jnp.sin(x).sum(0) ** 2).max())(x),
    ]  # fmt: skip
    chosen = draw(st.lists(st.sampled_from(range(len(steps))), min_size=1, max_size=5))
    sizes = draw(st.tuples(st.integers(1, 19), st.integers(1, 19)))
    mesh = draw(st.sampled_from([LINE, MESH, CUBE]))
    axes = [None, *mesh.axis_names, mesh.axis_names]
    first = draw(st.sampled_from(axes))
    taken = first if isinstance(first, tuple) else (first,)
    second = draw(
        st.sampled_from([a for a in axes if not {a} & {*taken, mesh.axis_names} or not a])
    )
    return [steps[i] for i in chosen], sizes, mesh, P(first, second)


@settings(deadline=None, max_examples=20, derandomize=True, suppress_health_check=list(HealthCheck))
@given(programs())
def test_random_programs(padding, program):
    steps, sizes, mesh, spec = program

    def function(x):
        for step in steps:
            if x.size < 2000:
                x = step(x)
        return x

    x = jnp.asarray(np.random.default_rng(0).normal(size=sizes).astype(np.float32))
    decorated = spmd(function, mesh=mesh, in_shardings=spec, out_shardings=spec, uneven="pad")
    serial = np.asarray(function(x))
    largest = np.abs(serial[np.isfinite(serial)]).max(initial=0)
    assert_spmd_equal(decorated, x, rtol=1e-3, atol=1e-5 + 1e-3 * largest)
    if min(sizes) > 1:  # XLA knows the order of one element, and gathers nothing for it
        decorated.verify(x)
