"""The decorator: what it takes, what a call does, and what it leaves as it is."""

import functools
import inspect
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, SingleDeviceSharding

from pypto_spmd import AUTO, CommPlan, DeviceMesh, PartitionSpec, ShardingSpec, SPMDFunction, spmd
from pypto_spmd.testing import assert_spmd_equal

P = PartitionSpec


@pytest.fixture
def x():
    return np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def spec_of(array):
    return tuple(array.sharding.spec) + (None,) * (array.ndim - len(array.sharding.spec))


def double(a):
    """Doubles."""
    return 2 * a


# How it is written


def test_bare_with_the_mesh_of_the_with_block(spmd_mesh, x):
    @spmd
    def bare(a):
        return jnp.sin(a)

    with spmd_mesh:
        assert_spmd_equal(bare, x)
        assert bare(x).sharding.mesh == spmd_mesh.jax_mesh


def test_bare_inside_the_with_block_keeps_that_mesh(spmd_mesh, x):
    with spmd_mesh:
        bare = spmd(double)
    assert bare(x).sharding.mesh == spmd_mesh.jax_mesh


def test_bare_follows_the_mesh_of_each_call(spmd_mesh, x):
    bare = spmd(double)
    other = DeviceMesh.simulate((8,), ("all",))
    for mesh in (spmd_mesh, other, spmd_mesh, other, other, spmd_mesh):
        with mesh:
            assert bare(x).sharding.mesh == mesh.jax_mesh


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        lambda mesh: P("data", "model"),
        lambda mesh: ShardingSpec(mesh, P("data", "model")),
        lambda mesh: NamedSharding(mesh.jax_mesh, P("data", "model")),
    ],
)
def test_positional(spmd_mesh, x, spec, many):
    spec = spec(spmd_mesh)

    @spmd(spmd_mesh, [spec] if many else spec)
    def positional(a):
        return jnp.sin(a)

    assert_spmd_equal(positional, x)
    assert positional.plan(x).in_layouts == {"a": "[data, model]"}


def test_a_jax_mesh_is_a_mesh(spmd_mesh, x):
    assert spmd(double, mesh=spmd_mesh.jax_mesh)(x).sharding.mesh == spmd_mesh.jax_mesh


def test_the_mesh_of_the_specs(spmd_mesh, x):
    decorated = spmd(double, in_shardings=ShardingSpec(spmd_mesh, P("model")))
    assert spec_of(decorated(x)) == ("model", None)


def test_out_sharding_is_out_shardings(spmd_mesh, x):
    for option in ("out_sharding", "out_shardings"):
        decorated = spmd(double, mesh=spmd_mesh, **{option: P(None, "model")})
        assert spec_of(decorated(x)) == (None, "model")


def test_it_looks_like_the_function_below(spmd_mesh):
    decorated = spmd(double, mesh=spmd_mesh)
    assert isinstance(decorated, SPMDFunction)
    assert decorated.__wrapped__ is double
    assert decorated.__name__ == "double"
    assert decorated.__doc__ == "Doubles."
    assert inspect.signature(decorated) == inspect.signature(double)
    assert repr(decorated) == "<@spmd function 'double'>"


def test_a_partial(spmd_mesh, x):
    decorated = spmd(functools.partial(jnp.add, 1), mesh=spmd_mesh)
    np.testing.assert_array_equal(decorated(x), x + 1)


# Specs


def tree(x):
    return {"w": x, "b": x[0], "more": [x, (x[:, 0], None)]}


@pytest.mark.parametrize(
    "specs",
    [
        [P("data"), P("model")],
        (P("data"), P("model")),
        [{"w": P("data"), "b": AUTO, "more": P("data")}, None],
        [{"w": P("data"), "b": None, "more": [P(), (P("data"), None)]}, P("model")],
        P("data"),
        AUTO,
        None,
        {"first": P("data")},
        {"second": P("model"), "first": {"w": P("data"), "b": AUTO, "more": AUTO}},
    ],
)
def test_prefixes(spmd_mesh, x, specs):
    @spmd(mesh=spmd_mesh, in_shardings=specs)
    def total(first, second):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(first)) + second

    assert_spmd_equal(total, tree(x), x)


