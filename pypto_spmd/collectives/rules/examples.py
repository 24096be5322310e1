"""An example of every primitive that has a rule: one table, two readers.

A rule is a function of an equation, so only an example has a notation that can be printed. The command
`pypto rules` prints those of this table, and the truth test runs them on shards.

Invariant: tracing an example at its arguments gives an equation of its primitive, and starts no backend.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.extend.core import primitives as p

from pypto_spmd.collectives.rules.factor import Rule
from pypto_spmd.collectives.rules.registry import Aval, rule_for
from pypto_spmd.collectives.rules.splice import splice_p
from pypto_spmd.errors import shape_text


@dataclass(frozen=True, slots=True)
class Example:
    """A function whose trace has an equation of the primitive.

    Args:
        function: the function.
        args: what to trace it at.
        axes: mesh axes of the region that it stands in, for collectives.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    axes: tuple[tuple[str, int], ...] = ()

    def equation(self, name: str) -> Any:
        """The first equation of the primitive called `name`.

        Raises:
            LookupError: if there is none, as where this version of JAX lacks the primitive.
        """
        try:
            traced = jax.make_jaxpr(self.function, axis_env=list(self.axes))(*self.args)
        except AttributeError as error:
            raise LookupError(f"JAX {jax.__version__} has no {name}") from error
        for eqn in _equations(traced.jaxpr):
            if eqn.primitive.name == name:
                return eqn
        raise LookupError(f"no {name} is bound by its example on JAX {jax.__version__}")

    def shown(self, name: str) -> "Shown":
        """The rule of that equation, and its shapes."""
        eqn = self.equation(name)
        ins, outs = (tuple(map(_aval, side)) for side in (eqn.invars, eqn.outvars))
        left, right = (", ".join(shape_text(a.shape, a.dtype) for a in s) for s in (ins, outs))
        return Shown(rule_for(name, eqn.params, ins, outs), f"{left} -> {right}".strip())


@dataclass(frozen=True, slots=True)
class Shown:
    """A rule as it is at an example.

    Args:
        rule: the rule.
        example: the shapes of the operands and results.
    """

    rule: Rule
    example: str


def _aval(variable: Any) -> Aval:
    aval = variable.aval
    if isinstance(variable, core.Literal) and not aval.shape:
        return Aval((), aval.dtype, np.asarray(variable.val).item())
    return Aval(tuple(aval.shape), aval.dtype)


def _equations(jaxpr: core.Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if isinstance(inner, core.Jaxpr):
                    yield from _equations(inner)


def _array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


_f32, _i32, _bool = (partial(_array, dtype) for dtype in (np.float32, np.int32, np.bool_))
_u32, _c64 = (partial(_array, dtype) for dtype in (np.uint32, np.complex64))
_KEY = jax.eval_shape(lambda: jax.random.key(0))
_KEYS = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4))
_POSITIVE = np.linspace(0.1, 0.9, 32, dtype=np.float32).reshape(4, 8)
_ROWS = np.array([3, 3, 1, 0], np.int32)
_ORDER = np.random.default_rng(0).permutation(64).reshape(4, 16).astype(np.float32)
_COVARIANCES = np.stack([np.eye(4, dtype=np.float32) * n + 1 for n in range(1, 9)])
_OVER_X = (("x", 2),)


def _bound(name: str, *args: Any, **params: Any) -> Example:
    """A primitive that `jax.extend.core.primitives` exports, bound as it is."""
    return Example(lambda *a: getattr(p, f"{name}_p").bind(*a, **params), args)


def _of(function: Callable[..., Any], *args: Any) -> Example:
    return Example(function, args)


def _in_region(function: Callable[..., Any], *args: Any) -> Example:
    return Example(function, args, _OVER_X)


