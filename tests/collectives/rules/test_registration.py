"""Rules of users' own primitives, functions, foreign calls and kernels, and what wrong ones are told."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pypto_spmd import DeviceMesh, PartitionSpec, ShardingError, register_rule, spmd
from pypto_spmd.collectives.rules import kernels, opaque, registry
from pypto_spmd.testing import assert_spmd_equal, check_rule

P = PartitionSpec
MESH = DeviceMesh.simulate((2, 4), ("data", "model"))


@pytest.fixture(autouse=True)
def _rules_of_one_test(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(registry, "_CACHE", {})
    monkeypatch.setattr(kernels, "FOREIGN", {})
    monkeypatch.setattr(kernels, "KERNELS", {})
    monkeypatch.setattr(opaque, "primitive_named", cache(opaque.primitive_named.__wrapped__))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


X, W, SCALE = normal(8, 12), normal(12, 16, seed=1), normal(16, seed=2)


def primitive_of(name, function, *, shape_param=False):
    """A primitive as a user would write one."""
    made = Primitive(name)

    def run(*operands, shape=None):
        return function(*operands) if shape is None else function(*operands, shape)

    made.def_impl(run)
    made.def_abstract_eval(
        lambda *avals, **params: jax.make_jaxpr(lambda *o: run(*o, **params))(*avals).out_avals[0]
    )
    mlir.register_lowering(made, mlir.lower_fun(run, multiple_results=False))
    return made


def rms_norm(x, scale, eps=1e-6):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * scale


# Primitives


@pytest.mark.parametrize("by_name", [False, True])
def test_a_primitive(by_name):
    matmul = primitive_of("user_matmul", jnp.matmul)
    register_rule(
        "i j, j k -> i k",
        primitive="user_matmul" if by_name else matmul,
        reduce={"j": "sum"},
        linear=[0, 1],
    )
    check_rule(matmul.bind, X, W, incomplete=True).check(complete=True)
    contracted = spmd(
        lambda x, w: matmul.bind(x, w),
        mesh=MESH,
        in_shardings=[P("data", "model"), P("model")],
        out_shardings=P("data"),
        strict=True,
    )
    contracted.plan(X, W).assert_counts(all_reduce=1)
    assert_spmd_equal(contracted, X, W)
    contracted.verify(X, W)


def test_params_that_hold_sizes():
    repeat = primitive_of("user_repeat", lambda x, shape: jnp.broadcast_to(x[:, None], shape))
    register_rule("i -> i j", primitive=repeat, local_params={"shape": "i j"})
    check_rule(lambda x: repeat.bind(x, shape=(8, 16)), normal(8), incomplete=True).check()
    spread = spmd(
        lambda x: repeat.bind(x, shape=(8, 16)),
        mesh=MESH,
        in_shardings=[P("data")],
        out_shardings=P("data", "model"),
    )
    spread.plan(normal(8)).assert_counts()
    assert_spmd_equal(spread, normal(8))


def test_a_factor_of_results_alone_is_whole_where_nothing_makes_it_local():
    repeat = primitive_of("user_repeat", lambda x, shape: jnp.broadcast_to(x[:, None], shape))
    register_rule("i -> i j", primitive=repeat, bind=None)
    report = check_rule(
        lambda x: repeat.bind(x, shape=(8, 16)),
        normal(8),
        primitives=["user_repeat"],
        mesh_shapes=[(1, 1)],
    )
    report.check()


def test_bind_knows_which_part_it_makes():
    position = primitive_of("user_position", lambda x: x + jnp.arange(x.shape[0])[:, None])

    def bind(context, x):
        return context.bind(x) + context.index("i") * context.local_size("i")

    register_rule("i j -> i j", primitive=position, bind=bind)
    check_rule(position.bind, X, incomplete=True).check(complete=True)


def test_a_wrong_rule_is_found():
    position = primitive_of("user_position", lambda x: x + jnp.arange(x.shape[0])[:, None])
    register_rule("i j -> i j", primitive=position)
    report = check_rule(position.bind, X, mesh_shapes=[(2,)])
    assert report.advice == (
        "keep 'i' whole, whole='i', or say how the parts combine, reduce={'i': ...}.",
    )
    assert report.wrong[0].startswith(
        "user_position(f32[8,12]) -> f32[8,12] by the rule 'i j -> i j', with factor 'i' split over 'x' on 2 "
        "devices: result 0 is wrong on device (1,): 48 of 48 elements differ, at (0, 0) "
    )


def test_dims_of_two_factors_and_whole_dims():
    fold = primitive_of("user_fold", lambda x: x.reshape(-1, 3, 4).sum(1))
    register_rule("i (a b) -> i b", primitive=fold, whole="a b")
    check_rule(fold.bind, X).check()
    register_rule("i _ -> i _", primitive=fold, override=True)
    check_rule(fold.bind, X).check()


# Functions


def test_a_function_and_its_derivatives():
    norm = register_rule("... d, d -> ... d", whole="d")(rms_norm)
    x, scale = normal(4, 8, 16), SCALE
    check_rule(norm, x, scale).check()
    gradient = jax.grad(lambda x, s: (norm(x, s) ** 2).sum(), (0, 1))
    check_rule(
        gradient, x, scale, primitives=["rms_norm", "rms_norm (backward)"], most_nested=20
    ).check()
    check_rule(lambda x, s: jax.jvp(norm, (x, s), (s * x, s)), x, scale, mesh_shapes=[(2,)]).check()
    check_rule(
        lambda x, s: jax.vmap(norm, (1, None), 1)(x, s), x, scale, mesh_shapes=[(2,)]
    ).check()
    by_sample = jax.vmap(jax.grad(lambda x, s: norm(x, s).sum(), 1), (0, None))
    check_rule(by_sample, x, scale, mesh_shapes=[(2,)]).check()

    def serial(x, scale):
        return jax.grad(lambda x, s: (rms_norm(x, s) ** 2).sum(), (0, 1))(x, scale)

    np.testing.assert_allclose(gradient(x, scale)[1], serial(x, scale)[1], rtol=1e-5)
    step = spmd(gradient, mesh=MESH, in_shardings=[P("data", "model"), None], strict=True)
    step.plan(x, scale).assert_counts(all_reduce=1)
    assert_spmd_equal(step, x, scale)
    step.verify(x, scale)


def test_a_hessian_is_planned_too():
    norm = register_rule("... d, d -> ... d", whole="d")(rms_norm)
    hessian = spmd(
        lambda x, s: jax.hessian(lambda s: (norm(x, s) ** 2).sum())(s),
        mesh=MESH,
        in_shardings=[P("data"), None],
    )
    assert_spmd_equal(hessian, X[:, :8], SCALE[:8])


def test_arrays_are_operands_and_python_values_are_not():
    norm = register_rule("i d, d -> i d", whole="d")(rms_norm)
    seen = []

    @register_rule("i, i -> i, i")
    def swap(tree, *, name, eps):
        seen.append(name)
        return {"b": tree["a"], "a": tree["b"] * eps}

    np.testing.assert_allclose(norm(X, X[0], 1e-3), rms_norm(X, X[0], eps=1e-3), rtol=1e-6)
    swapped = spmd(
        lambda a, b: swap({"a": a, "b": b}, name="n", eps=2.0), mesh=MESH, in_shardings=P("data")
    )
    swapped.plan(X[:, 0], X[:, 1]).assert_counts()
    assert_spmd_equal(swapped, X[:, 0], X[:, 1])
    assert set(seen) == {"n"}


def test_a_method():
    class Model:
        scale = 3.0

        @register_rule("... -> ...")
        def __call__(self, x):
            return x * self.scale

    np.testing.assert_array_equal(spmd(Model(), mesh=MESH, in_shardings=P("data"))(X), X * 3)


def test_a_function_named_as_a_primitive_of_jax_does_not_replace_it():
    @register_rule("i j -> i j", whole="i")
    def sort(x):
        return jnp.sort(x, 0)

    ours = spmd(sort, mesh=MESH, in_shardings=P(None, "model"), strict=True)
    ours.plan(X).assert_counts()
    assert_spmd_equal(ours, X)
    check_rule(lambda x: jax.lax.sort(x), X, mesh_shapes=[(2,)]).check()


def test_an_array_of_the_function_around_is_refused():
    def outer(x, y):
        inner = register_rule("i j -> i j")(lambda x: x + y)
        return inner(x)

    with pytest.raises(ShardingError) as raised:
        spmd(outer, mesh=MESH, in_shardings=P("data"))(X, X)
    assert str(raised.value) == (
        "register_rule: function '<lambda>': it uses an array of the function around it, "
        "which is being traced.\n"
        "  It is called again on each device's shards, where that array is not known.\n"
        "  Fix: pass the array as an argument, and name its dims in the rule."
    )


def test_bind_of_a_function_gets_its_arguments():
    def positions(x, *, step):
        return x + jnp.arange(x.shape[0]) * step

    def bind(context, x, *, step):
        return positions(x, step=step) + context.index("i") * context.local_size("i") * step

    placed = register_rule("i -> i", bind=bind)(positions)
    check_rule(lambda x: placed(x, step=3), normal(8)).check()
    check_rule(
        jax.grad(lambda x: (placed(x, step=3) ** 2).sum()), normal(8), mesh_shapes=[(2,)]
    ).check()


# jax.custom_vjp and jax.custom_jvp


def straight_through():
    @jax.custom_vjp
    def quantize(x, step):
        return jnp.round(x / step) * step

    def forward(x, step):
        return quantize(x, step), step

    def backward(step, cotangent):
        return 2 * cotangent, jnp.zeros_like(step)  # 2: unlike any derivative of the function

    quantize.defvjp(forward, backward)
    return quantize


@pytest.mark.parametrize("in_place", [False, True])
def test_a_custom_vjp(in_place):
    quantize = straight_through()
    expected = jax.grad(lambda x: (quantize(x, 0.5) * X).sum())(X)
    if in_place:
        register_rule("..., -> ...", primitive=quantize)
    else:
        quantize = register_rule("..., -> ...")(quantize)
    gradient = jax.grad(lambda x: (quantize(x, 0.5) * X).sum())
    np.testing.assert_allclose(gradient(X), expected)
    np.testing.assert_allclose(expected, 2 * X)
    text = str(jax.make_jaxpr(gradient)(X))
    assert "quantize (backward)[call='..., -> ...']" in text
    step = spmd(gradient, mesh=MESH, in_shardings=P("data", "model"), strict=True)
    step.plan(X).assert_counts()
    assert_spmd_equal(step, X)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_custom_jvp(in_place):
    @jax.custom_jvp
    def double(x):
        return x * 2

    double.defjvp(lambda primals, tangents: (double(*primals), tangents[0] * 7))
    if in_place:
        register_rule("i j -> i j", primitive=double)
    else:
        double = register_rule("i j -> i j")(double)
    gradient = jax.grad(lambda x: double(x).sum())
    np.testing.assert_array_equal(gradient(X), np.full_like(X, 7))
    check_rule(gradient, X, mesh_shapes=[(2,)]).check()
    np.testing.assert_array_equal(jax.jvp(double, (X,), (X,))[1], 7 * X)


def test_a_custom_vjp_around_functions_with_rules_keeps_its_residuals():
    norm = jax.custom_vjp(
        register_rule("... d, d -> ... d", whole="d")(lambda x, scale: rms_norm(x, scale))
    )

    @register_rule("... d, d -> ... d, ...", whole="d")
    def forward(x, scale):
        inverse = jax.lax.rsqrt((x * x).mean(-1) + 1e-6)
        return x * inverse[..., None] * scale, inverse

    @register_rule("... d, d, ..., ... d -> ... d, d", reduce={"...": "sum"}, whole="d")
    def backward(x, scale, inverse, cotangent):
        unit = x * inverse[..., None]
        along = cotangent * scale
        dx = inverse[..., None] * (along - unit * (along * unit).mean(-1, keepdims=True))
        return dx, (cotangent * unit).reshape(-1, x.shape[-1]).sum(0)

    def fwd(x, scale):
        y, inverse = forward(x, scale)
        return y, (x, scale, inverse)

    norm.defvjp(fwd, lambda kept, cotangent: backward(*kept, cotangent))
    gradient = jax.grad(lambda x, s: (norm(x, s) ** 2).sum(), (0, 1))
    text = str(jax.make_jaxpr(gradient)(X, X[0]))
    assert "forward[call=" in text
    assert "lambda>" not in text
    check_rule(gradient, X, X[0], primitives=["forward", "backward"]).check()
    step = spmd(gradient, mesh=MESH, in_shardings=[P("data"), None], strict=True)
    step.plan(X, X[0]).assert_counts(all_reduce=1)
    assert_spmd_equal(step, X, X[0])


def test_arguments_that_are_not_differentiated():
    @partial(jax.custom_vjp, nondiff_argnums=(0, 2))
    def apply(function, x, power):
        return function(x) ** power

    apply.defvjp(
        lambda function, x, power: (function(x) ** power, x),
        lambda function, power, x, cotangent: (cotangent * power,),
    )
    expected = jax.grad(lambda x: apply(jnp.sin, x, 3).sum())(X)
    register_rule("i j -> i j", primitive=apply)
    gradient = jax.grad(lambda x: apply(jnp.sin, x, 3).sum())
    np.testing.assert_allclose(gradient(X), expected)
    check_rule(gradient, X, mesh_shapes=[(2,)]).check()


# Foreign functions


def test_a_foreign_call():
    """Its parts are LAPACK's Cholesky factors: a target that jaxlib brings."""
    target = "lapack_spotrf_ffi"
    jax.numpy.linalg.cholesky(jnp.eye(2))  # has jaxlib register its targets
    stack = np.stack([np.eye(4, dtype=np.float32) * (i + 1) for i in range(8)])

    def factor(x):
        call = jax.ffi.ffi_call(
            target,
            (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-2], np.int32)),
        )
        return call(x, uplo=np.uint8(ord("L")))

    split = spmd(factor, mesh=MESH, in_shardings=P("data"), out_shardings=P("data"))
    (note,) = split.plan(stack).notes
    assert note.startswith(f"no rule for ffi_call '{target}' at test_registration.py:")
    register_rule("b _ _ -> b _ _, b", ffi_target=target)
    split = spmd(factor, mesh=MESH, in_shardings=P("data"), out_shardings=P("data"), strict=True)
    split.plan(stack).assert_counts()
    assert_spmd_equal(split, stack)
    check_rule(factor, stack).check()


