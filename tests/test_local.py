"""Functions on parts inside functions on whole arrays: `local`, and JAX's own `shard_map`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding

from pypto_spmd import (
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
MESH = DeviceMesh.simulate((2, 4), ("data", "model"))
OTHER = DeviceMesh.simulate((4, 2), ("data", "model"))
SHAPE = jax.ShapeDtypeStruct((8, 8), "float32")
X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
SPECS = [
    (None, None),
    (P("data"), P()),
    (P("model"), P(None, "data")),
    (P(None, "data"), P(("model", "data"))),
    (P("data", "model"), P("model", "data")),
]
WAYS = pytest.mark.parametrize("lower_to", ["shard_map", "jit"])


def layer(x, w):
    """tanh(x @ w), the contraction split over "model" by hand."""
    summed = lambda a, b: jnp.tanh(collectives.all_reduce(a @ b, "model"))  # noqa: E731
    return local(summed, (P("data", "model"), P("model")), P("data"))(x, w)


def jax_layer(x, w, check_vma=True):
    """The same in JAX's own words."""
    return jax.shard_map(
        lambda a, b: jnp.tanh(lax.psum(a @ b, "model")),
        mesh=MESH.jax_mesh,
        in_specs=(P("data", "model"), P("model")),
        out_specs=P("data"),
        check_vma=check_vma,
    )(x, w)


def unchecked_layer(x, w):
    return jax_layer(x, w, check_vma=False)


def part_manual_layer(x, w):
    """On parts along "model" only."""
    summed = lambda a, b: jnp.tanh(collectives.all_reduce(a @ b, "model"))  # noqa: E731
    specs = (P(None, "model"), P("model")), P()
    return local(summed, *specs, axis_names={"model"})(x, w)


def serial_layer(x, w):
    return jnp.tanh(x @ w)


LAYERS = [layer, jax_layer, unchecked_layer, part_manual_layer]


def once(layer):
    return lambda x, w: (layer(x * 2, w) ** 2).mean()


def twice(layer):
    return lambda x, w: (layer(layer(x, w), w.T) * x).mean()


def rematerialized(layer):
    return lambda x, w: (jax.checkpoint(lambda h: layer(layer(h, w), w))(x) ** 2).sum()


def scanned(layer):
    def run(x, w):
        trip = jax.checkpoint(lambda h, i: (layer(h, w) * i, h.sum()))
        h, sums = lax.scan(trip, x, jnp.arange(1.0, 4.0))
        return (h**2).sum() + sums.sum()

    return run


def branched(layer):
    def run(x, w):
        return lax.cond(x.sum() > 0, lambda: layer(x, w), lambda: layer(x, -w) * 2).sum() ** 2

    return run


PROGRAMS = [once, twice, rematerialized, scanned, branched]


def compare(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5 * (1 + np.abs(b).max()))


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_values_and_derivatives_are_those_of_serial_code(program, layer):
    function = jax.value_and_grad(program(layer), argnums=(0, 1))
    expected = jax.value_and_grad(program(serial_layer), argnums=(0, 1))(X, W)
    first = LAYERS.index(layer) + PROGRAMS.index(program)
    for specs in (SPECS[first % 5], SPECS[(first + 2) % 5]):
        decorated = spmd(function, mesh=MESH, in_shardings=specs)
        compare(decorated(X, W), expected)
        decorated.verify(X, W)
    around = jax.grad(spmd(program(layer), mesh=MESH, in_shardings=SPECS[3]), argnums=(0, 1))
    compare(around(X, W), expected[1])


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_as_constraints_to_xla(layer):
    for program in (twice, scanned):
        function = jax.value_and_grad(program(layer), argnums=(0, 1))
        decorated = spmd(function, mesh=MESH, in_shardings=SPECS[2], lower_to="jit")
        expected = jax.value_and_grad(program(serial_layer), argnums=(0, 1))(X, W)
        compare(decorated(X, W), expected)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_other_transformations(layer):
    mine, serial = spmd(twice(layer), mesh=MESH), twice(serial_layer)
    batch = np.stack([X, X + 1, X * 2])
    compare(jax.vmap(mine, (0, None))(batch, W), jax.vmap(serial, (0, None))(batch, W))
    gradients = jax.vmap(jax.grad(mine), (0, None))(batch, W)
    compare(gradients, jax.vmap(jax.grad(serial), (0, None))(batch, W))
    compare(jax.jvp(mine, (X, W), (W, X)), jax.jvp(serial, (X, W), (W, X)))
    second = jax.grad(lambda x: (jax.grad(mine)(x, W) ** 2).sum())(X)
    compare(second, jax.grad(lambda x: (jax.grad(serial)(x, W) ** 2).sum())(X))