def _elementwise() -> Iterator[tuple[str, Example]]:
    for name in (
        "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "cbrt",
        "ceil", "cos", "cosh", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor",
        "is_finite", "lgamma", "log", "log1p", "log2", "logistic", "neg", "one_minus_square", "round",
        "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "tan", "tanh",
    ):  # fmt: skip
        yield name, _of(partial(_by_name, name), _POSITIVE)
    for name in (
        "add", "atan2", "div", "eq", "ge", "gt", "igamma", "igammac", "le", "lt", "max", "min", "mul",
        "ne", "nextafter", "pow", "rem", "sub", "zeta",
    ):  # fmt: skip
        yield name, _of(partial(_by_name, name), _POSITIVE, _POSITIVE[::-1] + 1)
    for name in (
        "and", "or", "xor", "shift_left", "shift_right_arithmetic", "shift_right_logical", "mulhi",
    ):  # fmt: skip
        lax_name = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}.get(name, name)
        yield name, _of(partial(_by_name, lax_name), _i32(4, 8), _i32(4, 8))
    for name in ("clz", "population_count"):
        yield name, _of(getattr(lax, name), _i32(4, 8))
    for name in ("eq_to", "le_to", "lt_to"):
        yield name, _bound(name, _f32(4, 8), _f32(4, 8))
    for name in ("real", "imag", "conj"):
        yield name, _of(getattr(lax, name), _c64(4, 8))
    yield "not", _of(lax.bitwise_not, _bool(4, 8))


def _by_name(name: str, *operands: Any) -> Any:
    return getattr(lax, name)(*operands)