def test_keywords_are_resolved_by_the_signature(spmd_mesh, x):
    @spmd(mesh=spmd_mesh, in_shardings=[P("data"), P(None, "model")])
    def difference(a, b):
        return a - 2 * b

    layouts = {"a": "[data, -]", "b": "[-, model]"}
    for args, kwargs in (((x, x + 1), {}), ((x,), {"b": x + 1}), ((), {"b": x + 1, "a": x})):
        assert difference.plan(*args, **kwargs).in_layouts == layouts
        for _ in range(3):
            np.testing.assert_allclose(difference(*args, **kwargs), x - 2 * (x + 1))


def test_an_omitted_default_needs_no_spec(spmd_mesh, x):
    @spmd(mesh=spmd_mesh, in_shardings=[P("data"), P("model"), P()])
    def scaled(a, bias=None, scale=2.0):
        return a * scale if bias is None else a * scale + bias

    assert_spmd_equal(scaled, x)
    assert_spmd_equal(scaled, x, scale=3.0)
    assert_spmd_equal(scaled, x, x, 3.0)


def test_a_dict_of_specs_for_one_dict(spmd_mesh, x):
    @spmd(mesh=spmd_mesh, in_shardings={"w": P("data"), "b": P("model")})
    def linear(params):
        return params["w"] + params["b"]

    assert linear.plan({"w": x, "b": x[0]}).in_layouts == {
        "params['b']": "[model]",
        "params['w']": "[data, -]",
    }


def test_variadic_arguments(spmd_mesh, x):
    @spmd(mesh=spmd_mesh, in_shardings=[P("data"), P("model"), P("data")])
    def total(first, *rest, **named):
        return first + sum(rest) + named["z"]

    assert_spmd_equal(total, x, x, z=x)
    assert list(total.plan(x, x, z=x).in_layouts) == ["first", "rest[0]", "z"]


def test_parameter_shardings(spmd_mesh, x):
    def loss(params, theta, batch):
        return jnp.mean((batch @ params["w"] + theta) ** 2)

    decorated = spmd(loss, mesh=spmd_mesh, parameter_shardings=P("model"))
    layouts = decorated.plan({"w": x}, x, x).in_layouts
    assert layouts["params['w']"] == layouts["theta"] == "[model, -]"
    decorated = spmd(
        lambda p, batch: jnp.mean(batch @ p),
        mesh=spmd_mesh,
        parameter_shardings=P("model"),
        parameter_argnames="p",
        in_shardings={"batch": P("data")},
    )
    assert decorated.plan(x, x).in_layouts == {"p": "[model, -]", "batch": "[data, -]"}


# Calls


def test_every_signature_has_its_program(spmd_mesh, x):
    decorated = spmd(lambda a, b: a + b, mesh=spmd_mesh, in_shardings=P("data"))
    pairs = [
        (x, x),
        (x[:4], x[:4]),
        (x.astype(np.int32), x),
        (x, x.astype(np.int32)),
        (x, x[:, :2].repeat(4, 1)),
    ]
    for _ in range(3):
        for a, b in pairs:
            got = decorated(a, b)
            np.testing.assert_allclose(got, a + b, rtol=1e-6)
            assert got.dtype == jnp.float32
    for a, b in pairs:
        for _ in range(3):
            np.testing.assert_allclose(decorated(a, b), a + b, rtol=1e-6)


