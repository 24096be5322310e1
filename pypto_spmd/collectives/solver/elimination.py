"""Exact least-cost labelling by min-plus variable elimination and dead-end elimination.

The problem's graph is pruned, then its variables are eliminated, the one with the smallest union of
tables first, and pruned again as tables shrink; labels are read back in reverse. On a ladder of
constant width this is linear in the length. Where even the smallest union is too large, the rest is
solved approximately, and the solution states how far it may be from the optimum.
"""

import math

from pypto_spmd.collectives.solver.infeasibility import conflict
from pypto_spmd.collectives.solver.labelling import Infeasible, Problem, SearchFailed, Solution
from pypto_spmd.collectives.solver.local_search import improve
from pypto_spmd.collectives.solver.min_plus import Table, intern_table
from pypto_spmd.collectives.solver.network import MAX_ENTRIES, Contradiction, Network

__all__ = [
    "Infeasible",
    "Problem",
    "SearchFailed",
    "Solution",
    "Table",
    "intern_table",
    "solve",
]


def solve(problem: Problem, *, max_entries: int = MAX_ENTRIES, negligible: float = 0.0) -> Solution:
    """Finds a labelling of least cost.

    Of equally good labels the lower is preferred, and the same problem gives the same labelling on
    every run.

    Args:
        problem: the problem.
        max_entries: the largest table to make; where more is needed, the solution is approximate.

        negligible: a difference of cost that doesn't matter. A variable with very many neighbours, to
            which its label makes next to no difference, ties the whole problem together; it is settled
            early if that loses no more than this in all.

    Returns:
        The labelling, its cost, and a lower bound of every labelling's cost (less ``negligible``);
        they are equal if the labelling is known to be best.

    Raises:
        Infeasible: no labelling has a finite cost.
        SearchFailed: the problem is too wide, and no labelling of finite cost was found.
    """
    try:
        network = Network(problem, negligible=negligible)
        exact = network.eliminate_all(max_entries)
    except Contradiction as contradiction:
        raise Infeasible(conflict(problem, contradiction.variable, max_entries)) from None
    labels = network.labels()
    if exact:
        labels = improve(problem, labels, network.settled, windows=(1,))
        cost = problem.cost(labels)
        return Solution(tuple(labels), cost, cost)
    lower_bound = math.fsum(network.constants)
    doubtful = [step.variable for step in network.steps if step.choice is None]
    labels = improve(problem, labels, doubtful)
    cost = problem.cost(labels)
    if cost == math.inf:
        raise SearchFailed("the problem is too wide, and no labelling of finite cost was found")
    return Solution(tuple(labels), cost, min(cost, lower_bound))