# Pallas kernels


def add_kernel(x_ref, y_ref, out_ref):
    out_ref[...] = x_ref[...] + y_ref[...]


def add(x, y, kernel=add_kernel, rows=1):
    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // rows,),
        in_specs=[block, block],
        out_specs=block,
        interpret=True,
    )(x, y)


@pytest.mark.parametrize("target", [add_kernel, "add_kernel"])
def test_a_kernel_is_split_between_blocks(target):
    register_rule("i j, i j -> i j", pallas_kernel=target)
    split = spmd(add, mesh=MESH, in_shardings=P("data"), out_shardings=P("data"), strict=True)
    split.plan(X, X).assert_counts()
    assert_spmd_equal(split, X, X)
    report = check_rule(add, X, X)
    report.check()
    assert report.checked > 3
    # There are two blocks of 4 rows: they can be dealt out over the axis of 2 alone.
    assert check_rule(lambda x, y: add(x, y, rows=4), X, X).checked == 2


def test_a_kernel_that_asks_where_it_is_is_whole():
    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] + y_ref[...] * pl.program_id(0)

    register_rule("i j, i j -> i j", pallas_kernel=kernel)
    report = check_rule(lambda x, y: add(x, y, kernel), X, X)
    report.check()
    assert report.checked == 1


def test_a_function_around_a_kernel_is_traced_at_local_shapes():
    whole = register_rule("i j, i j -> i j")(lambda x, y: add(x, y, rows=x.shape[0]))
    check_rule(whole, X, X).check()
    split = spmd(whole, mesh=MESH, in_shardings=P("data", "model"), strict=True)
    split.plan(X, X).assert_counts()
    assert_spmd_equal(split, X, X)