def test_weak_types_are_told_apart(spmd_mesh, x):
    decorated = spmd(lambda a, s: a * s, mesh=spmd_mesh)
    half = jnp.asarray(x, jnp.bfloat16)
    for _ in range(3):
        assert decorated(half, 2.0).dtype == jnp.bfloat16
    assert decorated(half, np.float32(2)).dtype == jnp.float32
    assert decorated(half, jnp.float32(2)).dtype == jnp.float32
    assert decorated(half, jnp.asarray(2.0)).dtype == jnp.bfloat16


def test_weak_types_of_arrays_and_in_trees_are_told_apart(spmd_mesh, x):
    half = jnp.asarray(x, jnp.bfloat16)
    weak = jnp.broadcast_to(jnp.asarray(2.0), x.shape)
    assert weak.weak_type
    for factors in ((weak, x), ({"by": 2.0}, {"by": np.float32(2)})):
        decorated = spmd(lambda a, s: jax.tree.leaves(s)[0] * a, mesh=spmd_mesh)
        narrow, wide = factors
        for factor, dtype in ((narrow, jnp.bfloat16), (wide, jnp.float32), (narrow, jnp.bfloat16)):
            for _ in range(3):
                assert decorated(half, factor).dtype == dtype


def test_what_numpy_code_gives_back_is_taken_by_jax_code(spmd_mesh):
    a = np.random.default_rng(0).standard_normal((8, 8))
    found = spmd(lambda a: np.dot(a, a), mesh=spmd_mesh, in_shardings=P("data"))(a)
    assert found.dtype == np.float64
    by_jax = spmd(lambda a: jnp.sin(a), mesh=spmd_mesh, in_shardings=P("data"))
    for run in (by_jax, by_jax, jax.jit(lambda a: by_jax(a))):
        np.testing.assert_allclose(run(found), np.sin(a @ a), rtol=1e-5, atol=1e-5)


def test_settings_of_jax_are_told_apart(spmd_mesh):
    decorated = spmd(lambda a: a + jnp.arange(8.0), mesh=spmd_mesh)
    ones = jnp.ones(8, jnp.float32)
    for _ in range(2):
        assert decorated(ones).dtype == jnp.float32
        with jax.enable_x64(True):
            assert decorated(ones).dtype == jnp.float64


def test_static_arguments(spmd_mesh, x):
    calls = []

    def power(a, exponent, *, mode="plain", flip=False):
        calls.append((exponent, mode))
        return (-1 if flip else 1) * a**exponent + (0 if mode == "plain" else 1)

    for options in (
        {"static_argnums": 1, "static_argnames": ("mode", "flip")},
        {"static_argnums": (-1,), "static_argnames": ["mode", "flip"]},
        {"static_argnames": ["exponent", "mode", "flip"]},
    ):
        calls.clear()
        decorated = spmd(power, mesh=spmd_mesh, in_shardings=[P("data")], **options)
        for exponent, mode in ((2, "plain"), (3, "plain"), (2, "odd"), (2, "plain"), (2, "plain")):
            got = decorated(x, exponent, mode=mode)
            np.testing.assert_allclose(got, x**exponent + (mode == "odd"), rtol=1e-6)
            np.testing.assert_allclose(decorated(x, exponent=exponent, mode=mode), got)
        assert set(calls) == {(2, "plain"), (3, "plain"), (2, "odd")}


def test_traced_once_for_each_signature(spmd_mesh, x):
    traces = []

    @spmd(mesh=spmd_mesh, in_shardings=P("data"))
    def counted(a):
        traces.append(a.shape)
        return a + 1

    counted.plan(jax.ShapeDtypeStruct((8, 8), "float32"))
    counted.lower(x)
    counted.verify(x)
    y = x
    for _ in range(4):
        y = counted(y)
    counted(jax.device_put(x, jax.devices()[3]))
    assert traces == [(8, 8)]


