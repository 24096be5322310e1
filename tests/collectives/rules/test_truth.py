"""Every rule against the truth: one table of functions, whose equations are all checked."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pypto_spmd.testing.rule_truth import check_rule


def sds(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


f32 = partial(sds, jnp.float32)
i32 = partial(sds, jnp.int32)
boolean = partial(sds, jnp.bool_)


@dataclass(frozen=True, slots=True)
class Case:
    """A function and the arguments to trace it at."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    primitives: tuple[str, ...] = ()


def case(name: str, function: Callable[..., Any], *args: Any, primitives: str = "") -> Case:
    return Case(name, function, args, tuple(primitives.split()))


def only(primitives: str, *cases: Case) -> list[Case]:
    """The cases, in which only these primitives are checked."""
    return [replace(case, primitives=tuple(primitives.split())) for case in cases]


ELEMENTWISE = [
    case("elementwise chain", lambda a, b: -(a * 2.0 + b) / 3.0 - a * b, f32(8, 4), f32(8, 4)),
    case("nonlinear", lambda a: jnp.maximum(jnp.exp(a), lax.rsqrt(abs(a))), f32(8, 4)),
    case("select", lambda p, a, b: lax.select_n(p, a, b), boolean(8, 4), f32(8, 4), f32(8, 4)),
    case("scalar predicate", lambda p, a, b: lax.select_n(p, a, b), boolean(), f32(8), f32(8)),
    case("casts", lambda a: a.astype(jnp.bfloat16).astype(jnp.int32) > 0, f32(8, 4)),
    case("clamp", lambda a: lax.clamp(-1.0, a, 1.0), f32(8, 4)),
    case("complex", lambda a, b: lax.imag(lax.complex(a, b)) + a, f32(8), f32(8)),
]
CONTRACTION = [
    case("matmul", lambda a, b: a @ b, f32(8, 16), f32(16, 24)),
    case("matvec", lambda a, b: a @ b, f32(8, 16), f32(16)),
    case(
        "batched matmul",
        lambda a, b: jnp.einsum("bik,bkj->bij", a, b),
        f32(8, 4, 16),
        f32(8, 16, 12),
    ),
    case("two contracted dims", lambda a, b: jnp.tensordot(a, b, 2), f32(4, 8, 16), f32(8, 16, 12)),
    case(
        "attention scores",
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
        f32(2, 4, 8, 4),
        f32(2, 12, 8, 4),
    ),
]
REDUCTION = [
    case("sum", lambda a: a.sum((0, 2)), f32(8, 4, 16)),
    case("max and min", lambda a: a.max(1) + a.min(1), f32(8, 4)),
    case("product", lambda a: a.prod(0), f32(8, 4)),
    case("any and all", lambda a: a.any(0) & a.all(0), boolean(8, 4)),
    case("sum of integers", lambda a: a.sum(), i32(8, 4)),
]

TOKENS = np.array([[7, 0, 12], [15, 3, 3], [8, 11, 4], [1, 14, 9]], np.int32)
STRAY = np.array([[-3, 0], [17, 5], [6, 15], [16, -1]], np.int32)
"""Indices of which some are out of bounds of 16."""

DISTINCT = np.array([3, 17, 12, 0], np.int32)
ROWS = np.array([3, 3, 1, 0, 3, 2, 5, 7], np.int32)