def test_a_kernel_that_sums_over_a_grid_axis():
    def kernel(x_ref, w_ref, out_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)

        out_ref[...] += x_ref[...] @ w_ref[...]

    def matmul(x, w):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype),
            grid=(x.shape[0] // 2, x.shape[1] // 3),
            in_specs=[
                pl.BlockSpec((2, 3), lambda i, k: (i, k)),
                pl.BlockSpec((3, w.shape[1]), lambda i, k: (k, 0)),
            ],
            out_specs=pl.BlockSpec((2, w.shape[1]), lambda i, k: (i, 0)),
            interpret=True,
        )(x, w)

    register_rule("i k, k j -> i j", pallas_kernel=kernel, reduce={"k": "sum"}, linear=[0, 1])
    report = check_rule(matmul, X, W)
    report.check()
    contracted = spmd(matmul, mesh=MESH, in_shardings=[P("data", "model"), P("model")], strict=True)
    contracted.plan(X, W).assert_counts(all_reduce=1)
    assert_spmd_equal(contracted, X, W)


# What is told


@pytest.mark.parametrize(
    ("notation", "options", "told"),
    [
        (
            "i j",
            {},
            "register_rule('i j'): the rule 'i j' has 0 arrows.\n"
            "  It needs one '->'.\n"
            '  Fix: write it as "i j, j k -> i k".',
        ),
        (
            "i i -> i",
            {},
            "register_rule('i i -> i'): the rule 'i i -> i' has 'i' twice in one array.\n"
            "  An axis can split one dim of an array only.\n"
            "  Fix: give each dim of an array a letter of its own.",
        ),
        (
            "i (j -> i",
            {},
            "register_rule('i (j -> i'): the rule 'i (j -> i' has '('.\n"
            "  A dim is a name, '_' if it must be whole, or several names in parentheses.\n"
            '  Fix: write it as "i j, j k -> i k".',
        ),
        (
            "i -> i ...",
            {},
            "register_rule('i -> i ...'): the rule 'i -> i ...' has '...' in results only.\n"
            "  Operands say its rank.\n"
            "  Fix: name the dims.",
        ),
        (
            "i j -> i",
            {"reduce": {"j": "mean"}},
            "register_rule('i j -> i'): reduce['j'] is 'mean'.\n"
            "  Devices' parts of a result can be reduced by some operations only.\n"
            "  Fix: use 'sum', 'max', 'min', 'prod', 'or' or 'and', or keep the factor whole.",
        ),
        (
            "i j -> i",
            {"reduce": {"k": "sum"}, "whole": "m", "linear": [1]},
            "register_rule('i j -> i'): 3 things are wrong.\n"
            "  1. linear names operand 1.\n"
            "     'i j -> i' has 1 operand, counted from 0.\n"
            "     Fix: give indices of operands, or tuples of them.\n"
            "  2. reduce names 'k'.\n"
            "     The factors of 'i j -> i' are i and j.\n"
            "     Fix: name one of these.\n"
            "  3. whole names 'm'.\n"
            "     The factors of 'i j -> i' are i and j.\n"
            "     Fix: name one of these.",
        ),
        (
            "i -> i",
            {"primitive": "dot_general"},
            "register_rule('i -> i'): primitive 'dot_general' has a rule already.\n"
            "  Two rules of one primitive would leave open which is meant.\n"
            "  Fix: pass override=True to replace it.",
        ),
        (
            "i -> i",
            {"primitive": "scan"},
            "register_rule('i -> i'): 'scan' is a call or a loop: what it runs is planned, equation by "
            "equation.\n"
            "  No rule of it would ever be asked for.\n"
            "  Fix: decorate the function that is called with @register_rule(...) instead.",
        ),
        (
            "i -> i",
            {"primitive": "pallas_call"},
            "register_rule('i -> i'): 'pallas_call' calls whatever it is given.\n"
            "  Each of these has its own dims.\n"
            "  Fix: name it: register_rule('i -> i', pallas_kernel=\"...\").",
        ),
        (
            "i -> i",
            {"primitive": "a", "ffi_target": "b"},
            "register_rule('i -> i'): it has 2 targets.\n"
            "  A rule is of one primitive, function, foreign target or kernel.\n"
            "  Fix: register each by a call of its own.",
        ),
        (
            "i -> i",
            {"primitive": rms_norm},
            "register_rule('i -> i'): primitive= is 'rms_norm', of type function.\n"
            "  It takes a primitive, its name, or a jax.custom_vjp or jax.custom_jvp function.\n"
            "  Fix: decorate other functions: @register_rule(...).",
        ),
        (
            "i -> i",
            {"primitive": jax.custom_vjp(rms_norm)},
            "register_rule('i -> i'): the derivative of 'rms_norm' is not defined yet.\n"
            "  Its rule is to be of the whole function.\n"
            "  Fix: call its defvjp or defjvp first, or decorate it: @register_rule(...).",
        ),
        (
            "i -> i",
            {"local_params": {"shape": "i"}},
            "register_rule('i -> i'): it has local_params, but is a function's rule.\n"
            "  A function has no params: it is called with local arrays and takes sizes from these.\n"
            "  Fix: leave local_params out, or pass bind=.",
        ),
    ],
)
def test_rules_that_cannot_be(notation, options, told):
    with pytest.raises(ShardingError) as raised:
        register_rule(notation, **options)
    assert str(raised.value) == told


