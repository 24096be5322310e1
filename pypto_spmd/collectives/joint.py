"""What one axis's labels make the moves of the other axes cost.

Axis by axis, a move counts the bytes over that axis alone. But a tensor that is split on one axis is
cheaper to move on another, a move on two axes at once may send less, or more, than two moves, and axes
that are nested in the wrong order send what no axis counts. Where that is so, tables get the difference:
the bytes of the whole redistribution, less what the axis counts by itself. Solving with these, axis after
axis, descends on the bytes of all axes together.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod

import numpy as np

from pypto_spmd.collectives.assemble import Layouts, layout_of, nearest
from pypto_spmd.collectives.axis_tables import local_sizes, unary
from pypto_spmd.collectives.facts import EquationFacts
from pypto_spmd.collectives.links import Link
from pypto_spmd.collectives.objective import COLLECTIVE_COST, FREE, Option, move_cost
from pypto_spmd.collectives.rules import Choice
from pypto_spmd.collectives.solver.elimination import Table, intern_table
from pypto_spmd.sharding.layout import Label, Layout
from pypto_spmd.sharding.redistribute import redistribute, wire_bytes

Labels = tuple[Label, ...]
"""A label for the axis itself, then for each of the others."""


class JointMoves:
    """The differences for one axis, the labels of the others given.

    Args:
        layouts: of a labelling of all axes. A tensor or equation that keeps its labels keeps its nesting
            too; of others the best nesting is counted on.
        axis: the axis.
        domains: in which labels each tensor may be stored on the axis.
        choices: what each equation may choose on it.
    """

    def __init__(
        self,
        layouts: Layouts,
        axis: str,
        domains: Sequence[tuple[Option, ...]],
        choices: Mapping[int, tuple[Choice, ...]],
    ) -> None:
        self.layouts = layouts
        self.graph = layouts.request.graph
        self.axis = axis
        labels = dict(layouts.labelling.axes)
        self.mine = labels.pop(axis)
        self.others = tuple(labels.values())
        self.names = (axis, *labels)
        self.sizes = tuple(layouts.request.axis_sizes[name] for name in self.names)
        self.domains = domains
        self.choices = choices

    def of_equation(self, index: int, known: EquationFacts) -> Iterator[tuple[int, Table]]:
        """For each tensor moved to or from an equation, a table (choice, stored) where it matters."""
        equation, weight = known.equation, known.block.weight
        now = self.mine.choices[index]
        theirs = tuple(labels.choices[index] for labels in self.others)
        for tensor, positions in known.reads:
            if not any(self._matters(tensor, self.layouts.operand(equation, p)) for p in positions):
                continue
            rows = []
            for choice in self.choices[index]:
                targets: dict[Labels, Layout | None] = {}
                for p in positions:
                    fixed = self.layouts.operand(equation, p) if choice == now else None
                    targets[choice.operands[p], *(c.operands[p] for c in theirs)] = fixed
                rows.append(
                    [
                        weight * sum(self._read(tensor, o, t, f) for t, f in targets.items())
                        for o in self.domains[tensor]
                    ]
                )
            yield tensor, intern_table(np.array(rows))
        for position, tensor in enumerate(equation.outputs):
            if not self._matters(tensor, self.layouts.result(equation, position)):
                continue
            rows = []
            for choice in self.choices[index]:
                made = choice.results[position], *(c.results[position] for c in theirs)
                fixed = self.layouts.result(equation, position) if choice == now else None
                rows.append(
                    [weight * self._store(tensor, o, made, fixed) for o in self.domains[tensor]]
                )
            yield tensor, intern_table(np.array(rows))

    def exchanged(self, index: int, known: EquationFacts) -> Table | None:
        """For each choice of an equation, the bytes that its other axes exchange by themselves."""
        rule = known.equation.ruled
        theirs = tuple(labels.choices[index] for labels in self.others)
        exchanging = [
            (choice.factor, n)
            for choice, n in zip(theirs, self.sizes[1:], strict=True)
            if choice.factor >= 0 and rule.factors[choice.factor].exchanges_for(n)
        ]
        if not exchanging:
            return None
        costs = []
        for choice in self.choices[index]:
            local = local_sizes(rule, (choice, *theirs), self.sizes)
            sent = sum(
                wire_bytes(e.kind, e.full_elements(local, n) * e.itemsize, n)
                for factor, n in exchanging
                for e in rule.factors[factor].exchanges_for(n)
            )
            costs.append(known.block.weight * sent)
        return unary(tuple(costs))

    def of_end(self, tensor: int, given: Layout, *, leaving: bool) -> Table | None:
        """For each option of an argument, or of a result, the difference to what its given layout costs."""
        if not self._matters(tensor, given):
            return None
        cost, labels = self._read if leaving else self._store, self._labels(given)
        return unary(tuple(cost(tensor, option, labels, given) for option in self.domains[tensor]))

    def of_link(self, link: Link) -> Table | None:
        """A table (stored source, stored target), where what a loop takes or gives is moved."""
        assert isinstance(link.source, int)
        bound = self.layouts.stored(link.target)
        if link.kind in ("xs", "ys", "same") or not self._matters(link.source, bound):
            return None
        theirs = tuple(labels.stored[link.target][0] for labels in self.others)
        rows = [
            [
                link.weight * self._read(link.source, option, (wanted[0], *theirs), None)
                for wanted in self.domains[link.target]
            ]
            for option in self.domains[link.source]
        ]
        return intern_table(np.array(rows))

    def _matters(self, tensor: int, other: Layout) -> bool:
        """Whether between a stored tensor and another layout more is moved than this axis counts."""
        labels = {name: other.label(name) for name in self.names}
        stored = self.layouts.stored(tensor, labels)
        if any(stored.label(name) != labels[name] for name in self.names[1:]):
            return True
        nested = any(len(axes) > 1 for layout in (stored, other) for axes in layout.dims)
        return nested and stored != other

    def _labels(self, layout: Layout) -> Labels:
        return tuple(layout.label(name) for name in self.names)

    def _read(self, tensor: int, option: Option, target: Labels, fixed: Layout | None) -> float:
        """The difference of reading a tensor that is stored as `option`; `fixed` is how the target nests."""
        theirs = self._nearest(tensor, target[1:])
        order = self._order(tensor, option)
        return min(
            self._difference(tensor, (own, *theirs), target, target[1:], order, fixed)
            for own in option
        )

    def _store(self, tensor: int, option: Option, made: Labels, fixed: Layout | None) -> float:
        """The difference of storing a tensor as `option`; `fixed` is how it nests as it is made."""
        theirs = self._nearest(tensor, made[1:])
        order = self._order(tensor, option)
        # As the axis counts: what another one scatters is scattered first.
        cuts = tuple(
            labels.stored[tensor][0] if label.kind == "P" else label
            for label, labels in zip(made[1:], self.others, strict=True)
        )
        return min(
            self._difference(tensor, made, (own, *theirs), cuts, fixed, order) for own in option
        )

    def _nearest(self, tensor: int, labels: Labels) -> Labels:
        """The labels in which the others store a tensor: of several, those nearest to `labels`."""
        return tuple(
            nearest(theirs.stored[tensor], label, n)
            for theirs, label, n in zip(self.others, labels, self.sizes[1:], strict=True)
        )

    def _order(self, tensor: int, option: Option) -> tuple[str, ...] | None:
        """How a stored tensor nests its axes, if that is decided."""
        if option != self.mine.stored[tensor]:
            return None
        return self.layouts.tensor_order.get(tensor, self.layouts.axes)

    def _difference(
        self,
        tensor: int,
        source: Labels,
        target: Labels,
        cuts: Labels,
        source_nesting: Layout | tuple[str, ...] | None,
        target_nesting: Layout | tuple[str, ...] | None,
    ) -> float:
        aval = self.graph.avals[tensor]
        return _difference(
            aval.shape, aval.itemsize, self.names, self.sizes, source, target, cuts,
            source_nesting, target_nesting,
        )  # fmt: skip


@lru_cache(maxsize=200_000)
def _difference(
    shape: tuple[int, ...],
    itemsize: float,
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    source: Labels,
    target: Labels,
    cuts: Labels,
    source_nesting: Layout | tuple[str, ...] | None,
    target_nesting: Layout | tuple[str, ...] | None,
) -> float:
    """Bytes of a redistribution on all axes, less those that the first axis counts by itself.

    Args:
        shape: global shape of the tensor.
        itemsize: bytes of an element.
        names: the axes.
        sizes: their sizes.
        source: labels before.
        target: labels after.
        cuts: labels on the other axes which make the local size that the first axis counts with.
        source_nesting: the layout before, or the order of its axes, where that is decided.
        target_nesting: the same of the layout after.
    """
    axis_sizes = dict(zip(names, sizes, strict=True))
    best = np.inf
    for before in _nestings(source, names, len(shape), source_nesting):
        for after in _nestings(target, names, len(shape), target_nesting):
            legs = redistribute(before, after, shape, itemsize, axis_sizes)
            sent = sum(leg.wire_bytes(shape, itemsize, axis_sizes) for leg in legs)
            best = min(best, sent + COLLECTIVE_COST * sum(leg.is_collective for leg in legs))
    pieces = prod(n for label, n in zip(cuts, sizes[1:], strict=True) if label.kind == "S")
    own = move_cost(source[0], target[0], prod(shape) * itemsize / pieces, sizes[0], FREE)
    return float(best - own)


def _nestings(
    labels: Labels,
    names: tuple[str, ...],
    rank: int,
    decided: Layout | tuple[str, ...] | None,
) -> list[Layout]:
    """The layouts with these labels: the one that is decided, or the axes of a dim in every order."""
    if isinstance(decided, Layout):
        return [decided]
    orders = itertools.permutations(names) if decided is None else [decided]
    of_axes = dict(zip(names, labels, strict=True))
    return list(dict.fromkeys(layout_of(of_axes, rank, order) for order in orders))
