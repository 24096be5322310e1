"""NumPy code, traced by JAX, gives what NumPy gives: values, dtypes and shapes."""

import functools
import inspect
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import packaging.version
import pytest
from numpy.linalg import norm

from pypto_spmd.errors import ShardingError
from pypto_spmd.numpy_body import as_jax, numpy_body, uses_numpy

RANDOM = np.random.default_rng(7)
A = RANDOM.normal(size=(4, 6))
B = RANDOM.normal(size=(6, 3))
V = RANDOM.normal(size=6)
S = RANDOM.normal(size=(4, 4)) + 4 * np.eye(4)
X32 = RANDOM.normal(size=(4, 6)).astype(np.float32)
I32 = RANDOM.integers(1, 9, size=(4, 6)).astype(np.int32)
I64 = RANDOM.integers(0, 4, size=6)
U8 = RANDOM.integers(0, 200, size=(4, 6)).astype(np.uint8)
M = RANDOM.normal(size=(4, 6)) > 0
C = RANDOM.normal(size=(4, 6)) + 1j * RANDOM.normal(size=(4, 6))
F16 = np.arange(6, dtype=np.float16)
WEIGHT = RANDOM.normal(size=(6, 2))


def run(fn: Callable, *args):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(as_jax(fn))(*args))


def check(fn: Callable, *args, rtol=1e-6):
    copies = [np.array(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
    expected = jax.tree.map(np.asarray, fn(*copies))
    found = run(fn, *args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (f.shape, f.dtype) == (e.shape, e.dtype)
        np.testing.assert_allclose(f, e, rtol=1e-2 if e.dtype == np.float16 else rtol, atol=1e-12)


def softmax(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def layer_norm(x, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def relu_in_place(x):
    y = x.copy()
    y[y < 0] = 0
    return y


def stencil(x):
    out = np.zeros_like(x)
    out[1:-1, 1:-1] = (x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]) / 4
    out[0] += x[0]
    out[:, -1] *= 2.0
    return out


def loop_fill(x):
    out = np.zeros((x.shape[0], 2))
    for i, row in enumerate(x):
        out[i, 0] = row.sum()
        out[i][1] = np.max(row)
    return out


def write_through_view(x):
    y = x.copy()
    part = y[1:3]
    part[:, 0] = 7
    part += 1
    y[2] -= 1
    return y, part


def aliases(x):
    y = x + 1
    z = y
    z += 1
    return y


def reshaped_then_written(x):
    y = np.arange(6.0).reshape(2, 3)
    y[0] = x[:3]
    return y


def constants_stay_known(x):
    n = int(np.ceil(np.sqrt(10.0)))
    steps = np.arange(n)
    if steps.sum() > 3:
        x = x * steps[-1]
    return x[: steps[2]]


def with_out(x):
    out = np.empty_like(x)
    np.multiply(x, 2, out=out)
    np.add(out, 1.5, out=out)
    return out


def scatter_add(x, i):
    counts = np.zeros(4)
    np.add.at(counts, i, x)
    return counts


def copyto(x):
    y = np.ones_like(x)
    np.copyto(y, x, where=x > 0)
    np.fill_diagonal(y, 3)
    return y


def newton(s):
    x = np.eye(4)
    for _ in range(5):
        x = x @ (2 * np.identity(4) - s @ x) if _ else s.T / np.trace(s @ s.T)
    return x


def is_array(x):
    return x + 1 if isinstance(x, np.ndarray) and x.dtype == np.float64 else x - 1


def local_import(x):
    import numpy as xp

    return xp.tanh(x) + xp.linalg.norm(x)


def sort_in_place(x):
    y = x.copy()
    y.sort()
    return y


def fibonacci_like(x):
    y = np.empty(6)
    y[:2] = x[:2]
    for i in range(2, 6):
        y[i] = y[i - 1] + y[i - 2]
    return y


def pair_max(a, b=A):
    return np.maximum(a, b)


def transposed_view_read_before_write(x):
    y = x.copy()
    total = y.T.sum(axis=0)
    y[0] = total[0]
    return y


def with_closure(weight):
    def apply(x):
        def inner(y):
            return np.dot(y, weight)

        return inner(x)

    return apply


class Affine:
    """An object with a NumPy method."""

    def __init__(self):
        self.weight = WEIGHT

    def __call__(self, x):
        return np.dot(x, self.weight) + 1

    def forward(self, x):
        return np.tanh(x) @ self.weight


IDIOMS = {
    "dot": (lambda a, b: np.dot(a, b), A, B),
    "matmul": (lambda a, b: np.matmul(a, b), A, B),
    "operator @": (lambda a, b: np.abs(a @ b), A, B),
    "real array @": (lambda a: np.ones((2, 4)) @ a, A),
    "dot of two dtypes": (lambda a, b: np.dot(a, b), X32, B),
    "dot of integers": (lambda a, b: np.dot(a, b.T), I32, I32),
    "vdot, inner, outer": (lambda v: (np.vdot(v, v), np.inner(v, v), np.outer(v, v)), V),
    "einsum": (lambda a, b: np.einsum("ij,jk->ik", a, b), A, B),
    "einsum of two dtypes": (lambda a, b: np.einsum("ij,jk->k", a, b), X32, B),
    "tensordot": (lambda a, b: np.tensordot(a, b, axes=1), A, B),
    "kron": (lambda v: np.kron(v, np.array([1, 2])), V),
    "cross": (lambda b: np.cross(b, [1, 0, 2]), B),
    "exp, log": (lambda x: np.log(np.exp(x) + 1), A),
    "tanh of float32": (lambda x: np.tanh(x), X32),
    "exp of integers": (lambda x: np.exp(x), I32),
    "sqrt of uint8": (lambda x: np.sqrt(x), U8),
    "float16": (lambda x: np.exp(x) * 2, F16),
    "complex": (lambda x: (np.abs(x), x.conj(), np.angle(x), x.real, x.imag), C),
    "float32 times Python number": (lambda x: np.abs(x) * 2.5, X32),
    "float32 times float64 scalar": (lambda x: x * np.sqrt(2.0), X32),
    "float32 plus float32 scalar": (lambda x: x + np.float32(2), X32),
    "float32 plus int32": (lambda x, i: np.add(x, i), X32, I32),
    "int32 plus int64": (lambda i, j: np.add(i, j), I32, I64),
    "uint8 plus int32": (lambda u, i: np.multiply(u, i), U8, I32),
    "integer division": (lambda i: (i / np.int32(3), i // 3, i % 3, divmod(i, 2)), I32),
    "power": (lambda x, i: (x**2, np.power(x, 3), i**2, 2.0**x, np.square(i)), A, I32),
    "comparisons": (lambda x: (x > 0, x <= np.mean(x), np.equal(x, x)), A),
    "logic": (lambda m: (~m, m & ~m, np.logical_or(m, m), m ^ m, np.any(m), m.all()), M),
    "arithmetic of booleans": (lambda m: (m + m, m * 2, m.sum(), np.mean(m)), M),
    "minimum, clip": (lambda x: (np.minimum(x, 0), np.clip(x, -1, 1), x.clip(0)), X32),
    "clip of integers": (lambda i: np.clip(i, 2, 5), I32),
    "where": (lambda x: np.where(x > 0, x, 0.0), X32),
    "where of two dtypes": (lambda x, i: np.where(x > 0, x, i), X32, I32),
    "select": (lambda x: np.select([x > 1, x < -1], [x, -x], 0.5), A),
    "sum of int32": (lambda i: (np.sum(i), i.sum(axis=0), np.prod(i, axis=1)), I32),
    "sum of uint8": (lambda u: (np.sum(u, axis=1), np.sum(u, dtype=np.float32)), U8),
    "sum with initial and where": (lambda x, m: np.sum(x, where=m, initial=1.0), A, M),
    "mean, var, std": (lambda x: (np.mean(x), x.var(axis=1), np.std(x, ddof=1)), X32),
    "mean of integers": (lambda i: (np.mean(i, axis=0), np.var(i), np.median(i)), I32),
    "median, percentile": (lambda x: (np.median(x), np.percentile(x, 30), np.quantile(x, 0.2)), A),
    "average": (lambda x, w: np.average(x, axis=1, weights=w), A, np.abs(V)),
    "cumsum": (lambda x, i: (np.cumsum(x), i.cumsum(axis=1), np.cumprod(x, axis=0)), A, I32),
    "diff, gradient": (lambda x, i: (np.diff(x), np.gradient(x, axis=0), np.diff(i)), A, I32),
    "argmax, argsort": (lambda x: (np.argmax(x), x.argmin(axis=1), np.argsort(x), np.sort(x)), A),
    "searchsorted": (lambda v, i: (np.searchsorted(np.sort(v), i), np.digitize(i, [0, 2])), V, I64),
    "count_nonzero": (lambda m: np.count_nonzero(m), M),
    "reshape, ravel": (
        lambda x: (x.reshape(6, 4), np.reshape(x, (-1,)), x.ravel(), x.flatten()),
        A,
    ),
    "transpose": (lambda x: (x.T, np.transpose(x), x.transpose(1, 0), np.swapaxes(x, 0, 1)), A),
    "new axes": (lambda x: (x[:, None], np.expand_dims(x, 0), x[None].squeeze(), x[..., 0]), A),
    "concatenate": (lambda x, i: np.concatenate([x, i], axis=1), X32, I32),
    "stack": (lambda x: (np.stack([x, x]), np.vstack([x, x]), np.hstack((x, x))), A),
    "column_stack, append": (lambda v: (np.column_stack([v, v]), np.append(v, [1, 2])), V),
    "block": (lambda s: np.block([[s, np.zeros((4, 1))], [np.ones((1, 5))]]), S),
    "split": (lambda x: np.split(x, 2), A),
    "tile, repeat, roll, flip": (
        lambda x: (np.tile(x, 2), np.repeat(x, 2, axis=0), np.roll(x, 1, axis=1), np.flip(x, 0)),
        A,
    ),
    "pad": (lambda x: np.pad(x, ((1, 1), (0, 2)), mode="edge"), A),
    "triu, diag, trace": (lambda s: (np.triu(s), np.diag(s), np.trace(s), np.tril(s, -1)), S),
    "outer by broadcasting": (lambda v: v[:, np.newaxis] * v[np.newaxis, :] + np.pi, V),
    "meshgrid": (lambda v: np.add(*np.meshgrid(v, np.arange(3))), V),
    "interp": (lambda v: np.interp(v, [-1, 0, 1], [0.0, 2.0, 3.0]), V),
    "convolve": (lambda v: np.convolve(v, [1, 0, -1], mode="same"), V),
    "polyval": (lambda v: np.polyval([1, 2, 3], v), V),
    "trapezoid": (lambda v: np.trapezoid(v, dx=0.5), V),
    "linspace": (lambda v: np.linspace(v[0], v[1], 5), V),
    "array of traced numbers": (lambda v: np.array([[v[0], 1], [v[1] * 2, v[2]]]), V),
    "array of float32 and Python numbers": (lambda x: np.array([x[0, 0], 1.5]), X32),
    "asarray, astype": (lambda x: (np.asarray(x), x.astype(np.float32), np.float32(x)), A),
    "astype of complex and bool": (lambda x, m: (np.abs(x).astype(int), m.astype(float)), C, M),
    "like": (lambda x: (np.zeros_like(x), np.full_like(x, 2), np.ones(x.shape, x.dtype) * x), X32),
    "full of a traced number": (lambda x: np.full((2, 3), x[0, 0]), X32),
    "eye, arange, linspace": (lambda s: np.eye(4) * s + np.arange(4) - np.linspace(0, 1, 4), S),
    "basic indexing": (lambda x: (x[1], x[-1, 2], x[::2, 1:], x[..., -1], x[:, ::-1]), A),
    "advanced indexing": (lambda x, i: (x[[0, 2]], x[:, i], x[np.arange(4), [0, 1, 2, 3]]), A, I64),
    "known mask": (lambda x: x[np.array([True, False, True, True])], A),
    "take": (lambda x, i: (np.take(x, i, axis=1), x.take([1, 2], axis=0)), A, I64),
    "take_along_axis": (lambda x: np.take_along_axis(x, np.argsort(x, axis=1), axis=1), A),
    "traced index": (lambda x, i: x[i[0]] + np.float64(1), A, I64),
    "captured array, traced index": (lambda i: np.abs(WEIGHT[i]), I64),
    "inv, det, solve": (
        lambda s, a: (np.linalg.inv(s), np.linalg.det(s), np.linalg.solve(s, a)),
        S,
        A,
    ),
    "solve of integers": (lambda s: np.linalg.solve(s, [1, 2, 3, 4]), S),
    "norm": (lambda x, i: (norm(x), np.linalg.norm(x, axis=1), norm(i), norm(x, 1)), X32, I32),
    "eigvalsh, cholesky": (
        lambda s: (np.linalg.eigvalsh(s @ s.T), np.linalg.cholesky(s @ s.T)),
        S,
    ),
    "svd values, rank": (lambda x: np.linalg.svd(x, compute_uv=False), A),
    "qr": (lambda s: np.abs(np.linalg.qr(s).R), S),
    "pinv, matrix_power": (lambda s: (np.linalg.pinv(s), np.linalg.matrix_power(s, 3)), S),
    "cov, corrcoef": (lambda x: (np.cov(x), np.corrcoef(x)), X32),
    "fft": (lambda x, i: (np.fft.fft(x), np.fft.rfft2(x), np.fft.fft(i)), A, I64),
    "round, floor, sign": (lambda x: (np.round(x, 1), np.floor(x), np.sign(x), x.round()), A),
    "isnan, isfinite": (lambda x: (np.isnan(x), np.isfinite(x), np.nan_to_num(x)), A),
    "allclose": (lambda x: (np.allclose(x, x), np.isclose(x, 0), np.array_equal(x, x)), A),
    "reduce, accumulate, outer": (
        lambda x, v: (np.add.reduce(x), np.maximum.accumulate(v), np.multiply.outer(v, v)),
        A,
        V,
    ),
    "two results": (lambda x: (np.modf(x), np.divmod(x, 2.0), np.frexp(x)[0]), A),
    "apply_along_axis": (lambda x: np.apply_along_axis(lambda r: np.sum(r) * r, 1, x), A),
    "vectorize": (lambda x: np.vectorize(lambda a, b: np.exp(a) + b)(x, 2.0), A),
    "joiners": (lambda v: (np.r_[v, 0.0, v], np.c_[v, v]), V),
    "shape queries": (lambda x: x * np.size(x) + np.shape(x)[0] * np.ndim(x) + len(x), A),
    "finfo, dtype": (lambda x: x + np.finfo(np.float32).eps * (x.dtype == np.float64), A),
    "in place, float32 with float64": (lambda x: operator.iadd(np.abs(x), np.float64(1)), X32),
    "python functions": (lambda v: (sum(np.abs(v)), max(3, len(v)), abs(v), -v, +v), V),
    "math and NumPy": (lambda x: np.sin(x) * math.pi, A),
    "softmax": (softmax, A),
    "layer_norm": (layer_norm, X32),
    "relu in place": (relu_in_place, A),
    "stencil": (stencil, A),
    "loop that fills": (loop_fill, A),
    "write through view": (write_through_view, A),
    "aliases": (aliases, A),
    "reshaped, then written": (reshaped_then_written, V),
    "constants stay known": (constants_stay_known, V),
    "out": (with_out, A),
    "add.at": (scatter_add, V, I64),
    "copyto, fill_diagonal": (copyto, S),
    "newton": (newton, S),
    "isinstance": (is_array, A),
    "local import": (local_import, A),
    "sort in place": (sort_in_place, A),
    "recurrence": (fibonacci_like, V),
    "default array": (pair_max, A),
    "view read before write": (transposed_view_read_before_write, A),
    "closure": (with_closure(WEIGHT), A),
    "partial": (functools.partial(pair_max, b=X32), A),
    "callable object": (Affine(), A),
    "method": (Affine().forward, A),
    "ufunc itself": (np.tanh, X32),
    "pytrees": (lambda d: {"y": np.dot(d["a"], d["b"][0]), "n": None}, {"a": A, "b": [B]}),
    "Python number as argument": (lambda x, s: np.abs(x) * s, X32, 2.0),
}


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_gives_what_numpy_gives(name):
    fn, *args = IDIOMS[name]
    check(fn, *args)


def test_arguments_are_left_alone():
    before = A.copy()
    run(write_through_view, A)
    np.testing.assert_array_equal(A, before)


def test_zeros_are_no_constant_of_the_program():
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(as_jax(stencil))(A)
    assert sum(const.size for const in jaxpr.consts) == 0


# Errors


def branch(x):
    if x.sum() > 0:
        return np.exp(x)
    return x


def as_float(x):
    return np.exp(x) * float(x[0])


def as_size(x):
    return np.zeros(x[0])


def mask_read(x):
    return np.sum(x[x > 0])


def mask_written_with_array(x):
    y = x.copy()
    y[y > 0] = y[y < 0][:0]
    return y


def nonzero(x):
    return np.nonzero(x)


def random_numbers(x):
    return x + np.random.default_rng(0).normal(size=6)


def argument_written(x):
    x += np.float64(1)
    return x


def view_written(x):
    y = x.copy()
    z = y.reshape(2, 3)
    z[0] = y[:3]
    return y


def stale_view(x):
    y = x.copy()
    z = y.T
    y[0] = y[1]
    return z + np.float64(1)


def real_array(x):
    return MEMORY.__setitem__(0, np.exp(x[0]))


def no_twin(x):
    return np.real_if_close(np.exp(x))


def memory_attribute(x):
    return np.exp(x).strides


MEMORY = memoryview(np.zeros(3))
NO_VALUES = "While the function is traced, its arrays have shapes and dtypes but no values."
ERRORS = {
    branch: (
        "a branch ('if', 'while', 'and', 'or', 'not', 'assert' or bool()) needs the values of a"
        " traced array bool[]",
        NO_VALUES,
        "use np.where(condition, a, b), np.logical_and, np.logical_or or np.logical_not.",
    ),
    as_float: (
        "float() needs the values of a traced array f64[]",
        NO_VALUES,
        "leave it an array: x, or x.astype(np.float64).",
    ),
    as_size: (
        "using an array as a size or count needs the values of a traced array f64[]",
        NO_VALUES,
        "pass the number as a static argument (static_argnums).",
    ),
    mask_read: (
        "an array is indexed by a traced boolean mask",
        "How many elements the mask selects, so the shape of the result, is not known while the"
        " function is traced.",
        "keep the shape: np.where(mask, x, 0), or np.sum(x, where=mask); assigning x[mask] ="
        " number works.",
    ),
    nonzero: (
        "NumPy's 'nonzero' needs the values of a traced array",
        NO_VALUES,
        "use a form whose shape does not depend on values: np.where(condition, a, b), or pass what"
        " it needs as a static argument (static_argnums).",
    ),
    random_numbers: (
        "np.random is used",
        "The function is traced once and run many times, so its random numbers would never change.",
        "pass the random array as an argument, or write the function in jax.numpy and use"
        " jax.random with a key.",
    ),
    argument_written: (
        "an argument, or an array from outside the function, is written to",
        "The function runs on shards of its arguments, so its caller would not see it.",
        "copy it first: x = x.copy().",
    ),
    view_written: (
        "an array is written to that is a view of another one",
        "A write through a view that isn't made by indexing doesn't reach its base.",
        "write to the array itself, by an index, or copy it first: x = x.copy().",
    ),
    stale_view: (
        "an array is read that is a view of another one, which was written to since,",
        "A view that isn't made by indexing can't follow later writes.",
        "copy the view when it is made (y = x.reshape(...).copy()), or make it after the write.",
    ),
    no_twin: (
        "NumPy's 'real_if_close' is used",
        "There is no 'real_if_close' in JAX, which this code is traced with.",
        "write it with other functions of NumPy, or call it outside of the function.",
    ),
    memory_attribute: (
        "the attribute 'strides' of an array is used",
        "It is about the memory of an array, and a traced array has none.",
        "use a function of NumPy that makes a new array.",
    ),
}


@pytest.mark.parametrize("fn", ERRORS, ids=lambda fn: fn.__name__)
def test_error_names_line_and_fix(fn):
    what, why, fix = ERRORS[fn]
    with pytest.raises(ShardingError) as caught:
        run(fn, V)
    lines, first = inspect.getsourcelines(fn)
    shown = {f"{first + i} ({line.strip()})" for i, line in enumerate(lines)}
    message, *rest = str(caught.value).splitlines()
    start = f"@spmd function '{fn.__name__}': {what} at test_numpy_body.py:"
    assert message.startswith(start)
    assert message.removeprefix(start).removesuffix(".") in shown
    assert rest == [f"  {why}", f"  Fix: {fix}"]


@pytest.mark.parametrize(
    ("fn", "error"),
    [
        (lambda x: np.abs(x)[9], IndexError),
        (lambda x: operator.iadd(np.arange(6), x), TypeError),
        (lambda x: operator.iadd(np.zeros(1), x), ValueError),
        (lambda x: np.abs(x).nothing, AttributeError),
        (lambda x: len(np.sum(x)), TypeError),
    ],
)
def test_errors_of_numpy_stay(fn, error):
    with pytest.raises(error):
        fn(V)
    with pytest.raises(error):
        run(fn, V)


# The choice


def helper(x):
    return np.tanh(x)


def uses_helper(x):
    return helper(x) + 1


def jax_helper(x):
    return jnp.tanh(x)


def uses_both(x):
    return jax_helper(x) * np.sqrt(2.0)


def jnp_with_numpy_constant(x):
    return jnp.dot(x, np.ones(6, np.float32))


def only_operators(a, b):
    return a @ b


def only_constants(x):
    return x * np.sqrt(2.0)


def jax_methods(x):
    return x.at[0].set(np.float32(3))


@jax.jit
def jitted(x):
    return x


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (softmax, True),
        (uses_helper, True),
        (local_import, True),
        (with_closure(WEIGHT), True),
        (functools.partial(pair_max, b=A), True),
        (Affine(), True),
        (Affine().forward, True),
        (np.tanh, True),
        (only_constants, True),
        (lambda x: norm(x), True),
        (lambda x, f=np.tanh: f(x), True),
        (only_operators, False),
        (uses_both, False),
        (jnp_with_numpy_constant, False),
        (jnp.tanh, False),
        (jitted, False),
        (lambda x: jitted(x) + np.pi, False),
        (lambda x: x * WEIGHT[0, 0], False),
    ],
)
def test_uses_numpy(fn, expected):
    assert uses_numpy(fn) is expected


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (softmax, [A], True),
        (softmax, [jnp.ones(3)], True),
        (softmax, [jax.ShapeDtypeStruct((3,), jnp.float32)], True),
        (only_constants, [A], True),
        (only_constants, [jnp.ones(3)], False),
        (only_constants, [jax.ShapeDtypeStruct((3,), jnp.float32)], False),
        (only_operators, [A, B], True),
        (only_operators, [A, jax.ShapeDtypeStruct((6, 3), jnp.float64)], True),
        (only_operators, [A, jnp.ones((6, 3))], False),
        (only_operators, [jax.ShapeDtypeStruct((4, 6), jnp.float32)] * 2, False),
        (lambda x: packaging.version.parse(x), [A], False),
        (lambda x: x.at[0].set(1), [A], False),
        (lambda x: jitted(x), [A], False),
        (jax.vmap(only_operators), [A, B], False),
        (uses_both, [A], False),
        (jax_methods, [jnp.ones(3)], False),
        (lambda x: x.T.sum(axis=0) * np.float32(2), [jnp.ones((3, 2))], False),
        (lambda x: x * np.shape(x)[0] + np.ones(2), [jnp.ones((3, 2))], False),
    ],
)
def test_numpy_body(fn, args, expected):
    assert (numpy_body(fn, args) is not None) is expected


def test_jax_code_keeps_jax_rules():
    x = jnp.ones(3, jnp.float32)
    assert numpy_body(only_constants, [x]) is None
    assert jax.jit(only_constants)(x).dtype == only_constants(x).dtype == jnp.float32
