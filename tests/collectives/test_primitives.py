"""The collectives to write by hand: what they give, as steps of the plan, and what they refuse."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pypto_spmd import DeviceMesh, PartitionSpec, ShardingError, collectives, local, spmd

P = PartitionSpec
MESH = DeviceMesh.simulate((2, 4), ("data", "model"))
AXES = [("model",), ("data",), ("data", "model"), ("model", "data")]
X = np.random.default_rng(0).normal(size=(16, 8, 8)).astype(np.float32)
"""One (16, 8, 8) array; a device holds two rows of its first dim, in mesh order."""

SPLIT = P(("data", "model"))
SIZES = dict(MESH.shape)


def on_parts(run, **options):
    """The decorated function that runs `run` on each device's part of its argument."""
    return spmd(local(run, SPLIT, SPLIT, **options), mesh=MESH)


def groups(axes):
    """For each group of devices along the axes, their positions in the mesh, in the order of the axes."""
    names = list(SIZES)
    places = {at: i for i, at in enumerate(itertools.product(*map(range, SIZES.values())))}
    rest = [name for name in names if name not in axes]
    for others in itertools.product(*(range(SIZES[name]) for name in rest)):
        fixed = dict(zip(rest, others, strict=True))
        yield [
            places[tuple({**fixed, **dict(zip(axes, at, strict=True))}[name] for name in names)]
            for at in itertools.product(*(range(SIZES[name]) for name in axes))
        ]


def expected(axes, reference):
    """What each device has after `reference` gave each of a group its value."""
    parts = np.split(X, 8)
    results = [None] * 8
    for members in groups(axes):
        for place, value in zip(members, reference([parts[m] for m in members]), strict=True):
            results[place] = value
    return np.concatenate(results)


def rotated(values):
    return [values[-1], *values[:-1]]


def exchanged(values):
    cut = [np.split(v, len(values), axis=1) for v in values]
    return [np.concatenate([c[i] for c in cut], axis=2) for i in range(len(values))]


CASES = {
    "sum": (
        lambda x, axes: collectives.all_reduce(x, axes),
        lambda v: [sum(v)] * len(v),
        "all_reduce",
        lambda n, group: n,
    ),
    "mean": (
        lambda x, axes: collectives.all_reduce(x, axes, "mean"),
        lambda v: [sum(v) / len(v)] * len(v),
        "all_reduce",
        lambda n, group: n,
    ),
    "max": (
        lambda x, axes: collectives.all_reduce(x, axes, op="max"),
        lambda v: [np.max(v, axis=0)] * len(v),
        "all_reduce",
        lambda n, group: n,
    ),
    "min": (
        lambda x, axes: collectives.all_reduce(x, axes, op="min"),
        lambda v: [np.min(v, axis=0)] * len(v),
        "all_reduce",
        lambda n, group: n,
    ),
    "gather": (
        lambda x, axes: collectives.all_gather(x, axes, 1),
        lambda v: [np.concatenate(v, axis=1)] * len(v),
        "all_gather",
        lambda n, group: n * group,
    ),
    "stacked gather": (
        lambda x, axes: collectives.all_gather(x, axes, dim=1, tiled=False),
        lambda v: [np.stack(v, axis=1)] * len(v),
        "all_gather",
        lambda n, group: n * group,
    ),
    "scatter": (
        lambda x, axes: collectives.reduce_scatter(x, axes, 2),
        lambda v: np.split(sum(v), len(v), axis=2),
        "reduce_scatter",
        lambda n, group: n,
    ),
    "exchange": (
        lambda x, axes: collectives.all_to_all(x, axes, split_dim=1, concat_dim=2),
        exchanged,
        "all_to_all",
        lambda n, group: n,
    ),
    "permute": (
        lambda x, axes: collectives.permute(x, axes, ring(axes)),
        rotated,
        "collective_permute",
        lambda n, group: n,
    ),
    "broadcast": (
        lambda x, axes: collectives.broadcast(x, axes, root=1),
        lambda v: [v[1]] * len(v),
        "all_reduce",
        lambda n, group: n,
    ),
}


def ring(axes):
    count = int(np.prod([SIZES[a] for a in axes]))
    return [(i, (i + 1) % count) for i in range(count)]


