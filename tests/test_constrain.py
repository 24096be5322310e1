"""Asking for a layout in the middle of a function."""

import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

from pypto_spmd import (
    AUTO,
    DeviceMesh,
    PartitionSpec,
    ShardingError,
    ShardingSpec,
    collectives,
    constrain,
    local,
    spmd,
)

P = PartitionSpec
OPEN = PartitionSpec.UNCONSTRAINED
MESH = DeviceMesh.simulate((2, 4), ("data", "model"))
OTHER = DeviceMesh.simulate((4, 2), ("data", "model"))
X = np.arange(64.0, dtype=np.float32).reshape(8, 8)
SHAPE = jax.ShapeDtypeStruct((8, 8), "float32")
SPECS = {
    "PartitionSpec": lambda spec: spec,
    "ShardingSpec": lambda spec: ShardingSpec(MESH, spec),
    "NamedSharding": lambda spec: NamedSharding(MESH.jax_mesh, spec),
}


def check(function, *args, counts, in_shardings=None, out_shardings=None):
    """The decorated function equals the serial one, and runs a plan of these collectives."""
    decorated = spmd(function, mesh=MESH, in_shardings=in_shardings, out_shardings=out_shardings)
    plan = decorated.plan(*args)
    plan.assert_counts(**counts)
    decorated.verify(*args)
    serial = jax.tree.leaves(function(*args))
    for found, expected in zip(jax.tree.leaves(decorated(*args)), serial, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    return plan


@pytest.mark.parametrize("kind", SPECS)
def test_the_planner_grants_it(kind):
    def run(x):
        return constrain(x * 2, SPECS[kind](P("data", "model"))) + 1

    plan = check(run, X, counts={})
    assert plan.out_layouts == {"result": "[data, model]"}


def test_it_says_what_is_moved_and_where():
    def run(x):
        return constrain(x * 2, P(None, "model")) + 1

    split = P("model")
    plan = check(
        run, X, counts={"all_to_all": 1}, in_shardings=split, out_shardings=P(None, "model")
    )
    (step,) = plan.steps
    line = run.__code__.co_firstlineno + 1
    assert step.source == f"test_constrain.py:{line}"


def test_whole_means_whole():
    def run(x):
        return constrain(x, P()) * 2

    check(run, X, counts={"all_gather": 1}, in_shardings=P("data"), out_shardings=P())


def test_an_open_dim_is_the_planners():
    def run(x):
        return constrain(x, P(OPEN, None)) * 2

    check(run, X, counts={}, in_shardings=P("model"), out_shardings=P("model"))
    check(run, X, counts={"all_gather": 1}, in_shardings=P(None, "model"), out_shardings=P())

    def both(x):
        return constrain(x, P("data", OPEN)) * 2

    check(both, X, counts={}, in_shardings=P("data", "model"), out_shardings=P("data", "model"))


@pytest.mark.parametrize("order", [("data", "model"), ("model", "data")])
def test_axes_are_nested_as_the_spec_says(order):
    def run(x):
        return constrain(x, P(order)) * 2

    moves = {"collective_permute": 1} if order == ("model", "data") else {}
    plan = check(run, X, counts=moves, in_shardings=P(("data", "model")))
    assert plan.out_layouts == {"result": f"[({','.join(order)}), -]"}


def test_derivatives_ask_the_same_of_cotangents():
    def run(x):
        return (constrain(jnp.sin(x), P("model")) ** 2).sum()

    plan = check(jax.value_and_grad(run), X, counts={"all_reduce": 1})
    assert list(plan.out_layouts.values()) == ["[]", "[model, -]"]
    decorated = spmd(run, mesh=MESH)
    expected = jax.grad(lambda x: (jnp.sin(x) ** 2).sum())(X)
    np.testing.assert_allclose(jax.grad(decorated)(X), expected, rtol=1e-5, atol=1e-5)
    tangents = jax.jvp(decorated, (X,), (X,))[1], (expected * X).sum()
    np.testing.assert_allclose(*tangents, rtol=1e-4)
    batch = np.stack([X, X + 1])
    np.testing.assert_allclose(jax.vmap(decorated)(batch), jax.vmap(run)(batch), rtol=1e-5)


def test_in_loops_and_branches():
    def run(x):
        def trip(h, _):
            h = constrain(jnp.tanh(h @ x), P("data", "model"))
            return h, lax.cond(h.sum() > 0, lambda: constrain(h, P("model")), lambda: h * 2)

        return lax.scan(jax.checkpoint(trip), x, None, length=3)

    decorated = spmd(run, mesh=MESH, in_shardings=P("data"))
    for found, expected in zip(decorated(X / 64), jax.jit(run)(X / 64), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    decorated.verify(X)


def test_trees_and_prefixes():
    def run(x):
        made = constrain({"a": x, "b": [x, x + 1]}, {"a": P(), "b": AUTO})
        made = constrain(made, {"a": None, "b": [P("data"), None]})
        return made["a"] * 2, made["b"]

    split = P("data")
    check(run, X, counts={"all_gather": 1}, in_shardings=split, out_shardings=(P(), split))


def test_numpy_code():
    def run(x):
        return np.sqrt(constrain(x * 2, P("data", "model"))).sum(axis=1)

    decorated = spmd(run, mesh=MESH)
    np.testing.assert_allclose(
        decorated(X.astype(np.float64)), run(X.astype(np.float64)), rtol=1e-12
    )
    assert decorated(X.astype(np.float64)).dtype == np.float64
    decorated.plan(X).assert_counts(all_reduce=1)


def test_outside_it_asks_where_there_is_a_mesh():
    x = jnp.asarray(X)
    assert constrain(x, P("data")) is x
    spec = P("data", "model")
    with MESH:
        for moved in (constrain(x, spec), jax.jit(lambda x: constrain(x, spec))(x)):
            assert moved.sharding.is_equivalent_to(NamedSharding(MESH.jax_mesh, spec), 2)
            np.testing.assert_array_equal(moved, X)
    moved = constrain(x, ShardingSpec(MESH, spec))
    assert moved.sharding.is_equivalent_to(NamedSharding(MESH.jax_mesh, spec), 2)


def test_jax_own_constraints_are_honoured():
    def run(x):
        return lax.with_sharding_constraint(x, NamedSharding(MESH.jax_mesh, P("model"))) + 1

    plan = check(run, X, counts={})
    assert plan.out_layouts == {"result": "[model, -]"}


def test_with_a_current_mesh_of_jax():
    def run(x):
        x = lax.with_sharding_constraint(jnp.sin(x), P("model"))
        part = jax.shard_map(lambda p: lax.psum(p, "data"), in_specs=P("data"), out_specs=P())
        whole = local(lambda p: collectives.all_reduce(p, "data"), P("data"), P())
        return (part(x) + whole(x)).sum() + (constrain(x, P("data")) ** 2).sum()

    expected = jax.value_and_grad(lambda x: 2 * jnp.sin(x).sum() + (jnp.sin(x) ** 2).sum())(X)
    with jax.set_mesh(MESH.jax_mesh):
        for decorated in (
            spmd(jax.value_and_grad(run), mesh=MESH, in_shardings=P("data")),
            jax.value_and_grad(spmd(run, mesh=MESH, in_shardings=P("data"))),
            spmd(jax.value_and_grad(run), mesh=MESH, lower_to="jit"),
        ):
            for found, wanted in zip(decorated(X), expected, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
        spmd(jax.grad(run), mesh=MESH).verify(X)


def test_annotations_of_flax_are_honoured():
    def run(x):
        with nn.logical_axis_rules([("batch", "data"), ("embed", "model")]):
            return nn.with_logical_constraint(x * 2, ("batch", "embed")) + 1

    with jax.set_mesh(MESH.jax_mesh):
        plan = check(run, X, counts={})
    assert plan.out_layouts == {"result": "[data, model]"}


def test_planning_needs_no_devices():
    code = """
import jax
from pypto_spmd import DeviceMesh, PartitionSpec as P, collectives, constrain, local, spmd

mesh = DeviceMesh.simulate((64, 8), ("data", "model"))

def run(x):
    x = constrain(x * 2, P("data", "model"))
    return local(lambda part: collectives.all_reduce(part, "model"), P("data", "model"), P("data"))(x)

plan = spmd(run, mesh=mesh).plan(jax.ShapeDtypeStruct((64, 64), "float32"))
plan.assert_counts(all_reduce=1)
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend is up
"""
    subprocess.run([sys.executable, "-c", code], check=True)


MESSAGES = {
    "unknown axis": (
        lambda x: constrain(x, P("modle")),
        "constrain: spec is PartitionSpec('modle').\n"
        "  PartitionSpec('modle') names the mesh axis 'modle', but the mesh has 'data' and 'model'.\n"
        "  Fix: write 'model', or use one of 'data' and 'model'.",
    ),
    "rank": (
        lambda x: constrain(x.sum(), P("data")),
        "constrain: x has shape f32[].\n"
        "  PartitionSpec('data') has 1 entry but the array has rank 0.\n"
        "  Fix: leave a scalar whole: PartitionSpec().",
    ),
    "indivisible": (
        lambda x: constrain(x[:3], P("data", OPEN)),
        "constrain: x has shape f32[3,8].\n"
        "  PartitionSpec('data', UNCONSTRAINED) splits dim 0 (size 3) over mesh axis 'data' (size 2), "
        "which does not divide it.\n"
        '  Fix: let uneven="pad" pad dim 0 to 4, use an axis of size 1 or 3, or leave the dim whole: '
        "PartitionSpec(None, UNCONSTRAINED).",
    ),
    "no spec": (
        lambda x: constrain(x, "data"),
        "constrain: spec is 'data'.\n"
        "  A ShardingSpec, PartitionSpec, NamedSharding, AUTO or None is wanted there.\n"
        "  Fix: write PartitionSpec('data').",
    ),
    "several": (
        lambda x: constrain([x, x[0]], [P("data", "data"), P("x")]),
        "constrain: 2 things are wrong.\n"
        "  1. spec[0] is PartitionSpec('data', 'data').\n"
        "     PartitionSpec('data', 'data') has a duplicate axis: 'data' splits dims 0 and 1, but can "
        "split once only.\n"
        "     Fix: split one dim over each mesh axis, and once.\n"
        "  2. spec[1] is PartitionSpec('x').\n"
        "     PartitionSpec('x') names the mesh axis 'x', but the mesh has 'data' and 'model'.\n"
        "     Fix: use one of 'data' and 'model'.",
    ),
    "another mesh": (
        lambda x: constrain(x, ShardingSpec(OTHER, P("data"))),
        "constrain: spec is PartitionSpec('data').\n"
        "  It is of another mesh (data=4 × model=2) than the function's (data=2 × model=4).\n"
        "  Fix: make the spec of the function's mesh, or pass a bare PartitionSpec.",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages(case):
    function, message = MESSAGES[case]
    with pytest.raises(ShardingError) as error:
        spmd(function, mesh=MESH).plan(SHAPE)
    place = f"test_constrain.py:{function.__code__.co_firstlineno}"
    assert str(error.value) == message.replace("constrain:", f"constrain at {place}:", 1)


def test_a_constraint_of_jax_on_another_mesh_is_an_error():
    def run(x):
        return lax.with_sharding_constraint(x, NamedSharding(OTHER.jax_mesh, P("data")))

    with pytest.raises(ShardingError) as error:
        spmd(run, mesh=MESH).plan(SHAPE)
    line = run.__code__.co_firstlineno + 1
    assert str(error.value) == (
        f"@spmd function 'run': with_sharding_constraint at test_constrain.py:{line} asks for "
        "PartitionSpec('data') on the mesh data=4 × model=2.\n"
        "  It is in a function on the mesh data=2 × model=4, and both run on one mesh.\n"
        "  Fix: use pypto_spmd.constrain, which takes the function's mesh, or give both the same mesh."
    )
