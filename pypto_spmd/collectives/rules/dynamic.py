"""Slices, updates and pads: parts of a dim, at static or dynamic places.

A dim that is taken whole passes. Of the others, three kinds:

- many rows of a split dim at a static place are fetched by windows (`halo`), so that only the rows that
  change owner move, and the result is split too;
- few rows, or rows at a dynamic place, are read by whoever holds them, and come out partial;
- an update at a dynamic place is written by whoever holds the rows, without communication.
"""

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Linear, Rule, factor_rule
from pypto_spmd.collectives.rules.halo import (
    Rows,
    Window,
    cut_alike,
    fetch,
    read_rows,
    with_windows,
)
from pypto_spmd.collectives.rules.moving import dim_names, moves
from pypto_spmd.collectives.rules.registry import Aval, rule

FEW = 8
"""A slice of at most one part in so many is read, not fetched: reducing it costs no more than sending
its rows to all devices, and any number of devices will do."""


def _read_reduction(dtype: np.dtype) -> str:
    """How rows that one device holds, and the others have zeros for, become whole."""
    return "or" if dtype == np.dtype(bool) else "sum"


def _is_array(aval: Aval) -> bool:
    return isinstance(aval.dtype, np.dtype)


@rule("slice")
def _slice(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    operand, shape = ins[0], outs[0].shape
    rank = len(shape)
    starts, names = params["start_indices"], dim_names(rank)
    strides = params["strides"] or (1,) * rank
    left, right, sizes, rests = list(names), list(names), {}, []
    reduce: dict[str, str] = {}
    windows: dict[int, Window] = {}
    for d, (before, after) in enumerate(zip(operand.shape, shape, strict=True)):
        if before == after:
            continue
        if not _is_array(operand) or after == 0:
            left[d] = right[d] = "_"
        elif strides[d] == 1 and (after * FEW <= before or gcd(before, after) == 1):
            right[d] = "_"
            reduce[names[d]] = _read_reduction(operand.dtype)
        else:
            left[d], right[d], more, rest = cut_alike(names[d], before, after)
            sizes |= more
            rests += rest
            windows[d] = Window(
                names[d], 0, d, _slice_rows(after, starts[d], strides[d]), "rows of the slice"
            )
    ordered = list(windows.values())

    def bind(ctx: Context, x: jax.Array) -> Any:
        if not any(ctx.axes(n) for n in {*reduce, *(w.factor for w in ordered)}):
            return ctx.bind(x, **_local_slice(ctx, params))
        for d in range(rank):
            split = ctx.axes(names[d]) if d in windows or names[d] in reduce else ()
            if operand.shape[d] == shape[d]:
                continue
            if split and d in windows:
                x = fetch(ctx, ordered, ordered.index(windows[d]), x)
                x = lax.slice_in_dim(x, 0, x.shape[d], strides[d], axis=d)
            elif split:
                first = ctx.index(names[d]) * x.shape[d]
                x = read_rows(x, d, starts[d] - first, shape[d])
            else:
                x = lax.slice_in_dim(x, starts[d], params["limit_indices"][d], strides[d], axis=d)
        return x

    made = factor_rule(
        f"{' '.join(left)} -> {' '.join(right)}",
        [operand.shape],
        [shape],
        sizes=sizes,
        whole=rests,
        reduce=reduce,
        linear=moves({0}, operand.dtype),
        bind=bind,
    )
    return with_windows(made, ins, outs, ordered)


def _slice_rows(size: int, start: int, stride: int) -> Rows:
    def rows(pieces: int) -> tuple[tuple[int, ...], int]:
        local = size // pieces
        return tuple(start + p * local * stride for p in range(pieces)), (local - 1) * stride + 1

    return rows


def _local_slice(ctx: Context, params: Mapping[str, Any]) -> dict[str, Any]:
    """The slice's params where only dims that it takes whole are split."""
    limits = tuple(
        local if n == size else limit
        for local, n, size, limit in zip(
            ctx.in_shape(0),
            ctx.ins[0].shape,
            ctx.outs[0].shape,
            params["limit_indices"],
            strict=True,
        )
    )
    return {"limit_indices": limits}


@rule("pad")
def _pad(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    operand, shape, config = ins[0], outs[0].shape, params["padding_config"]
    names = dim_names(len(shape))
    left, right, sizes, rests = list(names), list(names), {}, []
    windows: dict[int, Window] = {}
    for d, (before, after) in enumerate(zip(operand.shape, shape, strict=True)):
        low, high, interior = config[d]
        if low == high == 0 and (interior == 0 or before <= 1):
            continue
        if not _is_array(operand) or before == 0 or after == 0:
            left[d] = right[d] = "_"
            continue
        left[d], right[d], more, rest = cut_alike(names[d], before, after)
        sizes |= more
        rests += rest
        windows[d] = Window(
            names[d], 0, d, _pad_rows(after, low, interior + 1), "rows that padding moves"
        )
    ordered = list(windows.values())
    crops = all(low <= 0 and high <= 0 and not interior for low, high, interior in config)
    zero = crops or (ins[1].value is not None and bool(np.all(ins[1].value == 0)))

    def bind(ctx: Context, x: jax.Array, value: jax.Array) -> Any:
        for d, window in windows.items():
            if ctx.axes(names[d]):
                x = fetch(ctx, ordered, ordered.index(window), x)
                x = _spread(ctx, x, d, value, config[d], operand.shape[d], keep=zero)
            else:
                only = [(0, 0, 0)] * len(shape)
                only[d] = config[d]
                x = lax.pad(x, value, only)
        return x

    made = factor_rule(
        f"{' '.join(left)},  -> {' '.join(right)}",
        [operand.shape, ()],
        [shape],
        sizes=sizes,
        whole=rests,
        linear=_pad_linear(operand.dtype, zero),
        bind=bind if windows else None,
    )
    return with_windows(made, ins, outs, ordered)


def _pad_rows(size: int, low: int, step: int) -> Rows:
    def rows(pieces: int) -> tuple[tuple[int, ...], int]:
        local = size // pieces
        if local % step == 0:  # as many rows in every block, at the same places in it
            return tuple(-((low - p * local) // step) for p in range(pieces)), local // step
        return tuple((p * local - low) // step for p in range(pieces)), (local - 1) // step + 2

    return rows


def _spread(
    ctx: Context,
    x: jax.Array,
    dim: int,
    value: jax.Array,
    config: tuple[int, int, int],
    size: int,
    keep: bool,
) -> jax.Array:
    """This device's block of a padded dim, from its window of the operand.

    Args:
        ctx: the equation on this device.
        x: the window.
        dim: the dim.
        value: the padding value.
        config: the dim's (low, high, interior).
        size: size of the operand's dim.
        keep: whether the zeros around the window are right as they are.
    """
    low, _, interior = config
    step = interior + 1
    local = ctx.out_shape()[dim]
    first = ctx.out_start()[dim] - low  # in rows of the padded dim, from the operand's first row on
    if interior and local % step == 0:
        inner = [(0, 0, 0)] * x.ndim
        inner[dim] = (low % step, interior - low % step, interior)
        x = lax.pad(x, value, inner)
    elif interior:
        inner = [(0, 0, 0)] * x.ndim
        inner[dim] = (0, interior, interior)
        x = lax.pad(x, value, inner)
        x = lax.dynamic_slice_in_dim(x, first % step, local, dim)
    if keep:
        return x
    row = first + lax.iota(jnp.int32, local)
    inside = (row >= 0) & (row <= (size - 1) * step)
    inside = lax.broadcast_in_dim(inside, x.shape, (dim,))
    return lax.select(inside, x, jnp.broadcast_to(value, x.shape))


def _pad_linear(dtype: Any, zero: bool) -> tuple[Linear, ...]:
    both = moves({0, 1}, dtype)
    if not both or not zero or "sum" not in both[0].ops:
        return both
    return (*both, Linear(frozenset({0})))  # zero is the sum of zeros


@rule("dynamic_slice")
def _dynamic_slice(
    params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]
) -> Rule:
    operand, shape = ins[0], outs[0].shape
    names = dim_names(len(shape))
    part = [n != size for n, size in zip(operand.shape, shape, strict=True)]
    left, right = list(names), ["_" if p else n for p, n in zip(part, names, strict=True)]
    reduce = {}
    for d in range(len(shape)):
        if part[d] and _is_array(operand):
            reduce[names[d]] = _read_reduction(operand.dtype)
        elif part[d]:
            left[d] = "_"

    def bind(ctx: Context, x: jax.Array, *starts: jax.Array) -> Any:
        begin = _clamped(starts, operand.shape, shape)
        for d, name in enumerate(names):
            if name in reduce and ctx.axes(name):
                first = ctx.index(name) * x.shape[d]
                x = read_rows(x, d, begin[d] - first, shape[d])
                begin[d] = jnp.int32(0)
            elif not part[d]:
                begin[d] = jnp.int32(0)
        return lax.dynamic_slice(x, begin, ctx.out_shape())

    return factor_rule(
        f"{' '.join(left)}{', ' * (len(ins) - 1)} -> {' '.join(right)}",
        [a.shape for a in ins],
        [shape],
        reduce=reduce,
        linear=moves({0}, operand.dtype),
        bind=bind,
    )


def _clamped(starts: Sequence[jax.Array], whole: Sequence[int], part: Sequence[int]) -> list[Any]:
    """Where a slice begins, clamped as in the whole array: all of one type, whatever they were."""
    begin = []
    for start, size, count in zip(starts, whole, part, strict=True):
        last = size - count
        if last <= np.iinfo(start.dtype).max:
            start = lax.min(start, jnp.asarray(last, start.dtype))
        begin.append(
            lax.convert_element_type(lax.max(start, jnp.zeros((), start.dtype)), jnp.int32)
        )
    return begin


@rule("dynamic_update_slice")
def _dynamic_update_slice(
    params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]
) -> Rule:
    operand, update = ins[0], ins[1]
    names = dim_names(len(operand.shape))
    part = [n != size for n, size in zip(operand.shape, update.shape, strict=True)]
    if not _is_array(operand):
        names = [f"_{d}" if p else n for d, (n, p) in enumerate(zip(names, part, strict=True))]
    small = ["_" if p else n for p, n in zip(part, names, strict=True)]

    def bind(ctx: Context, x: jax.Array, new: jax.Array, *starts: jax.Array) -> Any:
        begin = _clamped(starts, operand.shape, update.shape)
        inside = None
        for d, name in enumerate(names):
            if not part[d]:
                begin[d] = jnp.int32(0)
            elif ctx.axes(name):
                # Rows of the update, from `begin` on, that lie in this block: of as many rows as block
                # and update can share, at the place nearest to it.
                begin[d] -= ctx.index(name) * x.shape[d]
                kept = min(x.shape[d], update.shape[d])
                at = jnp.clip(begin[d], 0, x.shape[d] - kept)
                row = at - begin[d] + lax.iota(jnp.int32, kept)
                new = read_rows(new, d, at - begin[d], kept)
                begin[d] = at
                mine = (row >= 0) & (row < update.shape[d])
                mine = mine.reshape((kept,) + (1,) * (x.ndim - 1 - d))
                inside = mine if inside is None else inside & mine
        if inside is not None:
            old = lax.dynamic_slice(x, begin, new.shape)
            new = jnp.where(inside, new, old)
        return lax.dynamic_update_slice(x, new, begin)

    full = " ".join(names)
    return factor_rule(
        f"{full}, {' '.join(small)}{', ' * (len(ins) - 2)} -> {full}",
        [a.shape for a in ins],
        [outs[0].shape],
        whole=[n for n in names if n.startswith("_")],
        linear=moves({0, 1}, operand.dtype),
        bind=bind,
    )
