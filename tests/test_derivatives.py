"""Derivatives of SPMD functions are those of the serial functions, custom rules and all, and planned."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from pypto_spmd import PartitionSpec, spmd
from pypto_spmd.call import spmd_call_p
from pypto_spmd.collectives.hlo import parse_collectives

P = PartitionSpec


@jax.custom_vjp
def round_straight_through(a):
    """Rounds; its derivative is that of the identity."""
    return jnp.round(a)


round_straight_through.defvjp(lambda a: (jnp.round(a), None), lambda _, g: (g,))


@jax.custom_jvp
def sign_straight_through(a):
    """The sign; its derivative is that of three times the identity."""
    return jnp.sign(a)


@sign_straight_through.defjvp
def _(primals, tangents):
    return jnp.sign(primals[0]), 3 * tangents[0]


def mlp(params, batch):
    hidden = jax.nn.relu(batch @ params["w1"] + params["b1"])
    return hidden @ params["w2"]


def mean_squares(params, batch):
    return jnp.mean((mlp(params, batch) - 1) ** 2)


def cross_entropy(params, batch):
    labels = jnp.arange(batch.shape[0]) % 4
    return optax.softmax_cross_entropy_with_integer_labels(mlp(params, batch), labels).mean()


def straight_through(params, batch):
    return jnp.sum(
        round_straight_through(batch @ params["w1"] * 3) @ sign_straight_through(params["w2"]) ** 2
    ) + jnp.sum(params["b1"])


def checkpointed(params, batch):
    return jnp.sum(jnp.tanh(jax.checkpoint(mlp)(params, batch)))


def scanned(params, batch):
    def layer(carry, weight):
        return jnp.tanh(carry @ weight), carry.sum()

    stack = jnp.stack([params["w1"] @ params["w1"].T] * 3)
    last, sums = lax.scan(layer, batch, stack)
    return last.sum() + (sums**2).sum() + params["b1"][0]


def with_exact_numbers(params, batch):
    order = jnp.argsort(batch[:, 0])
    chosen = jnp.where(order % 2 == 0, batch.sum(1), 0)
    return chosen @ jnp.ones(8) * mean_squares(params, batch)


LOSSES = [
    mean_squares,
    cross_entropy,
    straight_through,
    checkpointed,
    scanned,
    with_exact_numbers,
]
LAYOUTS = {
    "data": [P(), P("data")],
    "tensor": [{"w1": P(None, "model"), "b1": P("model"), "w2": P("model")}, P("data")],
    "fsdp": [{"w1": P("data"), "b1": P("data"), "w2": P("data")}, P(("data", "model"))],
    "free": None,
}


@pytest.fixture
def params():
    rng = np.random.default_rng(1)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return {"w1": normal(8, 16), "b1": normal(16), "w2": normal(16, 4)}


@pytest.fixture
def batch():
    return np.random.default_rng(2).normal(size=(8, 8)).astype(np.float32)


def assert_close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        scale = float(np.max(np.abs(w), initial=1e-6))
        np.testing.assert_allclose(np.asarray(g) / scale, np.asarray(w) / scale, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_value_and_grad(spmd_mesh, params, batch, loss, layout):
    decorated = spmd(loss, mesh=spmd_mesh, in_shardings=LAYOUTS[layout])
    want = jax.value_and_grad(loss, argnums=(0, 1))(params, batch)
    gradient = jax.value_and_grad(decorated, argnums=(0, 1))
    assert_close(jax.jit(gradient)(params, batch), want)
    if layout == "tensor":
        assert_close(gradient(params, batch), want)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_grad_inside(spmd_mesh, params, batch, loss):
    """Of a function inside another one, which is inlined."""
    inner = spmd(loss, mesh=spmd_mesh, in_shardings=LAYOUTS["tensor"])

    @spmd(mesh=spmd_mesh, in_shardings=LAYOUTS["tensor"])
    def outer(params, batch):
        return jax.value_and_grad(inner)(params, batch)

    assert_close(outer(params, batch), jax.value_and_grad(loss)(params, batch))
    outer.verify(params, batch)


@pytest.mark.parametrize("loss", [mean_squares, cross_entropy, scanned], ids=lambda f: f.__name__)
def test_forward_and_mixed_modes(spmd_mesh, params, batch, loss):
    decorated = spmd(loss, mesh=spmd_mesh, in_shardings=LAYOUTS["tensor"])
    tangents = jax.tree.map(jnp.ones_like, params)

    def jvp(f):
        return jax.jvp(lambda p: f(p, batch), (params,), (tangents,))

    def linearized(f):
        value, linear = jax.linearize(lambda p: f(p, batch), params)
        return value, linear(tangents), linear(params)

    def forward_over_reverse(f):
        return jax.jvp(lambda p: jax.grad(f)(p, batch), (params,), (tangents,))

    def reverse_over_forward(f):
        return jax.grad(lambda p: jax.jvp(lambda q: f(q, batch), (p,), (tangents,))[1])(params)

    def reverse_over_reverse(f):
        def dot(g):
            leaves = zip(jax.tree.leaves(g), jax.tree.leaves(params), strict=True)
            return sum(jnp.vdot(a, b) for a, b in leaves)

        return jax.grad(lambda p: dot(jax.grad(f)(p, batch)))(params)

    for derived in (
        jvp,
        linearized,
        forward_over_reverse,
        reverse_over_forward,
        reverse_over_reverse,
    ):
        assert_close(derived(decorated), derived(loss))


def test_hessian(spmd_mesh):
    def f(a, b):
        return jnp.sum(jnp.sin(a) * jnp.cumsum(b) ** 2) + jnp.prod(a[:4])

    decorated = spmd(f, mesh=spmd_mesh, in_shardings=[P("model"), P("data")])
    a, b = np.linspace(0.5, 1, 8, dtype=np.float32), np.linspace(-1, 1, 8, dtype=np.float32)
    for hessian in (jax.hessian, lambda f, argnums: jax.jacrev(jax.jacfwd(f, argnums), argnums)):
        assert_close(hessian(decorated, argnums=(0, 1))(a, b), hessian(f, argnums=(0, 1))(a, b))


def test_vmap_of_grad_and_grad_of_vmap(spmd_mesh, params, batch):
    decorated = spmd(mean_squares, mesh=spmd_mesh, in_shardings=[LAYOUTS["tensor"][0], P()])
    rows = batch[:, None, :]

    def per_sample(f):
        return jax.vmap(jax.grad(f), in_axes=(None, 0))(params, rows)

    def of_all(f):
        return jax.grad(lambda p: jnp.sum(jax.vmap(f, in_axes=(None, 0))(p, rows) ** 2))(params)

    assert_close(per_sample(decorated), per_sample(mean_squares))
    assert_close(of_all(decorated), of_all(mean_squares))
    assert_close(jax.jit(lambda: per_sample(decorated))(), per_sample(mean_squares))


def test_relu_at_zero(spmd_mesh):
    decorated = spmd(lambda a: jax.nn.relu(a).sum(), mesh=spmd_mesh, in_shardings=P("data"))
    for transform in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(transform(jax.grad(decorated))(jnp.zeros(8)), np.zeros(8))


def test_results_that_have_no_derivative(spmd_mesh, batch):
    """Integer arguments and results, and results that nobody differentiates."""

    def f(a, i):
        return {"sum": jnp.sum(a * i), "count": jnp.sum(a > 0), "i": i + 1, "unused": jnp.sin(a)}

    decorated = spmd(f, mesh=spmd_mesh, in_shardings=[P("data"), P("data")])
    i = np.arange(8)[:, None]

    def loss(f):
        def of(a, i):
            out = f(a, i)
            return out["sum"], out["count"]

        return jax.value_and_grad(of, has_aux=True)(batch, i)

    assert_close(loss(decorated), loss(f))
    primal, tangent = jax.jvp(decorated, (batch, i), (batch, np.zeros(i.shape, jax.dtypes.float0)))
    assert tangent["i"].dtype == tangent["count"].dtype == jax.dtypes.float0
    assert_close(tangent["unused"], jnp.cos(batch) * batch)
    assert_close(primal, jax.jit(f)(batch, i))
    _, vjp = jax.vjp(decorated, batch, i)
    zero = lambda a: np.zeros(a.shape, jax.dtypes.float0)  # noqa: E731
    cotangents = {
        **primal,
        "count": zero(primal["count"]),
        "i": zero(primal["i"]),
        "sum": jnp.float32(2),
    }
    assert_close(
        vjp(cotangents)[0], 2 * np.broadcast_to(i, (8, 8)) + jnp.cos(batch) * jnp.sin(batch)
    )


def test_remat_of_one(spmd_mesh, params, batch):
    decorated = spmd(mean_squares, mesh=spmd_mesh, in_shardings=LAYOUTS["tensor"])
    got = jax.jit(jax.grad(jax.checkpoint(decorated)))(params, batch)
    assert_close(got, jax.grad(mean_squares)(params, batch))


def test_captured_arrays_have_derivatives(spmd_mesh, batch):
    def loss(a):
        return spmd(lambda b: jnp.sum(jnp.sin(a) * b), mesh=spmd_mesh, in_shardings=P("data"))(
            batch
        )

    np.testing.assert_allclose(jax.grad(loss)(batch), np.cos(batch) * batch, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        jax.jit(jax.grad(loss))(batch), np.cos(batch) * batch, rtol=1e-5, atol=1e-6
    )


def test_complex_numbers(spmd_mesh, batch):
    def f(a):
        return jnp.sum(jnp.abs(jnp.fft.fft(a, axis=1)) ** 2 * jnp.arange(8))

    decorated = spmd(f, mesh=spmd_mesh, in_shardings=P("data"))
    assert_close(jax.grad(decorated)(batch), jax.grad(f)(batch))


def calls(jaxpr):
    """The SPMD calls of a jaxpr, those of inner ones included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is spmd_call_p:
            yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from calls(inner)


