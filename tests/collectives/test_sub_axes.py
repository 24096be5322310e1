"""Axes that are cut for a reshape: grouped heads, and microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pypto_spmd import DeviceMesh, spmd
from pypto_spmd.collectives.sub_axes import coarsened, cut, join, joined
from pypto_spmd.sharding.layout import Layout
from pypto_spmd.testing import assert_spmd_equal

PARTS = {"model": (2, 2)}


def test_layouts_are_told_in_sub_axes_and_back():
    given = Layout.from_spec(P("data", ("model", "other")), 2)
    fine = cut(given, PARTS)
    assert str(fine) == "[data, (model.0,model.1,other)]"
    assert joined(fine, PARTS) == given
    assert joined(Layout((("model.0",), ())), PARTS) is None
    assert coarsened(Layout((("data", "model.0"), ())), PARTS) == Layout((("data",), ()))


def test_only_whole_axes_in_order_are_joined():
    assert join(("data", "model.0", "model.1"), PARTS) == ("data", "model")
    assert join(("model.1", "model.0"), PARTS) == ("model.1", "model.0")


def test_query_heads_in_groups_fewer_than_the_axis():
    """8 query heads over 4 devices, 2 key heads: the groups take half of the axis, the rest the other."""
    mesh = DeviceMesh.simulate((2, 4), ("data", "model"))

    def attention(q, k, v, wo):
        grouped = q.reshape(2, 8, 2, 4, 4)
        scores = jax.nn.softmax(jnp.einsum("bqgnd,bkgd->bgnqk", grouped, k), axis=-1)
        mixed = jnp.einsum("bgnqk,bkgd->bqgnd", scores, v).reshape(2, 8, 8, 4)
        return jnp.einsum("bqnd,ndm->bqm", mixed, wo)

    draw = np.random.default_rng(0)
    arrays = [
        draw.normal(size=s).astype(np.float32)
        for s in [(2, 8, 8, 4), (2, 8, 2, 4), (2, 8, 2, 4), (8, 4, 16)]
    ]
    decorated = spmd(
        attention,
        mesh=mesh,
        in_shardings=[P("data", None, "model"), P("data"), P("data"), P("model")],
        out_shardings=P("data"),
    )
    plan = decorated.plan(*arrays)
    plan.assert_counts(all_reduce=1)
    assert plan.steps[0].axes == ("model",)
    assert plan.in_layouts["q"] == "[data, -, model, -]"
    assert_spmd_equal(decorated, *arrays)
    decorated.verify(*arrays)


def test_microbatches_fewer_than_the_axis():
    mesh = DeviceMesh.simulate((4,), ("data",))

    def accumulate(w, x):
        def step(total, batch):
            return total + jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w)))(w), None

        return jax.lax.scan(step, jnp.zeros_like(w), x.reshape(2, 8, 32))[0]

    draw = np.random.default_rng(0)
    w, x = (draw.normal(size=s).astype(np.float32) for s in [(32, 8), (16, 32)])
    decorated = spmd(accumulate, mesh=mesh, in_shardings=[P(), P("data")], out_shardings=P())
    decorated.plan(w, x).assert_counts(all_to_all=1, all_reduce=1)
    assert_spmd_equal(decorated, w, x, atol=1e-4)
    decorated.verify(w, x)


def test_free_results_lie_on_whole_axes():
    mesh = DeviceMesh.simulate((4,), ("model",))
    split = spmd(lambda x: x.reshape(2, 4, 3) * 2, mesh=mesh, in_shardings=[P("model")])
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    result = split(x)
    np.testing.assert_array_equal(result, x.reshape(2, 4, 3) * 2)
    assert all("." not in str(axis) for axis in result.sharding.spec)
    split.verify(x)


def test_a_free_result_is_split_no_further_than_it_divides():
    """22 rows: each axis may split them, both may not."""

    def program(x):
        x = x[1:-1, 1:-1]
        return jax.lax.scan(lambda c, row: (c + row[1:], c * 1), x[0, 1:], x)[1]

    mesh = DeviceMesh.simulate((2, 4), ("data", "model"))
    decorated = spmd(program, mesh=mesh, in_shardings=P("model"), objective="bytes")
    x = np.random.default_rng(0).normal(size=(24, 16)).astype(np.float32)
    assert_spmd_equal(decorated, x, atol=1e-5)
    decorated.verify(x)
