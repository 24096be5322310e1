"""Ragged contractions: consecutive rows of one dim belong to groups whose sizes are data.

A block of the ragged dim holds parts of some groups, and a device finds their sizes from the sizes of all.
A device that holds some of the groups alone gives the rows before and after them to groups of zeros.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Linear, Rule, factor_rule
from pypto_spmd.collectives.rules.registry import Aval, rule


@rule("ragged_dot_general")
def _ragged_dot(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    numbers = params["ragged_dot_dimension_numbers"]
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    (ragged_dim,) = numbers.lhs_ragged_dimensions
    group_dims = tuple(numbers.rhs_group_dimensions)
    lhs = [f"m{d}" for d in range(len(ins[0].shape))]
    rhs = [f"n{d}" for d in range(len(ins[1].shape))]
    for left, right in zip((*lhs_batch, *lhs_contract), (*rhs_batch, *rhs_contract), strict=True):
        rhs[right] = lhs[left]
    for d in group_dims:
        rhs[d] = "g"
    contracted = [lhs[d] for d in lhs_contract]
    ragged = lhs[ragged_dim]
    makes_groups = ragged in contracted
    out = ["g"] if makes_groups else []
    out += [lhs[d] for d in lhs_batch]
    out += [n for d, n in enumerate(lhs) if d not in (*lhs_batch, *lhs_contract)]
    out += [n for d, n in enumerate(rhs) if d not in (*rhs_batch, *rhs_contract, *group_dims)]
    whole = []
    if len(ins[2].shape) > 1 or params["group_offset"] is not None:
        # Other sizes for each element of a batch.
        whole = ["g", ragged, *(lhs[d] for d in lhs_batch)]
    reduce = dict.fromkeys(contracted, "sum") | ({"g": "sum"} if group_dims else {})

    def bind(ctx: Context, x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
        if ctx.axes(ragged) and ragged_dim not in lhs_batch:
            rows = x.shape[ragged_dim]
            sizes = _sizes_in_block(sizes, ctx.index(ragged) * rows, rows)
        if "g" not in (*rhs, *out) or not ctx.axes("g"):
            return ctx.bind(x, y, sizes, out_sharding=None)
        count = ctx.local_size("g")
        sizes = _with_outsiders(sizes, ctx.index("g") * count, count, x.shape[ragged_dim])
        if makes_groups:
            made = ctx.bind(x, y, sizes, out_sharding=None)
            return lax.slice_in_dim(made, 1, 1 + count, axis=0)
        ends = [(0, 0, 0)] * y.ndim
        ends[group_dims[0]] = (1, 1, 0)
        return ctx.bind(x, lax.pad(y, jnp.zeros((), y.dtype), ends), sizes, out_sharding=None)

    return factor_rule(
        f"{' '.join(lhs)}, {' '.join(rhs)}, {' '.join(['_'] * len(ins[2].shape))} -> {' '.join(out)}",
        [a.shape for a in ins],
        [a.shape for a in outs],
        reduce=reduce,
        whole=whole,
        linear=(Linear(frozenset({0})), Linear(frozenset({1}))),
        works=True,
        bind=bind,
    )


def _sizes_in_block(sizes: jax.Array, first: Any, rows: int) -> jax.Array:
    """Of each group the number of rows that lie in a block of `rows` from row `first` on."""
    ends = jnp.cumsum(sizes, dtype=sizes.dtype)
    first = lax.convert_element_type(first, sizes.dtype)
    inside = [jnp.clip(bound, first, first + rows) for bound in (ends - sizes, ends)]
    return inside[1] - inside[0]


def _with_outsiders(sizes: jax.Array, first: Any, count: int, rows: int) -> jax.Array:
    """Sizes of `count` groups from group `first` on, between the rows before and those after them."""
    mine = lax.dynamic_slice_in_dim(sizes, first, count, 0)
    before = jnp.sum(jnp.where(jnp.arange(sizes.shape[0]) < first, sizes, 0), dtype=sizes.dtype)
    after = jnp.asarray(rows, sizes.dtype) - before - jnp.sum(mine, dtype=sizes.dtype)
    return jnp.concatenate([before[None], mine, after[None]])