def test_gradients_lie_as_their_parameters(spmd_mesh, params, batch):
    decorated = spmd(mean_squares, mesh=spmd_mesh, in_shardings=LAYOUTS["tensor"])
    gradient = jax.grad(decorated)(params, batch)
    assert gradient["w1"].sharding.spec == P(None, "model")
    assert gradient["b1"].sharding.spec == P("model")
    assert gradient["w2"].sharding.spec == P("model")


def test_both_directions_run_their_plans_alone(spmd_mesh, params, batch):
    """Every collective of a jitted gradient is a step of the forward's or the backward's plan."""
    decorated = spmd(mean_squares, mesh=spmd_mesh, in_shardings=LAYOUTS["tensor"])
    gradient = jax.value_and_grad(decorated)
    found = list(calls(jax.make_jaxpr(gradient)(params, batch).jaxpr))
    assert [eqn.params["options"].function_name for eqn in found] == [
        "mean_squares",
        "mean_squares (backward)",
    ]
    placed = jax.device_put(
        (params, batch),
        (
            {k: jax.NamedSharding(spmd_mesh.jax_mesh, s) for k, s in LAYOUTS["tensor"][0].items()},
            jax.NamedSharding(spmd_mesh.jax_mesh, P("data")),
        ),
    )
    text = jax.jit(gradient).lower(*placed).compile().as_text()
    collectives = parse_collectives(text, dict(spmd_mesh.shape))
    assert collectives
    assert all(collective.step_ids for collective in collectives)


def test_derivatives_are_planned_once(spmd_mesh, params, batch, monkeypatch):
    from pypto_spmd.collectives import planner

    planned = []
    make_program = planner.make_program

    def counted(*args, **kwargs):
        planned.append(kwargs["function_name"])
        return make_program(*args, **kwargs)

    monkeypatch.setattr(planner, "make_program", counted)
    decorated = spmd(mean_squares, mesh=spmd_mesh, in_shardings=LAYOUTS["data"])
    for _ in range(3):
        jax.value_and_grad(decorated)(params, batch)
    assert planned == ["mean_squares", "mean_squares (backward)"]
