"""Cumulative sums, products, maxima and minima.

Along a split dim each device scans its own block, the devices exchange the totals of their blocks, and
each combines its block with what the blocks before it come to (Blelloch 1990).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Exchange, Linear, Rule, factor_rule
from pypto_spmd.collectives.rules.moving import dim_names
from pypto_spmd.collectives.rules.registry import Aval, rule


@dataclass(frozen=True, slots=True)
class _Scan:
    """A cumulative primitive.

    Args:
        neutral: the neutral element of a dtype.
        total: reduces an array over its first dim.
        combine: two arrays' elements.
        linear: reduction that the primitive lets through ("" if none).
    """

    neutral: Callable[[np.dtype], Any]
    total: Callable[..., jax.Array]
    combine: Callable[[jax.Array, jax.Array], jax.Array]
    linear: str


def _least(dtype: np.dtype) -> Any:
    return -np.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min


def _greatest(dtype: np.dtype) -> Any:
    return np.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


_SCANS = {
    "cumsum": _Scan(lambda _: 0, lambda x: jnp.sum(x, 0, dtype=x.dtype), lax.add, "sum"),
    "cumprod": _Scan(lambda _: 1, lambda x: jnp.prod(x, 0, dtype=x.dtype), lax.mul, "prod"),
    "cummax": _Scan(_least, lambda x: jnp.max(x, 0), lax.max, "max"),
    "cummin": _Scan(_greatest, lambda x: jnp.min(x, 0), lax.min, "min"),
    "cumlogsumexp": _Scan(_least, lambda x: logsumexp(x, 0), jnp.logaddexp, ""),
}


def _cumulative(scan: _Scan):
    def make(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
        operand, axis, backward = ins[0], params["axis"], params["reverse"]
        names = dim_names(len(operand.shape))
        along = names[axis]
        # Complex numbers have sums and products, but no order that the neutral elements know.
        ordered = scan.linear in ("sum", "prod") or operand.dtype.kind != "c"
        totals = Exchange(
            "all_gather",
            tuple(d for d in range(len(names)) if d != axis),
            1.0,
            operand.itemsize,
            per_shard=True,
            what="the totals of the blocks",
        )

        def bind(ctx: Context, x: jax.Array) -> jax.Array:
            made = ctx.bind(x)
            if not ctx.axes(along):
                return made
            mine = lax.index_in_dim(made, 0 if backward else -1, axis, keepdims=False)
            all_totals = ctx.exchange(along, 0, lambda axes: lax.all_gather(mine, axes, axis=0))
            piece = lax.broadcasted_iota(jnp.int32, all_totals.shape, 0)
            index = ctx.index(along)
            before = piece > index if backward else piece < index
            neutral = jnp.asarray(scan.neutral(x.dtype), x.dtype)
            so_far = scan.total(jnp.where(before, all_totals, neutral))
            return scan.combine(made, jnp.broadcast_to(jnp.expand_dims(so_far, axis), made.shape))

        notation = " ".join(names)
        return factor_rule(
            f"{notation} -> {notation}",
            [operand.shape],
            [outs[0].shape],
            whole=() if ordered else (along,),
            linear=(Linear(frozenset({0}), (scan.linear,)),) if scan.linear and ordered else (),
            exchanges={along: (totals,)},
            bind=bind,
        )

    return make


for _name, _scan in _SCANS.items():
    rule(_name)(_cumulative(_scan))