def test_arguments_are_brought_to_in_specs():
    given = [P("data"), P(None, "model")]
    function = spmd(layer, mesh=MESH, in_shardings=given, out_shardings=P("data"))
    plan = function.plan(SHAPE, SHAPE)
    plan.assert_counts(all_to_all=1, all_reduce=1)
    move, reduce = plan.steps
    assert (move.axes, move.tensor) == (("model",), "w f32[8,8]")
    assert move.reason == "shard_map needs dim 0 split over 'model', which splits dim 1"
    assert (reduce.kind, reduce.axes, reduce.elements) == ("all_reduce", ("model",), 32)
    assert reduce.reason == "written by hand"
    line = layer.__code__.co_firstlineno + 2
    assert reduce.source == f"test_local.py:{line}"


def test_derivatives_say_what_they_are_of():
    plan = spmd(jax.grad(once(layer), argnums=1), mesh=MESH).plan(SHAPE, SHAPE)
    reasons = [(s.kind, s.axes, s.reason) for s in plan.steps if "by hand" in s.reason]
    assert reasons == [
        ("all_reduce", ("model",), "written by hand"),
        ("all_reduce", ("data",), "the derivative of what is written by hand"),
    ]


def test_specs_keep_their_nesting():
    def run(x):
        return local(lambda p: p * 2, P(("model", "data")), P(("model", "data")))(x)

    given = P(("data", "model"))
    function = spmd(run, mesh=MESH, in_shardings=given, out_shardings=P(("model", "data")))
    function.plan(SHAPE).assert_counts(collective_permute=1)
    compare(function(X), 2 * X)
    function.verify(X)


def test_what_other_axes_do_is_planned():
    """The batch stays split over "data" around and inside a function on parts along "model"."""

    def run(x, w):
        hidden = jnp.sin(x)
        summed = lambda a, b: collectives.all_reduce(a @ b, "model")  # noqa: E731
        made = local(summed, (P(None, "model"), P("model")), P(), axis_names={"model"})(hidden, w)
        return (made**2).mean()

    function = spmd(
        jax.grad(run, argnums=1), mesh=MESH, in_shardings=[P("data", "model"), P("model")]
    )
    plan = function.plan(SHAPE, SHAPE)
    plan.assert_counts(all_reduce=2)
    forward, backward = plan.steps
    assert (forward.axes, forward.elements, forward.reason) == (("model",), 32, "written by hand")
    assert (backward.axes, backward.elements) == (("data",), 16)
    expected = jax.grad(lambda w: ((jnp.sin(X) @ w) ** 2).mean())(W)
    compare(function(X, W), expected)
    function.verify(X, W)


def test_one_in_another():
    def run(x):
        def rows(part):
            def block(piece):
                return collectives.all_reduce(piece, "model") * piece

            inner = local(block, P(None, "model"), P(None, "model"))
            return collectives.all_reduce(inner(part), "data")

        return local(rows, P("data"), P(), axis_names={"data"})(x)

    function = spmd(run, mesh=MESH)
    blocks = X.reshape(2, 4, 4, 2)
    expected = (blocks.sum(2, keepdims=True) * blocks).sum(0).reshape(4, 8)
    compare(function(X), expected)
    function.plan(SHAPE).assert_counts(all_reduce=2)
    function.verify(X)
    compare(spmd(run, mesh=MESH, lower_to="jit")(X), expected)


def test_heads_that_share_an_axis_with_their_groups():
    """Cutting an axis into sub-axes, as a reshape inside needs, leaves hand-written code as it is."""

    def run(x):
        heads = (x * 2).reshape(8, 2, 4)
        mixed = jnp.cumsum(heads, axis=0).reshape(8, 8)

        def part(p):
            sums = collectives.all_gather(p.sum(1), "model")
            return p + sums.sum() + lax.axis_index("model")

        mixed = local(part, P(None, "model"), P(None, "model"))(mixed)
        return constrain(mixed, P(None, "model"))

    function = spmd(run, mesh=MESH, in_shardings=P(None, "model"))
    made = np.cumsum(2 * X, axis=0)
    expected = made + made.sum() + np.repeat(np.arange(4), 2)
    np.testing.assert_allclose(function(X), expected, rtol=1e-4)
    function.plan(SHAPE).assert_counts(all_gather=1)
    function.verify(X)


