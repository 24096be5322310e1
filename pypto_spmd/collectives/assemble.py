"""From labels to layouts: what each axis decided separately, put together with a nesting.

Where several axes split one dim of a tensor, their order matters: only the innermost can be gathered or
moved alone. The orders are chosen by the same solver as the labels, to least wire bytes: a variable for
each tensor that several axes split in one dim, one for each equation that splits a factor over several.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pypto_spmd.collectives.axis_tables import piled_label, stack_labels
from pypto_spmd.collectives.graph import Atom, Block, Constant, Equation, Graph
from pypto_spmd.collectives.links import Link, links_of
from pypto_spmd.collectives.objective import Mobility, Option, move_cost
from pypto_spmd.collectives.request import Labelling, Request
from pypto_spmd.collectives.rules import Choice
from pypto_spmd.collectives.rules.factor import Dims
from pypto_spmd.collectives.solver.elimination import Problem, Table, intern_table, solve
from pypto_spmd.collectives.together import scattered_together
from pypto_spmd.sharding.layout import Label, Layout, P, R
from pypto_spmd.sharding.redistribute import redistribution_bytes

Labels = Mapping[str, Label]
"""A label for every mesh axis."""

Order = tuple[str, ...]
"""Mesh axes from outermost to innermost; of one tensor's dim those that split it, in this order."""

_ANY = Mobility()


