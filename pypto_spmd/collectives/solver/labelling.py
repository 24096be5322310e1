"""What is solved: choose one label per variable so that the sum of the cost tables is least."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pypto_spmd.collectives.solver.min_plus import Table


class Infeasible(ValueError):
    """No labelling has a finite cost.

    Attributes:
        variables: a set of variables, ascending, whose tables alone already exclude every labelling.
    """

    def __init__(self, variables: tuple[int, ...]) -> None:
        self.variables = variables
        names = ", ".join(map(str, variables))
        super().__init__(f"the tables of variables {names} allow no combination of their labels")


class SearchFailed(RuntimeError):
    """The problem is too wide for an exact solution, and no labelling of finite cost was found."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A least-cost labelling problem.

    Attributes:
        domain_sizes: number of labels of each variable.
        tables: pairs of a scope (variables, each at most once) and the cost table over their labels.
    """

    domain_sizes: tuple[int, ...]
    tables: tuple[tuple[tuple[int, ...], Table], ...]

    def __post_init__(self) -> None:
        sizes = self.domain_sizes
        if min(sizes, default=1) < 1:
            raise ValueError(f"variable {sizes.index(min(sizes))} has no labels")
        for scope, table in self.tables:
            if table.shape != tuple([sizes[variable] for variable in scope]):
                expected = tuple([sizes[variable] for variable in scope])
                raise ValueError(
                    f"the table of variables {scope} has shape {table.shape}, not {expected}"
                )
            if len(scope) > 1 and len(set(scope)) < len(scope):
                raise ValueError(f"scope {scope} repeats a variable")

    def cost(self, labels: Sequence[int]) -> float:
        """The cost of a labelling: the correctly rounded sum of its table entries."""
        return math.fsum(
            [
                table.array.item(*[labels[variable] for variable in scope])
                for scope, table in self.tables
            ]
        )


@dataclass(frozen=True, slots=True)
class Solution:
    """A labelling and how good it is.

    Attributes:
        labels: one label per variable.
        cost: its cost.
        lower_bound: no labelling costs less.
    """

    labels: tuple[int, ...]
    cost: float
    lower_bound: float

    @property
    def exact(self) -> bool:
        """Whether no labelling is cheaper."""
        return self.cost <= self.lower_bound
