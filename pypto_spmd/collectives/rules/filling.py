"""Filling the end of dims with one value: what hides padding from a primitive that would read it.

No program has this primitive to begin with: `collectives.padding` brings it in. Every device fills what it
holds of the end, so nothing is sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Linear, Rule, factor_rule
from pypto_spmd.collectives.rules.moving import dim_names
from pypto_spmd.collectives.rules.registry import Aval, rule

fill_end_p = Primitive("fill_end")


@fill_end_p.def_impl
def fill_end(x: jax.Array, *, sizes: Sequence[tuple[int, int]], value: Any) -> jax.Array:
    """Sets to `value` all elements from `size` on along `dim`, for each `(dim, size)`."""
    return _filled(x, sizes, value, (0,) * x.ndim)


@fill_end_p.def_abstract_eval
def _abstract(x: Any, *, sizes: Sequence[tuple[int, int]], value: Any) -> Any:
    return x.update(weak_type=False)


mlir.register_lowering(fill_end_p, mlir.lower_fun(fill_end, multiple_results=False))


def _filled(
    x: jax.Array, sizes: Sequence[tuple[int, int]], value: Any, starts: Sequence[Any]
) -> jax.Array:
    """`starts` are the indices of the first element of `x` in the whole array."""
    filler = lax.full_like(x, value)
    for dim, size in sizes:
        inside = lax.iota(jnp.int32, x.shape[dim]) + starts[dim] < size
        x = lax.select(lax.broadcast_in_dim(inside, x.shape, (dim,)), x, filler)
    return x


_NEUTRAL_OF = {"max": -jnp.inf, "min": jnp.inf, "sum": 0, "prod": 1}


@rule("fill_end")
def _fill_end(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    notation = " ".join(dim_names(len(ins[0].shape)))

    def bind(ctx: Context, x: jax.Array) -> jax.Array:
        return _filled(x, params["sizes"], params["value"], ctx.out_start())

    # Filling partial values with a reduction's neutral element gives partial values: sums with 0.
    ops = tuple(op for op, neutral in _NEUTRAL_OF.items() if _is(params["value"], neutral))
    return factor_rule(
        f"{notation} -> {notation}",
        [ins[0].shape],
        [outs[0].shape],
        linear=(Linear(frozenset({0}), ops),) if ops and ins[0].dtype != bool else (),
        bind=bind,
    )


def _is(value: Any, neutral: Any) -> bool:
    return not isinstance(value, bool) and value == neutral