def layout_of(labels: Labels, rank: int, order: Sequence[str]) -> Layout:
    """The layout with these labels, the axes of each dim nested in `order`."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    partial = []
    for axis in order:
        label = labels.get(axis, R)
        if label.kind == "S":
            dims[label.dim].append(axis)
        elif label.kind == "P":
            partial.append((axis, label.op))
    return Layout(tuple(map(tuple, dims)), tuple(sorted(partial)))


def nearest(option: Option, target: Label, axis_size: int) -> Label:
    """The member of a stored option from which `target` is read most cheaply."""
    return min(option, key=lambda m: (move_cost(m, target, 1e6, axis_size, _ANY), m))


@dataclass(slots=True)
class Layouts:
    """The full layouts of a program, as the schedule asks for them."""

    request: Request
    labelling: Labelling
    tensor_order: dict[int, Order]
    equation_order: dict[int, Order]

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that were labelled, in mesh order."""
        return tuple(self.labelling.axes)

    def choice(self, equation: Equation, axis: str) -> Choice:
        """What an axis does to an equation."""
        return self.labelling.axes[axis].choices[equation.index]

    def rank(self, atom: Atom) -> int:
        """Number of dims of a tensor or constant."""
        return len(self.request.graph.aval(atom).shape)

    def operand(self, equation: Equation, position: int) -> Layout:
        """The layout in which an equation reads an operand."""
        labels = {a: self.choice(equation, a).operands[position] for a in self.axes}
        return self._of_equation(equation, labels, equation.ruled.operands[position])

    def result(self, equation: Equation, position: int) -> Layout:
        """The layout in which an equation makes a result."""
        labels = {a: self.choice(equation, a).results[position] for a in self.axes}
        return self._of_equation(equation, labels, equation.ruled.results[position])

    def splits(self, equation: Equation) -> dict[int, tuple[str, ...]]:
        """Which axes split each factor of an equation, outermost first."""
        found: dict[int, list[str]] = {}
        order = self.equation_order.get(equation.index, self.axes)
        if equation.constraint is not None:
            # A constraint also says in which order axes are nested.
            named = Layout.from_spec(equation.constraint, self.rank(equation.outputs[0]))
            first = [a for axes in named.dims for a in axes if a in order]
            order = (*first, *(a for a in order if a not in first))
        for axis in order:
            factor = self.choice(equation, axis).factor
            if factor >= 0:
                found.setdefault(factor, []).append(axis)
        return {f: tuple(a) for f, a in found.items()}

    def _of_equation(self, equation: Equation, labels: Labels, dims: Dims) -> Layout:
        splits = self.splits(equation)
        nested = tuple(tuple(a for f in dim for a in splits.get(f, ())) for dim in dims)
        partial = tuple(sorted((a, label.op) for a, label in labels.items() if label.kind == "P"))
        return Layout(nested, partial)

    def stored(self, tensor: int, toward: Labels | None = None) -> Layout:
        """The layout in which a tensor is stored; of several, that which is nearest to `toward`."""
        labels = {}
        for axis, theirs in self.labelling.axes.items():
            option = theirs.stored[tensor]
            target = None if toward is None else toward.get(axis, R)
            size = self.request.axis_sizes[axis]
            labels[axis] = option[0] if target is None else nearest(option, target, size)
        order = self.tensor_order.get(tensor, self.axes)
        return layout_of(labels, self.rank(tensor), order)

    def stack(self, link: Link) -> Layout:
        """The layout in which a scan reads a stack (xs), given that of its slices."""
        inner = self.stored(link.target)
        owners, partial = [], []
        for axis, op in inner.partial:
            option = (
                self.labelling.axes[axis].stored[link.source]
                if isinstance(link.source, int)
                else ()
            )
            held = op == "sum" and any(m == stack_labels(P("sum"))[1] for m in option)
            (owners if held else partial).append((axis, op))
        order = (
            self.tensor_order.get(link.source, self.axes)
            if isinstance(link.source, int)
            else self.axes
        )
        leading = tuple(a for a in order if a in dict(owners))
        return Layout((leading, *inner.dims), tuple(partial))

    def pile(self, link: Link) -> Layout:
        """The layout in which a scan makes a pile of slices (ys)."""
        tensor, labels = link.target, {}
        for axis, theirs in self.labelling.axes.items():
            inner = theirs.stored[link.source] if isinstance(link.source, int) else (R,)
            labels[axis] = piled_label(inner, theirs.stored[tensor][0])
        return layout_of(labels, self.rank(tensor), self.tensor_order.get(tensor, self.axes))

    def slice_of(self, pile: Layout) -> Layout:
        """The layout of one slice of a pile."""
        return Layout(pile.dims[1:], pile.partial)

    def inside(self, axes: Sequence[str], result: int) -> Layout:
        """The layout in which the body of a region on `axes` gives back what will be `result`."""
        stored = self.stored(result)
        for axis in axes:
            stored = stored.with_label(axis, R)
        return stored

    def around(self, given: Layout, local: Layout) -> Layout:
        """The layout outside a region of a value that is given so there, and lies so inside."""
        outer = tuple(tuple(a for a in axes if a in self.labelling.axes) for axes in given.dims)
        dims = tuple((*o, *i) for o, i in zip(outer, local.dims, strict=True))
        return Layout(dims, local.partial)

    def argument(self, position: int) -> Layout:
        """The layout in which an argument comes in."""
        given = self.request.inputs[position]
        if given is not None:
            return given
        tensor = self.request.graph.block.inputs[position]
        labels = {a: t.inputs[position] for a, t in self.labelling.axes.items()}
        return layout_of(labels, self.rank(tensor), self.tensor_order.get(tensor, self.axes))

    def output(self, position: int) -> Layout:
        """The layout in which a result goes out."""
        given = self.request.outputs[position]
        if given is not None:
            return given
        atom = self.request.graph.block.outputs[position]
        labels = {a: t.outputs[position] for a, t in self.labelling.axes.items()}
        order = self.tensor_order.get(atom, self.axes) if isinstance(atom, int) else self.axes
        return layout_of(labels, self.rank(atom), order)


def assemble(request: Request, labelling: Labelling) -> Layouts:
    """The layouts of a labelling, with the nesting that costs least."""
    layouts = Layouts(request, scattered_together(request, labelling), {}, {})
    if len(labelling.axes) > 1:
        _Nesting(layouts).choose()
    return layouts