@pytest.mark.parametrize("table", ["ffi_target", "pallas_kernel"])
def test_a_second_rule_is_refused_unless_it_is_to_replace_the_first(table):
    register_rule("i -> i", **{table: "mine"})
    with pytest.raises(ShardingError, match="'mine' has a rule already, 'i -> i'"):
        register_rule("j -> j", **{table: "mine"})
    register_rule("j -> j", **{table: "mine"}, override=True)
    quantize = straight_through()
    register_rule("..., -> ...", primitive=quantize)
    with pytest.raises(ShardingError, match="function 'quantize' has a rule already"):
        register_rule("i j, -> i j", primitive=quantize)
    register_rule("i j, -> i j", primitive=quantize, override=True)
    assert "call='i j, -> i j'" in str(jax.make_jaxpr(quantize)(X, 0.5))


@pytest.mark.parametrize(
    ("notation", "why"),
    [
        ("i j, k k2 -> i", "It gives result 0 1 dim, which has 2.\n  Fix: write one letter for each dim"),
        ("i j -> i j", "It has 1 operand, the call 2.\n  Fix: write one group of dims for each array"),
        ("i j, i k -> i k", "Factor 'i' is 8 in dim 0 of operand 0 and 12 in dim 0 of operand 1.\n"),
        ("i j, j (k l) -> i _", "The sizes of k and l in dim 1 of operand 1, of size 16, are not known.\n"),
        ("i j, m (i j) -> i _", "Factors i and j multiply to 96 in dim 1 of operand 1, of size 16.\n  Fix:"),
    ],
)  # fmt: skip
def test_a_rule_that_does_not_fit_the_shapes(notation, why):
    matmul = primitive_of("user_matmul", jnp.matmul)
    register_rule(notation, primitive=matmul)
    wrong = spmd(lambda x, w: matmul.bind(x, w), mesh=MESH, in_shardings=P("data"))
    line = wrong.__wrapped__.__code__.co_firstlineno
    with pytest.raises(ShardingError) as raised:
        wrong.plan(X, W)
    assert str(raised.value).startswith(
        f"'user_matmul' at test_registration.py:{line}: its rule {notation!r} does not fit "
        f"f32[8,12], f32[12,16] -> f32[8,16].\n  {why}"
    )


