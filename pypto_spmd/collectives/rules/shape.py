"""Primitives that only move, repeat or number elements: reshape, transpose, broadcast, rev, iota, ...

All of them are linear in what they move. A reshape is a matter of factors: where two shapes have a
common leading factor, that factor passes.
"""

from collections.abc import Mapping, Sequence
from math import gcd, prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Dims, Exchange, Factor, Linear, Rule, factor_rule
from pypto_spmd.collectives.rules.halo import Rows, Window, fetch, permute, with_windows
from pypto_spmd.collectives.rules.moving import dim_names, moves
from pypto_spmd.collectives.rules.registry import Aval, rule


@rule("broadcast_in_dim")
def _broadcast_in_dim(
    params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]
) -> Rule:
    shape, operand = outs[0].shape, ins[0]
    out = dim_names(len(shape))
    # A dim broadcast from nothing or from size 1 is a factor of the result alone.
    left = [
        out[d] if n == shape[d] else "_"
        for n, d in zip(operand.shape, params["broadcast_dimensions"], strict=True)
    ]
    linear = moves({0}, operand.dtype)
    if _is_zero(operand):
        # Zero is the sum of zeros, so that sums may start from it without a mask.
        linear += (Linear(frozenset()),)
    return factor_rule(
        f"{' '.join(left)} -> {' '.join(out)}",
        [operand.shape],
        [shape],
        linear=linear,
        bind=lambda ctx, x: ctx.bind(x, shape=ctx.out_shape(), sharding=None),
    )


def _is_zero(operand: Aval) -> bool:
    return operand.value is not None and operand.shape == () and bool(np.all(operand.value == 0))


