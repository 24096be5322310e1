"""Marked gradients are summed, and reduced, in the wide type wherever the way up to a sum allows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pypto_spmd import DeviceMesh, PartitionSpec, spmd
from pypto_spmd.collectives.wide_sums import sum_in

P = PartitionSpec
NARROW, WIDE = jnp.bfloat16, jnp.float32


def narrow(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, NARROW)


def through_dot(w, x):
    return (x @ w).astype(WIDE).sum()


def through_transpose(w, x):
    return (x @ w.T).astype(WIDE).sum()


def through_two_uses(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w).astype(WIDE).sum()


def through_bias(w, x):
    return jnp.tanh(x[:, None, :] + w).astype(WIDE).sum()


def through_rows(w, x):
    return w[jnp.arange(8) % 4, :].astype(WIDE).sum() + x.astype(WIDE).sum()


def through_lookup(w, x):
    ids = jnp.argmax(x, axis=1)
    return (w[ids] * x).astype(WIDE).sum()


def through_convolution(w, x):
    images = jnp.broadcast_to(x[:, :, None, None], (8, 8, 6, 6))
    return lax.conv(images, w[:, :, None, None], (1, 1), "SAME").astype(WIDE).sum()


def through_a_loop_that_shares_it(w, x):
    body = jax.checkpoint(lambda h, _: (jnp.tanh(h @ w), None))
    return lax.scan(body, x, None, length=3)[0].astype(WIDE).sum()


def through_a_loop_over_layers(w, x):
    stacked = jnp.concatenate([w[None], w[None] * 2])
    return lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, stacked)[0].astype(WIDE).sum()


def through_parts(w, x):
    return (x[:, :4] @ w[:4] + x[:, 4:] @ w[4:]).astype(WIDE).sum()


CASES = [value for name, value in list(globals().items()) if name.startswith("through_")]


def gradient(loss, wanted):
    def of(w, x):
        return sum_in(jax.grad(loss)(w, x), wanted)

    return of


@pytest.mark.parametrize("loss", CASES, ids=lambda case: case.__name__)
def test_the_gradient_is_reduced_in_the_wide_type(loss):
    mesh = DeviceMesh([[0, 1], [2, 3]], ["data", "other"])
    w, x = narrow(8, 8), narrow(8, 8, seed=1)
    step = spmd(gradient(loss, WIDE), mesh=mesh, in_shardings=[P(), P("data")], out_shardings=P())
    plan = step.plan(w, x)
    reduced = [s for s in plan.steps if s.kind == "all_reduce"]
    assert {s.dtype for s in reduced} <= {"float32"}
    found = step(w, x)
    assert found.dtype == WIDE
    step.verify(w, x)
    exact = jax.grad(loss)(w.astype(WIDE), x.astype(WIDE))
    np.testing.assert_allclose(found, exact, atol=0.06 * float(jnp.abs(exact).max()))


def test_without_the_mark_the_narrow_type_travels():
    mesh = DeviceMesh([0, 1], ["data"])
    plain = lambda w, x: jax.grad(through_dot)(w, x).astype(WIDE)  # noqa: E731
    step = spmd(plain, mesh=mesh, in_shardings=[P(), P("data")], out_shardings=P())
    assert [s.dtype for s in step.plan(narrow(8, 8), narrow(8, 8)).steps] == ["bfloat16"]


def test_what_is_read_in_the_narrow_type_too_stays_narrow():
    mesh = DeviceMesh([0, 1], ["data"])

    def both(w, x):
        grad = jax.grad(through_dot)(w, x)
        return sum_in(grad, WIDE), grad

    step = spmd(both, mesh=mesh, in_shardings=[P(), P("data")], out_shardings=P())
    w, x = narrow(8, 8), narrow(8, 8, seed=1)
    wide, same = step(w, x)
    assert (wide.dtype, same.dtype) == (WIDE, NARROW)
    assert [s.dtype for s in step.plan(w, x).steps] == ["bfloat16"]
    np.testing.assert_array_equal(wide, same)


def test_outside_of_a_plan_it_is_a_cast():
    x = narrow(4)
    np.testing.assert_array_equal(jax.jit(lambda x: sum_in(x, WIDE))(x), x.astype(WIDE))
    assert sum_in(x.astype(WIDE), WIDE).dtype == WIDE
