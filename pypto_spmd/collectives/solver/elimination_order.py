"""In which order to eliminate variables so that few large tables are made.

The best order is as hard to find as the problem itself, so several are tried on the graph alone and
the cheapest one is taken. Taking the smallest union of all is best in bushy graphs, but in a long
ladder it works on every rung at once and meets each rung from both sides; sweeping on from the
tables made last meets it from one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush

Graph = Mapping[int, set[int]]


def cheapest_order(graph: Graph, sizes: Sequence[int]) -> list[int]:
    """The best elimination order found.

    Args:
        graph: the variables left, ascending, with those that each shares a table with.
        sizes: number of labels by variable.

    Returns:
        All of the graph's variables.
    """
    log_sizes = {variable: math.log(sizes[variable]) for variable in graph}
    attempts = [_order(graph, log_sizes, sweep_from=None)]
    attempts += [_order(graph, log_sizes, sweep_from=start) for start in _ends(graph)]
    return min(attempts)[1]


def _order(
    graph: Graph, log_sizes: Mapping[int, float], sweep_from: int | None
) -> tuple[float, list[int]]:
    """Eliminates symbolically; gives the sum of all unions' entries, and the order."""
    around = {variable: set(neighbours) for variable, neighbours in graph.items()}
    weights: dict[int, float] = {}
    heap: list[tuple[float, int]] = []
    order = []
    entries = 0.0

    def reach(variables: Iterable[int]) -> None:
        for variable in variables:
            weight = log_sizes[variable] + sum([log_sizes[other] for other in around[variable]])
            if weights.get(variable) != weight:
                weights[variable] = weight
                heappush(heap, (weight, variable))

    for start in graph if sweep_from is None else (sweep_from, *graph):
        if start in around:  # else an earlier sweep has come past it
            reach([start] if sweep_from is not None else graph)
        while heap:
            weight, variable = heappop(heap)
            if variable not in around or weights[variable] != weight:
                continue
            entries += math.exp(weight)
            order.append(variable)
            neighbours = around.pop(variable)
            for neighbour in neighbours:
                around[neighbour] |= neighbours
                around[neighbour] -= {variable, neighbour}
            reach(neighbours)
    return entries, order


def _ends(graph: Graph) -> list[int]:
    """Two variables far apart."""
    first = next(iter(graph))
    end = _farthest(graph, first)
    return [end, _farthest(graph, end)]


def _farthest(graph: Graph, start: int) -> int:
    seen = {start}
    ring = [start]
    last = start
    while ring:
        last = ring[0]
        ring = sorted(set().union(*[graph[variable] for variable in ring]) - seen)
        seen.update(ring)
    return last