@rule("reshape")
def _reshape(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    order = params["dimensions"] or tuple(range(len(ins[0].shape)))
    left, right, sizes, rests = common_factors([ins[0].shape[d] for d in order], outs[0].shape)
    operand = [""] * len(order)
    for d, dim in zip(order, left, strict=True):
        operand[d] = dim
    return factor_rule(
        f"{' '.join(operand)} -> {' '.join(right)}",
        [ins[0].shape],
        [outs[0].shape],
        sizes=sizes,
        whole=rests,
        linear=moves({0}, ins[0].dtype),
        bind=lambda ctx, x: ctx.bind(x, new_sizes=ctx.out_shape(), sharding=None),
    )


def common_factors(
    left: Sequence[int], right: Sequence[int]
) -> tuple[list[str], list[str], dict[str, int], list[str]]:
    """Cuts the dims of two shapes of equal size into common factors, major first.

    Dims are taken from the left in groups of equal product. Within a group the greatest common divisor
    of what is left of the two current dims is a factor of both: being the major one of each, it cuts
    both row-major orders at the same places. Where nothing is common, the rest of the group is whole.

    Returns:
        The dims of either side in factor notation, the size of each factor, and the names of those that
        only complete a dim and must be whole.
    """
    cuts: tuple[list[list[str]], list[list[str]]] = ([[] for _ in left], [[] for _ in right])
    sizes: dict[str, int] = {}
    i = j = 0
    while 0 not in left and i < len(left) and j < len(right):
        end_i, end_j = i + 1, j + 1
        a, b = left[i], right[j]
        while a != b:
            if a < b:
                a, end_i = a * left[end_i], end_i + 1
            else:
                b, end_j = b * right[end_j], end_j + 1
        rest_i, rest_j = left[i], right[j]
        while (common := gcd(rest_i, rest_j)) > 1 or 1 in (rest_i, rest_j):
            if common > 1:
                name = f"f{len(sizes)}"
                sizes[name] = common
                cuts[0][i].append(name)
                cuts[1][j].append(name)
                rest_i, rest_j = rest_i // common, rest_j // common
            if rest_i == 1 and (i := i + 1) < end_i:
                rest_i = left[i]
            if rest_j == 1 and (j := j + 1) < end_j:
                rest_j = right[j]
            if i == end_i or j == end_j:
                break
        i, j = end_i, end_j
    rests: list[str] = []
    written = [
        [_written(names, size, sizes, rests) for names, size in zip(side, shape, strict=True)]
        for side, shape in zip(cuts, (left, right), strict=True)
    ]
    return written[0], written[1], sizes, rests


def _written(names: list[str], size: int, sizes: dict[str, int], rests: list[str]) -> str:
    """A dim in notation: what its common factors do not cover is a factor of its own."""
    rest = size // prod(sizes[n] for n in names)
    if not names:
        return "_"
    if rest > 1:
        rests.append(f"rest{len(rests)}")
        sizes[rests[-1]] = rest
        names = [*names, rests[-1]]
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


@rule("transpose")
def _transpose(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    names = dim_names(len(ins[0].shape))
    return factor_rule(
        f"{' '.join(names)} -> {' '.join(names[d] for d in params['permutation'])}",
        [ins[0].shape],
        [outs[0].shape],
        linear=moves({0}, ins[0].dtype),
    )


@rule("squeeze")
def _squeeze(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    names = dim_names(len(ins[0].shape))
    removed = params["dimensions"]
    left = ["_" if d in removed else n for d, n in enumerate(names)]
    right = [n for d, n in enumerate(names) if d not in removed]
    return factor_rule(
        f"{' '.join(left)} -> {' '.join(right)}",
        [ins[0].shape],
        [outs[0].shape],
        linear=moves({0}, ins[0].dtype),
    )


@rule("rev")
def _rev(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    names = dim_names(len(ins[0].shape))
    reversed_names = [names[d] for d in params["dimensions"]]
    movable = isinstance(ins[0].dtype, np.dtype)
    block = Exchange(
        "collective_permute",
        tuple(range(len(names))),
        1.0,
        ins[0].itemsize,
        what="the block that mirrors this one",
    )

    def bind(ctx: Context, x: Any) -> Any:
        for name in reversed_names:
            if ctx.axes(name):
                last = ctx.shards(name) - 1
                x = permute(ctx, name, 0, x, [(n, last - n) for n in range(last + 1)])
        return ctx.bind(x)

    return factor_rule(
        f"{' '.join(names)} -> {' '.join(names)}",
        [ins[0].shape],
        [outs[0].shape],
        linear=moves({0}, ins[0].dtype),
        whole=() if movable else reversed_names,
        exchanges=dict.fromkeys(reversed_names, (block,)) if movable else {},
        bind=bind,
    )


@rule("iota")
def _iota(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    shape = outs[0].shape
    factors, dims = _free(shape)

    def bind(ctx: Context) -> Any:
        local, dimension, dtype = ctx.out_shape(), params["dimension"], params["dtype"]
        if local[dimension] == shape[dimension]:
            return ctx.bind(shape=local, sharding=None)
        if jnp.issubdtype(dtype, jnp.integer):
            first = lax.convert_element_type(ctx.out_start()[dimension], dtype)
            return ctx.bind(shape=local, sharding=None) + first
        # Numbered as integers: adding an offset to floats would round twice.
        numbers = ctx.bind(shape=local, sharding=None, dtype=np.dtype("int32"))
        return lax.convert_element_type(numbers + ctx.out_start()[dimension], dtype)

    return Rule((), (dims,), factors, bind=bind)


@rule("split")
def _split(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    axis, sizes = params["axis"], params["sizes"]
    left, rights, factors = _joint_dim(f"d{axis}", ins[0].shape[axis], sizes, ins[0].dtype)
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    windows = [
        Window(f"d{axis}", 0, axis, _shifted(size, first), "rows of the pieces")
        for size, first in zip(sizes, firsts, strict=True)
    ]

    def bind(ctx: Context, x: Any) -> Any:
        if left == "_" or not ctx.axes(f"d{axis}"):
            return ctx.bind(x)
        return [fetch(ctx, windows, i, x) for i in range(len(windows))]

    names = dim_names(len(ins[0].shape))
    made = factor_rule(
        f"{_replaced(names, axis, left)} -> {', '.join(_replaced(names, axis, r) for r in rights)}",
        [ins[0].shape],
        [a.shape for a in outs],
        sizes=factors,
        whole=[n for n in factors if n != f"d{axis}"],
        linear=moves({0}, ins[0].dtype),
        bind=bind,
    )
    return made if left == "_" else with_windows(made, ins, outs, windows)


@rule("concatenate")
def _concatenate(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    axis = params["dimension"]
    sizes = [a.shape[axis] for a in ins]
    right, lefts, factors = _joint_dim(f"d{axis}", outs[0].shape[axis], sizes, outs[0].dtype)
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    windows = [
        Window(f"d{axis}", i, axis, _shifted(outs[0].shape[axis], -first), "rows of the operands")
        for i, first in enumerate(firsts)
    ]

    def bind(ctx: Context, *operands: Any) -> Any:
        if right == "_" or not ctx.axes(f"d{axis}"):
            return ctx.bind(*operands)
        made = fetch(ctx, windows, 0, operands[0])
        row = ctx.out_start()[axis] + lax.iota(jnp.int32, made.shape[axis])
        for i, operand in enumerate(operands[1:], 1):
            later = lax.broadcast_in_dim(row >= firsts[i], made.shape, (axis,))
            made = lax.select(later, fetch(ctx, windows, i, operand), made)
        return made

    names = dim_names(len(outs[0].shape))
    made = factor_rule(
        f"{', '.join(_replaced(names, axis, n) for n in lefts)} -> {_replaced(names, axis, right)}",
        [a.shape for a in ins],
        [outs[0].shape],
        sizes=factors,
        whole=[n for n in factors if n != f"d{axis}"],
        linear=moves(range(len(ins)), outs[0].dtype),
        bind=bind,
    )
    return made if right == "_" else with_windows(made, ins, outs, windows)


def _joint_dim(
    name: str, whole: int, pieces: Sequence[int], dtype: Any
) -> tuple[str, list[str], dict[str, int]]:
    """A dim and its consecutive pieces, all cut into as many blocks: whole, if they cannot be.

    Returns:
        The dim and the pieces' dims in factor notation, and the sizes of their factors.
    """
    common = gcd(*pieces)
    if common <= 1 or not isinstance(dtype, np.dtype):
        return "_", ["_"] * len(pieces), {}
    factors = {name: common}

    def written(size: int, rest: str) -> str:
        if size == common:
            return name
        factors[rest] = size // common
        return f"({name} {rest})"

    return (
        written(whole, f"{name}_whole"),
        [written(size, f"{name}_piece{i}") for i, size in enumerate(pieces)],
        factors,
    )


def _shifted(size: int, first: int) -> Rows:
    """Windows that are the blocks of a dim of `size` that begins at row `first` of another."""

    def rows(pieces: int) -> tuple[tuple[int, ...], int]:
        return tuple(first + p * (size // pieces) for p in range(pieces)), size // pieces

    return rows


def _replaced(names: Sequence[str], axis: int, dim: str) -> str:
    return " ".join([*names[:axis], dim, *names[axis + 1 :]])


@rule("stack")
def _stack(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    names = dim_names(len(ins[0].shape))
    out = [*names[: params["axis"]], "_", *names[params["axis"] :]]
    return factor_rule(
        f"{', '.join([' '.join(names)] * len(ins))} -> {' '.join(out)}",
        [a.shape for a in ins],
        [outs[0].shape],
        linear=moves(range(len(ins)), outs[0].dtype),
    )


@rule("unstack")
def _unstack(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    names = dim_names(len(outs[0].shape))
    operand = [*names[: params["axis"]], "_", *names[params["axis"] :]]
    return factor_rule(
        f"{' '.join(operand)} -> {', '.join([' '.join(names)] * len(outs))}",
        [ins[0].shape],
        [a.shape for a in outs],
        linear=moves({0}, ins[0].dtype),
    )


@rule("tile")
def _tile(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    names = dim_names(len(ins[0].shape))
    reps = params["reps"]
    # The repetitions are the major factor of a result's dim: each device makes some of them.
    out = [
        n if r == 1 else f"(rep{d} {n})" for d, (n, r) in enumerate(zip(names, reps, strict=True))
    ]

    def bind(ctx: Context, x: Any) -> Any:
        local = tuple(1 if r == 1 else ctx.local_size(f"rep{d}") for d, r in enumerate(reps))
        return ctx.bind(x, reps=local)

    return factor_rule(
        f"{' '.join(names)} -> {' '.join(out)}",
        [ins[0].shape],
        [outs[0].shape],
        sizes={f"rep{d}": r for d, r in enumerate(reps) if r != 1},
        linear=moves({0}, ins[0].dtype),
        bind=bind,
    )


@rule("empty")
def _empty(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    factors, dims = _free(outs[0].shape)
    return Rule(
        (), (dims,), factors, bind=lambda ctx: ctx.bind(shape=ctx.out_shape(), out_sharding=None)
    )


@rule("empty2")
def _empty2(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    return Rule((), ((),))


def _free(shape: Sequence[int]) -> tuple[tuple[Factor, ...], Dims]:
    """Factors that only a result has, one a dim, and that result's dims."""
    factors = tuple(Factor(n, size) for n, size in zip(dim_names(len(shape)), shape, strict=True))
    return factors, tuple((d,) for d in range(len(shape)))
