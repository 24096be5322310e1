"""The working state of a least-cost labelling problem while it is pruned and eliminated.

Two steps shrink a network, and neither changes the least cost: *pruning* drops labels that are
impossible or never better than another one, *eliminating* replaces a variable and its tables by one
table over its neighbours. Both are recorded, so that labels can be read back in reverse.

Invariant: least cost of the original problem = sum of ``constants`` + least cost of the tables left
(a lower bound, once a variable was eliminated in parts).
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from pypto_spmd.collectives.solver import min_plus
from pypto_spmd.collectives.solver.elimination_order import cheapest_order
from pypto_spmd.collectives.solver.labelling import Problem
from pypto_spmd.collectives.solver.min_plus import Elimination, Table, View

Scope = tuple[int, ...]
Factors = tuple[tuple[Scope, View], ...]

MAX_ENTRIES = 4_000_000
"""The largest table to make unless asked otherwise: 32 MB."""

EASY_ENTRIES = 5_000
"""Unions up to this size are taken smallest first; if only larger ones are left, a plan is made."""

HUB_DEGREE = 12
"""Variables with so many neighbours tie distant parts together: worth a negligible loss to settle."""


class Contradiction(Exception):
    """A variable has no possible label left."""

    def __init__(self, variable: int) -> None:
        self.variable = variable
        super().__init__(variable)


@dataclass(frozen=True, slots=True)
class Step:
    """One elimination, with what is needed to read the variable's label back.

    Attributes:
        variable: the variable that was minimised over.
        domain: labels that it still had.
        neighbours: the variables it shared tables with, ascending.
        domains: labels that each neighbour still had.
        choice: position in ``domain`` of its best label, with the neighbours as axes; None if it was
            eliminated in parts.
        factors: its tables, if it was eliminated in parts or is tainted.
        message: the table over the neighbours that replaced it, if it is tainted.
    """

    variable: int
    domain: tuple[int, ...]
    neighbours: Scope
    domains: tuple[tuple[int, ...], ...]
    choice: np.ndarray | None
    factors: Factors = ()
    message: Table | None = None


class Network:
    """The tables of a problem by variable, each normalised, at most one a scope.

    Args:
        problem: the problem.
        exempt: variables whose every label must keep its least cost, for min-marginals. They aren't
            pruned; nor is any variable next to a table that has minimised over one of them, since
            what such a table says need not hold for each single label ("tainted" variables).
        negligible: what may be lost in all by settling hubs.

    Raises:
        Contradiction: a table has no finite entry.
    """

    def __init__(
        self, problem: Problem, exempt: Collection[int] = (), *, negligible: float = 0.0
    ) -> None:
        count = len(problem.domain_sizes)
        ranges = {size: tuple(range(size)) for size in set(problem.domain_sizes)}
        self.domains: list[tuple[int, ...]] = [ranges[size] for size in problem.domain_sizes]
        self.constants: list[float] = []
        self.steps: list[Step] = []
        self.settled: list[int] = []
        self._negligible = negligible
        self._sizes = list(problem.domain_sizes)
        self._incident: list[dict[Scope, View]] = [{} for _ in range(count)]
        self._alive = bytearray([1]) * count
        self._tainted = bytearray(count)
        for variable in exempt:
            self._tainted[variable] = 1
        # Eliminating these taints their neighbours, so what is easy without is done before.
        self._held = set(exempt)
        self._dirty = deque(range(count))
        self._is_dirty = bytearray([1]) * count
        self._weights = [0] * count
        self._heap: list[tuple[int, int]] = []
        self._reweigh: set[int] = set()
        for scope, table in problem.tables:
            ordered = scope
            if len(scope) > 1:
                ordered = tuple(sorted(scope))
                if ordered != scope:
                    axes = tuple([scope.index(variable) for variable in ordered])
                    table = min_plus.transpose(table, axes)
            constant, normalised = min_plus.normalise_table(table)
            if constant:
                self._add_constant(constant, scope)
            if normalised is not None:
                self._add(ordered, normalised)

    def prune(self) -> None:
        """Drops labels that can be dispensed with, until no table that changed allows more.

        Raises:
            Contradiction: a variable has no possible label.
        """
        dirty, is_dirty, alive, tainted = self._dirty, self._is_dirty, self._alive, self._tainted
        while dirty:
            variable = dirty.popleft()
            is_dirty[variable] = 0
            incident = self._incident[variable]
            if not incident or tainted[variable] or not alive[variable]:
                continue
            if self._sizes[variable] == 1:
                self._restrict(variable, (0,))
                continue
            keep = min_plus.kept_labels(tuple(incident.values()))
            if keep is not None:
                if not keep:
                    raise Contradiction(variable)
                self._restrict(variable, keep)

    def order(self) -> None:
        """Sets up the order of elimination, after the first :meth:`prune`."""
        self._weights = [self._weight(variable) for variable in range(len(self._sizes))]
        self._heap = [(w, v) for v, w in enumerate(self._weights) if v not in self._held]
        heapify(self._heap)
        self._reweigh.clear()

    def lightest(self) -> int | None:
        """The variable whose tables together are smallest, the lowest of several.

        Returns:
            The variable; None if no tables are left.
        """
        weights, heap, alive, held = self._weights, self._heap, self._alive, self._held
        for variable in self._reweigh:
            if alive[variable] and self._incident[variable]:
                weight = self._weight(variable)
                if weight != weights[variable]:
                    weights[variable] = weight
                    if variable not in held:
                        heappush(heap, (weight, variable))
        self._reweigh.clear()
        while heap:
            weight, variable = heap[0]
            if alive[variable] and weights[variable] == weight and self._incident[variable]:
                return variable
            heappop(heap)
        return None

    def plan(self) -> list[int]:
        """A good order in which to eliminate what is left."""
        graph = {
            variable: set().union(*incident) - {variable}
            for variable, incident in enumerate(self._incident)
            if incident
        }
        return cheapest_order(graph, self._sizes)

    def _settle(self) -> bool:
        """Drops labels of hubs that are hardly ever better than another one, and prunes.

        Each decision loses at most what the label could have gained on the one that stays, whatever
        the neighbours do; together no more than is negligible.

        Returns:
            Whether anything was dropped.
        """
        hubs = []
        for variable, incident in enumerate(self._incident):
            degree = len(set().union(*incident)) - 1
            if degree >= HUB_DEGREE and not self._tainted[variable]:
                hubs.append((-degree, variable))
        settled = len(self.settled)
        for _, variable in sorted(hubs):
            views = tuple(self._incident[variable].values())
            while views and self._sizes[variable] > 1 and self._negligible > 0:
                loss, label = min_plus.least_loss(views)
                if loss > self._negligible:
                    break
                self._negligible -= loss
                self.settled.append(variable)
                keep = [other for other in range(self._sizes[variable]) if other != label]
                self._restrict(variable, tuple(keep))
                self.prune()
                views = tuple(self._incident[variable].values())
        return len(self.settled) > settled

    def message_entries(self, variable: int) -> int:
        """The size of the table that eliminating the variable would make."""
        return self._weights[variable] // self._sizes[variable]

    def eliminate_all(self, max_entries: int) -> bool:
        """Prunes and eliminates until no tables are left.

        Args:
            max_entries: the largest message to make; a variable that would need more is eliminated
                in parts.

        Returns:
            Whether no variable was eliminated in parts, so that ``constants`` sum to the least cost.

        Raises:
            Contradiction: no labelling has a finite cost.
        """
        exact = True
        plan: Iterator[int] | None = None
        self.prune()
        self.order()
        while True:
            variable = self.lightest()
            if variable is None or self._weights[variable] > EASY_ENTRIES:
                if plan is None and self._settle():
                    continue
                if self._held:
                    self._release()
                    continue
                if variable is None:
                    return exact
                if plan is None:
                    plan = iter(self.plan())
                planned = next((v for v in plan if self._alive[v] and self._incident[v]), variable)
                if self.message_entries(planned) <= max_entries:
                    variable = planned
                else:
                    plan = iter(())  # where all is too wide, smallest first gives better bounds
            if self.message_entries(variable) <= max_entries:
                self.eliminate(variable)
            else:
                self.eliminate_in_parts(variable, max_entries)
                exact = False
            self.prune()

    def _release(self) -> None:
        """Lets the exempt variables be eliminated as well."""
        for variable in sorted(self._held):
            heappush(self._heap, (self._weights[variable], variable))
        self._held.clear()

    def eliminate(self, variable: int) -> None:
        """Replaces a variable and its tables by one table over its neighbours.

        Raises:
            Contradiction: no combination of labels is possible.
        """
        incident = self._incident[variable]
        scopes = sorted(incident)
        views = tuple([incident[scope] for scope in scopes])
        neighbours, result = self._minimise(variable, scopes, views)
        domains = tuple([self.domains[neighbour] for neighbour in neighbours])
        tainted = self._tainted[variable]
        message = result.message
        if tainted:
            for neighbour in neighbours:
                self._tainted[neighbour] = 1
            if message is None and neighbours:
                # The downward pass needs every neighbourhood to stay inside one table.
                message = min_plus.intern_table(np.zeros(result.choice.shape))
        self.steps.append(
            Step(
                variable,
                self.domains[variable],
                neighbours,
                domains,
                result.choice,
                tuple(zip(scopes, views, strict=True)) if tainted else (),
                message if tainted else None,
            )
        )
        self._retire(variable, scopes)
        if message is not None:
            self._add(neighbours, message)
        self._touch(neighbours)

    def eliminate_in_parts(self, variable: int, max_entries: int) -> None:
        """Eliminates a variable from groups of its tables, each on its own (mini-buckets).

        A labelling of what is left may then stand for another label of the variable in each group:
        its least cost is a lower bound only.

        Args:
            variable: the variable.
            max_entries: what no group's message should exceed.

        Raises:
            Contradiction: no combination of labels is possible.
        """
        incident = self._incident[variable]
        groups: list[tuple[set[int], list[Scope]]] = []
        for scope in sorted(incident, key=lambda scope: (-self._entries(scope), scope)):
            for union, members in groups:
                wider = union.union(scope)
                if self._entries(wider) // self._sizes[variable] <= max_entries:
                    union |= wider
                    members.append(scope)
                    break
            else:
                groups.append((set(scope), [scope]))
        scopes = sorted(incident)
        neighbours = tuple(sorted(set().union(*scopes) - {variable}))
        messages = []
        for _, members in groups:
            members.sort()
            views = tuple([incident[scope] for scope in members])
            part, result = self._minimise(variable, members, views)
            if result.message is not None:
                messages.append((part, result.message))
        self.steps.append(
            Step(
                variable,
                self.domains[variable],
                neighbours,
                tuple([self.domains[neighbour] for neighbour in neighbours]),
                None,
                tuple([(scope, incident[scope]) for scope in scopes]),
            )
        )
        self._retire(variable, scopes)
        for part, message in messages:
            self._add(part, message)
        self._touch(neighbours)

    def labels(self) -> list[int]:
        """Reads the labels back, the last eliminated variable first."""
        labels = [domain[0] for domain in self.domains]
        for step in reversed(self.steps):
            positions = [
                domain.index(labels[neighbour])
                for neighbour, domain in zip(step.neighbours, step.domains, strict=True)
            ]
            if step.choice is not None:
                position = step.choice.item(*positions)
            else:
                position = _best_position(step, positions)
            labels[step.variable] = step.domain[position]
        return labels

    def _minimise(
        self, variable: int, scopes: list[Scope], views: tuple[View, ...]
    ) -> tuple[Scope, Elimination]:
        """Minimises tables, given in ascending order of scope, over a variable."""
        neighbours: list[int] = []
        pattern = None
        for scope in scopes:
            if len(scope) == 2:
                neighbours.append(scope[0] if scope[1] == variable else scope[1])
            elif len(scope) > 2:
                neighbours = sorted(set().union(*scopes) - {variable})
                place = {neighbour: index for index, neighbour in enumerate(neighbours)}
                pattern = tuple(
                    [
                        tuple([place[other] for other in scope if other != variable])
                        for scope in scopes
                    ]
                )
                break
        sizes = self._sizes
        shape = tuple([sizes[neighbour] for neighbour in neighbours])
        result = min_plus.eliminate(views, pattern, sizes[variable], shape)
        if result.constant:
            self._add_constant(result.constant, (variable,))
        return tuple(neighbours), result

    def _add(self, scope: Scope, table: Table) -> None:
        """Adds a table, to the one already there if the scope has one."""
        present = self._incident[scope[0]].get(scope)
        if present is not None:
            constant, total = min_plus.add(present.table, table)
            if constant:
                self._add_constant(constant, scope)
            if total is None and self._tainted[scope[0]]:
                total = min_plus.intern_table(np.zeros(table.shape))
            if total is None:
                for variable in scope:
                    del self._incident[variable][scope]
                return
            table = total
        for variable, view in zip(scope, table.views, strict=True):
            self._incident[variable][scope] = view

    def _add_constant(self, constant: float, scope: Scope) -> None:
        if constant == math.inf:
            raise Contradiction(scope[0])
        self.constants.append(constant)

    def _restrict(self, variable: int, keep: tuple[int, ...]) -> None:
        """Keeps only some labels of a variable; a single one takes the variable out of its tables."""
        domain = self.domains[variable]
        self.domains[variable] = tuple([domain[position] for position in keep])
        self._sizes[variable] = len(keep)
        single = len(keep) == 1
        incident = self._incident[variable]
        changed: set[int] = set()
        for scope, view in list(incident.items()):
            constant, table = view.restrict(keep)
            if constant:
                self._add_constant(constant, scope)
            if single or table is None:
                for other in scope:
                    del self._incident[other][scope]
                if single and table is not None:
                    self._add(tuple([other for other in scope if other != variable]), table)
            else:
                for other, other_view in zip(scope, table.views, strict=True):
                    self._incident[other][scope] = other_view
            changed.update(scope)
        self._touch(changed)

    def _retire(self, variable: int, scopes: list[Scope]) -> None:
        """Takes an eliminated variable and its tables out."""
        for scope in scopes:
            for other in scope:
                del self._incident[other][scope]
        self._alive[variable] = 0

    def _touch(self, variables: Iterable[int]) -> None:
        """Notes that tables of these variables changed."""
        for variable in variables:
            self._reweigh.add(variable)
            if not self._is_dirty[variable]:
                self._is_dirty[variable] = 1
                self._dirty.append(variable)

    def _weight(self, variable: int) -> int:
        incident = self._incident[variable]
        return self._entries(set().union(*incident)) if incident else self._sizes[variable]

    def _entries(self, variables: Iterable[int]) -> int:
        sizes = self._sizes
        entries = 1
        for variable in variables:
            entries *= sizes[variable]
        return entries


def _best_position(step: Step, positions: list[int]) -> int:
    """The best label of a variable eliminated in parts, given its neighbours' labels."""
    at = dict(zip(step.neighbours, positions, strict=True))
    total = np.zeros(len(step.domain))
    for scope, view in step.factors:
        index = tuple([slice(None) if v == step.variable else at[v] for v in scope])
        total += view.table.array[index]
    return int(total.argmin())