def test_python_numbers_and_scalars(spmd_mesh):
    decorated = spmd(lambda a, b, c: (a + 1, b * c), mesh=spmd_mesh)
    for _ in range(3):
        assert decorated(1, 2.0, True) == (2, 2.0)
        assert decorated(True, 2.0, 3) == (2, 6.0)
        assert decorated(np.int32(1), np.float32(2.0), 1j) == (2, 2j)
    assert [leaf.dtype.name for leaf in decorated(1, 2.0, True)] == ["int32", "float32"]


def test_no_arguments_and_no_results(spmd_mesh, x):
    assert_spmd_equal(spmd(lambda: jnp.arange(8), mesh=spmd_mesh, out_shardings=P("data")))
    assert spmd(lambda a: (None, {}), mesh=spmd_mesh)(x) == (None, {})
    assert_spmd_equal(spmd(lambda a: (a, a, jnp.zeros(3)), mesh=spmd_mesh), x)
    assert spmd(lambda a: (a, 1.0), mesh=spmd_mesh)(x)[1] == 1.0


def test_random_keys_and_integers(spmd_mesh):
    decorated = spmd(
        lambda key, i: jax.random.normal(key, (8, 4)) + i[:, None],
        mesh=spmd_mesh,
        out_shardings=P("data"),
    )
    assert_spmd_equal(decorated, jax.random.key(0), np.arange(8))


def test_captured_arrays_are_arguments_where_they_lie(spmd_mesh, x):
    table = jax.device_put(x, NamedSharding(spmd_mesh.jax_mesh, P("model")))
    big = np.arange(64, dtype=np.float32).reshape(8, 8)

    @spmd(mesh=spmd_mesh, in_shardings=P("data"))
    def lookup(a):
        return a @ table + big

    assert_spmd_equal(lookup, x)
    assert lookup.plan(x).in_layouts["table"] == "[model, -]"
    lookup.verify(x)
    assert "dense_resource" not in lookup.lower(x).as_text()
    assert not re.search(r"dense<[^>]{40}", lookup.lower(x).as_text())
    for _ in range(3):
        np.testing.assert_allclose(lookup(x), x @ x + big, rtol=1e-5, atol=1e-5)


def test_committed_inputs_without_a_spec_stay_where_they_lie(spmd_mesh, x):
    decorated = spmd(lambda a, b: a + b, mesh=spmd_mesh)
    placed = jax.device_put(x, NamedSharding(spmd_mesh.jax_mesh, P(None, "model")))
    assert decorated.plan(placed, x).in_layouts["a"] == "[-, model]"
    assert decorated.plan(placed, x).counts() == dict.fromkeys(decorated.plan(x, x).counts(), 0)


@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P(("model", "data")), None])
def test_inputs_that_lie_otherwise_are_moved(spmd_mesh, x, spec):
    decorated = spmd(double, mesh=spmd_mesh, in_shardings=P("data", "model"))
    if spec is None:
        placed = jax.device_put(x, SingleDeviceSharding(jax.devices()[5]))
    else:
        placed = jax.device_put(x, NamedSharding(spmd_mesh.jax_mesh, spec))
    for array in (placed, x, placed, placed, x):
        np.testing.assert_array_equal(decorated(array), 2 * x)


def test_state_without_out_shardings_comes_back_as_it_lies(spmd_mesh, x):
    def step(params, batch):
        loss, gradient = jax.value_and_grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), loss

    for specs, wanted in (
        ([P("model"), P("data")], ("model", None)),
        ([P(), P("data")], (None, None)),
    ):
        decorated = spmd(step, mesh=spmd_mesh, in_shardings=specs)
        params, serial = {"w": x}, {"w": x}
        for _ in range(3):
            params, loss = decorated(params, x)
            serial, expected = step(serial, x)
            np.testing.assert_allclose(loss, expected, rtol=1e-5)
            assert spec_of(params["w"]) == wanted
        decorated.verify(params, x)