class _Nesting:
    """The problem of choosing orders."""

    def __init__(self, layouts: Layouts) -> None:
        self.layouts = layouts
        self.graph: Graph = layouts.request.graph
        self.sizes: list[int] = []
        self.tables: list[tuple[tuple[int, ...], Table]] = []
        self.tensor_variable: dict[int, int] = {}
        self.equation_variable: dict[int, int] = {}
        self.orders: list[tuple[Order, ...]] = []

    def choose(self) -> None:
        layouts = self.layouts
        for tensor in range(len(self.graph.avals)):
            if tensor_needs_order(layouts, tensor):
                self.tensor_variable[tensor] = self._variable(self._tensor_axes(tensor))
        for equation, _ in self.graph.equations():
            if equation.rule is None:
                continue
            repeated = [axes for axes in layouts.splits(equation).values() if len(axes) > 1]
            if repeated:
                self.equation_variable[equation.index] = self._variable(tuple(sum(repeated, ())))
        if not self.sizes:
            return
        for equation, block in self.graph.equations():
            self._add_equation(equation, block)
        self._add_ends()
        solution = solve(Problem(tuple(self.sizes), tuple(self.tables)))
        for tensor, variable in self.tensor_variable.items():
            layouts.tensor_order[tensor] = self.orders[variable][solution.labels[variable]]
        for index, variable in self.equation_variable.items():
            layouts.equation_order[index] = self.orders[variable][solution.labels[variable]]

    def _variable(self, axes: Sequence[str]) -> int:
        rest = tuple(a for a in self.layouts.axes if a not in axes)
        self.orders.append(tuple((*p, *rest) for p in itertools.permutations(axes)))
        self.sizes.append(len(self.orders[-1]))
        return len(self.sizes) - 1

    def _tensor_axes(self, tensor: int) -> Order:
        axes = self.layouts.labelling.axes
        return tuple(a for a in axes if any(m.kind == "S" for m in axes[a].stored[tensor]))

    def _add_equation(self, equation: Equation, block: Block) -> None:
        layouts = self.layouts
        if equation.rule is None:
            self._add_loop(equation, block)
            return
        variable = self.equation_variable.get(equation.index)
        ends = [(p, atom, True) for p, atom in enumerate(equation.inputs) if isinstance(atom, int)]
        ends += [(p, tensor, False) for p, tensor in enumerate(equation.outputs)]
        for position, tensor, reading in ends:
            end = layouts.operand if reading else layouts.result
            chosen = {a: layouts.choice(equation, a) for a in layouts.axes}
            self._add_pair(
                variable,
                tensor,
                functools.partial(end, equation, position),
                {a: (c.operands if reading else c.results)[position] for a, c in chosen.items()},
                block.weight,
                reading=reading,
                equation=equation,
            )

    def _add_pair(
        self,
        variable: int | None,
        tensor: int,
        layout: Callable[[], Layout],
        labels: Labels,
        weight: float,
        *,
        reading: bool,
        equation: Equation,
    ) -> None:
        """A table (order of the equation, order of the tensor)."""
        layouts = self.layouts
        other = self.tensor_variable.get(tensor)
        if variable is None and other is None:
            return
        rows = []
        for order in self.orders[variable] if variable is not None else (None,):
            if order is not None:
                layouts.equation_order[equation.index] = order
            row = []
            for stored_order in self.orders[other] if other is not None else (None,):
                if stored_order is not None:
                    layouts.tensor_order[tensor] = stored_order
                ends = layouts.stored(tensor, labels), layout()
                row.append(weight * self._bytes(tensor, *(ends if reading else ends[::-1])))
            rows.append(row)
        layouts.equation_order.pop(equation.index, None)
        layouts.tensor_order.pop(tensor, None)
        self._add([variable, other], np.array(rows))

    def _add(self, scope: Sequence[int | None], table: np.ndarray) -> None:
        kept = tuple(v for v in scope if v is not None)
        shape = tuple(self.sizes[v] for v in kept)
        if table.any():
            self.tables.append((kept, intern_table(table.reshape(shape))))

    def _bytes(self, tensor: int, source: Layout, target: Layout) -> float:
        if source == target:
            return 0.0
        aval = self.graph.avals[tensor]
        sizes = self.layouts.request.axis_sizes
        return redistribution_bytes(source, target, aval.shape, aval.itemsize, sizes)

    def _add_loop(self, equation: Equation, block: Block) -> None:
        for link in links_of(equation, block.weight):
            if isinstance(link.source, Constant):
                continue
            first, second = (self.tensor_variable.get(t) for t in (link.source, link.target))
            if (first is None and second is None) or link.source == link.target:
                continue
            rows = []
            for source_order in self.orders[first] if first is not None else (None,):
                if source_order is not None:
                    self.layouts.tensor_order[link.source] = source_order
                row = []
                for target_order in self.orders[second] if second is not None else (None,):
                    if target_order is not None:
                        self.layouts.tensor_order[link.target] = target_order
                    row.append(link.weight * self._link_bytes(link))
                rows.append(row)
            for tensor in (link.source, link.target):
                self.layouts.tensor_order.pop(tensor, None)
            self._add([first, second], np.array(rows))

    def _link_bytes(self, link: Link) -> float:
        """What a link sends, under the orders that are being tried."""
        layouts = self.layouts
        if link.kind == "xs":
            stack = layouts.stack(link)
            labels = {a: stack.label(a) for a in layouts.axes}
            return self._bytes(link.tensor, layouts.stored(link.tensor, labels), stack)
        source = layouts.stored(link.tensor)
        if link.kind == "ys":
            return self._bytes(link.tensor, source, layouts.slice_of(layouts.pile(link)))
        target = layouts.stored(link.target)
        if link.kind == "same" and source != target:
            return np.inf
        if link.kind == "enter":
            entering = layouts.around(_given(link), target)
            labels = {a: entering.label(a) for a in layouts.axes}
            return self._bytes(link.tensor, layouts.stored(link.tensor, labels), entering)
        if link.kind == "leave":
            inside = layouts.inside(link.axes, link.target)
            made = self._bytes(link.target, layouts.around(_given(link), inside), target)
            return made + self._bytes(link.tensor, source, inside)
        return self._bytes(link.target, source, target)

    def _add_ends(self) -> None:
        """Arguments and results whose layout is given."""
        request = self.layouts.request
        block = self.graph.block
        ends: list[tuple[Atom, Layout | None, bool]] = []
        ends += [(t, g, False) for t, g in zip(block.inputs, request.inputs, strict=True)]
        ends += [(a, g, True) for a, g in zip(block.outputs, request.outputs, strict=True)]
        for atom, given, leaving in ends:
            variable = self.tensor_variable.get(atom) if isinstance(atom, int) else None
            if variable is None or given is None or not isinstance(atom, int):
                continue
            row = []
            for order in self.orders[variable]:
                self.layouts.tensor_order[atom] = order
                labels = {a: given.label(a) for a in self.layouts.axes}
                stored = self.layouts.stored(atom, labels)
                row.append(self._bytes(atom, *((stored, given) if leaving else (given, stored))))
            self.layouts.tensor_order.pop(atom, None)
            self._add([variable], np.array(row))


def _given(link: Link) -> Layout:
    """The layout that a region's spec gives a tensor that enters or leaves it."""
    assert link.given is not None
    return link.given


def tensor_needs_order(layouts: Layouts, tensor: int) -> bool:
    """Whether several axes may split one dim of a stored tensor."""
    seen: set[int] = set()
    for theirs in layouts.labelling.axes.values():
        dims = {m.dim for m in theirs.stored[tensor] if m.kind == "S"}
        if seen & dims:
            return True
        seen |= dims
    return False
