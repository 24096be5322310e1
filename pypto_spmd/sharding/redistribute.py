"""From one layout of a tensor to another, as the cheapest sequence of collectives.

Changes on several axes are planned together: the layouts reachable by one collective form a graph
whose edges cost wire bytes, and the sequence is a shortest path in it (Dijkstra 1959). So it slices
early, gathers late, and reduces over two axes with one AllReduce.

Wire bytes per device follow the bandwidth-optimal ring algorithms (Thakur, Rabenseifner and Gropp
2005): with B the bytes of the tensor that is whole over the group of n devices, AllReduce 2B(n-1)/n,
AllGather and ReduceScatter B(n-1)/n, AllToAll B(n-1)/n^2, CollectivePermute the bytes sent.
"""

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from pypto_spmd.sharding.layout import Layout

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
"""Kinds of legs that move data; the other kinds, "slice" and "mask", are local."""

STEP_COST = 1e-3
"""Added to every collective's bytes, so that of two equal paths the shorter one is taken."""


def wire_bytes(kind: str, full_bytes: float, group: int) -> float:
    """Bytes that each device sends for one collective.

    Args:
        kind: one of `COLLECTIVES`.
        full_bytes: bytes of the tensor that is whole over the group (for AllToAll too: the tensor that
            the group holds together); for CollectivePermute the bytes that one device sends.
        group: number of devices that take part.
    """
    share = (group - 1) / group
    if kind == "all_reduce":
        return 2 * full_bytes * share
    if kind in ("all_gather", "reduce_scatter"):
        return full_bytes * share
    if kind == "all_to_all":
        return full_bytes * share / group
    if kind == "collective_permute":
        return full_bytes if group > 1 else 0.0
    raise ValueError(f"unknown collective {kind!r}")


@dataclass(frozen=True, slots=True)
class Leg:
    """One change of layout: a collective, or a local "slice" or "mask".

    Args:
        kind: one of `COLLECTIVES`, "slice" (take this device's block) or "mask" (become partial: all
            devices of the axis but the first hold the reduction's neutral element).
        axes: mesh axes over which it runs, outermost first.
        source: layout before.
        target: layout after.
        dims: the dim of each axis of `axes` that is gathered, scattered to or sliced (several axes may go
            to different dims in one collective); for AllToAll the one dim that becomes split over all.
        from_dim: for AllToAll the dim that becomes whole over the axes.
        op: reduction of AllReduce, ReduceScatter and mask.
    """

    kind: str
    axes: tuple[str, ...]
    source: Layout
    target: Layout
    dims: tuple[int, ...] = ()
    from_dim: int = -1
    op: str = ""

    @property
    def is_collective(self) -> bool:
        """Whether data moves between devices."""
        return self.kind in COLLECTIVES

    def full_elements(self, shape: tuple[int, ...], axis_sizes: Mapping[str, int]) -> int:
        """Elements of the tensor that is whole over the group, as `wire_bytes` counts them."""
        gathered = self.kind in ("all_gather", "collective_permute")
        layout = self.target if gathered else self.source
        local = prod(layout.local_shape(shape, axis_sizes))
        group = prod(axis_sizes[a] for a in self.axes)
        return local * group if self.kind == "all_to_all" else local

    def wire_bytes(
        self, shape: tuple[int, ...], itemsize: float, axis_sizes: Mapping[str, int]
    ) -> float:
        """Bytes each device sends for this leg of a tensor of global `shape`."""
        if not self.is_collective:
            return 0.0
        group = prod(axis_sizes[a] for a in self.axes)
        return wire_bytes(self.kind, self.full_elements(shape, axis_sizes) * itemsize, group)


def redistribute(
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    itemsize: float,
    axis_sizes: Mapping[str, int],
) -> tuple[Leg, ...]:
    """The cheapest legs that take a tensor from `source` to `target`, in order.

    Raises:
        ValueError: if no sequence of legs does (for instance a partial max to a partial sum is possible,
            but a target that does not divide the shape is not).
    """
    sizes = tuple(sorted(axis_sizes.items()))
    return _shortest(source, target, shape, itemsize, sizes)


def redistribution_bytes(
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    itemsize: float,
    axis_sizes: Mapping[str, int],
) -> float:
    """Wire bytes per device of `redistribute`."""
    legs = redistribute(source, target, shape, itemsize, axis_sizes)
    return sum(leg.wire_bytes(shape, itemsize, axis_sizes) for leg in legs)


@lru_cache(maxsize=200_000)
def _shortest(
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    itemsize: float,
    sizes: tuple[tuple[str, int], ...],
) -> tuple[Leg, ...]:
    if source == target:
        return ()
    axis_sizes = dict(sizes)
    relevant = source.axes | target.axes
    counter = itertools.count()
    queue: list[tuple[float, int, Layout]] = [(0.0, next(counter), source)]
    best: dict[Layout, float] = {source: 0.0}
    came: dict[Layout, Leg] = {}
    while queue:
        cost, _, layout = heapq.heappop(queue)
        if cost > best[layout]:
            continue
        if layout == target:
            legs = []
            while layout != source:
                legs.append(came[layout])
                layout = came[layout].source
            return tuple(reversed(legs))
        for leg in _legs_from(layout, target, shape, axis_sizes, relevant):
            after = leg.target
            step = leg.wire_bytes(shape, itemsize, axis_sizes)
            step += STEP_COST if leg.is_collective else STEP_COST * 1e-3
            if cost + step < best.get(after, float("inf")):
                best[after] = cost + step
                came[after] = leg
                heapq.heappush(queue, (cost + step, next(counter), after))
    raise ValueError(f"no redistribution from {source} to {target} of a tensor of shape {shape}")