def test_specs_of_every_kind_and_trees():
    def run(tree):
        part = lambda t: (t["a"] + 1, [t["b"] * 2, t["b"].sum()[None]])  # noqa: E731
        in_specs = [
            {"a": ShardingSpec(MESH, P("data")), "b": NamedSharding(MESH.jax_mesh, P("model"))}
        ]
        return local(part, in_specs, [P("data"), P("model")])(tree)

    function = spmd(run, mesh=MESH)
    first, (second, sums) = function({"a": X, "b": W})
    compare((first, second), (X + 1, 2 * W))
    compare(sums, W.reshape(4, 16).sum(1))


def test_outside_of_decorated_functions_it_is_shard_map():
    with MESH:
        compare(layer(X, W), serial_layer(X, W))
        compare(jax.jit(jax.grad(once(layer)))(X, W), jax.grad(once(serial_layer))(X, W))
    spec = ShardingSpec(MESH, P("data"))
    compare(local(lambda p: p + 1, spec, spec)(X), X + 1)


def test_unused_results_and_arguments_move_nothing():
    def run(x, w):
        def part(a, b):
            return collectives.all_reduce(a, "data"), collectives.all_gather(b, "model")

        specs = (P("data"), P("model")), (P(), P())
        return local(part, *specs, check_vma=False)(x, w)[0]

    function = spmd(run, mesh=MESH, in_shardings=[None, P("data")])
    function.plan(SHAPE, SHAPE).assert_counts(all_reduce=1)
    compare(function(X, W), X.reshape(2, 4, 8).sum(0))
    function.verify(X, W)


def test_constants_and_numpy_values():
    table = np.arange(8.0, dtype=np.float32)

    def run(x):
        part = lambda p, t, s: (p * t + s, jnp.float32(3), t)  # noqa: E731
        specs = (P("data"), P(), P()), (P("data"), P(), P("model"))
        return local(part, *specs, check_vma=False)(x, table, 2.0)

    made, three, tables = spmd(run, mesh=MESH)(X)
    compare(made, X * table + 2)
    assert three == 3
    compare(tables, np.tile(table, 4))


def test_custom_derivatives_of_functions_that_run_on_parts():
    @jax.custom_vjp
    def doubled(x):
        return local(lambda p: p * 2, P("model"), P("model"))(x)

    doubled.defvjp(
        lambda x: (doubled(x), None),
        lambda _, g: (local(lambda p: p * 5, P("model"), P("model"))(g),),
    )
    function = spmd(lambda x: (doubled(x) ** 2).sum(), mesh=MESH)
    compare(jax.grad(function)(X), 20 * X)
    compare(spmd(jax.grad(lambda x: (doubled(x) ** 2).sum()), mesh=MESH)(X), 20 * X)