GATHER = only(
    "gather",
    case("embedding", lambda t, i: t[i], f32(16, 8), TOKENS),
    case("embedding in bfloat16", lambda t, i: t[i], sds(jnp.bfloat16, 16, 8), TOKENS),
    *(
        case(f"take, {mode}", lambda t, i, mode=mode: t.at[i].get(mode=mode), f32(16, 8), STRAY)
        for mode in ("clip", "fill")
    ),
    case("take, fill 7", lambda t, i: t.at[i].get(mode="fill", fill_value=7), f32(16, 8), STRAY),
    case("take, fill 0", lambda t, i: t.at[i].get(mode="fill", fill_value=0), f32(16, 8), STRAY),
    case("take of integers", lambda t, i: t.at[i].get(mode="fill"), i32(16, 8), STRAY),
    case("take of bools", lambda t, i: t.at[i].get(mode="fill"), boolean(16, 8), STRAY),
    case(
        "take, unsigned", lambda t, i: t.at[i].get(mode="clip"), f32(16, 8), STRAY.astype(np.uint8)
    ),
    case(
        "take along axis",
        lambda t, i: jnp.take_along_axis(t, i, 1),
        f32(8, 16),
        TOKENS.repeat(2, 0),
    ),
    case(
        "labels' logits",
        lambda t, i: jnp.take_along_axis(t, i[..., None], -1),
        f32(4, 3, 16),
        TOKENS,
    ),
    case("one row", lambda t, i: t.at[i].get(mode="fill"), f32(16, 8), jnp.int32(9)),
    case("columns", lambda t, i: t[:, i], f32(4, 16), TOKENS),
    case("two indices", lambda t, i, j: t[i, j], f32(8, 16), ROWS, ROWS[::-1].copy()),
    case("two indices, clip", lambda t, i: t.at[i[0], i[1]].get(mode="clip"), f32(8, 16), STRAY),
    case("two indices, fill", lambda t, i: t.at[i[0], i[1]].get(mode="fill"), f32(8, 16), STRAY),
    case("two dims apart", lambda t, i, j: t[i, :, j], f32(8, 4, 16), ROWS, ROWS),
    case(
        "keys",
        lambda t, i: jax.random.split(t, 16)[i],
        jax.random.key(0),
        ROWS,
        primitives="gather",
    ),
    case(
        "window of rows",
        lambda t, i: lax.gather(
            t, i, lax.GatherDimensionNumbers((1, 2), (), (0, 1)), (3, 8), mode="clip"
        ),
        f32(16, 8),
        STRAY,
    ),
    *(
        case(
            f"windows, {mode}",
            lambda t, i, mode=mode: lax.gather(
                t, i, lax.GatherDimensionNumbers((1, 2), (), (0,)), (3, 8), mode=mode
            ),
            f32(16, 8),
            STRAY.reshape(8, 1),
        )
        for mode in ("clip", "fill")
    ),
    case(
        "windows of bools",
        lambda t, i: lax.gather(
            t, i, lax.GatherDimensionNumbers((1,), (), (0,)), (9,), mode="clip"
        ),
        boolean(16),
        STRAY.reshape(8, 1),
    ),
    case(
        "windows of two dims",
        lambda t, i: lax.gather(
            t, i, lax.GatherDimensionNumbers((1, 2), (), (0, 1)), (3, 5), mode="clip"
        ),
        f32(16, 8),
        STRAY,
    ),
    case(
        "slices by vmap",
        lambda t, i: jax.vmap(lambda j: lax.dynamic_slice_in_dim(t, j, 5, 0))(i),
        f32(16, 8),
        STRAY.reshape(8),
    ),
    case("batched by vmap", jax.vmap(lambda t, i: t[i]), f32(4, 16, 8), TOKENS),
)
SCATTER = only(
    "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max",
    *(
        case(
            f"scatter {name}, {mode}",
            lambda t, i, u, name=name, mode=mode: getattr(t.at[i], name)(u, mode=mode),
            f32(16, 8),
            STRAY,
            f32(4, 2, 8),
        )
        for name in ("add", "subtract", "mul", "min", "max")
        for mode in ("clip", "drop")
    ),
    case("set", lambda t, i, u: t.at[i].set(u), f32(16, 8), DISTINCT, f32(4, 8)),
    *(
        case(
            f"windows add, {mode}",
            lambda t, i, u, mode=mode: lax.scatter_add(
                t, i, u, lax.ScatterDimensionNumbers((1, 2), (), (0,)), mode=mode
            ),
            f32(16, 8),
            STRAY.reshape(8, 1),
            f32(8, 3, 8),
        )
        for mode in ("clip", "drop")
    ),
    case(
        "window set",
        lambda t, i, u: lax.scatter(
            t, i, u, lax.ScatterDimensionNumbers((0, 1), (), (0, 1)), mode="clip"
        ),
        f32(16, 8),
        np.array([3, 2]),
        f32(7, 4),
    ),
    case(
        "window beyond the end",
        lambda t, i, u: lax.scatter_max(
            t, i, u, lax.ScatterDimensionNumbers((0, 1), (), (0,)), mode="drop"
        ),
        f32(16, 8),
        np.array([10]),
        f32(7, 8),
    ),
    case(
        "gradient of slices by vmap",
        jax.grad(
            lambda t, i: (jax.vmap(lambda j: lax.dynamic_slice_in_dim(t, j, 5, 0))(i) ** 2).sum()
        ),
        f32(16, 8),
        STRAY.reshape(8),
    ),
    case("apply", lambda t, i: t.at[i].apply(jnp.sin), f32(16, 8), np.array([3, 3, 12, -20])),
    case("set of bools", lambda t, i, u: t.at[i].set(u), boolean(16, 8), DISTINCT, boolean(4, 8)),
    case("max of bools", lambda t, i, u: t.at[i].max(u), boolean(16, 8), STRAY, boolean(4, 2, 8)),
    case("gradient of embedding", jax.grad(lambda t, i: (t[i] ** 2).sum()), f32(16, 8), TOKENS),
    case(
        "gradient of labels' logits",
        jax.grad(lambda t, i: jnp.take_along_axis(t, i[..., None], -1).sum()),
        f32(4, 3, 16),
        TOKENS,
    ),
    case("segment sum", lambda d, i: jax.ops.segment_sum(d, i, 8), f32(8, 4), ROWS),
    case("columns add", lambda t, i, u: t.at[:, i].add(u), f32(4, 16), ROWS, f32(4, 8)),
    case("points add", lambda t, i, j, u: t.at[i, j].add(u), f32(8, 16), ROWS, ROWS, f32(8)),
    case("one element", lambda t: t.at[2, 3].set(1.0), f32(8, 16)),
    case(
        "batched by vmap, add",
        jax.vmap(lambda t, i, u: t.at[i].add(u)),
        f32(4, 16),
        TOKENS,
        f32(4, 3),
    ),
)