@pytest.mark.parametrize("axes", AXES, ids="-".join)
@pytest.mark.parametrize("name", CASES)
def test_what_it_gives_and_plans(name, axes):
    write, reference, kind, elements = CASES[name]
    function = on_parts(lambda x: write(x * 1, axes))
    np.testing.assert_allclose(function(X), expected(axes, reference), rtol=1e-5, atol=1e-5)
    plan = function.plan(X)
    plan.assert_counts(**{kind: 1})
    (step,) = plan.steps
    group = int(np.prod([SIZES[a] for a in axes]))
    # JAX counts the devices of a permutation in mesh order.
    order = tuple(a for a in SIZES if a in axes) if name == "permute" else axes
    assert (step.axes, step.elements) == (order, elements(X.size // 8, group))
    assert (step.reason, step.repeat, step.dtype) == ("written by hand", 1, "float32")
    assert step.source.startswith("test_primitives.py:")
    function.verify(X)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("max", "min")])
def test_derivatives(name):
    write = CASES[name][0]

    def loss(x, weights):
        return (jnp.sin(local(lambda x: write(x, ("model",)), SPLIT, SPLIT)(x)) * weights).sum()

    weights = np.random.default_rng(1).normal(
        size=on_parts(lambda x: write(x, ("model",)))(X).shape
    )
    with MESH:
        reference = jax.jit(jax.value_and_grad(loss))(X, weights.astype(np.float32))
    decorated = spmd(jax.value_and_grad(loss), mesh=MESH)
    around = jax.value_and_grad(spmd(loss, mesh=MESH))
    for found in (decorated, around):
        value, gradient = found(X, weights.astype(np.float32))
        np.testing.assert_allclose(value, reference[0], rtol=1e-4)
        np.testing.assert_allclose(gradient, reference[1], rtol=1e-4, atol=1e-4)
    decorated.verify(X, weights.astype(np.float32))


def test_trees_and_types():
    def run(x):
        tree = {"f": x, "i": (x * 10).astype(jnp.int32), "b": x > 0}
        return collectives.broadcast(tree, "model", 2), collectives.all_gather(tree, "model")

    function = on_parts(run)
    given, gathered = function(X)
    for of_type in (lambda x: x, lambda x: (x * 10).astype(np.int32), lambda x: x > 0):
        key = {"f": "f", "i": "i", "b": "b"}[of_type(X).dtype.kind]
        chosen = expected(("model",), lambda v: [v[2]] * len(v))
        np.testing.assert_array_equal(given[key], of_type(chosen))
        whole = expected(("model",), lambda v: [np.concatenate(v)] * len(v))
        np.testing.assert_array_equal(gathered[key], of_type(whole))
    function.verify(X)


def test_no_pair_no_value():
    function = on_parts(lambda x: collectives.permute(x, "data", [(1, 0)]))
    result = function(X)
    np.testing.assert_array_equal(result[:8], X[8:])
    np.testing.assert_array_equal(result[8:], 0)


def test_axes_of_one_device_send_nothing():
    mesh = DeviceMesh.simulate((8, 1), ("data", "one"))

    def run(x):
        x = collectives.all_reduce(x, "one") + collectives.all_reduce(x, "one", "max")
        x = collectives.all_gather(x, "one") + collectives.all_gather(x, "one", tiled=False)[0]
        x = x + collectives.reduce_scatter(x, "one", 1) + collectives.all_to_all(x, "one", 0, 1)
        x = x + collectives.reduce_scatter(x[None], "one", tiled=False)
        x = x + collectives.permute(x, "one", [(0, 0)]) + collectives.broadcast(x, "one")
        return x + jax.lax.axis_index("one")

    function = spmd(local(run, P("data"), P("data"), check_vma=False), mesh=mesh)
    function.plan(X).assert_counts()
    function.verify(X)
    np.testing.assert_allclose(function(X), 72 * X, rtol=1e-5)


def test_they_are_those_of_jax_outside_of_decorated_functions():
    with MESH:
        run = local(lambda x: collectives.all_reduce(x, ("data", "model")), SPLIT, P())
        np.testing.assert_allclose(run(X), X.reshape(8, 2, 8, 8).sum(0), rtol=1e-5, atol=1e-5)