def test_a_primitive_without_a_rule_under_strict():
    mystery = primitive_of("user_mystery", jnp.sin)
    loose = spmd(lambda x: mystery.bind(x), mesh=MESH, in_shardings=P("data"))
    line = loose.__wrapped__.__code__.co_firstlineno
    assert loose.plan(X).notes == (
        f"no rule for user_mystery at test_registration.py:{line}: runs whole",
    )
    strict = spmd(loose.__wrapped__, mesh=MESH, in_shardings=P("data"), strict=True)
    with pytest.raises(ShardingError) as raised:
        strict.plan(X)
    assert str(raised.value) == (
        f"@spmd function '<lambda>': primitive 'user_mystery' at test_registration.py:{line} "
        "has no rule.\n"
        "  Without one its operands are gathered and it runs whole, which strict=True forbids.\n"
        "  Fix: register one with register_rule(..., primitive='user_mystery'), "
        "or decorate with strict=False."
    )
    register_rule("... -> ...", primitive=mystery)
    spmd(loose.__wrapped__, mesh=MESH, in_shardings=P("data"), strict=True).plan(X).assert_counts()


def test_a_kernel_without_a_rule_under_strict():
    strict = spmd(add, mesh=MESH, in_shardings=P("data"), strict=True)
    with pytest.raises(ShardingError) as raised:
        strict.plan(X, X)
    assert str(raised.value).endswith(
        "Fix: register one with register_rule(..., pallas_kernel='add_kernel'), "
        "or decorate with strict=False."
    )


def test_a_rule_that_comes_late_changes_what_was_planned_before():
    late = primitive_of("late", jnp.tanh)
    call = spmd(lambda x: late.bind(x), mesh=MESH, in_shardings=P("data"), out_shardings=P("data"))
    assert call.plan(X).counts()["all_gather"] == 1
    np.testing.assert_allclose(call(X), np.tanh(X), rtol=1e-6)
    register_rule("i j -> i j", primitive="late")
    call.plan(X).assert_counts()
    assert_spmd_equal(call, X)
    call.verify(X)
    before = call.plan(X)
    other = register_rule("i j, j -> i j")(rms_norm)  # which changes nothing here
    spmd(other, mesh=MESH).plan(X, SCALE[:12])
    assert call.plan(X) is before
