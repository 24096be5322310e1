"""Why a problem has no labelling: a small set of variables that can't be labelled together."""

from collections.abc import Collection

import numpy as np

from pypto_spmd.collectives.solver.labelling import Problem
from pypto_spmd.collectives.solver.min_plus import Table, intern_table
from pypto_spmd.collectives.solver.network import Contradiction, Network

FEW = 400


def conflict(problem: Problem, near: int, max_entries: int) -> tuple[int, ...]:
    """Finds variables whose tables alone exclude every labelling.

    Args:
        problem: a problem without a labelling of finite cost.
        near: a variable near the trouble.
        max_entries: the largest table to make.

    Returns:
        The variables, ascending. Leaving any one out would let the others be labelled, unless there
        are many of them or the proof is too wide.
    """
    scopes_of: list[list[tuple[int, ...]]] = [[] for _ in problem.domain_sizes]
    for scope, _ in problem.tables:
        for variable in scope:
            scopes_of[variable].append(scope)
    core = {near}
    while not _excluded(problem, core, max_entries):
        wider = core.union(*[scope for variable in core for scope in scopes_of[variable]])
        if wider == core:
            # Either the proof needs larger tables, or the trouble lies elsewhere.
            return tuple(range(len(problem.domain_sizes)))
        core = wider
    chunk = len(core) if len(core) <= FEW else 0
    while chunk > 1:
        chunk = (chunk + 1) // 2
        members = sorted(core)
        for start in range(0, len(members), chunk):
            smaller = core.difference(members[start : start + chunk])
            if _excluded(problem, smaller, max_entries):
                core = smaller
    return tuple(sorted(core))


def _excluded(problem: Problem, variables: Collection[int], max_entries: int) -> bool:
    """Whether the tables among some variables are known to exclude every labelling."""
    place = {variable: index for index, variable in enumerate(sorted(variables))}
    part = Problem(
        tuple([problem.domain_sizes[variable] for variable in place]),
        tuple(
            [
                (tuple([place[variable] for variable in scope]), _forbidden(table))
                for scope, table in problem.tables
                if all(variable in place for variable in scope)
            ]
        ),
    )
    try:
        Network(part).eliminate_all(max_entries)
    except Contradiction:
        return True
    return False


def _forbidden(table: Table) -> Table:
    return intern_table(np.where(np.isfinite(table.array), 0.0, np.inf))
