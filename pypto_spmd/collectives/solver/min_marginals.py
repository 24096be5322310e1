"""What each label of some variables would cost at least.

The variables asked about keep all their labels while the rest is pruned and eliminated as usual. The
eliminations form a tree: a variable's parent is the first of its neighbours to be eliminated after
it, whose tables then hold all the others. A downward pass gives every variable, for each combination
of its own and its neighbours' labels, the least cost of *everything* rather than of its subtree.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from pypto_spmd.collectives.solver import min_plus
from pypto_spmd.collectives.solver.elimination import solve
from pypto_spmd.collectives.solver.infeasibility import conflict
from pypto_spmd.collectives.solver.labelling import Infeasible, Problem
from pypto_spmd.collectives.solver.local_search import improve
from pypto_spmd.collectives.solver.min_plus import intern_table
from pypto_spmd.collectives.solver.network import MAX_ENTRIES, Contradiction, Network, Step


def min_marginals(
    problem: Problem,
    variables: Collection[int],
    *,
    max_entries: int = MAX_ENTRIES,
    negligible: float = 0.0,
) -> dict[int, np.ndarray]:
    """For each label of each of some variables, the least total cost with that label fixed.

    Args:
        problem: the problem.
        variables: the variables asked about.
        max_entries: the largest table to make.
        negligible: a difference of cost that doesn't matter, as for ``solve``.

    Returns:
        For each variable, (labels,): least cost by label, inf where the label is impossible. If
        larger tables than ``max_entries`` were needed, the costs of the best labellings found.

    Raises:
        Infeasible: no labelling has a finite cost.
        SearchFailed: the problem is too wide, and no labelling of finite cost was found.
    """
    try:
        network = Network(problem, exempt=variables, negligible=negligible)
        exact = network.eliminate_all(max_entries)
    except Contradiction as contradiction:
        raise Infeasible(conflict(problem, contradiction.variable, max_entries)) from None
    if not exact:
        labels = solve(problem, max_entries=max_entries, negligible=negligible).labels
        return {variable: _searched(problem, variable, labels) for variable in variables}
    optimum = math.fsum(network.constants)
    marginals = {v: np.full(problem.domain_sizes[v], optimum) for v in variables}
    steps = network.steps
    children = _children(steps, marginals)
    downward: dict[int, np.ndarray] = {}
    for index in sorted(children, reverse=True):
        step = steps[index]
        own = (step.variable, *step.neighbours)
        beliefs = _beliefs(step, downward.pop(index, None))
        if step.variable in marginals:
            marginals[step.variable] += _least(beliefs, own, (step.variable,))
        for child_index in children[index]:
            child = steps[child_index]
            least = _least(beliefs, own, child.neighbours)
            if child.message is not None:
                possible = np.isfinite(least)
                least[possible] -= child.message.array[possible]
            downward[child_index] = least
    return marginals


def _children(steps: Sequence[Step], variables: Collection[int]) -> dict[int, list[int]]:
    """The part of the tree that leads to some variables: each step's children, by index of step."""
    when = {step.variable: index for index, step in enumerate(steps)}
    children: dict[int, list[int]] = {}
    for variable in variables:
        index = when.get(variable)
        child = None
        while index is not None:
            known = index in children
            below = children.setdefault(index, [])
            if child is not None:
                below.append(child)
            if known:
                break
            child = index
            index = min([when[neighbour] for neighbour in steps[index].neighbours], default=None)
    return children


def _beliefs(step: Step, downward: np.ndarray | None) -> np.ndarray:
    """Least cost of everything over the optimum; axes: the variable, then its neighbours."""
    place = {neighbour: axis for axis, neighbour in enumerate(step.neighbours)}
    total = np.zeros((len(step.domain), *[len(domain) for domain in step.domains]))
    for scope, view in step.factors:
        positions = tuple([place[other] for other in scope if other != step.variable])
        total += min_plus.aligned(view, positions, len(place))
    if downward is not None:
        total += downward
    return total - total.min()


def _least(costs: np.ndarray, axes: tuple[int, ...], kept: tuple[int, ...]) -> np.ndarray:
    """Minimises over all variables but some, and gives these in their order."""
    reduced = costs.min(axis=tuple([i for i, variable in enumerate(axes) if variable not in kept]))
    left = [variable for variable in axes if variable in kept]
    return reduced.transpose([left.index(variable) for variable in kept])


def _searched(problem: Problem, variable: int, labels: Sequence[int]) -> np.ndarray:
    """The cost found for each label of a variable by changing a good labelling near it."""
    costs = np.full(problem.domain_sizes[variable], math.inf)
    for label in range(len(costs)):
        only = np.full(len(costs), math.inf)
        only[label] = 0.0
        fixed = replace(problem, tables=(*problem.tables, ((variable,), intern_table(only))))
        start = [*labels[:variable], label, *labels[variable + 1 :]]
        costs[label] = fixed.cost(improve(fixed, start, [variable]))
    return costs
