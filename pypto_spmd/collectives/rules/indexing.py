"""Gather and scatter in all their forms: embedding lookups, `x[i]`, `take_along_axis`, `x.at[i].add`.

A gather's result has the dims of the indices (all but the last, which holds the components of one
index) and the dims of the window; a scatter's updates likewise. Three kinds of dims pass through:
windows as large as the operand's dim, batching dims, and dims of the indices.

A dim of the operand along which an index moves can be split too. Each device looks up, or updates, the
rows that it holds: the index is moved by the offset of its block, and what is then out of bounds is
filled with zero, or dropped. So a lookup leaves a partial result, in which one device holds the row and
the others zero, and a scatter needs no communication. A window of several rows may lie on two blocks:
each device widens its own by a margin of zeros, in which the other part falls.

Invariant: what is out of bounds of the *whole* operand is clamped, filled or dropped as the primitive's
mode says, once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Linear, Rule, factor_rule
from pypto_spmd.collectives.rules.moving import moves, moving_ops
from pypto_spmd.collectives.rules.registry import Aval, rule

CLIP = lax.GatherScatterMode.CLIP
FILL_OR_DROP = lax.GatherScatterMode.FILL_OR_DROP


@dataclass(frozen=True, slots=True)
class _Dims:
    """Factor names of the dims of a gather or scatter; "_" where a dim must be whole.

    Args:
        operand: of the operand (of a scatter: of its result too).
        indices: of the indices.
        slices: of a gather's result, or of a scatter's updates.
        window: for each operand dim, how many of its rows one index takes.
        looked_up: the operand dims along which an index moves.
        points: the factors of dims that only indices and slices have.
        points_at: the dims of the slices that are not window dims, in the order of the indices' dims.
    """

    operand: tuple[str, ...]
    indices: tuple[str, ...]
    slices: tuple[str, ...]
    window: tuple[int, ...]
    looked_up: frozenset[int]
    points: tuple[str, ...]
    points_at: tuple[int, ...]


def _dims(
    operand: Aval,
    indices: Aval,
    slices: Aval,
    *,
    window_dims: Sequence[int],
    dropped: Sequence[int],
    operand_batching: Sequence[int],
    indices_batching: Sequence[int],
    index_map: Sequence[int],
) -> _Dims:
    rank = len(operand.shape)
    in_window = [d for d in range(rank) if d not in dropped and d not in operand_batching]
    at_slice = dict(zip(in_window, window_dims, strict=True))
    window = tuple(slices.shape[at_slice[d]] if d in at_slice else 1 for d in range(rank))
    of_operand = [f"o{d}" for d in range(rank)]
    of_slices = ["_"] * len(slices.shape)
    looked_up = set()
    for dim, size in enumerate(operand.shape):
        if dim in operand_batching:
            continue
        if dim in at_slice and window[dim] == size:
            of_slices[at_slice[dim]] = of_operand[dim]
        elif window[dim] > 0 and dim in index_map:
            looked_up.add(dim)
        else:
            of_operand[dim] = "_"
    of_indices = [f"i{d}" for d in range(len(indices.shape) - 1)]
    for dim, batch in zip(operand_batching, indices_batching, strict=True):
        of_indices[batch] = of_operand[dim]
    points_at = [d for d in range(len(slices.shape)) if d not in window_dims]
    for name, dim in zip(of_indices, points_at, strict=True):
        of_slices[dim] = name
    points = tuple(n for d, n in enumerate(of_indices) if d not in indices_batching)
    return _Dims(
        tuple(of_operand), (*of_indices, "_"), tuple(of_slices), window, frozenset(looked_up),
        points, tuple(points_at),
    )  # fmt: skip


def _local_window(ctx: Context, dims: _Dims) -> tuple[int, ...]:
    """How many rows of this device's block of the operand one index takes, by dim."""
    return tuple(
        local if name != "_" and window > 1 and d not in dims.looked_up else window
        for d, (local, window, name) in enumerate(
            zip(ctx.in_shape(0), dims.window, dims.operand, strict=True)
        )
    )