def _legs_from(
    layout: Layout,
    target: Layout,
    shape: tuple[int, ...],
    axis_sizes: Mapping[str, int],
    relevant: frozenset[str],
) -> Iterator[Leg]:
    """Every single leg out of `layout` that can lie on a shortest path to `target`."""
    local = layout.local_shape(shape, axis_sizes)
    used = layout.axes

    useful = [d for d in range(len(local)) if layout.dims[d] or target.dims[d]]

    # Reductions of partial axes that the target does not keep partial; several axes with one op at once.
    wanted = dict(target.partial)
    pending = [(a, op) for a, op in layout.partial if wanted.get(a) != op]
    for count in range(1, len(pending) + 1):
        for group in itertools.combinations(pending, count):
            axes = tuple(a for a, _ in group)
            op = group[0][1]
            if any(other != op for _, other in group):
                continue
            bare = layout
            for a in axes:
                bare = _drop(bare, a)
            yield Leg("all_reduce", axes, layout, bare, op=op)
            if op != "sum":
                continue
            for order in itertools.permutations(axes):
                for dims in itertools.product(useful, repeat=count):
                    after = bare
                    for a, d in zip(order, dims, strict=True):
                        after = _push(after, d, a)
                    if after.divides(shape, axis_sizes):
                        yield Leg("reduce_scatter", order, layout, after, dims, op=op)

    # Gathers of the innermost axes of one dim or of several dims together.
    split_dims = [d for d in useful if layout.dims[d]]
    for kept in itertools.product(*(range(len(layout.dims[d]) + 1) for d in split_dims)):
        gathered = [
            (a, d) for d, k in zip(split_dims, kept, strict=True) for a in layout.dims[d][k:]
        ]
        if gathered:
            after = layout
            for a, _ in gathered:
                after = _drop(after, a)
            axes, dims = zip(*gathered, strict=True)
            yield Leg("all_gather", axes, layout, after, dims)

    # AllToAll of the innermost axes of a dim, one or several together, to another dim.
    for dim in split_dims:
        axes = layout.dims[dim]
        for start, to_dim in itertools.product(range(len(axes)), useful):
            moved = axes[start:]
            if to_dim == dim or local[to_dim] % prod(axis_sizes[a] for a in moved):
                continue
            after = layout
            for a in moved:
                after = _push(_drop(after, a), to_dim, a)
            yield Leg("all_to_all", moved, layout, after, (to_dim,), dim)

    for axis in sorted(relevant - used):
        for dim in useful:
            if local[dim] % axis_sizes[axis] == 0:
                yield Leg("slice", (axis,), layout, _push(layout, dim, axis), (dim,))
        if axis in wanted:
            op = wanted[axis]
            yield Leg("mask", (axis,), layout, _partial(layout, axis, op), op=op)

    yield from _permutations(layout, shape, axis_sizes, relevant)
    if _is_finer(layout, target, shape, axis_sizes):
        moved = tuple(sorted(layout.axes | target.axes))
        yield Leg("collective_permute", moved, layout, target)


def _permutations(
    layout: Layout, shape: tuple[int, ...], axis_sizes: Mapping[str, int], relevant: frozenset[str]
) -> Iterator[Leg]:
    """Whole shards that change owner: other nestings, or axes that change places."""
    split = [a for axes in layout.dims for a in axes]
    free = sorted(relevant - layout.axes)
    local = layout.local_shape(shape, axis_sizes)
    if not split or len(split) + len(free) < 2:
        return
    for chosen in itertools.permutations(split + free, len(split)):
        replacement = dict(zip(split, chosen, strict=True))
        dims, start = [], 0
        for axes in layout.dims:
            dims.append(chosen[start : start + len(axes)])
            start += len(axes)
        after = Layout(tuple(dims), layout.partial)
        if after == layout or after.local_shape(shape, axis_sizes) != local:
            continue
        moved = tuple(
            sorted({a for pair in replacement.items() if pair[0] != pair[1] for a in pair})
        )
        yield Leg("collective_permute", moved, layout, after)


def _is_finer(
    layout: Layout, target: Layout, shape: tuple[int, ...], axis_sizes: Mapping[str, int]
) -> bool:
    """Whether one CollectivePermute leads to the target, a block of it being cut out of each device's own.

    The devices that hold one block of `layout` are then as many as those that want a block out of it.
    """
    if layout.partial != target.partial or not layout.axes or not target.divides(shape, axis_sizes):
        return False
    held = [layout.shards(d, axis_sizes) for d in range(len(shape))]
    wanted = [target.shards(d, axis_sizes) for d in range(len(shape))]
    return held != wanted and all(w % h == 0 for h, w in zip(held, wanted, strict=True))


def _drop(layout: Layout, axis: str) -> Layout:
    dims = tuple(tuple(a for a in axes if a != axis) for axes in layout.dims)
    return Layout(dims, tuple(p for p in layout.partial if p[0] != axis))


def _push(layout: Layout, dim: int, axis: str) -> Layout:
    dims = list(layout.dims)
    dims[dim] = (*dims[dim], axis)
    return Layout(tuple(dims), layout.partial)


def _partial(layout: Layout, axis: str, op: str) -> Layout:
    return Layout(layout.dims, tuple(sorted((*layout.partial, (axis, op)))))
