"""Choosing a label for every tensor and every equation, at least cost.

One mesh axis is solved at a time, exactly, by variable elimination (`elimination.solve`): a variable for
the labelling that each equation chooses and one for the labels in which each tensor is stored; tables for
what reading and storing cost. Sizes are local to what the other axes' current choices make of *this*
equation, and the axes are swept, slowest link first, until nothing changes.

A tensor is stored in one label, or in two where that saved a conversion: the larger sets are added only
for tensors that a first solution converted more than once, and the axis is solved again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from pypto_spmd.collectives.classes import DimClasses, dim_classes, factor_dims
from pypto_spmd.collectives.elimination import Problem, Table, intern_table, solve
from pypto_spmd.collectives.graph import Atom, Block, Constant, Equation, Graph
from pypto_spmd.collectives.links import Link, predicates
from pypto_spmd.collectives.min_marginals import min_marginals
from pypto_spmd.collectives.objective import (
    HOLD,
    WHOLE_COST,
    Mobility,
    Objective,
    Option,
    move_cost,
    preference_table,
    read_cost,
    read_table,
    store_cost,
    store_table,
)
from pypto_spmd.collectives.rules import Choice, Rule, choices
from pypto_spmd.sharding.layout import Label, Layout, P, R, S
from pypto_spmd.sharding.redistribute import wire_bytes

MAX_SWEEPS = 4
"""Sweeps over the axes; two and one to confirm are what real programs need."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What inference is asked.

    Args:
        graph: the traced function.
        axis_sizes: size of each mesh axis.
        axis_order: the axes, slowest link first.
        inputs: given layout of each argument, None if it is free.
        outputs: given layout of each result, None if it is free.
        is_state: for each argument whether it is parameters or train state.
        objective: the weights.
    """

    graph: Graph
    axis_sizes: Mapping[str, int]
    axis_order: tuple[str, ...]
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    is_state: tuple[bool, ...]
    objective: Objective


@dataclass(slots=True)
class AxisLabels:
    """What one axis does everywhere.

    Args:
        choices: the labelling of each equation, by equation index.
        stored: the labels in which each tensor is stored, by tensor.
        inputs: the label of each argument as it comes in.
        outputs: the label of each result as it goes out.
        cost: cost under the objective.
        lower_bound: no labelling of the axis costs less (given the other axes).
    """

    choices: dict[int, Choice] = field(default_factory=dict)
    stored: dict[int, Option] = field(default_factory=dict)
    inputs: tuple[Label, ...] = ()
    outputs: tuple[Label, ...] = ()
    cost: float = 0.0
    lower_bound: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Labelling:
    """The labels of every axis."""

    axes: Mapping[str, AxisLabels]

    @property
    def gap(self) -> float:
        """By how much (relatively) the cost may exceed the least one, axis by axis; 0 when exact."""
        return max(
            ((a.cost - a.lower_bound) / a.cost if a.cost > 0 else 0.0) for a in self.axes.values()
        )


def infer(request: Request) -> Labelling:
    """The least-cost labels of all axes."""
    classes = dim_classes(request.graph)
    labels: dict[str, AxisLabels] = {}
    problems: dict[str, object] = {}
    axes = [a for a in request.axis_order if request.axis_sizes[a] > 1]
    for sweep in range(MAX_SWEEPS):
        changed = False
        for axis in axes:
            if sweep and len(axes) == 1:
                break
            solver = _Axis(request, classes, axis, {a: v for a, v in labels.items() if a != axis})
            found, signature = solver.solve(problems.get(axis), labels.get(axis))
            if problems.get(axis) != signature:
                problems[axis] = signature
                changed = changed or axis not in labels or not _same(found, labels[axis])
                labels[axis] = found
        if not changed:
            break
    return Labelling({a: labels[a] for a in request.axis_sizes if a in labels})


def input_marginals(
    request: Request, labelling: Labelling, axis: str, position: int
) -> dict[Label, float]:
    """The least extra cost of each label that one argument could come in with on one axis.

    Args:
        request: what was asked.
        labelling: its solution; the other axes stay as they are there.
        axis: the mesh axis.
        position: which argument.
    """
    others = {a: v for a, v in labelling.axes.items() if a != axis}
    solver = _Axis(request, dim_classes(request.graph), axis, others)
    return solver.input_marginals(position, labelling.axes[axis].inputs[position])


def _same(a: AxisLabels, b: AxisLabels) -> bool:
    return a.choices == b.choices and a.stored == b.stored


class _Axis:
    """One axis to solve, the labels of the others given."""

    def __init__(
        self,
        request: Request,
        classes: DimClasses,
        axis: str,
        others: Mapping[str, AxisLabels],
    ) -> None:
        self.request = request
        self.graph = request.graph
        self.classes = classes
        self.axis = axis
        self.size = request.axis_sizes[axis]
        self.others = tuple(others.items())
        self.objective = request.objective
        self._asked_classes()
        self.mobility = [self._mobility(t) for t in range(len(self.graph.avals))]
        self.choice_lists: dict[int, tuple[Choice, ...]] = {}
        self.domains: list[tuple[Option, ...]] = []

    # What is given -----------------------------------------------------------------------------

    def _asked_classes(self) -> None:
        graph, axis = self.graph, self.axis
        self.asked: set[int] = set()
        self.data: set[int] = set()
        self.state: set[int] = set()
        given = self.request.inputs
        for tensor, layout, state in zip(graph.block.inputs, given, self.request.is_state, strict=True):
            if layout is not None and layout.label(axis).kind == "S":
                found = self.classes.find(tensor, layout.label(axis).dim)
                self.asked.add(found)
                (self.state if state else self.data).add(found)
        for atom, layout in zip(graph.block.outputs, self.request.outputs, strict=True):
            if layout is not None and isinstance(atom, int) and layout.label(axis).kind == "S":
                self.asked.add(self.classes.find(atom, layout.label(axis).dim))
        for equation, _ in graph.equations():
            if equation.constraint is not None:
                label = self._constraint(equation)
                if label.kind == "S":
                    self.asked.add(self.classes.find(equation.outputs[0], label.dim))
        self.state_only = self._state_only() if not self.data else frozenset()

    def _constraint(self, equation: Equation) -> Label:
        rank = len(self.graph.avals[equation.outputs[0]].shape)
        return Layout.from_spec(equation.constraint, rank).label(self.axis)

    def _state_only(self) -> frozenset[int]:
        """Tensors that depend on state and constants alone (and on some state)."""
        tainted: set[int] = set()
        from_state: set[int] = set()
        for tensor, state in zip(self.graph.block.inputs, self.request.is_state, strict=True):
            (from_state if state else tainted).add(tensor)

        def visit(block: Block) -> None:
            for equation in block.equations:
                sources = [a for a in equation.inputs if isinstance(a, int)]
                for body in equation.bodies:
                    # A body input is what it is bound to, from outside or from the trip before.
                    mixed = any(s in tainted for s in sources)
                    for tensor in body.inputs:
                        (tainted if mixed else from_state).add(tensor)
                    for link in self.classes.links[equation.index]:
                        if link.target in body.inputs and link.kind in ("const", "xs"):
                            if isinstance(link.source, int) and link.source in from_state - tainted:
                                tainted.discard(link.target)
                                from_state.add(link.target)
                    visit(body)
                if any(s in tainted for s in sources):
                    tainted.update(equation.outputs)
                elif any(s in from_state for s in sources):
                    from_state.update(equation.outputs)

        visit(self.graph.block)
        return frozenset(from_state - tainted)

    def _mobility(self, tensor: int) -> Mobility:
        hold = self.objective.hold
        if hold == 1.0:
            return _FREE
        if self.data:
            shape = self.graph.avals[tensor].shape
            found = [self.classes.find(tensor, d) for d in range(len(shape))]
            if not self.data.intersection(found):
                return _FREE
            pairs = tuple(
                (i, j)
                for i, a in enumerate(found)
                for j, b in enumerate(found)
                if (a in self.data and b in self.state) or (a in self.state and b in self.data)
            )
            return Mobility(hold, hold, pairs)
        return _HELD if tensor in self.state_only else _FREE

    # Sizes -------------------------------------------------------------------------------------

    def _bytes(self, aval, labels: Sequence[Label], axis_sizes: Sequence[int]) -> float:
        """Bytes of a tensor, local to the other axes."""
        pieces = prod(n for label, n in zip(labels, axis_sizes, strict=True) if label.kind == "S")
        return prod(aval.shape) * aval.itemsize / pieces

    def _local_sizes(self, equation: Equation) -> tuple[int, ...]:
        """Sizes of an equation's factors, local to the other axes' choices for it."""
        sizes = [f.size for f in equation.rule.factors]
        for name, labels in self.others:
            choice = labels.choices.get(equation.index)
            if choice is not None and choice.factor >= 0:
                sizes[choice.factor] //= self.request.axis_sizes[name]
        return tuple(sizes)

    def _stored_bytes(self, tensor: int) -> float:
        aval = self.graph.avals[tensor]
        size = prod(aval.shape) * aval.itemsize
        for name, labels in self.others:
            if labels.stored[tensor][0].kind == "S":
                size /= self.request.axis_sizes[name]
        return size

    def _may_split(self, tensor: int, dim: int) -> bool:
        size = self.graph.avals[tensor].shape[dim]
        cut = self.size
        for name, labels in self.others:
            if any(m == S(dim) for m in labels.stored.get(tensor, ())):
                cut *= self.request.axis_sizes[name]
        return size % cut == 0

    # Domains -----------------------------------------------------------------------------------

    def _choices(self, equation: Equation) -> tuple[Choice, ...]:
        rule = equation.rule
        found = choices(rule, self._local_sizes(equation), self.size)
        if equation.constraint is not None:
            label = self._constraint(equation)
            return tuple(c for c in found if c.results[0] == label) or found[:1]
        if self.objective.closure and rule.factors:
            allowed = self._allowed_factors(equation)
            found = tuple(c for c in found if c.factor < 0 or allowed[c.factor])
        # Split first: of equal costs the first is taken.
        split = [c for c in found if c.factor >= 0]
        return tuple(split + [c for c in found if c.factor < 0])

    def _allowed_factors(self, equation: Equation) -> list[bool]:
        allowed = []
        for index, nodes in enumerate(factor_dims(equation)):
            if nodes:
                allowed.append(self.classes.find(*nodes[0]) in self.asked)
            else:
                allowed.append(self._inner_factor_asked(equation, index))
        return allowed

    def _inner_factor_asked(self, equation: Equation, factor: int) -> bool:
        """Whether a dim is asked for in which the factor stands behind another."""
        rule = equation.rule
        sides = (
            *zip(equation.inputs, rule.operands, strict=True),
            *zip(equation.outputs, rule.results, strict=True),
        )
        return any(
            self.classes.find(tensor, d) in self.asked
            for tensor, dims in sides
            if isinstance(tensor, int)
            for d, dim in enumerate(dims)
            if factor in dim
        )

    def _partial_ops(self) -> list[set[str]]:
        """For each tensor the reductions it may be waiting for, following them through the graph."""
        ops: list[set[str]] = [set() for _ in self.graph.avals]
        while self._spread_ops(self.graph.block, ops):
            pass
        return ops

    def _spread_ops(self, block: Block, ops: list[set[str]]) -> bool:
        changed = False

        def add(tensor: int, found: set[str]) -> None:
            nonlocal changed
            if not found <= ops[tensor]:
                ops[tensor] |= found
                changed = True

        for equation in block.equations:
            if equation.rule is None:
                for link in self.classes.links[equation.index]:
                    if isinstance(link.source, int):
                        add(link.target, ops[link.source])
                    if link.kind == "xs":
                        add(link.target, {"sum"})
                for body in equation.bodies:
                    changed |= self._spread_ops(body, ops)
                for link in self.classes.links[equation.index]:
                    if isinstance(link.source, int):
                        add(link.target, ops[link.source])
                continue
            for choice in self.choice_lists[equation.index]:
                made = {label.op for label in choice.results if label.kind == "P"}
                if not made:
                    continue
                if choice.linear >= 0 and not any(
                    isinstance(a, int) and label.op in ops[a]
                    for a, label in zip(equation.inputs, choice.operands, strict=True)
                    if label.kind == "P"
                ) and any(label.kind == "P" for label in choice.operands):
                    continue
                for output, label in zip(equation.outputs, choice.results, strict=True):
                    if label.kind == "P":
                        add(output, {label.op})
        return changed

    def _domain(self, tensor: int, ops: set[str]) -> tuple[Option, ...]:
        shape = self.graph.avals[tensor].shape
        found: list[Option] = []
        for dim in range(len(shape)):
            asked = not self.objective.closure or self.classes.find(tensor, dim) in self.asked
            if asked and self._may_split(tensor, dim):
                found.append((S(dim),))
        found.append((R,))
        found.extend((P(op),) for op in sorted(ops))
        return tuple(found)

    # The problem -------------------------------------------------------------------------------

    def solve(self, known: object, current: AxisLabels | None) -> tuple[AxisLabels, object]:
        """The labels of least cost, and a signature of the problem; `current` if that is `known`."""
        self._prepare()
        self._build()
        signature = self._signature()
        if signature == known and current is not None:
            return current, signature
        found = self._solve_once()
        widened = self._widen(found)
        if widened:
            self._build()
            found = self._solve_once()
        return found, signature

    def _prepare(self) -> None:
        """Domains of all variables."""
        for equation, _ in self.graph.equations():
            if equation.rule is not None:
                self.choice_lists[equation.index] = self._choices(equation)
        ops = self._partial_ops()
        self.domains = [self._domain(t, ops[t]) for t in range(len(self.graph.avals))]

    def _signature(self) -> object:
        return (
            tuple(self.sizes),
            tuple((scope, id(table)) for scope, table in self.tables),
            self.tables,  # holds the tables, so that no id is used again
        )

    def _build(self, free_input: int = -1) -> None:
        """Variables and tables of the whole graph, those of one argument's end left out if asked."""
        graph = self.graph
        self.sizes: list[int] = [len(d) for d in self.domains]
        self.choice_variables: dict[int, int] = {}
        self.tables: list[tuple[tuple[int, ...], Table]] = []
        for domain, tensor in zip(self.domains, range(len(self.domains)), strict=True):
            if len(domain) > 1:
                self.tables.append(((tensor,), preference_table(domain)))
        for equation, block in graph.equations():
            if equation.rule is None:
                self._add_loop(equation, block)
            else:
                self._add_equation(equation, block)
        self.input_labels = self._add_inputs(free_input)
        self.output_labels = self._add_outputs()

    def _variable(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _add_equation(self, equation: Equation, block: Block) -> None:
        found = self.choice_lists[equation.index]
        variable = self._variable(len(found))
        self.choice_variables[equation.index] = variable
        names = [n for n, _ in self.others]
        sizes = [self.request.axis_sizes[n] for n in names]
        theirs = [labels.choices[equation.index] for _, labels in self.others]
        work = self._work_table(equation, block, found)
        if work is not None:
            self.tables.append(((variable,), work))
        reads: dict[int, list[int]] = {}
        for position, atom in enumerate(equation.inputs):
            if isinstance(atom, int):
                reads.setdefault(atom, []).append(position)
        for tensor, positions in reads.items():
            size = tuple(
                self._bytes(graph_aval, [c.operands[p] for c in theirs], sizes)
                for graph_aval, p in ((self.graph.avals[tensor], p) for p in positions)
            )
            targets = tuple(tuple(c.operands[p] for p in positions) for c in found)
            table = read_table(
                self.domains[tensor], targets, size, self.size, self.mobility[tensor], block.weight
            )
            self.tables.append(((variable, tensor), table))
        for position, tensor in enumerate(equation.outputs):
            size = self._bytes(
                self.graph.avals[tensor], [c.results[position] for c in theirs], sizes
            )
            made = tuple(c.results[position] for c in found)
            table = store_table(
                self.domains[tensor], made, size, self.size, self.mobility[tensor], block.weight
            )
            self.tables.append(((variable, tensor), table))

    def _work_table(
        self, equation: Equation, block: Block, found: tuple[Choice, ...]
    ) -> Table | None:
        rule = equation.rule
        local = self._local_sizes(equation)
        costs = []
        for choice in found:
            cost = 0.0 if choice.factor >= 0 else WHOLE_COST
            if rule.works and choice.factor < 0:
                cost += block.weight * self._operand_bytes(equation) * self.objective.work * (
                    (self.size - 1) / self.size
                )
            if choice.factor >= 0:
                after = list(local)
                after[choice.factor] //= self.size
                for exchange in rule.factors[choice.factor].exchanges:
                    full = exchange.full_elements(after, self.size) * exchange.itemsize
                    cost += block.weight * (wire_bytes(exchange.kind, full, self.size) + 1e-3)
            costs.append(cost)
        return _unary(tuple(costs)) if any(costs) else None

    def _operand_bytes(self, equation: Equation) -> float:
        total = 0.0
        for position, atom in enumerate(equation.inputs):
            aval = self.graph.aval(atom)
            size = prod(aval.shape) * aval.itemsize
            for name, labels in self.others:
                if labels.choices[equation.index].operands[position].kind == "S":
                    size /= self.request.axis_sizes[name]
            total += size
        return total

    def _add_loop(self, equation: Equation, block: Block) -> None:
        for link in self.classes.links[equation.index]:
            if isinstance(link.source, Constant):
                continue
            weight = link.weight if link.inside else block.weight
            table = self._link_table(link, weight)
            scope = (link.source, link.target)
            if link.source == link.target:
                continue
            self.tables.append((scope, table))
        for atom, _ in predicates(equation):
            if isinstance(atom, int):
                domain = self.domains[atom]
                cost = tuple(
                    block.weight * read_cost(o, R, self._stored_bytes(atom), self.size, _FREE)
                    for o in domain
                )
                self.tables.append(((atom,), _unary(cost)))

    def _link_table(self, link: Link, weight: float) -> Table:
        source = self.domains[link.source]
        target = self.domains[link.target]
        size = self._stored_bytes(link.source if link.source_shift > 0 else link.target)
        # A stack is read slice by slice: its conversions before the loop are of all of it.
        mobility = self.mobility[link.source]
        key = (link.kind, source, target, size, self.size, mobility, weight)
        found = _LINK_TABLES.get(key)
        if found is None:
            rows = [
                [_link_cost(link.kind, s, t, size, self.size, mobility, weight) for t in target]
                for s in source
            ]
            found = _LINK_TABLES[key] = intern_table(np.array(rows))
        return found

    def _add_inputs(self, free_input: int) -> list[tuple[Label, ...]]:
        """Arguments: free to come in as their given label, at the cost of a move if stored otherwise."""
        labels = []
        ends = zip(self.graph.block.inputs, self.request.inputs, strict=True)
        for position, (tensor, given) in enumerate(ends):
            domain = self.domains[tensor]
            if position == free_input:
                labels.append(())
                continue
            if given is None:
                labels.append(())
                # What is free comes in as it is stored, and cannot come in partial.
                size = self._stored_bytes(tensor)
                cost = tuple(
                    np.inf
                    if o[0].kind == "P"
                    else store_cost(o[0], o, size, self.size, self.mobility[tensor])
                    for o in domain
                )
            else:
                label = given.label(self.axis)
                labels.append((label,))
                size = self._given_bytes(tensor, given)
                cost = tuple(
                    store_cost(label, o, size, self.size, self.mobility[tensor]) for o in domain
                )
            if any(cost):
                self.tables.append(((tensor,), _unary(cost)))
        return labels

    def _given_bytes(self, tensor: int, given: Layout) -> float:
        aval = self.graph.avals[tensor]
        size = prod(aval.shape) * aval.itemsize
        for name in given.axes - {self.axis}:
            size /= self.request.axis_sizes[name]
        return size

    def _add_outputs(self) -> list[Label | None]:
        labels: list[Label | None] = []
        for atom, given in zip(self.graph.block.outputs, self.request.outputs, strict=True):
            if isinstance(atom, Constant):
                labels.append(given.label(self.axis) if given else R)
                continue
            domain = self.domains[atom]
            if given is None:
                labels.append(None)
                # Partial results are reduced, into whichever label is cheapest.
                size = self._stored_bytes(atom)
                cost = tuple(
                    min(
                        read_cost(o, t[0], size, self.size, self.mobility[atom])
                        for t in domain
                        if t[0].kind != "P"
                    )
                    for o in domain
                )
            else:
                label = given.label(self.axis)
                labels.append(label)
                size = self._given_bytes(atom, given)
                cost = tuple(
                    read_cost(o, label, size, self.size, self.mobility[atom]) for o in domain
                )
            if any(cost):
                self.tables.append(((atom,), _unary(cost)))
        return labels

    def input_marginals(self, position: int, chosen: Label) -> dict[Label, float]:
        """For each label of an argument, by how much the least cost exceeds that of `chosen`."""
        tensor = self.graph.block.inputs[position]
        # Whatever dim the argument is split in must be allowed downstream as well.
        rank = len(self.graph.avals[tensor].shape)
        self.asked |= self.classes.of(tensor, range(rank))
        self._prepare()
        labels = [o[0] for o in self.domains[tensor] if o[0].kind != "P"]
        self._build(free_input=position)
        slot = self._variable(len(labels))
        rows = [
            [
                store_cost(label, o, self._stored_bytes(tensor), self.size, self.mobility[tensor])
                for o in self.domains[tensor]
            ]
            for label in labels
        ]
        self.tables.append(((slot, tensor), intern_table(np.array(rows))))
        costs = min_marginals(Problem(tuple(self.sizes), tuple(self.tables)), [slot])[slot]
        base = costs[labels.index(chosen)]
        return {label: float(cost - base) for label, cost in zip(labels, costs, strict=True)}

    # The solution ------------------------------------------------------------------------------

    def _solve_once(self) -> AxisLabels:
        solution = solve(Problem(tuple(self.sizes), tuple(self.tables)))
        result = AxisLabels(cost=solution.cost, lower_bound=solution.lower_bound)
        for tensor, domain in enumerate(self.domains):
            result.stored[tensor] = domain[solution.labels[tensor]]
        for index, variable in self.choice_variables.items():
            result.choices[index] = self.choice_lists[index][solution.labels[variable]]
        result.inputs = tuple(
            given[0] if given else result.stored[tensor][0]
            for tensor, given in zip(self.graph.block.inputs, self.input_labels, strict=True)
        )
        result.outputs = tuple(
            label if label is not None else self._free_output(atom, result)
            for atom, label in zip(self.graph.block.outputs, self.output_labels, strict=True)
        )
        return result

    def _free_output(self, atom: Atom, result: AxisLabels) -> Label:
        option = result.stored[atom]
        size = self._stored_bytes(atom)
        targets = [o[0] for o in self.domains[atom] if o[0].kind != "P"]
        return min(
            targets,
            key=lambda t: (
                read_cost(option, t, size, self.size, self.mobility[atom]),
                t not in option,
                targets.index(t),
            ),
        )

    def _widen(self, found: AxisLabels) -> bool:
        """Lets tensors that were converted more than once exist in two labels; whether any may."""
        conversions: dict[int, int] = {}

        def count(tensor: int, source: Label | Option, target: Label) -> None:
            option = source if isinstance(source, tuple) else (source,)
            if read_cost(option, target, 1e6, self.size, _FREE) > 1:
                conversions[tensor] = conversions.get(tensor, 0) + 1

        for equation, _ in self.graph.equations():
            choice = found.choices.get(equation.index)
            if choice is None:
                continue
            for atom, label in zip(equation.inputs, choice.operands, strict=True):
                if isinstance(atom, int):
                    count(atom, found.stored[atom], label)
            for tensor, label in zip(equation.outputs, choice.results, strict=True):
                count(tensor, label, found.stored[tensor][0])
        for tensor, label in zip(self.graph.block.inputs, found.inputs, strict=True):
            count(tensor, label, found.stored[tensor][0])
        for atom, label in zip(self.graph.block.outputs, found.outputs, strict=True):
            if isinstance(atom, int):
                count(atom, found.stored[atom], label)
        bound = {t for e, _ in self.graph.equations() for b in e.bodies for t in b.inputs}
        changed = False
        for tensor, times in conversions.items():
            singles = [o[0] for o in self.domains[tensor] if o != (R,)]
            if times < 2 or len(singles) < 2 or tensor in bound:
                continue
            pairs = tuple(
                (a, b)
                for i, a in enumerate(singles)
                for b in singles[i + 1 :]
                if not (a.kind == b.kind == "P")
            )
            self.domains[tensor] += pairs
            changed = changed or bool(pairs)
        return changed


_FREE = Mobility()
_HELD = Mobility(gather=HOLD)
_LINK_TABLES: dict[object, Table] = {}
_UNARY: dict[tuple[float, ...], Table] = {}


def _unary(costs: tuple[float, ...]) -> Table:
    found = _UNARY.get(costs)
    if found is None:
        found = _UNARY[costs] = intern_table(np.array(costs))
    return found


def _link_cost(
    kind: str,
    source: Option,
    target: Option,
    size: float,
    axis_size: int,
    mobility: Mobility,
    weight: float,
) -> float:
    """What it costs to bind a tensor stored as `source` to one stored as `target`."""
    return min(
        _bind_cost(kind, source, delivered, size, axis_size, mobility, weight)
        + weight * store_cost(delivered, target, size, axis_size, mobility)
        for delivered in target[:1]
    )


def _bind_cost(
    kind: str,
    source: Option,
    delivered: Label,
    size: float,
    axis_size: int,
    mobility: Mobility,
    weight: float,
) -> float:
    if kind == "same":
        return 0.0 if source == (delivered,) else np.inf
    if kind != "xs" and kind != "ys":
        return weight * read_cost(source, delivered, size, axis_size, mobility)
    if kind == "ys":
        return weight * read_cost(source, slice_label(delivered), size, axis_size, mobility)
    best = np.inf
    for wanted in stack_labels(delivered):
        for member in source:
            if member.kind != "R" and wanted.kind == "R":
                continue  # a stack is never gathered whole: its slices are, inside the loop
            best = min(best, weight * move_cost(member, wanted, size, axis_size, mobility))
    return best


def slice_label(stack: Label) -> Label:
    """The label of one slice of a stack that is made slice by slice; the leading dim is cut after it."""
    if stack.kind != "S":
        return stack
    return S(stack.dim - 1) if stack.dim else R


def stack_labels(inner: Label) -> tuple[Label, ...]:
    """In which labels a stack can be read slice by slice so that a slice is `inner`."""
    if inner == P("sum"):
        return (P("sum"), S(0))  # only the owner of the slice has it
    return (S(inner.dim + 1) if inner.kind == "S" else inner,)
