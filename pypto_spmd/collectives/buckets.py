"""AllReduces that can travel together do: gradients in one AllReduce, not one for each parameter.

The items of a block are reordered, dependencies kept: whatever does not wait for an AllReduce runs first,
in program order; when nothing else is left, the AllReduces with the longest way still to go are issued,
together with all that are ready and alike (critical-path list scheduling, Graham 1969). Alike are those
over the same axes, with the same reduction and dtype, in the same pass (forward, or backward: the
gradients).

What is made inside :func:`bucketed` travels in buckets of at most so many bytes, each issued as soon as it
is full: the first then need not wait for the last gradient.
"""

import heapq
import re
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from math import inf

import jax

from pypto_spmd.collectives.drafts import DraftConvert, DraftRun
from pypto_spmd.collectives.graph import Equation, Graph
from pypto_spmd.sharding.layout import Layout

Item = DraftConvert | DraftRun
Value = tuple[int, Layout]
"""A tensor in one layout."""


_SCOPE = "pypto_spmd.bucket_bytes"
_CAP = re.compile(rf"{_SCOPE}_(\d+)")


@contextmanager
def bucketed(most_bytes: int) -> Iterator[None]:
    """Has the AllReduces of what is made inside travel in buckets of at most so many bytes.

    One array that has more travels alone. Without it, all that can travel together does.

    Args:
        most_bytes: of one bucket.
    """
    with jax.named_scope(f"{_SCOPE}_{most_bytes}"):
        yield


def bucket(items: list[Item], graph: Graph, axis_sizes: Mapping[str, int]) -> list[Item]:
    """The items in their new order; those that travel together stand together and share a `bucket`."""
    maker = {value: place for place, item in enumerate(items) for value in _made(item)}
    needs = [{maker[v] for v in _read(item) if v in maker} for item in items]
    _join_barriers(items, needs)
    _keep_order(items, needs)
    readers: list[list[int]] = [[] for _ in items]
    for place, makers in enumerate(needs):
        for m in makers:
            readers[m].append(place)
    keys, caps = _keys(items, graph)
    sizes = [_bytes(item, graph, axis_sizes) for item in items]
    if not any(key is not None for key in keys):
        return items
    heights = _heights(keys, readers)
    missing = [len(m) for m in needs]
    ready = [place for place, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    pending: dict[Hashable, list[int]] = {}
    order: list[Item] = []
    buckets = 0

    def issue(place: int) -> None:
        order.append(items[place])
        for reader in readers[place]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)

    def issue_together(places: list[int]) -> None:
        nonlocal buckets
        for place in places:
            item = items[place]
            if isinstance(item, DraftConvert):
                item.bucket = buckets
            issue(place)
        buckets += 1

    while ready or pending:
        if ready:
            place = heapq.heappop(ready)
            key = keys[place]
            if key is None:
                issue(place)
                continue
            together = pending.get(key, [])
            if caps[place] < inf and sum(sizes[p] for p in [*together, place]) > caps[place]:
                issue_together(pending.pop(key, []))
            pending.setdefault(key, []).append(place)
            continue
        first = max(pending, key=lambda k: (max(heights[p] for p in pending[k]), -pending[k][0]))
        issue_together(pending.pop(first))
    return order


def _join_barriers(items: list[Item], needs: list[set[int]]) -> None:
    """Has the barriers of one recomputation wait for each other's operands, so that they come together."""
    joined: dict[int, set[int]] = {}
    for place, item in enumerate(items):
        if isinstance(item, DraftRun) and item.equation.name == "optimization_barrier":
            # Those of one recomputation were made with the very same source.
            together = joined.setdefault(id(item.equation.source), set())
            together |= needs[place]
            needs[place] = together


def _keep_order(items: list[Item], needs: list[set[int]]) -> None:
    """Has each item that acts on the world in order wait for the one before it."""
    before: set[int] = set()
    for place, item in enumerate(items):
        if isinstance(item, DraftRun) and item.equation.acts_in_order:
            needs[place] = needs[place] | before
            before = {place}


def _made(item: Item) -> Iterator[Value]:
    if isinstance(item, DraftConvert):
        yield item.tensor, item.leg.target
    else:
        yield from zip(item.equation.outputs, item.results, strict=True)


def _read(item: Item) -> Iterator[Value]:
    if isinstance(item, DraftConvert):
        yield item.tensor, item.leg.source
        return
    for atom, layout in zip(item.equation.inputs, item.operands, strict=True):
        if isinstance(atom, int):
            yield atom, layout


def _keys(items: list[Item], graph: Graph) -> tuple[list[Hashable], list[float]]:
    """What each AllReduce can travel with, None for everything else; and the most bytes together."""
    producers: dict[int, Equation] = {}
    keys: list[Hashable] = []
    caps = [inf] * len(items)
    for item in items:
        if isinstance(item, DraftRun):
            producers.update(dict.fromkeys(item.equation.outputs, item.equation))
            keys.append(None)
        elif item.leg.kind == "all_reduce":
            producer = producers.get(item.tensor)
            backward = producer is not None and producer.is_backward
            dtype = str(graph.avals[item.tensor].dtype)
            said = _CAP.search(producer.scope) if producer is not None else None
            caps[len(keys)] = int(said[1]) if said else inf
            keys.append((item.leg.axes, item.leg.op, dtype, backward, said and said[1]))
        else:
            keys.append(None)
    return keys, caps


def _bytes(item: Item, graph: Graph, axis_sizes: Mapping[str, int]) -> int:
    """Of an AllReduce, how many bytes are reduced."""
    if isinstance(item, DraftRun) or item.leg.kind != "all_reduce":
        return 0
    aval = graph.avals[item.tensor]
    return item.leg.full_elements(aval.shape, axis_sizes) * aval.itemsize


def _heights(keys: list[Hashable], readers: list[list[int]]) -> list[int]:
    """For each item, how many AllReduces lie on the longest way from it to the end."""
    heights = [0] * len(keys)
    for place in range(len(keys) - 1, -1, -1):
        below = max((heights[r] for r in readers[place]), default=0)
        heights[place] = below + (keys[place] is not None)
    return heights