def conv(
    strides: int | tuple[int, ...] = 1, padding: Any = "SAME", dims: int = 1, **more: Any
) -> Callable[..., Any]:
    """A convolution of `dims` spatial dims, channels first."""
    strides = (strides,) * dims if isinstance(strides, int) else strides
    return lambda x, w: lax.conv_general_dilated(x, w, strides, padding, **more)


def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Both gradients of a function of two arrays, at a whole cotangent."""
    return lambda x, w, g: jax.vjp(function, x, w)[1](g)


NHWC = ("NHWC", "HWIO", "NHWC")
CONVOLUTION = only(
    "conv_general_dilated",
    case("conv", conv(), f32(4, 6, 16), f32(8, 6, 3)),
    case(
        "conv, channels last",
        conv(dims=2, dimension_numbers=NHWC),
        f32(2, 8, 4, 4),
        f32(3, 3, 4, 8),
    ),
    case("conv, valid", conv(padding="VALID"), f32(2, 2, 10), f32(4, 2, 3)),
    case("conv, padded lopsidedly", conv(padding=((3, 1),)), f32(2, 2, 16), f32(2, 2, 5)),
    case("conv, cropped", conv(padding=((-4, 4),)), f32(2, 2, 16), f32(2, 2, 1)),
    case("conv, strided", conv(2), f32(2, 4, 16), f32(4, 4, 3)),
    case("conv, strided out of step", conv(3, ((1, 2),)), f32(2, 2, 16), f32(2, 2, 4)),
    case("conv, patches", conv(4, "VALID"), f32(2, 3, 32), f32(8, 3, 4)),
    case("conv, dilated", conv(rhs_dilation=(3,)), f32(2, 2, 16), f32(2, 2, 3)),
    case(
        "conv, transposed", conv(padding=((1, 2),), lhs_dilation=(2,)), f32(2, 2, 16), f32(2, 2, 3)
    ),
    case("conv, wide kernel", conv(), f32(2, 2, 16), f32(2, 2, 11)),
    case("conv, kernel of the image", conv(padding="VALID"), f32(2, 2, 16), f32(2, 2, 16)),
    case("conv, two dims cut", conv((1, 2), dims=2), f32(2, 2, 8, 8), f32(2, 2, 3, 3)),
    case("conv, groups", conv(feature_group_count=2), f32(2, 8, 8), f32(8, 4, 3)),
    case("conv, depthwise", conv(feature_group_count=8), f32(2, 8, 8), f32(16, 1, 3)),
    case("conv, batch groups", conv(batch_group_count=2), f32(8, 4, 8), f32(8, 4, 3)),
    case("gradients of conv", gradients(conv()), f32(4, 6, 16), f32(8, 6, 3), f32(4, 8, 16)),
    case(
        "gradients of strided conv", gradients(conv(2)), f32(4, 2, 16), f32(2, 2, 3), f32(4, 2, 8)
    ),
    case(
        "gradients of grouped conv",
        gradients(conv(feature_group_count=4)),
        f32(4, 8, 8),
        f32(16, 2, 3),
        f32(4, 16, 8),
    ),
    case(
        "gradients of depthwise conv",
        gradients(conv(2, feature_group_count=8)),
        f32(4, 8, 8),
        f32(8, 1, 3),
        f32(4, 8, 4),
    ),
)


def pool(reduce: Callable[..., Any], init: Any, window: int, stride: int, padding: Any) -> Any:
    """A reduction of windows of the last dim of a matrix."""
    if not isinstance(padding, str):
        padding = ((0, 0), padding)
    return lambda x: lax.reduce_window(x, init, reduce, (1, window), (1, stride), padding)


def largest_two(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
    return jnp.maximum(left[0], right[0]), jnp.minimum(left[1], right[1])


POOL = pool(lax.max, -jnp.inf, 2, 2, "VALID")
POOL_SAME = pool(lax.max, -jnp.inf, 3, 2, "SAME")
POOL_2D = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 3), (1, 2), "SAME")  # noqa: E731
WINDOW = only(
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min "
    "select_and_scatter_add select_and_gather_add",
    case("max pool", POOL, f32(4, 16)),
    case("max pool of negative numbers", lambda x: POOL_SAME(-abs(x)), f32(4, 16)),
    case("min pool, padded", pool(lax.min, jnp.inf, 3, 1, (2, 0)), f32(4, 16)),
    case("max pool of integers", pool(lax.max, jnp.iinfo(jnp.int32).min, 3, 1, "SAME"), i32(4, 16)),
    case("sum pool, overlapping", pool(lax.add, 0.0, 3, 1, "SAME"), f32(4, 16)),
    case("sum pool with gaps", pool(lax.add, 0.0, 2, 4, "VALID"), f32(4, 16)),
    case("running sum", pool(lax.add, 0.0, 16, 1, (15, 0)), f32(4, 16)),
    case("global sum pool", pool(lax.add, 0.0, 16, 1, "VALID"), f32(4, 16)),
    case("global max pool", pool(lax.max, -jnp.inf, 16, 1, "VALID"), f32(4, 16)),
    case(
        "dilated windows",
        lambda x: lax.reduce_window(
            x, 0.0, lax.add, (1, 3), (1, 1), "SAME", base_dilation=(1, 2), window_dilation=(1, 2)
        ),
        f32(4, 16),
    ),
    case(
        "two dims of windows",
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 2), (1, 2), "SAME"),
        f32(8, 16),
    ),
    case(
        "windows of two operands",
        lambda x, y: lax.reduce_window(
            (x, y), (-jnp.inf, jnp.inf), largest_two, (1, 3), (1, 1), "SAME"
        ),
        f32(4, 16),
        f32(4, 16),
    ),
    case("gradient of max pool", jax.grad(lambda x: (POOL(x) ** 2).sum()), f32(4, 16)),
    case("gradient of overlapping pool", jax.grad(lambda x: (POOL_SAME(x) ** 2).sum()), f32(4, 16)),
    case(
        "gradient of wide pool",
        jax.grad(lambda x: (pool(lax.max, -jnp.inf, 7, 2, (2, 3))(x) ** 2).sum()),
        f32(4, 16),
    ),
    case(
        "gradient of pool with gaps",
        jax.grad(lambda x: (pool(lax.max, -jnp.inf, 2, 4, "VALID")(x) ** 2).sum()),
        f32(4, 16),
    ),
    case(
        "gradient of overlapping min pool",
        jax.grad(lambda x: (pool(lax.min, jnp.inf, 3, 1, "SAME")(x) ** 2).sum()),
        f32(4, 16),
    ),
    case("gradient of pool of two dims", jax.grad(lambda x: (POOL_2D(x) ** 2).sum()), f32(8, 16)),
    case(
        "derivative of overlapping pool",
        lambda x, t: jax.jvp(POOL_SAME, (x,), (t,)),
        f32(4, 16),
        f32(4, 16),
    ),
    case("derivative of pool of two dims", lambda x, t: jax.jvp(POOL_2D, (x,), (t,)), *[f32(8, 16)] * 2),
    case(
        "derivative of max pool",
        lambda x, t: jax.jvp(POOL, (x,), (t,)),
        f32(4, 16),
        f32(4, 16),
    ),
)  # fmt: skip


def spd(x: Any) -> Any:
    """A symmetric positive definite matrix for each one in a batch."""
    return x @ x.mT + 4 * jnp.eye(x.shape[-1])


LINALG = only(
    "cholesky cholesky_update eigh fft geqrf hessenberg householder_product lu "
    "lu_pivots_to_permutation qr schur svd symmetric_product triangular_solve tridiagonal "
    "tridiagonal_solve",
    case("cholesky", lambda x: lax.linalg.cholesky(spd(x), symmetrize_input=False), f32(2, 8, 4, 4)),
    case("qr", lambda x: lax.linalg.qr(x, full_matrices=False), f32(8, 4, 4)),
    case("eigh", lambda x: lax.linalg.eigh(spd(x), symmetrize_input=False), f32(8, 4, 4)),
    case("svd", lambda x: lax.linalg.svd(x, full_matrices=False), f32(8, 4, 4)),
    case("singular values", lambda x: lax.linalg.svd(x, compute_uv=False), f32(8, 4, 4)),
    case("lu", lambda x: lax.linalg.lu(x), f32(8, 4, 4)),
    case("schur", lambda x: lax.linalg.schur(spd(x)), f32(8, 4, 4)),
    case("hessenberg", lambda x: lax.linalg.hessenberg(x), f32(8, 4, 4)),
    case("tridiagonal", lambda x: lax.linalg.tridiagonal(spd(x)), f32(8, 4, 4)),
    case("householder", lambda x, t: lax.linalg.householder_product(x, t), f32(8, 4, 4), f32(8, 4)),
    case(
        "symmetric product",
        lambda x, c: lax.linalg.symmetric_product(x, c, beta=1.0),
        f32(8, 4, 8),
        f32(8, 4, 4),
    ),
    *(
        case(
            f"triangular solve, {'left' if left else 'right'}",
            lambda a, b, left=left: lax.linalg.triangular_solve(
                jnp.tril(a) / 4 + jnp.eye(4), b, left_side=left, lower=True
            ),
            f32(8, 4, 4),
            f32(8, 4, 8) if left else f32(8, 8, 4),
        )
        for left in (True, False)
    ),
    case(
        "tridiagonal solve",
        lambda d, b: lax.linalg.tridiagonal_solve(d / 8, 2 + abs(d), d / 8, b),
        f32(8, 4),
        f32(8, 4, 8),
    ),
    case("fft", lambda x: jnp.fft.fft(x), sds(jnp.complex64, 8, 4)),
    case("real fft and back", lambda x: jnp.fft.irfft2(jnp.fft.rfft2(x)), f32(8, 4, 4)),
)  # fmt: skip

CASES = [
    *ELEMENTWISE,
    *CONTRACTION,
    *REDUCTION,
    *GATHER,
    *SCATTER,
    *CONVOLUTION,
    *WINDOW,
    *LINALG,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_legal_labellings_are_right(case: Case):
    report = check_rule(case.function, *case.args, primitives=case.primitives, most_nested=6)
    assert report.checked
    assert not report.wrong, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_combinations_are_right(case: Case):
    report = check_rule(case.function, *case.args, primitives=case.primitives)
    assert not report.wrong, str(report)


# Updates that are not read, of `x.at[i].apply(f)` or of a window that is dropped, are right in any labelling.
COMPARABLE = [case for case in CASES if case.name not in ("apply", "window beyond the end")]


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPARABLE, ids=lambda case: case.name)
def test_no_right_labelling_is_missing(case: Case):
    report = check_rule(
        case.function, *case.args, primitives=case.primitives, mesh_shapes=(), incomplete=True
    )
    assert not report.incomplete, str(report)