def _doubled(x: Any) -> Any:
    def double(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = 2 * x_ref[...]

    # Pallas is large, and needed for this alone.
    from jax.experimental import pallas

    return pallas.pallas_call(double, out_shape=x, interpret=True)(x)


def _routed(x: Any, source: Any) -> Any:
    """The source's values where windows have their maximum, added by a reduction that is no plain sum."""
    select, scatter = (
        jax.make_jaxpr(function)(np.float32(0), np.float32(0))
        for function in (lax.ge, lambda a, b: a + b + a * b)
    )
    return p.select_and_scatter_p.bind(
        x,
        source,
        np.float32(0),
        select_jaxpr=select.jaxpr,
        select_consts=(),
        scatter_jaxpr=scatter.jaxpr,
        scatter_consts=(),
        **_WINDOW,
    )


_ONE_DIM = lax.ConvDimensionNumbers((0, 1, 2), (0, 1, 2), (0, 1, 2))
_WINDOW = {"window_dimensions": (1, 2), "window_strides": (1, 2), "padding": ((0, 0), (0, 0))}
_DILATED = {**_WINDOW, "base_dilation": (1, 1), "window_dilation": (1, 1)}
_GROUPS = np.array([5, 3, 7, 1], np.int32)

EXAMPLES: Mapping[str, Example] = dict(_elementwise()) | {
    "add_any": _of(lambda x: jax.vjp(lambda x: x * jnp.sin(x), x)[1](x), _f32(4, 8)),
    "polygamma": _of(lambda x: lax.polygamma(lax.full_like(x, 2), x), _POSITIVE),
    "integer_pow": _of(lambda x: x**3, _f32(4, 8)),
    "polynomial": _of(lambda x: _by_name("polynomial", x, (1.0, 2.0)), _f32(4, 8)),
    "clamp": _of(lambda x: lax.clamp(-1.0, x, 1.0), _f32(4, 8)),
    "complex": _of(lax.complex, _f32(4, 8), _f32(4, 8)),
    "igamma_grad_a": _of(lax.igamma_grad_a, _POSITIVE, _POSITIVE[::-1]),
    "regularized_incomplete_beta": _of(lax.betainc, _POSITIVE, _POSITIVE[::-1], _POSITIVE),
    "select_n": _of(lax.select_n, _bool(4, 8), _f32(4, 8), _f32(4, 8)),
    "convert_element_type": _of(lambda x: x.astype(jnp.bfloat16), _f32(4, 8)),
    "bitcast_convert_type": _of(lambda x: lax.bitcast_convert_type(x, np.uint16), _f32(4, 8)),
    "reduce_precision": _of(lambda x: lax.reduce_precision(x, 8, 20), _f32(4, 8)),
    "copy": _of(jnp.copy, _f32(4, 8)),
    "device_put": _of(jax.device_put, _f32(4, 8)),
    "name": _of(lambda x: checkpoint_name(x, "kept"), _f32(4, 8)),
    "optimization_barrier": _of(lax.optimization_barrier, _f32(4, 8)),
    "platform_index": _of(
        lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), _f32(4, 8)
    ),
    "layout_constraint": _of(lambda x: with_layout_constraint(x, Layout((1, 0))), _f32(4, 8)),
    "xla_metadata_value": _of(lambda x: set_xla_metadata(x, kind="kept"), _f32(4, 8)),
    "empty": _of(lambda: lax.empty((4, 8), np.float32)),
    # Contractions and reductions.
    "dot_general": _of(partial(jnp.einsum, "bij,bjk->bik"), _f32(4, 8, 4), _f32(4, 4, 8)),
    "scaled_dot": _of(
        lambda x, y, x_scale, y_scale: lax.scaled_dot(x, y, lhs_scale=x_scale, rhs_scale=y_scale),
        _array(jnp.float8_e4m3fn, 4, 64),
        _array(jnp.float8_e4m3fn, 64, 8),
        _array(jnp.float8_e8m0fnu, 4, 2),
        _array(jnp.float8_e8m0fnu, 2, 8),
    ),
    "ragged_dot_general": _of(lax.ragged_dot, _f32(16, 8), _f32(4, 8, 12), _GROUPS),
    **{
        f"reduce_{n}": _of(partial(getattr(jnp, n), axis=1), _f32(4, 8))
        for n in ("sum", "max", "min", "prod")
    },
    "reduce_or": _of(lambda x: jnp.any(x, 1), _bool(4, 8)),
    "reduce_and": _of(lambda x: jnp.all(x, 1), _bool(4, 8)),
    "reduce_xor": _of(lambda x: lax.reduce_xor(x, (1,)), _i32(4, 8)),
    "reduce": _of(lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + a + b, (1,)), _f32(4, 8)),
    "argmax": _of(lambda x: lax.argmax(x, 1, np.int32), _ORDER),
    "argmin": _of(lambda x: lax.argmin(x, 1, np.int32), _ORDER),
    "top_k": _of(lambda x: lax.top_k(x, 2), _ORDER),
    "approx_top_k": _of(lambda x: lax.approx_max_k(x, 2), _ORDER),
    "sort": _of(lambda x: lax.sort(x, dimension=1), _ORDER),
    "cumsum": _of(lambda x: lax.cumsum(x, 1), _f32(4, 8)),
    "cumprod": _of(lambda x: lax.cumprod(x, 1), _POSITIVE),
    "cummax": _of(lambda x: lax.cummax(x, 1), _f32(4, 8)),
    "cummin": _of(lambda x: lax.cummin(x, 1), _f32(4, 8)),
    "cumlogsumexp": _of(lambda x: lax.cumlogsumexp(x, 1), _f32(4, 8)),
    # What moves elements.
    "reshape": _of(lambda x: x.reshape(4, 2, 4), _f32(4, 8)),
    "transpose": _of(jnp.transpose, _f32(4, 8)),
    "broadcast_in_dim": _of(lambda x: jnp.broadcast_to(x[None], (2, 4, 8)), _f32(4, 8)),
    "squeeze": _of(lambda x: lax.squeeze(x, (1,)), _f32(4, 1, 8)),
    "iota": _of(lambda: lax.broadcasted_iota(np.int32, (4, 8), 1)),
    "tile": _of(lambda x: jnp.tile(x, (1, 2)), _f32(4, 8)),
    "concatenate": _of(lambda x, y: lax.concatenate([x, y], 1), _f32(4, 8), _f32(4, 16)),
    "stack": _of(lambda x, y: jnp.stack([x, y]), _f32(4, 8), _f32(4, 8)),
    "unstack": _of(lambda x: jnp.unstack(x), _f32(2, 8)),
    "split": _of(lambda x: lax.split(x, (4, 12), 1), _f32(4, 16)),
    "pad": _of(lambda x: lax.pad(x, 0.0, ((0, 0, 0), (4, 4, 0))), _f32(4, 8)),
    "slice": _of(lambda x: x[:, 2:10], _f32(4, 16)),
    "rev": _of(lambda x: lax.rev(x, (1,)), _f32(4, 8)),
    "dynamic_slice": _of(
        lambda x, i: lax.dynamic_slice_in_dim(x, i, 8, 1), _f32(4, 16), np.int32(3)
    ),
    "dynamic_update_slice": _of(
        lambda x, y, i: lax.dynamic_update_slice_in_dim(x, y, i, 1),
        _f32(4, 16),
        _f32(4, 8),
        np.int32(3),
    ),
    "gather": _of(lambda x, i: x.at[i].get(mode="clip"), _f32(8, 4), _ROWS),
    "scatter": _of(
        lambda x, i, y: x.at[i].set(y, mode="drop", unique_indices=True),
        _f32(8, 4),
        _ROWS[1:],
        _f32(3, 4),
    ),
    **{
        f"scatter-{op}": _of(
            lambda x, i, y, method=method: getattr(x.at[i], method)(y, mode="drop"),
            _f32(8, 4),
            _ROWS,
            _f32(4, 4),
        )
        for op, method in (
            ("add", "add"),
            ("mul", "mul"),
            ("min", "min"),
            ("max", "max"),
            ("sub", "subtract"),
        )
    },
    "splice": _of(lambda x: splice_p.bind(x, dim=0, segments=((0, 7, 1), (0, 0, 7))), _f32(8, 4)),
    # Windows.
    "conv_general_dilated": _of(
        lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=_ONE_DIM),
        _f32(4, 8, 16),
        _f32(12, 8, 3),
    ),
    "reduce_window_sum": _bound("reduce_window_sum", _f32(4, 8), **_DILATED),
    "reduce_window_max": _bound("reduce_window_max", _f32(4, 8), **_DILATED),
    "reduce_window_min": _bound("reduce_window_min", _f32(4, 8), **_DILATED),
    "reduce_window": _of(
        lambda x: lax.reduce_window(x, 0.0, lambda a, b: a + b * b, (1, 2), (1, 2), "VALID"),
        _f32(4, 8),
    ),
    "select_and_scatter_add": _of(
        jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID").sum()),
        _ORDER,
    ),
    "select_and_gather_add": _of(
        lambda x, t: jax.jvp(
            lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"), (x,), (t,)
        ),
        _ORDER,
        _f32(4, 16),
    ),
    "select_and_scatter": _of(_routed, _ORDER, _f32(4, 8)),
    # Linear algebra and transforms.
    "fft": _of(partial(jnp.fft.fftn, axes=(1, 2)), _c64(4, 8, 8)),
    "cholesky": _of(lax.linalg.cholesky, _COVARIANCES),
    "eig": _of(lax.linalg.eig, _COVARIANCES),
    "eigh": _of(lax.linalg.eigh, _COVARIANCES),
    "hessenberg": _of(lax.linalg.hessenberg, _f32(8, 4, 4)),
    "householder_product": _of(lax.linalg.householder_product, _f32(8, 4, 4), _f32(8, 4)),
    "lu": _of(lax.linalg.lu, _f32(8, 4, 4)),
    "lu_pivots_to_permutation": _of(
        lambda x: lax.linalg.lu_pivots_to_permutation(x, 4), np.zeros((8, 4), np.int32)
    ),
    "qr": _of(lax.linalg.qr, _f32(8, 4, 4)),
    "geqrf": _of(lambda x: jnp.linalg.qr(x, mode="raw"), _f32(8, 4, 4)),
    "schur": _of(lax.linalg.schur, _f32(8, 4, 4)),
    "svd": _of(lax.linalg.svd, _f32(8, 4, 4)),
    "triangular_solve": _of(
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        _COVARIANCES,
        _f32(8, 4, 6),
    ),
    "tridiagonal": _of(lax.linalg.tridiagonal, _COVARIANCES),
    "tridiagonal_solve": _of(
        lax.linalg.tridiagonal_solve, _f32(8, 4), _f32(8, 4), _f32(8, 4), _f32(8, 4, 6)
    ),
    "symmetric_product": _of(lax.linalg.symmetric_product, _f32(8, 4, 6), _f32(8, 4, 4)),
    "cholesky_update": _of(lax.linalg.cholesky_update, _f32(4, 4), _f32(4)),
    "ormqr": _of(
        lambda a, t, c: lax.linalg.ormqr(a, t, c), _f32(8, 4, 4), _f32(8, 4), _f32(8, 4, 6)
    ),
    # Random numbers.
    "random_seed": _of(jax.vmap(jax.random.key), _u32(4)),
    "random_wrap": _of(jax.random.wrap_key_data, _u32(4, 2)),
    "random_unwrap": _of(jax.random.key_data, _KEYS),
    "random_clone": _of(jax.random.clone, _KEYS),
    "random_fold_in": _of(jax.vmap(jax.random.fold_in), _KEYS, _u32(4)),
    "random_split": _of(lambda key: jax.random.split(key, 4), _KEY),
    "random_bits": _of(lambda key: jax.random.bits(key, (4, 8)), _KEY),
    "random_gamma": _of(jax.vmap(jax.random.gamma), _KEYS, _POSITIVE),
    "threefry2x32": _of(lambda *a: p.threefry2x32_p.bind(*a), *[_u32(4, 8)] * 4),
    "rng_bit_generator": _of(lambda key: lax.rng_bit_generator(key, (4, 8)), _u32(4)),
    # Calls by name.
    "ffi_call": _of(lambda x: jax.ffi.ffi_call("no_such_target", _f32(4, 8))(x), _f32(4, 8)),
    "pallas_call": _of(_doubled, _f32(4, 8)),
    # Collectives of hand-written regions.
    "psum": _in_region(lambda x: lax.psum(x, "x"), _f32(4, 8)),
    "pmax": _in_region(lambda x: lax.pmax(x, "x"), _f32(4, 8)),
    "pmin": _in_region(lambda x: lax.pmin(x, "x"), _f32(4, 8)),
    "ppermute": _in_region(lambda x: lax.ppermute(x, "x", [(0, 1)]), _f32(4, 8)),
    "all_gather": _in_region(lambda x: lax.all_gather(x, "x", axis=1, tiled=True), _f32(4, 8)),
    "all_to_all": _in_region(lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True), _f32(4, 8, 16)),
    "reduce_scatter": _in_region(
        lambda x: lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True), _f32(4, 8)
    ),
    "axis_index": _in_region(lambda: lax.axis_index("x")),
}
"""Primitive -> an example; of the others that have a rule, `WITHOUT_EXAMPLE` says why there is none."""

WITHOUT_EXAMPLE: Mapping[str, str] = {
    "pbroadcast": "JAX itself runs it on GPUs only; that all get the one value is tested beside",
    "empty2": "is bound only by JAX itself",
    "inspect_sharding": "gives nothing: it tells how its operand lies",
    "fill_end": "is bound only by the planner, where it pads dims",
    "with_memory_space_constraint": "is bound only for memories that CPUs do not have",
    "geqp3": "is bound only by JAX itself, when it lowers qr",
}
