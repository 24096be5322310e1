"""Arrays from outside are arguments of the program, those that a `jax.jit` inside takes too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pypto_spmd import PartitionSpec as P
from pypto_spmd import spmd
from pypto_spmd.testing import assert_spmd_equal

TABLE = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
X = np.random.default_rng(1).standard_normal((8, 32)).astype(np.float32)

by_table = jax.jit(lambda x: x @ TABLE)


@jax.jit
def passing_on(x, y):
    return x, x, jnp.sin(y), 3.0, TABLE


@jax.jit
def nested(x):
    return by_table(x) + by_table(jax.jit(lambda z: by_table(z) / 6)(x))


@pytest.mark.parametrize(
    "function",
    [
        by_table,
        lambda x: by_table(by_table(x)),
        lambda x: passing_on(x, x + 1),
        nested,
        jax.vmap(by_table),
        jax.grad(lambda x: jnp.sin(by_table(x)).sum()),
        lambda x: jax.lax.scan(lambda c, _: (c @ TABLE / 6, None), x, None, length=3)[0],
        lambda x: jax.lax.scan(lambda c, _: (by_table(c) / 6, c), x, None, length=3),
        lambda x: jax.lax.fori_loop(0, 3, lambda i, c: by_table(c) / (i + 6), x),
        lambda x: jax.lax.while_loop(lambda c: by_table(c).sum() < 9, lambda c: by_table(c) + 1, x),
        lambda x: jax.lax.cond(x.sum() > 0, nested, lambda v: v, x),
        lambda x: jax.lax.switch(2, [jnp.sin, by_table, nested], x),
        jax.checkpoint(nested),
        jax.grad(lambda x: jnp.sin(jax.checkpoint(by_table)(x)).sum()),
        lambda x: jax.lax.map(lambda row: jax.checkpoint(by_table)(row[None])[0], x),
    ],
)
def test_arrays_from_outside_are_no_part_of_the_program(spmd_mesh, function):
    decorated = spmd(function, mesh=spmd_mesh, in_shardings=P("data"))
    assert (
        'dense<"0x' not in decorated.lower(X).as_text()
    )  # how an array's numbers are written there
    assert any(name != "x" for name in decorated.plan(X).in_layouts)
    assert_spmd_equal(decorated, X)
    decorated.verify(X)


def test_an_inlined_call_keeps_its_line_and_its_array_the_name(spmd_mesh):
    @spmd(mesh=spmd_mesh, in_shardings=P(None, "model"))
    def decorated(x):
        return by_table(x)

    (step,) = decorated.plan(X).steps
    assert step.source.startswith("test_hoisting.py:")
    assert list(spmd(lambda x: x @ TABLE, mesh=spmd_mesh).plan(X).in_layouts) == ["TABLE", "x"]


def test_derivatives_of_a_function_with_an_array_from_outside(spmd_mesh):
    decorated = spmd(nested, mesh=spmd_mesh, in_shardings=P("data"))
    got = jax.grad(lambda x: jnp.sin(decorated(x)).sum())(X)
    np.testing.assert_allclose(
        got, jax.grad(lambda x: jnp.sin(nested(x)).sum())(X), rtol=1e-4, atol=1e-4
    )
