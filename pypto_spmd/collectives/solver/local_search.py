"""Improving a labelling piece by piece, where the whole is too wide to be solved exactly.

A *window* of neighbouring variables is labelled anew while all others stay; a window of one variable
is iterated conditional modes, a larger one is solved by elimination. A labelling that breaks some
"forbidden" first gets rid of these, then of cost.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np

from pypto_spmd.collectives.solver.labelling import Problem
from pypto_spmd.collectives.solver.min_plus import intern_table
from pypto_spmd.collectives.solver.network import Contradiction, Network

WINDOWS = (1, 20, 60)
WINDOW_ENTRIES = 50_000
ROUNDS = 10


def improve(
    problem: Problem,
    labels: Sequence[int],
    doubtful: Collection[int],
    windows: Sequence[int] = WINDOWS,
) -> list[int]:
    """Relabels windows until that no longer helps.

    Args:
        problem: the problem.
        labels: the labelling to start from.
        doubtful: the variables at which to begin.
        windows: how many variables to relabel together, sizes tried one after the other.

    Returns:
        A labelling that costs no more.
    """
    if problem.cost(labels) == math.inf:
        counts = {
            table: intern_table(np.where(np.isfinite(table.array), 0.0, 1.0))
            for table in {table for _, table in problem.tables}
        }
        broken = Problem(
            problem.domain_sizes,
            tuple([(scope, counts[table]) for scope, table in problem.tables]),
        )
        start, labels = labels, _descend(broken, labels, doubtful, windows)
        if broken.cost(labels):
            return list(start)
    return _descend(problem, labels, doubtful, windows)


def _descend(
    problem: Problem, labels: Sequence[int], doubtful: Collection[int], windows: Sequence[int]
) -> list[int]:
    labels = list(labels)
    tables_of: list[list[int]] = [[] for _ in problem.domain_sizes]
    for index, (scope, _) in enumerate(problem.tables):
        for variable in scope:
            tables_of[variable].append(index)
    for size in windows:
        seeds = sorted(doubtful)
        for _ in range(ROUNDS):
            changed: set[int] = set()
            covered: set[int] = set()
            for seed in seeds:
                if seed in covered:
                    continue
                window = _window(problem, tables_of, seed, size)
                covered.update(window[: size // 3])  # the others are too near its edge
                for variable, label in _relabel(problem, tables_of, labels, window).items():
                    if labels[variable] != label:
                        labels[variable] = label
                        changed.update(*[problem.tables[index][0] for index in tables_of[variable]])
            if not changed:
                break
            if size == 1:
                seeds = sorted(changed)
    return labels


def _window(
    problem: Problem, tables_of: Sequence[Sequence[int]], seed: int, size: int
) -> list[int]:
    """The variables nearest to a seed, which is the first."""
    window = [seed]
    seen = {seed}
    for variable in window:
        for index in tables_of[variable]:
            for other in problem.tables[index][0]:
                if other not in seen:
                    if len(window) == size:
                        return window
                    seen.add(other)
                    window.append(other)
    return window


def _relabel(
    problem: Problem,
    tables_of: Sequence[Sequence[int]],
    labels: Sequence[int],
    window: Sequence[int],
) -> dict[int, int]:
    """Better labels for the variables of a window while the others keep theirs; {} if there are none."""
    place = {variable: index for index, variable in enumerate(sorted(window))}
    tables = []
    for index in sorted({index for variable in window for index in tables_of[variable]}):
        scope, table = problem.tables[index]
        at = tuple([slice(None) if v in place else labels[v] for v in scope])
        tables.append((tuple([place[v] for v in scope if v in place]), table.array[at]))
    if len(place) == 1:
        costs = sum([costs for _, costs in tables], np.zeros(problem.domain_sizes[window[0]]))
        best = int(costs.argmin())
        return {window[0]: best} if costs[best] < costs[labels[window[0]]] else {}
    part = Problem(
        tuple([problem.domain_sizes[variable] for variable in place]),
        tuple([(scope, intern_table(costs)) for scope, costs in tables]),
    )
    network = Network(part)
    try:
        network.eliminate_all(WINDOW_ENTRIES)
    except Contradiction:
        return {}
    better = network.labels()
    if part.cost(better) < part.cost([labels[variable] for variable in place]):
        return dict(zip(place, better, strict=True))
    return {}