def test_explicit_meshes_of_jax():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    run = jax.shard_map(lambda p: lax.psum(p, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    function = spmd(run, mesh=MESH)
    compare(function(X), X.reshape(2, 4, 8).sum(0))
    function.verify(X)


MESSAGES = {
    "no specs": (
        lambda x: local(lambda a: a, None, "data")(x),
        "local function '<lambda>': 2 things are wrong.\n"
        "  1. in_specs is None.\n"
        "     A function that runs on parts must be told how arrays are cut.\n"
        "     Fix: give a PartitionSpec, PartitionSpec() for an array that is whole everywhere.\n"
        "  2. out_specs is 'data'.\n"
        "     A function that runs on parts must be told how arrays are cut.\n"
        "     Fix: give a PartitionSpec, PartitionSpec() for an array that is whole everywhere.",
    ),
    "number of arguments": (
        lambda x: local(lambda a: a, (P("data"), P()), P())(x),
        "local function '<lambda>': in_specs has 2 entries but the function was called with 1 argument.\n"
        "  in_specs has one entry for each argument, and the arguments are: 'a'.\n"
        "  Fix: give 1 entry: in_specs=[...].",
    ),
    "several": (
        lambda x: local(lambda a: a, P("data", None, None), P("modle"))(x),
        "local function '<lambda>': 2 things are wrong.\n"
        "  1. argument 'a' has shape f32[8,8].\n"
        "     PartitionSpec('data', None, None) has 3 entries but the array has rank 2.\n"
        "     Fix: give at most 2 entries, one a dim.\n"
        "  2. out_specs is PartitionSpec('modle').\n"
        "     PartitionSpec('modle') names the mesh axis 'modle', but the mesh has 'data' and 'model'.\n"
        "     Fix: write 'model', or use one of 'data' and 'model'.",
    ),
    "indivisible": (
        lambda x: local(lambda a: a, P("data"), P("data"))(x[:3]),
        "local function '<lambda>': argument 'a' has shape f32[3,8].\n"
        "  PartitionSpec('data') splits dim 0 (size 3) over mesh axis 'data' (size 2), which does not "
        "divide it.\n"
        "  Fix: pad dim 0 to 4, use an axis of size 1 or 3, or leave the dim whole: PartitionSpec(None).",
    ),
    "rank of a result": (
        lambda x: local(lambda a: a.sum(), P("data"), P("data"))(x),
        "local function '<lambda>': result has shape f32[].\n"
        "  PartitionSpec('data') has 1 entry but the array has rank 0.\n"
        "  Fix: leave a scalar whole: PartitionSpec().",
    ),
    "tree of results": (
        lambda x: local(lambda a: (a, a), P("data"), [P("data")])(x),
        "local function '<lambda>': out_specs has 1 entry, but result has 2.\n"
        "  The specs must be a prefix of the tree that they are for; this is where they differ.\n"
        "  Fix: mirror the tree, with AUTO where the planner is to choose, or give one spec for all of it.",
    ),
    "not the same": (
        lambda x: local(lambda a: collectives.all_gather(a, "data"), P("data"), P())(x),
        "local function '<lambda>': out_specs leave out a mesh axis along which the result may differ.\n"
        "  Then all devices along it must give the same, which JAX can't tell of this result: what "
        "all_gather gives, for one, is the same, but counts as what may differ.\n"
        "  Fix: name the axis in out_specs, or all_reduce over it; or, where you know it to be the same, "
        "say check_vma=False.",
    ),
    "axes": (
        lambda x: local(lambda a: a, P("data"), P("model"), axis_names={"data"})(x),
        "local function '<lambda>': out_specs is PartitionSpec('model').\n"
        "  The function runs on parts along 'data' only.\n"
        "  Fix: leave out 'model'.",
    ),
    "unknown axes": (
        lambda x: local(lambda a: a, P(), P(), axis_names={"date"})(x),
        "local function '<lambda>': axis_names has 'date'.\n"
        "  The mesh axes to choose from are 'data' and 'model'.\n"
        "  Fix: name some of these.",
    ),
    "another mesh": (
        lambda x: local(lambda a: a, ShardingSpec(OTHER, P("data")), P())(x),
        "local function '<lambda>': in_specs is PartitionSpec('data').\n"
        "  It is of another mesh (data=4 × model=2) than the function's (data=2 × model=4).\n"
        "  Fix: make the spec of the function's mesh, or pass a bare PartitionSpec.",
    ),
    "constraint on parts": (
        lambda x: local(lambda a: constrain(a, P("data")), P("data"), P("data"))(x),
        "constrain: spec is PartitionSpec('data'), in a function that runs on parts along "
        "'data'.\n"
        "  There a value is one device's own, and lies nowhere else.\n"
        "  Fix: leave the axis out, or constrain the whole array outside of that function.",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages(case):
    function, message = MESSAGES[case]
    with pytest.raises(ShardingError) as error:
        spmd(function, mesh=MESH).plan(SHAPE)
    place = f"test_local.py:{function.__code__.co_firstlineno}"
    subject, told = message.split(":", 1)
    assert str(error.value) == f"{subject} at {place}:{told}"


def test_without_a_mesh():
    line = test_without_a_mesh.__code__.co_firstlineno + 3
    with pytest.raises(ShardingError) as error:
        local(lambda a: a, P("data"), P("data"))(X)
    assert str(error.value) == (
        f"local function '<lambda>' at test_local.py:{line}: it has no mesh.\n"
        "  A function runs on the parts that the devices of a mesh hold.\n"
        "  Fix: call it in an @spmd function, or inside `with mesh:`, or give ShardingSpecs."
    )


def test_a_shard_map_on_another_mesh_is_an_error():
    def run(x):
        return jax.shard_map(lambda a: a, mesh=OTHER.jax_mesh, in_specs=P(), out_specs=P())(x)

    with pytest.raises(ShardingError) as error:
        spmd(run, mesh=MESH).plan(SHAPE)
    line = run.__code__.co_firstlineno + 1
    assert str(error.value) == (
        f"@spmd function 'run': shard_map at test_local.py:{line} is on the mesh data=4 × model=2.\n"
        "  It is in a function on the mesh data=2 × model=4, and both run on one mesh.\n"
        "  Fix: use pypto_spmd.local, which takes the function's mesh, or give both the same mesh."
    )