def test_a_product_that_looks_like_its_weight_is_laid_out_by_the_planner(spmd_mesh):
    dense = spmd(mesh=spmd_mesh, in_shardings=(P("data"), P(None, "model")))(lambda x, w: x @ w)
    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    plan = dense.plan(square, square)
    plan.assert_counts()
    assert plan.out_layouts["result"] == "[data, model]"


def test_methods(spmd_mesh, x):
    class Model:
        """Holds its weight."""

        def __init__(self, weight):
            self.weight = jnp.asarray(weight)

        @spmd(mesh=spmd_mesh, in_shardings=[P("data")], static_argnames="scale")
        def apply(self, a, scale=1):
            return scale * (a @ self.weight)

        @staticmethod
        @spmd(mesh=spmd_mesh)
        def add(a, b):
            return a + b

    one, two = Model(x), Model(2 * x)
    for model, factor in ((one, 1), (two, 2), (one, 1), (one, 1)):
        np.testing.assert_allclose(model.apply(x), factor * (x @ x), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            model.apply(x, scale=3), 3 * factor * (x @ x), rtol=1e-5, atol=1e-6
        )
    assert isinstance(one.apply.plan(x), CommPlan)
    one.apply.verify(x)
    np.testing.assert_allclose(one.add(x, x), 2 * x)
    assert isinstance(Model.apply, SPMDFunction)
    assert Model(x).apply(x).shape == (8, 8)


# Donation


def aliased(decorated, *args):
    return decorated.lower(*args).compile().memory_analysis().alias_size_in_bytes


@pytest.mark.parametrize("options", [{"donate_argnums": 0}, {"donate_argnames": "params"}])
def test_donated_memory_is_reused(spmd_mesh, x, options):
    def step(params, batch):
        return jax.tree.map(lambda p: p + jnp.mean(batch), params)

    decorated = spmd(step, mesh=spmd_mesh, in_shardings=[P("model"), P("data")], **options)
    assert aliased(decorated, {"w": x}, x) == x.nbytes // 4
    params = jax.device_put({"w": x}, NamedSharding(spmd_mesh.jax_mesh, P("model")))
    new = decorated(params, x)
    assert params["w"].is_deleted()
    again = decorated(new, x)
    assert new["w"].is_deleted()
    np.testing.assert_allclose(again["w"], x + 2 * np.mean(x), rtol=1e-6, atol=1e-6)


def test_donated_arguments_whose_memory_no_result_can_use(spmd_mesh, x):
    """They do no harm, and no warning says that they did none."""
    decorated = spmd(
        lambda a, b: (a.sum(), b["one"] + 1),
        mesh=spmd_mesh,
        in_shardings=[P("data"), {"one": P("data"), "two": P("model")}],
        out_shardings=(P(), P("data")),
        donate_argnums=(0, 1),
    )
    # As much as "one" takes: nothing for `a` and "two".
    assert aliased(decorated, x, {"one": x, "two": x}) == x.nbytes // 2
    decorated = spmd(
        lambda a: a + 1,
        mesh=spmd_mesh,
        in_shardings=P("data"),
        out_shardings=P("model"),
        donate_argnums=0,
    )
    assert aliased(decorated, x) == 0
    np.testing.assert_array_equal(decorated(jnp.asarray(x)), x + 1)


# Plans


def test_plans_from_descriptions(spmd_mesh):
    @spmd(mesh=spmd_mesh, in_shardings=[P("data", "model"), P("model")])
    def gemm(a, b):
        return a @ b

    a = jax.ShapeDtypeStruct((1 << 16, 1 << 16), "bfloat16")
    plan = gemm.plan(a, a)
    assert isinstance(plan, CommPlan)
    plan.assert_counts(all_reduce=1)
    assert plan.steps[0].bytes == (1 << 15) * (1 << 16) * 2
    assert plan.steps[0].source.startswith("test_spmd.py:")
    assert json.loads(plan.to_json())["function"] == "gemm"
    assert gemm.lower(a, a).as_text()