MESSAGES = {
    "serial": (
        lambda x: collectives.all_gather(x, "data"),
        "all_gather: it is over mesh axis 'data', but this code does not run on parts along it.\n"
        "  A serial function works on whole arrays, which have no parts.\n"
        "  Fix: call it in a function that pypto_spmd.local runs on parts along 'data'.",
    ),
    "another axis": (
        local(lambda x: collectives.all_reduce(x, "model"), P("data"), P(), axis_names={"data"}),
        "all_reduce: it is over mesh axis 'model', but this code does not run on parts along it.\n"
        "  A collective is between the parts that devices hold: here those along 'data'.\n"
        "  Fix: call it in a function that pypto_spmd.local runs on parts along 'model'.",
    ),
    "reduction": (
        local(lambda x: collectives.all_reduce(x, "model", "prod"), SPLIT, SPLIT),
        "all_reduce: op is 'prod'.\n"
        "  There is no such reduction.\n"
        "  Fix: use 'sum', 'mean', 'max' or 'min'.",
    ),
    "scatter": (
        local(lambda x: collectives.reduce_scatter(x, ("data", "model")), SPLIT, SPLIT),
        "reduce_scatter: the value on each device has shape (2, 8, 8).\n"
        "  Its dim 0 (size 2) is cut into 8 parts, over 'data' and 'model', which does not divide it.\n"
        "  Fix: cut another dim, or pad this one.",
    ),
    "all_to_all": (
        local(lambda x: collectives.all_to_all(x, "model", 0, 1), SPLIT, SPLIT),
        "all_to_all: the value on each device has shape (2, 8, 8).\n"
        "  Its dim 0 (size 2) is cut into 4 parts, over 'model', which does not divide it.\n"
        "  Fix: cut another dim, or pad this one.",
    ),
    "pairs": (
        local(lambda x: collectives.permute(x, "data", [(0, 1), (0, 2), (2, 1)]), SPLIT, SPLIT),
        "permute: 4 things are wrong.\n"
        "  1. pairs has (0, 2).\n"
        "     The devices are 0 to 1.\n"
        "     Fix: name devices that there are.\n"
        "  2. pairs has (2, 1).\n"
        "     The devices are 0 to 1.\n"
        "     Fix: name devices that there are.\n"
        "  3. pairs has (0, 1) and (0, 2).\n"
        "     Device 0 sends two values, but a permutation is of one value each.\n"
        "     Fix: use two calls, or all_gather or broadcast.\n"
        "  4. pairs has (0, 1) and (2, 1).\n"
        "     Device 1 is sent two values, but a permutation is of one value each.\n"
        "     Fix: use two calls, or all_gather or broadcast.",
    ),
    "root": (
        local(lambda x: collectives.broadcast(x, "data", 2), SPLIT, SPLIT),
        "broadcast: root is 2.\n  Over 'data' there are devices 0 to 1.\n  Fix: name one of them.",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages(case):
    function, message = MESSAGES[case]
    with pytest.raises(ShardingError) as error:
        spmd(function, mesh=MESH).plan(X)
    assert str(error.value) == message


@pytest.mark.parametrize("axes", AXES, ids="-".join)
def test_those_of_jax_are_steps_too(axes):
    def run(x):
        y = jax.lax.psum(x, axes) + jax.lax.pmax(x, axes) - jax.lax.pmin(x, axes)
        return y, jax.lax.all_gather(x, axes, tiled=True), jax.lax.axis_index(axes)[None]

    for check_vma in (True, False):
        hand = jax.shard_map(
            run, mesh=MESH.jax_mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=check_vma
        )
        function = spmd(hand, mesh=MESH)
        function.plan(X).assert_counts(all_reduce=3, all_gather=1)
        function.verify(X)
        for found, serial in zip(function(X), hand(X), strict=True):
            np.testing.assert_allclose(found, serial, rtol=1e-5, atol=1e-5)


def test_collectives_that_no_plan_has():
    grouped = functools.partial(jax.lax.psum, axis_name="model", axis_index_groups=[[0, 1], [2, 3]])
    function = spmd(local(lambda x: grouped(x), SPLIT, SPLIT, check_vma=False), mesh=MESH)
    with pytest.raises(ShardingError) as error:
        function.plan(X)
    line = test_collectives_that_no_plan_has.__code__.co_firstlineno + 2
    assert str(error.value) == (
        f"@spmd function '<lambda>': psum at test_primitives.py:{line} has axis_index_groups.\n"
        "  A step of the plan is between all devices along mesh axes.\n"
        "  Fix: make a mesh that has the groups as an axis of its own."
    )


def test_the_broadcast_of_jax_is_an_all_reduce():
    function = on_parts(lambda x: jax.lax.pbroadcast(x, ("model",), 3), check_vma=False)
    np.testing.assert_array_equal(function(X), expected(("model",), lambda v: [v[3]] * len(v)))
    function.plan(X).assert_counts(all_reduce=1)
    function.verify(X)