def _in_block(
    ctx: Context, dims: _Dims, index_map: Sequence[int], mode: Any, indices: Any
) -> tuple[Any, Any]:
    """Indices into this device's widened block of the operand, and which were out of bounds of the whole.

    An index of a window that has no row of this device's becomes one that is out of bounds.
    """
    shape, local = ctx.ins[0].shape, ctx.in_shape(0)
    last = np.array([shape[d] - dims.window[d] for d in index_map])
    before = np.array([-dims.window[d] for d in index_map])
    beyond = np.array([shape[d] for d in index_map])
    margins = np.array([_margin(ctx, dims, d) for d in index_map])
    wide = jnp.int64 if indices.dtype in (jnp.int64, jnp.uint64) else jnp.int32
    last, before, beyond, margins = (a.astype(wide) for a in (last, before, beyond, margins))
    if indices.dtype in (jnp.uint32, jnp.uint64):
        indices = jnp.minimum(indices, jnp.iinfo(wide).max)
    indices = indices.astype(wide)
    clamped = jnp.clip(indices, 0, last)
    outside = jnp.any(clamped != indices, axis=-1)
    if mode == CLIP:
        indices = clamped
    starts = jnp.stack(
        [
            ctx.index(dims.operand[d]).astype(wide) * local[d] if d in dims.looked_up else wide(0)
            for d in index_map
        ]
    )
    # What has no row of the whole has none of a block either, and cannot overflow when it is moved.
    indices = jnp.where(indices < 0, before, jnp.where(indices > last, beyond, indices))
    return indices - starts + margins, outside


def _margin(ctx: Context, dims: _Dims, dim: int) -> int:
    """How many rows of a window may lie before this device's block, or after it."""
    is_cut = dim in dims.looked_up and bool(ctx.axes(dims.operand[dim]))
    return dims.window[dim] - 1 if is_cut else 0


def _widened(ctx: Context, dims: _Dims, x: Any) -> Any:
    """A block with a margin of zeros on both sides of its split dims."""
    margins = [_margin(ctx, dims, d) for d in range(len(dims.window))]
    return lax.pad(x, np.zeros((), x.dtype), [(m, m, 0) for m in margins]) if any(margins) else x


def _narrowed(ctx: Context, dims: _Dims, x: Any) -> Any:
    """A widened block without its margins."""
    margins = [_margin(ctx, dims, d) for d in range(len(dims.window))]
    if not any(margins):
        return x
    return lax.slice(x, margins, [n - m for n, m in zip(x.shape, margins, strict=True)])


def _is_cut(ctx: Context, dims: _Dims) -> bool:
    """Whether a dim that is looked up is split."""
    return any(ctx.axes(dims.operand[d]) for d in dims.looked_up)