def test_explain(spmd_mesh, capsys):
    @spmd(mesh=spmd_mesh, in_shardings=[P("data", "model"), P("model")])
    def gemm(a, b):
        return a @ b

    a = jax.ShapeDtypeStruct((8, 8), "float32")
    line = inspect.getsourcelines(gemm.__wrapped__)[1] + 2
    gemm.explain(a, a)
    assert capsys.readouterr().out == (
        "gemm on data=2 × model=4 needs 1 collective: each device sends 192B a call, about 6.02us.\n"
        "\n"
        f"0. AllReduce of dot_general f32[8,8] over 'model' (128B) at test_spmd.py:{line}\n"
        "   Why: contracted dim 1 of operand 0 of dot_general is split over 'model', so each device holds "
        "a partial sum.\n"
        "\n"
        "Arguments: a [data, model], b [model, -]\n"
        "Results: result [data, -]\n"
        "\n"
        'Note: objective="bytes" would send 96B instead of 192B from each device.\n'
    )


def test_verify_gives_what_matched(spmd_mesh, x):
    decorated = spmd(
        lambda a, b: a @ b, mesh=spmd_mesh, in_shardings=[P(None, "model"), P("model")]
    )
    found = decorated.verify(x, x)
    assert found.ok
    assert [match.steps for match in found.matched] == [decorated.plan(x, x).steps]


def test_lower_to_jit(spmd_mesh, x):
    decorated = spmd(
        lambda a, b: jax.nn.relu(a @ b), mesh=spmd_mesh, in_shardings=[P("data", "model"), P("model")],
        lower_to="jit",
    )  # fmt: skip
    assert_spmd_equal(decorated, x, x)


def test_topology_changes_seconds(spmd_mesh, x):
    def seconds(**options):
        decorated = spmd(lambda a: a.sum(), mesh=spmd_mesh, in_shardings=P("data"), **options)
        return decorated.plan(x).seconds

    slow = seconds(topology={"data": "ethernet_100g", "model": "nvlink_h100"})
    assert slow > seconds(topology={"data": "nvlink_h100", "model": "nvlink_h100"}) > seconds()


# Inside and around others


def test_nested(spmd_mesh, x):
    @spmd(mesh=spmd_mesh, in_shardings=[P(None, "model"), P("model")], out_shardings=P())
    def inner(a, b):
        return a @ b

    @spmd(mesh=spmd_mesh, in_shardings=[P("data"), AUTO])
    def outer(a, b):
        return jnp.sin(inner(a, b)) + inner(a, a)

    assert_spmd_equal(outer, x, x)
    outer.verify(x, x)


def test_nested_without_a_mesh_of_its_own(spmd_mesh, x):
    inner = spmd(double)
    outer = spmd(lambda a: inner(a) + jax.grad(lambda b: inner(b).sum())(a), mesh=spmd_mesh)
    np.testing.assert_allclose(outer(x), 2 * x + 2)


