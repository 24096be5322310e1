"""What a call that can't be is told, word for word."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pypto_spmd import DeviceMesh, PartitionSpec, ShardingError, spmd

P = PartitionSpec
MIRROR = (
    "  The specs must be a prefix of the tree that they are for; this is where they differ.\n"
    "  Fix: mirror the tree, with AUTO where the planner is to choose, or give one spec for all of it."
)
TAKES_ARRAYS = "An @spmd function takes arrays, numbers, and pytrees of them."
NO_VALUE = "What it does must be known while the function is traced, before any array has a value."


@pytest.fixture
def x():
    return np.ones((8, 8), np.float32)


def told(function, *args, **kwargs):
    with pytest.raises(ShardingError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def step(params, x):
    return jax.tree.map(lambda p: p * x.sum(), params)


# Layouts that can't be


def test_a_size_that_is_not_divisible(spmd_mesh):
    decorated = spmd(step, mesh=spmd_mesh, in_shardings=[P("model"), P("data")])
    assert told(decorated, {"w": np.ones((6, 4))}, np.ones((8, 8))) == (
        "@spmd function 'step': argument params['w'] has shape f32[6,4].\n"
        "  PartitionSpec('model') splits dim 0 (size 6) over mesh axis 'model' (size 4), which does not "
        "divide it.\n"
        '  Fix: let uneven="pad" pad dim 0 to 8, '
        "use an axis of size 1, 2, 3 or 6, or leave the dim whole: "
        "PartitionSpec(None)."
    )


@pytest.mark.parametrize("method", ["__call__", "plan", "explain", "lower", "verify"])
def test_all_faults_at_once(spmd_mesh, method):
    decorated = spmd(
        step,
        mesh=spmd_mesh,
        in_shardings=[{"w": P("model"), "b": P("modle")}, P("data", None, None)],
        out_shardings={"w": P("model", "model")},
    )
    params = {"w": np.ones((6, 4)), "b": np.ones(3)}
    assert told(getattr(decorated, method), params, np.ones((5, 8))) == (
        "@spmd function 'step': 4 things are wrong.\n"
        "  1. in_shardings[0]['b'] is PartitionSpec('modle').\n"
        "     PartitionSpec('modle') names the mesh axis 'modle', but the mesh has 'data' and 'model'.\n"
        "     Fix: write 'model', or use one of 'data' and 'model'.\n"
        "  2. argument params['w'] has shape f32[6,4].\n"
        "     PartitionSpec('model') splits dim 0 (size 6) over mesh axis 'model' (size 4), which does not "
        "divide it.\n"
        '     Fix: let uneven="pad" pad dim 0 to 8, '
        "use an axis of size 1, 2, 3 or 6, or leave the dim whole: "
        "PartitionSpec(None).\n"
        "  3. argument 'x' has shape f32[5,8].\n"
        "     PartitionSpec('data', None, None) has 3 entries but the array has rank 2.\n"
        "     Fix: give at most 2 entries, one a dim.\n"
        "  4. out_shardings has nothing for result['b'].\n"
        "     The specs must be a prefix of the tree that they are for; this is where they differ.\n"
        "     Fix: mirror the tree, with AUTO where the planner is to choose, or give one spec for all of it."
    )


def test_a_repeated_axis(spmd_mesh, x):
    decorated = spmd(lambda a: a, mesh=spmd_mesh, in_shardings=P("data", "data"))
    assert told(decorated, x) == (
        "@spmd function '<lambda>': in_shardings is PartitionSpec('data', 'data').\n"
        "  PartitionSpec('data', 'data') has a duplicate axis: 'data' splits dims 0 and 1, but can split "
        "once only.\n"
        "  Fix: split one dim over each mesh axis, and once."
    )


def test_an_output_layout_that_cannot_be(spmd_mesh, x):
    decorated = spmd(
        lambda a: (a.sum(), a[:5]),
        mesh=spmd_mesh,
        out_shardings=(P("data"), P(("data", "model"), None)),
    )
    assert told(decorated, x) == (
        "@spmd function '<lambda>': 2 things are wrong.\n"
        "  1. result[0] has shape f32[].\n"
        "     PartitionSpec('data') has 1 entry but the array has rank 0.\n"
        "     Fix: leave a scalar whole: PartitionSpec().\n"
        "  2. result[1] has shape f32[5,8].\n"
        "     PartitionSpec(('data', 'model'), None) splits dim 0 (size 5) over mesh axes 'data' (size 2) "
        "and 'model' (size 4), whose product 8 does not divide it.\n"
        '     Fix: let uneven="pad" pad dim 0 to 8, '
        "use axes whose sizes multiply to 1 or 5, or leave the dim whole: "
        "PartitionSpec(None, None)."
    )


def test_trees_that_differ(spmd_mesh, x):
    params = {"w": x, "b": x}
    decorated = spmd(step, mesh=spmd_mesh, in_shardings=[{"w": P()}, P("data")])
    message = "@spmd function 'step': in_shardings[0] has nothing for argument params['b'].\n"
    assert told(decorated, params, x) == message + MIRROR
    decorated = spmd(step, mesh=spmd_mesh, out_shardings=(P(), P()))
    message = "@spmd function 'step': out_shardings is a tuple, but result is a dict.\n"
    assert told(decorated, params, x) == message + MIRROR
    decorated = spmd(step, mesh=spmd_mesh, parameter_shardings={"v": P()})
    message = "@spmd function 'step': parameter_shardings has nothing for argument params['w'].\n"
    assert told(decorated, {"w": x}, x) == message + MIRROR


def test_specs_for_another_number_of_arguments(spmd_mesh, x):
    decorated = spmd(step, mesh=spmd_mesh, in_shardings=[P("data")])
    assert told(decorated, {"w": x}, x) == (
        "@spmd function 'step': in_shardings has 1 entry but the function was called with 2 arguments.\n"
        "  in_shardings has one entry for each argument, and the arguments are: 'params' and 'x'.\n"
        "  Fix: give 2 entries, AUTO where the planner is to choose: in_shardings=[..., ...]."
    )


def test_specs_for_an_argument_that_is_not_there(spmd_mesh, x):
    decorated = spmd(step, mesh=spmd_mesh, in_shardings={"y": P()})
    assert told(decorated, {"w": x}, x) == (
        "@spmd function 'step': in_shardings has 'y', which is no argument.\n"
        "  The arguments are: 'params' and 'x'.\n"
        "  Fix: name arguments of the function, or give a list."
    )


# Arguments and results that can't be


def test_arguments_that_are_no_arrays(spmd_mesh, x):
    decorated = spmd(step, mesh=spmd_mesh)
    assert told(decorated, {"w": x, "act": "relu"}, {"deep": np.array(["s"])}) == (
        "@spmd function 'step': 2 things are wrong.\n"
        "  1. argument params['act'] is of type str: 'relu'.\n"
        f"     {TAKES_ARRAYS}\n"
        "     Fix: keep it out of the tree, or register the class around it as a pytree with it as "
        "metadata.\n"
        "  2. argument x['deep'] is a NumPy array of dtype <U1.\n"
        f"     {TAKES_ARRAYS}\n"
        "     Fix: encode it as numbers before the call."
    )
    assert told(decorated, {"w": x}, step) == (
        "@spmd function 'step': argument 'x' is of type function: step.\n"
        f"  {TAKES_ARRAYS}\n"
        "  Fix: make it a static argument, @spmd(..., static_argnames='x'), or close over it."
    )
    assert told(decorated, {"w": x}, object()).splitlines()[0] == (
        "@spmd function 'step': argument 'x' is of type object."
    )


def test_a_static_argument_that_is_not_hashable(spmd_mesh, x):
    decorated = spmd(step, mesh=spmd_mesh, static_argnames="x")
    assert told(decorated, {"w": x}, [1, 2]) == (
        "@spmd function 'step': static argument 'x' is of type list.\n"
        "  A program is made for each value of a static argument, so that it must be hashable.\n"
        "  Fix: pass a tuple in place of a list, a frozen dataclass or a string in place of a dict."
    )


def test_a_result_that_is_no_array(spmd_mesh, x):
    assert told(spmd(lambda a: {"a": a, "name": "a"}, mesh=spmd_mesh), x) == (
        "@spmd function '<lambda>': result['name'] is of type str: 'a'.\n"
        "  An @spmd function returns arrays, numbers, and pytrees of them.\n"
        "  Fix: leave it out of the result, and make it outside the @spmd function."
    )


def test_what_is_no_array_hides_no_other_fault(spmd_mesh, x):
    decorated = spmd(
        lambda a, b, c: a,
        mesh=spmd_mesh,
        in_shardings=[P("data"), P("modle"), P("data", None, "model")],
    )
    assert told(decorated, "text", x, x[0]) == (
        "@spmd function '<lambda>': 3 things are wrong.\n"
        "  1. argument 'a' is of type str: 'text'.\n"
        "     An @spmd function takes arrays, numbers, and pytrees of them.\n"
        "     Fix: make it a static argument, @spmd(..., static_argnames='a'), or close over it.\n"
        "  2. in_shardings[1] is PartitionSpec('modle').\n"
        "     PartitionSpec('modle') names the mesh axis 'modle', but the mesh has 'data' and 'model'.\n"
        "     Fix: write 'model', or use one of 'data' and 'model'.\n"
        "  3. argument 'c' has shape f32[8].\n"
        "     PartitionSpec('data', None, 'model') has 3 entries but the array has rank 1.\n"
        "     Fix: give at most 1 entry, one a dim."
    )


def test_a_call_with_descriptions(spmd_mesh):
    assert told(spmd(lambda a: a, mesh=spmd_mesh), jax.ShapeDtypeStruct((8,), "float32")) == (
        "@spmd function '<lambda>': it was called with a jax.ShapeDtypeStruct.\n"
        "  That describes an array and holds no values to work on.\n"
        "  Fix: pass arrays, or use .plan(...), .explain(...), .lower(...) or .verify(...)."
    )


def test_a_call_that_does_not_fit_the_signature(spmd_mesh, x):
    decorated = spmd(step, mesh=spmd_mesh)
    for args, message in (
        ((x,), r"step\(\) missing a required argument: 'x'"),
        ((x,) * 3, r"step\(\) too many positional"),
    ):
        with pytest.raises(TypeError, match=message):
            decorated(*args)


def test_a_current_mesh_of_explicit_axes(spmd_mesh, x):
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=explicit)):
        assert told(spmd(lambda a: a, mesh=spmd_mesh), x) == (
            "@spmd function '<lambda>': it is called under jax.set_mesh of a mesh whose axes 'data' and "
            "'model' are Explicit.\n"
            "  There JAX keeps each array's sharding in its type, and would have the function say what is "
            "planned.\n"
            "  Fix: call it outside of jax.set_mesh, or make that mesh of AxisType.Auto."
        )


def test_faults_of_a_hot_function(spmd_mesh, x):
    """The compiled program refuses these calls first; its words are not what is told."""
    decorated = spmd(step, mesh=spmd_mesh, in_shardings=[P("data"), P("model")])
    for _ in range(3):
        decorated(x, x)
    assert told(decorated, x[:3], x) == (
        "@spmd function 'step': argument 'params' has shape f32[3,8].\n"
        "  PartitionSpec('data') splits dim 0 (size 3) over mesh axis 'data' (size 2), which does not "
        "divide it.\n"
        '  Fix: let uneven="pad" pad dim 0 to 4, '
        "use an axis of size 1 or 3, or leave the dim whole: PartitionSpec(None)."
    )
    assert told(decorated, x, "a").splitlines()[0] == (
        "@spmd function 'step': argument 'x' is of type str: 'a'."
    )
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        decorated(x)
    np.testing.assert_array_equal(decorated({"w": x}, x)["w"], 64 * x)


# Code that can't be traced


def branch(a, flag):
    if flag > 0:
        return a
    return -a


def repeat(a, count):
    for _ in range(count):
        a = a + 1
    return a


def select(a, _):
    return a[a > 0]


def concrete(a, _):
    return a * float(a.sum())


def shaped(_, count):
    return jnp.zeros(count)


def printed(a, _):
    print(f"{a.sum():.2f}")
    return a


@pytest.mark.parametrize(
    ("function", "line", "does", "instead"),
    [
        (
            branch,
            1,
            "lets Python branch on the value of a traced array: if flag > 0:",
            "use jnp.where(condition, a, b) or jax.lax.cond for if, jax.lax.while_loop for while; or, if "
            "the value is known before the call, make its argument static: static_argnames.",
        ),
        (
            repeat,
            1,
            "uses a traced array as a Python integer: for _ in range(count):",
            "use jax.lax.fori_loop or jax.lax.dynamic_slice; or make the argument that it comes from "
            "static: static_argnames.",
        ),
        (
            select,
            1,
            "indexes with a traced boolean mask, so that the shape of its result depends on values: "
            "return a[a > 0]",
            "use jnp.where(mask, x, other), or x.at[...] and a reduction with where=mask.",
        ),
        (
            concrete,
            1,
            "asks for the value of a traced array: return a * float(a.sum())",
            "keep it an array (no float(), int() or bool()), or make the argument that it comes from "
            "static: static_argnames.",
        ),
        (
            shaped,
            1,
            "makes an array whose shape is a traced value: return jnp.zeros(count)",
            "take sizes from x.shape; or make the argument that it comes from static: static_argnames.",
        ),
        (
            printed,
            1,
            'writes the value of a traced array as text: print(f"{a.sum():.2f}")',
            'use jax.debug.print("{}", x), which prints it when the program runs.',
        ),
    ],
)
def test_python_that_needs_a_value(spmd_mesh, x, function, line, does, instead):
    first = inspect.getsourcelines(function)[1]
    decorated = spmd(function, mesh=spmd_mesh)
    for method in (decorated, decorated.plan):
        assert told(method, x, 3) == (
            f"@spmd function '{function.__name__}': test_call_errors.py:{first + line} {does}\n"
            f"  {NO_VALUE}\n"
            f"  Fix: {instead}"
        )


def test_static_arguments_may_be_branched_on(spmd_mesh, x):
    np.testing.assert_array_equal(spmd(branch, mesh=spmd_mesh, static_argnames="flag")(x, -1), -x)


def test_errors_of_the_code_itself_are_left_as_they_are(spmd_mesh, x):
    def fails(a):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        spmd(fails, mesh=spmd_mesh)(x)


def test_a_primitive_without_a_rule_under_strict(spmd_mesh, x):
    twice_p = Primitive("twice_for_a_test")
    twice_p.def_abstract_eval(lambda a: a)
    mlir.register_lowering(twice_p, mlir.lower_fun(lambda a: 2 * a, multiple_results=False))

    def twice(a):
        return twice_p.bind(a)

    line = inspect.getsourcelines(twice)[1] + 1
    assert told(spmd(twice, mesh=spmd_mesh, strict=True), x) == (
        f"@spmd function 'twice': primitive 'twice_for_a_test' at test_call_errors.py:{line} has no rule.\n"
        "  Without one its operands are gathered and it runs whole, which strict=True forbids.\n"
        "  Fix: register one with register_rule(..., primitive='twice_for_a_test'), or decorate with "
        "strict=False."
    )
    lenient = spmd(twice, mesh=spmd_mesh, in_shardings=P("data"))
    np.testing.assert_array_equal(lenient(x), 2 * x)
    assert lenient.plan(x).notes[0] == (
        f"no rule for twice_for_a_test at test_call_errors.py:{line}: runs whole"
    )


# Options that can't be


def test_no_mesh(x):
    assert told(spmd(step), x, x) == (
        "@spmd function 'step': it has no mesh.\n"
        "  Where arrays lie is said on a mesh of devices.\n"
        "  Fix: pass one, @spmd(mesh=DeviceMesh([0, 1], ['data'])), or call it inside `with mesh:`."
    )


def test_options(spmd_mesh):
    assert told(
        spmd, step, objective="fast", lower_to="xla", out_sharding=P(), out_shardings=P()
    ) == (
        "@spmd function 'step': 3 things are wrong.\n"
        "  1. both out_shardings and out_sharding are given.\n"
        "     They are two names of one option.\n"
        "     Fix: keep one of them.\n"
        "  2. objective is 'fast'.\n"
        "     It is one of 'standard' or 'bytes'.\n"
        "     Fix: use objective='standard' or 'bytes'.\n"
        "  3. lower_to is 'xla'.\n"
        "     It is one of 'shard_map' or 'jit'.\n"
        "     Fix: use lower_to='shard_map' or 'jit'."
    )
    assert told(spmd, spmd_mesh, mesh=spmd_mesh) == (
        "@spmd: the mesh is given twice, by place and by name.\n"
        "  A function runs on one mesh.\n"
        "  Fix: leave one of them out."
    )
    assert told(spmd, P("data"), P("model")).splitlines()[1:] == [
        "  @spmd takes a function, or a mesh first: @spmd(mesh, in_shardings).",
        "  Fix: pass a DeviceMesh, and specs as in_shardings=... and out_shardings=....",
    ]
    assert told(spmd(spmd_mesh), 3) == (
        "@spmd: @spmd decorates a value of type int.\n"
        "  It decorates functions.\n"
        "  Fix: pass a function, and options by name: spmd(function, mesh=..., in_shardings=...)."
    )


def test_static_and_donated_arguments_that_are_not_there():
    assert told(spmd, step, static_argnums=5, static_argnames="foo", donate_argnames="foo") == (
        "@spmd function 'step': 3 things are wrong.\n"
        "  1. static_argnames has 'foo', which is no parameter.\n"
        "     The parameters are 'params' and 'x'.\n"
        "     Fix: use the names of the function's parameters in static_argnames.\n"
        "  2. static_argnums has 5, but there are 2 positional parameters.\n"
        "     The parameters are 'params' and 'x'.\n"
        "     Fix: use places from 0 to 1, or static_argnames.\n"
        "  3. donate_argnames has 'foo', which is no parameter.\n"
        "     The parameters are 'params' and 'x'.\n"
        "     Fix: use the names of the function's parameters in donate_argnames."
    )
    assert told(spmd, step, static_argnums=0, donate_argnums=0) == (
        "@spmd function 'step': argument 'params' is both static and donated.\n"
        "  A static argument has no memory that could be donated.\n"
        "  Fix: take it out of one of them."
    )


def test_a_function_inside_one_on_another_mesh(spmd_mesh, x):
    inner = spmd(lambda a: a, mesh=DeviceMesh.simulate((8,), ("all",)))
    assert told(spmd(lambda a: inner(a), mesh=spmd_mesh), x) == (
        "@spmd function '<lambda>': it is on the mesh all=8, but is called inside an @spmd function on the "
        "mesh data=2 × model=4.\n"
        "  A function is inlined into the one that calls it, and both run on one mesh.\n"
        "  Fix: give both the same mesh, or call one after the other."
    )


def test_verifying_what_xla_partitions(spmd_mesh, x):
    assert told(spmd(lambda a: a, mesh=spmd_mesh, lower_to="jit").verify, x) == (
        "@spmd function '<lambda>': verify() is asked for with lower_to='jit'.\n"
        "  Then XLA's partitioner chooses the collectives, and the plan only says where arrays lie.\n"
        '  Fix: use lower_to="shard_map".'
    )
