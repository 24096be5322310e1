"""Improving a labelling one variable at a time (iterated conditional modes)."""

from collections.abc import Sequence

import numpy as np

from pypto_spmd.collectives.labelling import Problem
from pypto_spmd.collectives.min_plus import Table

ROUNDS = 20


def improve(problem: Problem, labels: Sequence[int], rounds: int = ROUNDS) -> list[int]:
    """Gives each variable in turn its best label among its neighbours' until nothing changes.

    Fewer forbidden combinations count before less cost, so an impossible labelling may become a
    possible one.

    Args:
        problem: the problem.
        labels: the labelling to start from.
        rounds: how often to go over the variables at most.

    Returns:
        A labelling that is no worse.
    """
    labels = list(labels)
    incident: list[list[tuple[tuple[int, ...], int, Table]]] = [[] for _ in problem.domain_sizes]
    for scope, table in problem.tables:
        for axis, variable in enumerate(scope):
            incident[variable].append((scope, axis, table))
    waiting = set(range(len(labels)))
    for _ in range(rounds):
        if not waiting:
            break
        now, waiting = sorted(waiting), set()
        for variable in now:
            size = problem.domain_sizes[variable]
            forbidden = np.zeros(size, dtype=int)
            total = np.zeros(size)
            for scope, axis, table in incident[variable]:
                index: list[int | slice] = [labels[other] for other in scope]
                index[axis] = slice(None)
                costs = table.array[tuple(index)]
                possible = np.isfinite(costs)
                forbidden += ~possible
                total[possible] += costs[possible]
            best = int(np.lexsort((total, forbidden))[0])
            old = labels[variable]
            if (forbidden[best], total[best]) < (forbidden[old], total[old]):
                labels[variable] = best
                for scope, _, _ in incident[variable]:
                    waiting.update(scope)
    return labels