def test_jit_of_one(spmd_mesh, x):
    decorated = spmd(lambda a, b: a @ b, mesh=spmd_mesh, in_shardings=[P("data"), P(None, "model")])

    @jax.jit
    def around(a, b):
        return jnp.cos(decorated(a, b) + 1), decorated(b, a)

    for got, want in zip(around(x, x), around.__wrapped__(x, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert jax.eval_shape(decorated, x, x).shape == (8, 8)


def test_vmap_of_one(spmd_mesh, x):
    decorated = spmd(
        lambda a, b: (a @ b, a.sum()), mesh=spmd_mesh, in_shardings=[P("data"), P(None, "model")],
        out_shardings=(P("data", "model"), P()),
    )  # fmt: skip
    stack = np.stack([x, x + 1, x - 1])
    for axes, args in (
        ((0, None), (stack, x)),
        ((None, 2), (x, np.moveaxis(stack, 0, 2))),
        ((1, 0), (stack.swapaxes(0, 1), stack)),
    ):
        want = jax.vmap(decorated.__wrapped__, in_axes=axes)(*args)
        for function in (
            jax.vmap(decorated, in_axes=axes),
            jax.jit(jax.vmap(decorated, in_axes=axes)),
        ):
            for g, w in zip(function(*args), want, strict=True):
                np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


def test_a_hot_function_still_meets_transformations(spmd_mesh, x):
    decorated = spmd(lambda a: jnp.sin(a).sum(), mesh=spmd_mesh, in_shardings=P("data"))
    for _ in range(3):
        decorated(x)
    np.testing.assert_allclose(jax.grad(decorated)(x), np.cos(x), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(decorated)(x), np.sin(x).sum(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(decorated(x), np.sin(x).sum(), rtol=1e-4, atol=1e-5)


def test_flax_and_optax(spmd_mesh):
    class Net(nn.Module):
        """Two layers."""

        @nn.compact
        def __call__(self, a):
            return nn.Dense(4)(nn.LayerNorm()(nn.gelu(nn.Dense(16)(a))))

    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 8)).astype(np.float32), "y": np.arange(8) % 4}
    net = Net()
    state = TrainState.create(
        apply_fn=net.apply,
        params=net.init(jax.random.key(0), batch["x"])["params"],
        tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    )

    @spmd(mesh=spmd_mesh, in_shardings=[AUTO, P("data")], donate_argnames="state")
    def step(state, batch):
        def loss(params):
            logits = state.apply_fn({"params": params}, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        value, gradient = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradient), value

    serial = spmd_state = jax.tree.map(jnp.copy, state)
    for _ in range(3):
        serial, want = step.__wrapped__(serial, batch)
        spmd_state, got = step(spmd_state, batch)
        np.testing.assert_allclose(got, want, rtol=1e-5)
    step.verify(spmd_state, batch)


def test_planned_shardings(spmd_mesh, x):
    @spmd(
        mesh=spmd_mesh,
        in_shardings={"batch": P("data")},
        out_shardings={"loss": P(), "out": P(None, "model")},
        static_argnames="scale",
    )
    def function(params, batch, *, scale):
        out = batch @ params["w"] * scale
        return {"loss": out.sum(), "out": out}

    batch = np.ones((4, 8), np.float32)
    (params, data), result = function.shardings({"w": x}, batch, scale=2)
    assert (data.mesh, data.spec) == (spmd_mesh.jax_mesh, P("data"))
    assert (result["loss"].spec, result["out"].spec) == (P(), P(None, "model"))
    placed = jax.device_put(({"w": x}, batch), (params, data))
    found = function(*placed, scale=2)
    assert jax.tree.map(lambda a: a.sharding, found) == result
    np.testing.assert_allclose(found["out"], 2 * batch @ x, rtol=1e-6)


def test_numpy_code_keeps_numpys_meaning(spmd_mesh):
    @spmd(
        mesh=spmd_mesh,
        in_shardings=[
            ShardingSpec(spmd_mesh, P("data", None)),
            ShardingSpec(spmd_mesh, P(None, "model")),
        ],
        out_sharding=ShardingSpec(spmd_mesh, P("data", "model")),
    )
    def gemm(a, b):
        return np.dot(a, b)

    a, b = np.random.default_rng(0).random((2, 8, 8))
    for _ in range(3):
        c = gemm(a, b)
        assert c.dtype == np.float64
        assert np.allclose(c, a @ b, rtol=1e-14)
    gemm.plan(a, b).assert_counts()
    gemm.verify(a, b)
    assert gemm(a.astype(np.float32), b.astype(np.float32)).dtype == np.float32
    with jax.enable_x64(True):
        gradient = jax.grad(lambda a: gemm(a, b).sum())(a)
    np.testing.assert_allclose(gradient, np.broadcast_to(b.sum(1), (8, 8)), rtol=1e-14)
