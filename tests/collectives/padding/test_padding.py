"""Dims that no mesh axis divides: results are the serial ones, whatever stands in the padding.

Every program is run as it is, and with garbage (NaN, the largest integer, True) written over the padding
of every argument and of every result on the way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from pypto_spmd import DeviceMesh, PartitionSpec, constrain, local, spmd
from pypto_spmd.collectives.padding import boundary
from pypto_spmd.errors import ShardingError
from pypto_spmd.testing import assert_spmd_equal

P = PartitionSpec
MESH = DeviceMesh.simulate((2, 4), ("x", "y"))
LINE = DeviceMesh.simulate((8,), ("x",))
CUBE = DeviceMesh.simulate((2, 2, 2), ("x", "y", "z"))


@pytest.fixture(params=[False, True], ids=["zeros", "garbage"])
def padding(request, monkeypatch):
    monkeypatch.setattr(boundary, "GARBAGE", request.param)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def whole(*shape: int, below: int = 1000, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).integers(0, below, size=shape).astype(np.int32)


def check(
    function: Callable[..., Any],
    *args: Any,
    mesh: DeviceMesh = MESH,
    ins: Any = None,
    outs: Any = None,
    **options: Any,
) -> Any:
    decorated = spmd(
        function, mesh=mesh, in_shardings=ins, out_shardings=outs, uneven="pad", **options
    )
    assert_spmd_equal(decorated, *args)
    decorated.verify(*args)
    return decorated.plan(*args)


class Case(NamedTuple):
    """A program.

    Args:
        function: on arrays of the shapes below.
        shapes: of its arguments; letters stand for sizes.
        ins: the layouts of its arguments, as entries.
    """

    function: Callable[..., Any]
    shapes: tuple[str, ...]
    ins: tuple[Any, ...]


def batch_norm(x):
    mean, variance = x.mean((0, 1)), x.var((0, 1))
    return (x - mean) * lax.rsqrt(variance + 1e-5)


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(q, k, v):
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
    return jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ v


def heads(x, w):
    b, s, d = x.shape
    y = (x.reshape(b * s, d) @ w).reshape(b, s, -1)
    return jax.nn.softmax(y, 1).transpose(1, 0, 2)


def cross_entropy(logits):
    labels = jnp.arange(logits.shape[0]) % logits.shape[1]
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    return -found.mean()


def lookup(table, x):
    rows = jnp.clip(jnp.abs(x[:, 0] * 5).astype(int), 0, table.shape[0] + 2)
    return table[rows], (-table).at[rows].get(mode="clip"), table.at[rows].get(mode="fill")


def updates(table, x):
    rows = jnp.abs(x[:, 0] * 5).astype(int) - 1
    return (
        table.at[rows].add(x),
        table.at[rows].max(x, mode="clip"),
        table.at[rows].mul(x, mode="drop"),
        table.at[rows].set(x),
        table.at[1:].set(0.5),
        table.at[:, 0].set(x[0, 0]),
    )


def dynamic(x, w):
    place = (w[0, 0] * 100).astype(int)
    part = lax.dynamic_slice_in_dim(x, place, 1, 0)
    late = lax.dynamic_update_slice_in_dim(x, part, 99, 0)
    return part, late, lax.dynamic_index_in_dim(x, -place, 0), x[-1], x[0]


def scanned(x, w):
    def step(carry, row):
        carry = jnp.tanh(carry + row @ w)
        return carry, carry.max(-1)

    return lax.scan(step, jnp.zeros((x.shape[1], w.shape[1])), x)


def until_large(x):
    def trip(carry):
        value, count = carry
        return value * 1.5 + 0.1, count + 1

    return lax.while_loop(lambda c: (jnp.abs(c[0]).sum() < 100) & (c[1] < 9), trip, (x, 0))


def branched(x):
    return lax.cond(x.sum() > 0, lambda x: x - x.mean(0), lambda x: jnp.sort(x, 0), x)


def moved(x):
    return (
        jnp.roll(x, 1, 0), x[::-1], jnp.concatenate([x, x[:1]]), jnp.pad(x, ((1, 2), (0, 0))),
        x[1:] - x[:-1], x[::2], x.T, x[:, None] + x[None], jnp.repeat(x, 2, 0), jnp.tile(x, (2, 1)),
        x.reshape(-1), jnp.diag(x @ x.T), jnp.stack([x, -x], 1), jnp.split(x, [1])[1],
    )  # fmt: skip


def reduced(x):
    positive = x > 0
    return (
        x.sum(0), x.max(0), x.min(), x.prod(0), x.mean(), x.std(0), positive.any(0), positive.all(0),
        jnp.argmax(x, 0), jnp.argmin(x, 0), jnp.median(x, 0), jnp.linalg.norm(x),
        jax.nn.logsumexp(x, 0), (x * 9).astype(int).sum(0), jnp.bitwise_or.reduce((x * 9).astype(int)),
        jnp.bitwise_and.reduce((x * 9).astype(int)), jnp.nanmax(jnp.where(x > 1, jnp.nan, x)),
    )  # fmt: skip


def inverses(x):
    return (
        (1 / x).sum(0),
        jnp.log(jnp.abs(x)).mean(),
        (x / x.sum(0)).max(),
        jnp.exp(1 / x**2).min(0),
    )


def ordered(x):
    largest, where = lax.top_k(x.T, 1)
    return (
        jnp.sort(x, 0), jnp.argsort(x, 0), jnp.sort(x, 1), jnp.argsort(x, 1), largest, where,
        lax.top_k(x, x.shape[1]), jnp.searchsorted(jnp.sort(x[:, 0]), 0.1),
        jnp.sort(jnp.where(x > 1, jnp.nan, x), 0),
    )  # fmt: skip


def accumulated(x):
    return (
        jnp.cumsum(x, 0), lax.cumsum(x, 0, reverse=True), jnp.cumprod(x, 0), lax.cummax(x, 0),
        lax.cummin(x, 0, reverse=True), lax.cumlogsumexp(x, 0, reverse=True), jnp.cumsum(x, 1),
        lax.associative_scan(jnp.add, x),
    )  # fmt: skip


def transformed(x):
    square = jnp.einsum("ij,ik->ijk", x, x) + jnp.eye(x.shape[1])
    return jnp.fft.fft(x, axis=0), jnp.fft.rfft(x), jnp.linalg.cholesky(square)


def convolved(image, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    z = lax.conv_general_dilated(image, kernel, (2, 2), "SAME", dimension_numbers=numbers)
    pooled = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
    mean = lax.reduce_window(y, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    return y, z, pooled, mean


def convolved_depthwise(image, kernel):
    kernel = kernel[:, :, :1, :].transpose(0, 1, 2, 3)
    kernel = jnp.broadcast_to(kernel.mean(-1, keepdims=True), (*kernel.shape[:3], image.shape[-1]))
    return lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=image.shape[-1],
    )  # fmt: skip


def convolution_gradient(image, kernel):
    return jax.grad(
        lambda i, k: (convolved(i, k)[0] ** 2).sum() + convolved(i, k)[2].sum(), (0, 1)
    )(image, kernel)


def drawn(x):
    key = jax.random.key(0)
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return (
        jnp.where(kept, x, 0),
        x + jax.random.normal(key, x.shape),
        jax.random.permutation(key, x),
    )


def by_keys(x):
    keys = jax.random.split(jax.random.key(1), x.shape[0])
    return jax.vmap(lambda key, row: row * jax.random.uniform(key, row.shape))(keys, x)


def network_step(params, x, labels):
    def loss(params):
        hidden = jax.nn.relu(layer_norm(x) @ params["w"] + params["b"])
        logits = hidden @ params["v"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


CASES = {
    "batch norm": Case(batch_norm, ("nbc",), (("x", None, "y"),)),
    "layer norm": Case(layer_norm, ("nb",), (("x", "y"),)),
    "matmul": Case(jnp.matmul, ("nb", "bc"), (("x", "y"), ("y",))),
    "attention": Case(attention, ("nbc", "nbc", "nbc"), (("x", "y"), ("x", "y"), ("x", "y"))),
    "heads": Case(heads, ("nbc", "cd"), (("x",), (None, "y"))),
    "cross entropy": Case(cross_entropy, ("nc",), (("x", "y"),)),
    "its gradient": Case(jax.grad(cross_entropy), ("nc",), (("x", "y"),)),
    "lookup": Case(lookup, ("nb", "cb"), (("x",), ("y",))),
    "updates": Case(updates, ("nb", "cb"), (("x",), ("y",))),
    "dynamic": Case(dynamic, ("nb", "bc"), (("x", "y"), None)),
    "scan": Case(scanned, ("nbc", "cc"), (("x", "y"), None)),
    "scan's gradient": Case(
        jax.grad(lambda x, w: scanned(x, w)[0].sum()), ("nbc", "cc"), (("x", "y"), None)
    ),
    "while": Case(until_large, ("nb",), (("x", "y"),)),
    "cond": Case(branched, ("nb",), (("x", "y"),)),
    "moved": Case(moved, ("nb",), (("x", "y"),)),
    "reduced": Case(reduced, ("nb",), (("x", "y"),)),
    "inverses": Case(inverses, ("nb",), (("x", "y"),)),
    "ordered": Case(ordered, ("nb",), (("x", "y"),)),
    "accumulated": Case(accumulated, ("nb",), (("x", "y"),)),
    "transformed": Case(transformed, ("nb",), (("x", "y"),)),
    "convolution": Case(convolved, ("nbcd", "33de"), (("x", None, None, "y"), None)),
    "convolution, image split": Case(convolved, ("nbcd", "33de"), ((None, "x", "y"), None)),
    "convolution, depthwise": Case(
        convolved_depthwise, ("nbcd", "33de"), (("x", None, None, "y"), None)
    ),
    "convolution's gradient": Case(
        convolution_gradient, ("nbcd", "33de"), (("x", None, None, "y"), (None, None, None, "y"))
    ),
    "convolution's gradient, image split": Case(
        convolution_gradient, ("nbcd", "33de"), ((None, "x", "y"), None)
    ),
    "random": Case(drawn, ("nb",), (("x", "y"),)),
    "random keys": Case(by_keys, ("nb",), (("x", "y"),)),
}

SIZES = (
    {"n": 19, "b": 7, "c": 5, "d": 3, "e": 6, "3": 3},
    {"n": 1, "b": 2, "c": 3, "d": 1, "e": 2, "3": 2},
    {"n": 6, "b": 9, "c": 10, "d": 5, "e": 1, "3": 3},
    {"n": 3, "b": 13, "c": 1, "d": 6, "e": 9, "3": 3},
)


def arguments(case: Case, sizes: dict[str, int]) -> list[jax.Array]:
    return [
        jnp.asarray(normal(*(sizes[letter] for letter in shape), seed=i))
        for i, shape in enumerate(case.shapes)
    ]


def specs(case: Case) -> list[Any]:
    return [None if spec is None else P(*spec) for spec in case.ins]


FIRST_OR_ALL = [SIZES[0], *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in SIZES[1:])]


@pytest.mark.parametrize("sizes", FIRST_OR_ALL, ids=lambda sizes: f"n={sizes['n']}")
@pytest.mark.parametrize("name", CASES)
def test_results_are_the_serial_ones(name, sizes, padding):
    case = CASES[name]
    check(case.function, *arguments(case, sizes), ins=specs(case))


def test_sizes_of_a_training_step(padding):
    for n, inner, classes in ((19, 7, 5), (6, 3, 10), (1, 5, 2)):
        params = {"w": normal(11, inner), "b": normal(inner), "v": normal(inner, classes)}
        shard = {"w": P(None, "y"), "b": P("y"), "v": P("y")}
        args = params, normal(n, 11), whole(n, below=classes)
        plan = check(network_step, *args, ins=(shard, P("x"), P("x")))
        assert plan.wire_bytes > 0


@pytest.mark.parametrize("mesh", [LINE, MESH, CUBE], ids=str)
def test_adam(mesh, padding):
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))

    def step(params, state, x, y):
        def loss(params):
            return ((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params = {"w": normal(5, 13), "v": normal(13, 3)}
    rules = [("w", P(None, mesh.axis_names)), ("v", P(mesh.axis_names))]
    decorated = spmd(
        step, mesh=mesh, in_shardings=[P("x"), P("x")], parameter_shardings=rules, uneven="pad",
        donate_argnames=["params", "state"],
    )  # fmt: skip
    states = [params, optimizer.init(params)]
    serial = [params, optimizer.init(params)]
    x, y = normal(9, 5), normal(9, 3)
    for _ in range(3):
        *states, value = decorated(*states, x, y)
        *serial, expected = step(*serial, x, y)
        np.testing.assert_allclose(value, expected, rtol=1e-4)
    for found, wanted in zip(jax.tree.leaves(states), jax.tree.leaves(serial), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-5)


def test_the_plan_is_that_of_the_padded_sizes_and_the_gathered_results():
    def model(x, w, v):
        return jax.nn.relu(x @ w) @ v

    ins, outs = (P("x"), P(None, "y"), P("y")), P("x")
    even = spmd(model, mesh=MESH, in_shardings=ins, out_shardings=outs)
    uneven = spmd(model, mesh=MESH, in_shardings=ins, out_shardings=outs, uneven="pad")
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((20, 5), (5, 8), (8, 3))]
    smaller = [jax.ShapeDtypeStruct(s, "float32") for s in ((19, 5), (5, 7), (7, 3))]
    assert uneven.plan(*shapes).to_json() == even.plan(*shapes).to_json()
    *steps, last = uneven.plan(*smaller).steps
    assert [(s.kind, s.axes, s.bytes) for s in steps] == [
        (s.kind, s.axes, s.bytes) for s in even.plan(*shapes).steps
    ]
    assert (last.kind, last.axes, last.bytes, last.tensor) == (
        "all_gather", ("x",), 20 * 3 * 4, "result f32[20,3]",
    )  # fmt: skip
    assert uneven.plan(*smaller).notes == (
        "x dim 0: 19 padded to 20 over 'x'",
        "w dim 1: 7 padded to 8 over 'y'",
        "v dim 0: 7 padded to 8 over 'y'",
        "result dim 0: 19 padded to 20 over 'x'",
    )
    assert uneven.plan(*smaller).in_layouts == {"x": "[-, -]", "w": "[-, -]", "v": "[-, -]"}


def test_rows_that_move_are_those_that_change_owner():
    rolled = spmd(
        lambda x: (jnp.roll(x, 1, 0) * x).sum(), mesh=MESH, in_shardings=P("y"), uneven="pad"
    )
    x = normal(19, 4)
    plan = rolled.plan(x)
    plan.assert_counts(collective_permute=1, all_reduce=1)
    assert plan.steps[0].wire_bytes == 4 * 4  # a row of four floats
    assert_spmd_equal(rolled, x)


def test_embedding_of_an_uneven_vocabulary_stays_split():
    def loss(table, tokens):
        logits = jax.nn.log_softmax(table[tokens] @ table.T)
        return -jnp.take_along_axis(logits, tokens[:, None], 1).mean()

    step = spmd(jax.value_and_grad(loss), mesh=MESH, in_shardings=(P("y"), P("x")), uneven="pad")
    table, tokens = jnp.asarray(normal(1021, 4)), whole(16, below=1021)
    assert_spmd_equal(step, table, tokens)
    # The whole table is gathered where its gradient is returned, and nowhere else.
    gathers = [s for s in step.plan(table, tokens).steps if s.kind == "all_gather"]
    assert [s.bytes for s in gathers] == [1024 * 4 * 4]


def test_derivatives_of_the_decorated_function(padding):
    def model(x, w):
        return jax.nn.softmax(jnp.sin(x @ w), 0).sum(1) + jnp.cumsum(x, 0).max(1)

    decorated = spmd(
        model, mesh=MESH, in_shardings=(P("x"), P(None, "y")), out_shardings=P("x"), uneven="pad"
    )
    x, w = normal(19, 5), normal(5, 7)
    cotangent = normal(19)
    for derive in (
        lambda f: jax.grad(lambda x, w: (f(x, w) * cotangent).sum(), (0, 1))(x, w),
        lambda f: jax.jvp(f, (x, w), (x, w)),
        lambda f: jax.jit(jax.grad(lambda x, w: (f(x, w) ** 2).sum()))(x, w),
        lambda f: jax.hessian(lambda w: f(x, w).max())(w),
        lambda f: jax.vmap(f, (0, None))(jnp.stack([x, -x]), w),
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
            derive(decorated),
            derive(model),
        )


def test_a_derivative_is_split_inside_as_the_function_is():
    decorated = spmd(
        lambda x, w: jnp.tanh(x @ w).sum(1), mesh=LINE, in_shardings=(P("x"), None), uneven="pad"
    )
    lowered = jax.jit(jax.grad(lambda w, x: decorated(x, w).sum())).lower(
        normal(5, 7), normal(19, 5)
    )
    assert "f32[3,7]" in lowered.compile().as_text()


def test_donated_arguments_are_given_back():
    step = spmd(lambda p: p * 2, mesh=LINE, in_shardings=P("x"), donate_argnums=0, uneven="pad")
    p = step(normal(19, 2))
    again = step(p)
    assert p.is_deleted()
    assert again.sharding.is_fully_replicated
    np.testing.assert_allclose(again, normal(19, 2) * 4)


def test_constraints_inside():
    def function(x):
        return constrain(x * 2, P("x")).sum(0)

    check(function, normal(19, 3))
    with pytest.raises(ShardingError) as error:
        spmd(function, mesh=MESH)(normal(19, 3))
    assert str(error.value) == (
        f"constrain at test_padding.py:{function.__code__.co_firstlineno + 1}: x has shape f32[19,3].\n"
        "  PartitionSpec('x') splits dim 0 (size 19) over mesh axis 'x' (size 2), which does not "
        "divide it.\n"
        '  Fix: let uneven="pad" pad dim 0 to 20, use an axis of size 1 or 19, or leave the dim whole: '
        "PartitionSpec(None)."
    )


def test_the_default_is_an_error_that_names_the_option():
    with pytest.raises(ShardingError) as error:
        spmd(jnp.sin, mesh=MESH, in_shardings=P("y"))(normal(19))
    assert str(error.value) == (
        "@spmd function 'sin': argument 'x' has shape f32[19].\n"
        "  PartitionSpec('y') splits dim 0 (size 19) over mesh axis 'y' (size 4), which does not "
        "divide it.\n"
        '  Fix: let uneven="pad" pad dim 0 to 20, use an axis of size 1 or 19, or leave the dim whole: '
        "PartitionSpec(None)."
    )


def test_an_option_that_is_none():
    with pytest.raises(ShardingError) as error:
        spmd(jnp.sin, mesh=MESH, uneven="mask")
    assert str(error.value) == (
        "@spmd function 'sin': uneven is 'mask'.\n"
        "  It is one of 'error' or 'pad'.\n"
        "  Fix: use uneven='error' or 'pad'."
    )


def test_numpy_code_and_xla_partitioner():
    def function(x):
        y = np.sort(np.exp(x), axis=0)
        return y / np.sum(y, axis=0), np.linalg.norm(x)

    x = np.random.default_rng(0).normal(size=(7, 3))
    check(function, x, ins=P("x"), outs=(P("x"), None))
    by_jit = spmd(function, mesh=MESH, in_shardings=P("x"), uneven="pad", lower_to="jit")
    assert_spmd_equal(by_jit, x)


def test_random_keys_and_literals_are_whole():
    def function(keys, x):
        return keys, jax.vmap(jax.random.uniform)(keys) + x, 3.0, jnp.zeros(5)

    keys = jax.random.split(jax.random.key(0), 5)
    check(function, keys, normal(5), ins=P("x"), outs=(P("x"), P("x"), None, P("x")))


def test_functions_inside_and_around():
    inner = spmd(lambda x: x - x.mean(0), mesh=MESH, in_shardings=P("x"), uneven="pad")

    def outer(x):
        return inner(x) * 2 + inner(-x[:5]).sum()

    x = jnp.asarray(normal(7, 3))
    check(outer, x, ins=P("y"))
    assert_spmd_equal(spmd(outer, mesh=MESH), x)
    np.testing.assert_allclose(jax.jit(inner)(x), inner.__wrapped__(x), rtol=1e-5, atol=1e-6)


def test_parts_by_hand_get_true_sizes(padding):
    def function(x):
        spread = local(lambda part: part - lax.pmean(part, "y"), P(None, "y"), P(None, "y"))
        return spread(jnp.cos(x)) / x

    with MESH:
        check(function, normal(7, 8), ins=P("x"), outs=P("x"))


def test_effects_see_true_sizes(capfd, padding):
    def function(x):
        jax.debug.callback(lambda v: print("rows", v.shape, float(v.sum())), x * 0 + 1)
        return x.sum()

    check(function, normal(7, 2), ins=P("x"))
    jax.effects_barrier()
    assert set(capfd.readouterr().out.split("\n")) == {"rows (7, 2) 14.0", ""}


DTYPES = (
    "int8",
    "uint8",
    "int32",
    "uint32",
    "bool",
    "bfloat16",
    "float16",
    "complex64",
    "float8_e4m3fn",
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, padding):
    x = jnp.asarray(normal(7, 3) * 5).astype(dtype)

    def function(x):
        found = [jnp.sort(x, 0), x[1:], jnp.roll(x, 2, 0), jnp.concatenate([x, x])]
        if x.dtype != bool and "float8" not in dtype:
            found += [x.sum(0), x.prod(0), jnp.cumsum(x, 0)]
        if dtype != "complex64":
            found += [x.max(0), x.min(0), jnp.argmax(x, 0), jnp.argmin(x, 0)]
        if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool:
            found += [(x & 1).astype(bool).all(0), lax.reduce_and(x, (0,)), lax.reduce_or(x, (0,))]
        return found

    check(function, x, ins=P("x"))