@rule("gather")
def _gather(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    numbers = params["dimension_numbers"]
    index_map = numbers.start_index_map
    dims = _dims(
        ins[0], ins[1], outs[0],
        window_dims=numbers.offset_dims,
        dropped=numbers.collapsed_slice_dims,
        operand_batching=numbers.operand_batching_dims,
        indices_batching=numbers.start_indices_batching_dims,
        index_map=index_map,
    )  # fmt: skip
    mode, fill = params["mode"], params["fill_value"]

    def bind(ctx: Context, operand: Any, indices: Any) -> Any:
        sizes = _local_window(ctx, dims)
        if not _is_cut(ctx, dims):
            return ctx.bind(operand, indices, slice_sizes=sizes)
        # What is promised to be in bounds is clamped if it is not.
        bounds = FILL_OR_DROP if mode == FILL_OR_DROP else CLIP
        indices, outside = _in_block(ctx, dims, index_map, bounds, indices)
        found = ctx.bind(
            _widened(ctx, dims, operand), indices, slice_sizes=sizes, mode=FILL_OR_DROP, fill_value=0,
            indices_are_sorted=params["indices_are_sorted"] and len(index_map) == 1,
        )  # fmt: skip
        if mode != FILL_OR_DROP or fill == 0:
            return found
        # Of all the devices, the one with the first block of every dim has the fill value.
        blocks = [ctx.index(dims.operand[d]) for d in dims.looked_up]
        first = jnp.all(jnp.stack(blocks) == 0)
        filled = lax.broadcast_in_dim(outside & first, found.shape, dims.points_at)
        return jnp.where(filled, jnp.asarray(fill, found.dtype), found)

    # A fill value is added once for each partial value, which only 0 and NaN bear.
    affine = mode == FILL_OR_DROP and fill is not None and fill != 0 and fill == fill
    ops = tuple(op for op in moving_ops(ins[0].dtype) if not (affine and op == "sum"))
    is_array = isinstance(ins[0].dtype, np.dtype)
    looked_up = [dims.operand[d] for d in dims.looked_up]
    return factor_rule(
        f"{' '.join(dims.operand)}, {' '.join(dims.indices)} -> {' '.join(dims.slices)}",
        [a.shape for a in ins],
        [a.shape for a in outs],
        reduce=dict.fromkeys(looked_up, "or" if ins[0].dtype == np.dtype(bool) else "sum"),
        linear=(Linear(frozenset({0}), ops),) if ops else (),
        whole=() if is_array else looked_up,  # keys cannot be added up
        bind=bind,
    )


_SCATTERS: dict[str, tuple[str, tuple[Linear, ...]]] = {
    # name -> what updates that different devices hold reduce by, groups of linear operands
    "scatter": ("", ()),
    "scatter-add": ("sum", (Linear(frozenset({0, 2})),)),
    "scatter-sub": ("sum", (Linear(frozenset({0, 2})),)),
    "scatter-mul": ("prod", (Linear(frozenset({0})), Linear(frozenset({0, 2}), ("prod",)))),
    "scatter-min": ("min", (Linear(frozenset({0, 2}), ("min",)),)),
    "scatter-max": ("max", (Linear(frozenset({0, 2}), ("max",)),)),
}


def _scatter(reduce: str, linear: tuple[Linear, ...]):
    def make(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
        numbers = params["dimension_numbers"]
        index_map = numbers.scatter_dims_to_operand_dims
        dims = _dims(
            ins[0], ins[1], ins[2],
            window_dims=numbers.update_window_dims,
            dropped=numbers.inserted_window_dims,
            operand_batching=numbers.operand_batching_dims,
            indices_batching=numbers.scatter_indices_batching_dims,
            index_map=index_map,
        )  # fmt: skip

        def bind(ctx: Context, operand: Any, indices: Any, updates: Any) -> Any:
            if not _is_cut(ctx, dims):
                return ctx.bind(operand, indices, updates)
            indices, _ = _in_block(ctx, dims, index_map, params["mode"], indices)
            return _narrowed(ctx, dims, put(ctx, _widened(ctx, dims, operand), indices, updates))

        def put(ctx: Context, operand: Any, indices: Any, updates: Any) -> Any:
            if prod(updates.shape[d] for d in dims.points_at) == 1:
                return one_point(ctx, operand, indices, updates)
            return ctx.bind(
                operand, indices, updates, mode=FILL_OR_DROP,
                indices_are_sorted=params["indices_are_sorted"] and len(index_map) == 1,
            )  # fmt: skip

        def one_point(ctx: Context, operand: Any, indices: Any, updates: Any) -> Any:
            # XLA makes a dynamic-update-slice of it, and jaxlib 0.10 merges that with a slice that cut
            # the operand as if no index were out of bounds. So none is: a row that another device
            # holds becomes one of this block, which is given its own value.
            window = _local_window(ctx, dims)
            last = np.array([operand.shape[d] - window[d] for d in index_map], indices.dtype)
            held = jnp.clip(indices, 0, last)
            inside = jnp.all(held == indices)
            if applies:
                return jnp.where(inside, ctx.bind(operand, held, updates), operand)
            own = lax.gather(
                operand, held,
                lax.GatherDimensionNumbers(
                    offset_dims=numbers.update_window_dims,
                    collapsed_slice_dims=numbers.inserted_window_dims,
                    start_index_map=index_map,
                    operand_batching_dims=numbers.operand_batching_dims,
                    start_indices_batching_dims=numbers.scatter_indices_batching_dims,
                ),
                window, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
            )  # fmt: skip
            neutral = {"sum": 0, "prod": 1}.get(reduce, own)
            return ctx.bind(
                operand, held, jnp.where(inside, updates, jnp.asarray(neutral, updates.dtype))
            )

        is_bool = ins[0].dtype == np.dtype(bool)
        op = (
            {"max": "or", "min": "and", "sum": "", "prod": ""}.get(reduce, "")
            if is_bool
            else reduce
        )
        # `x.at[i].apply(f)` is a scatter too, of which the updates are not read.
        applies = params["update_jaxpr"] is not None and not reduce
        operand = " ".join(dims.operand)
        return factor_rule(
            f"{operand}, {' '.join(dims.indices)}, {' '.join(dims.slices)} -> {operand}",
            [a.shape for a in ins],
            [a.shape for a in outs],
            reduce=dict.fromkeys(dims.points, op),
            # The operand counts once, not once for each device's updates.
            partial_operands=dict.fromkeys(dims.points, (0,)),
            linear=linear if reduce else () if applies else moves({0, 2}, ins[0].dtype),
            whole=() if op else dims.points,
            bind=bind,
        )

    return make


for _name, _facts in _SCATTERS.items():
    rule(_name)(_scatter(*_facts))
