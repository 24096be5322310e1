"""One mesh axis as a least-cost labelling problem, the labels of the other axes given.

There is a variable for the labelling that each equation chooses and one for the labels in which each
tensor is stored, and there are tables for what reading and storing cost. A tensor is stored in one label,
or in two where that saves a conversion: the larger sets are added only for tensors that a first solution
converted more than once, and the axis is solved again.
"""

from collections.abc import Mapping
from math import prod

import numpy as np

from pypto_spmd.collectives.assemble import Layouts
from pypto_spmd.collectives.axis_tables import (
    choice_list,
    domain_of,
    equation_tables,
    link_table,
    partial_makers,
    unary,
    whole_choices,
)
from pypto_spmd.collectives.facts import NOTHING, EquationFacts, GraphFacts
from pypto_spmd.collectives.graph import Atom, Constant, Equation, Graph
from pypto_spmd.collectives.joint import JointMoves
from pypto_spmd.collectives.links import Link, predicates
from pypto_spmd.collectives.objective import (
    COLLECTIVE_COST,
    FREE,
    Mobility,
    Option,
    mobility,
    preference_table,
    read_cost,
    store_cost,
)
from pypto_spmd.collectives.request import AxisLabels, Request
from pypto_spmd.collectives.rules import Choice
from pypto_spmd.collectives.solver.elimination import Problem, Table, intern_table, solve
from pypto_spmd.collectives.solver.min_marginals import min_marginals
from pypto_spmd.sharding.layout import Label, Layout, R, S, open_dims


class AxisProblem:
    """The problem of one axis.

    Args:
        request: what is asked.
        facts: of its graph.
        axis: the axis.
        others: the labels of the axes that have some already.
        layouts: those of a labelling of all axes, `others` among them, where moves on several axes are to
            count what they send together; without, each axis counts by itself.
    """

    def __init__(
        self,
        request: Request,
        facts: GraphFacts,
        axis: str,
        others: Mapping[str, AxisLabels],
        layouts: Layouts | None = None,
    ) -> None:
        self.request = request
        self.facts = facts
        self.graph: Graph = request.graph
        self.axis = axis
        self.size = request.axis_sizes[axis]
        self.layouts = layouts
        self.others = tuple(others.values())
        self.other_sizes = tuple(request.axis_sizes[a] for a in others)
        self.objective = request.objective
        self._read_given()
        self.mobility = self._mobilities()
        self.choice_lists: dict[int, tuple[Choice, ...]] = {}
        self.domains: list[tuple[Option, ...]] = []

    def solve(self) -> AxisLabels:
        """The labels of least cost."""
        self._prepare()
        self._build()
        found = self._solve_once()
        if self._widen(found):
            self._build()
            found = self._solve_once()
        return found

    def input_marginals(self, position: int, chosen: Label) -> dict[Label, float]:
        """For each label of an argument, by how much the least cost exceeds that of `chosen`."""
        tensor = self.graph.block.inputs[position]
        # Whatever dim the argument is split in must be allowed downstream as well.
        self.asked |= set(self.facts.dims[tensor])
        self._prepare()
        labels = [o[0] for o in self.domains[tensor] if o[0].kind != "P"]
        self._build(free_input=position)
        slot = self._variable(len(labels))
        size = self._stored_bytes(tensor)
        rows = [
            [
                store_cost(label, o, size, self.size, self.mobility[tensor])
                for o in self.domains[tensor]
            ]
            for label in labels
        ]
        self.tables.append(((slot, tensor), intern_table(np.array(rows))))
        problem = Problem(tuple(self.sizes), tuple(self.tables))
        costs = min_marginals(problem, [slot], negligible=COLLECTIVE_COST / 2)[slot]
        base = costs[labels.index(chosen)]
        return {label: float(cost - base) for label, cost in zip(labels, costs, strict=True)}

    # What is given -----------------------------------------------------------------------------

    def _read_given(self) -> None:
        """The classes of dims that given layouts ask to split, and those of data and of state."""
        request, dims = self.request, self.facts.dims
        self.asked: set[int] = set()
        self.data: set[int] = set()
        self.state: set[int] = set()
        block = self.graph.block
        for tensor, layout, state in zip(
            block.inputs, request.inputs, request.is_state, strict=True
        ):
            label = layout.label(self.axis) if layout is not None else R
            if label.kind == "S":
                self.asked.add(dims[tensor][label.dim])
                (self.state if state else self.data).add(dims[tensor][label.dim])
        for atom, layout in zip(block.outputs, request.outputs, strict=True):
            label = layout.label(self.axis) if layout is not None else R
            if label.kind == "S" and isinstance(atom, int):
                self.asked.add(dims[atom][label.dim])
        self.inside = self.facts.inside.get(self.axis, NOTHING)
        self.constraints: dict[int, frozenset[Label]] = {}
        for index, known in self.facts.equations.items():
            spec = known.equation.constraint
            if spec is not None and index not in self.inside.equations:
                output = known.equation.outputs[0]
                label = Layout.from_spec(spec, len(dims[output])).label(self.axis)
                if label.kind == "S":
                    self.asked.add(dims[output][label.dim])
                    self.constraints[index] = frozenset({label})
                    if output in self.graph.padded:
                        is_state = request.is_state[self.graph.padded[output]]
                        (self.state if is_state else self.data).add(dims[output][label.dim])
                else:
                    self.constraints[index] = frozenset({R, *map(S, open_dims(spec))})
        for _, _, links in self.facts.loops:
            for link in links:
                outside = link.target if link.inside else link.source
                label = link.given_label(self.axis)
                if label is not None and label.kind == "S" and isinstance(outside, int):
                    self.asked.add(dims[outside][label.dim])

    def _mobilities(self) -> list[Mobility]:
        """By how much moving each tensor is made dearer on this axis (design, objective "standard")."""
        hold, dims = self.objective.hold, self.facts.dims
        if hold == 1.0:
            return [FREE] * len(dims)
        state_only = self._state_only()
        found = self._holding(state_only)
        # A stack of layers is gathered, and its gradients scattered, slice by slice inside the loop.
        layers = {
            dims[link.tensor][0]
            for _, _, links in self.facts.loops
            for link in links
            if link.kind == "xs" and link.source in state_only
        }
        for tensor, classes in enumerate(dims):
            if not layers.isdisjoint(classes):
                m = found[tensor]
                found[tensor] = mobility(m.gather, m.reduce, m.free_pairs, whole=hold)
        return found

    def _holding(self, state_only: frozenset[int]) -> list[Mobility]:
        """What holds data still on an axis that splits data, and state on the others."""
        hold, dims = self.objective.hold, self.facts.dims
        if not self.data:
            held = mobility(gather=hold)
            return [held if t in state_only else FREE for t in range(len(dims))]
        experts = self.state & self.facts.batched
        made: dict[tuple[tuple[bool, bool], ...], Mobility] = {}
        found = []
        for classes in dims:
            kinds = tuple((c in self.data, c in experts) for c in classes)
            if kinds not in made:
                pairs = tuple(
                    (i, j)
                    for i, (data, expert) in enumerate(kinds)
                    for j, (other_data, other_expert) in enumerate(kinds)
                    if (data and other_expert) or (expert and other_data)
                )
                is_data = any(data for data, _ in kinds)
                made[kinds] = mobility(hold, hold, pairs) if is_data else FREE
            found.append(made[kinds])
        return found

    def _state_only(self) -> frozenset[int]:
        """Tensors that depend on state and constants alone (and on some state)."""
        mixed: set[int] = set()
        from_state: set[int] = set()
        for tensor, state in zip(self.graph.block.inputs, self.request.is_state, strict=True):
            (from_state if state else mixed).add(tensor)
        links = {e.index: found for e, _, found in self.facts.loops}
        for equation, _ in self.facts.order:
            sources = [a for a in equation.inputs if isinstance(a, int)]
            for link in links.get(equation.index, ()):
                if link.inside or link.kind == "result":
                    continue
                # Constants and stacks keep what they are inside a loop; what is carried is mixed.
                kept = link.kind in ("const", "xs", "operand", "enter")
                pure = kept and link.source in from_state
                (from_state if pure else mixed).add(link.target)
            if any(s in mixed for s in sources):
                mixed.update(equation.outputs)
            elif any(s in from_state for s in sources):
                from_state.update(equation.outputs)
        return frozenset(from_state - mixed)

    # Sizes -------------------------------------------------------------------------------------

    def _given_bytes(self, tensor: int, given: Layout) -> float:
        pieces = prod(self.request.axis_sizes[name] for name in given.axes - {self.axis})
        return self.facts.bytes[tensor] / pieces

    def _stored_bytes(self, tensor: int) -> float:
        """Bytes of a stored tensor, local to the other axes."""
        size = float(self.facts.bytes[tensor])
        for theirs, n in zip(self.others, self.other_sizes, strict=True):
            if theirs.stored[tensor][0].kind == "S":
                size /= n
        return size

    # Domains -----------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Domains of all variables."""
        asked, constrained = self.asked, self.constraints
        closure = self.objective.closure
        constants = self.facts.constants
        whole_equations = self.inside.equations | constants.equations
        whole_tensors = self.inside.tensors | constants.tensors
        for index, known in self.facts.equations.items():
            rule = known.equation.ruled
            theirs = tuple(labels.choices[index] for labels in self.others)
            if index in whole_equations:
                self.choice_lists[index] = whole_choices(rule, theirs, self.other_sizes, self.size)
                continue
            mask = tuple(
                not closure or any(c in asked for c in classes) for classes in known.factor_classes
            )
            found = choice_list(rule, theirs, self.other_sizes, mask, self.size)
            if index in constrained:
                granted = tuple(c for c in found if c.results[0] in constrained[index])
                found = granted or whole_choices(rule, theirs, self.other_sizes, self.size)
            self.choice_lists[index] = found
        ops = self._partial_ops()
        self.domains = []
        for tensor, classes in enumerate(self.facts.dims):
            if tensor in whole_tensors:
                self.domains.append(((R,),))
                continue
            mask = tuple(not closure or c in asked for c in classes)
            cuts = tuple(theirs.stored[tensor] for theirs in self.others) if any(mask) else ()
            self.domains.append(
                domain_of(
                    self.graph.avals[tensor].shape, mask, cuts, self.other_sizes, self.size,
                    frozenset(ops[tensor]),
                )
            )  # fmt: skip

    def _partial_ops(self) -> list[set[str]]:
        """For each tensor the reductions it may be waiting for, following them through the graph."""
        ops: list[set[str]] = [set() for _ in self.graph.avals]
        links = {e.index: found for e, _, found in self.facts.loops}
        changed = True
        while changed:
            changed = False
            for equation, _ in self.facts.order:
                for link in links.get(equation.index, ()):
                    if link.given_label(self.axis) is not None:
                        continue
                    found = set(ops[link.source]) if isinstance(link.source, int) else set()
                    if link.kind == "xs":
                        found.add("sum")
                    if not found <= ops[link.target]:
                        ops[link.target] |= found
                        changed = True
                if equation.rule is None:
                    continue
                for op, needs, results in partial_makers(self.choice_lists[equation.index]):
                    partial = [a for a in (equation.inputs[i] for i in needs) if isinstance(a, int)]
                    if needs and not any(op in ops[a] for a in partial):
                        continue
                    for result in results:
                        ops[equation.outputs[result]].add(op)
            changed = changed and bool(links)
        return ops

    # The problem -------------------------------------------------------------------------------

    def _variable(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _build(self, free_input: int = -1) -> None:
        """Variables and tables of the whole graph, those of one argument's end left out if asked."""
        self.sizes: list[int] = [len(d) for d in self.domains]
        self.choice_variables: dict[int, int] = {}
        self.tables: list[tuple[tuple[int, ...], Table]] = []
        self.joint = None
        if self.layouts is not None:
            self.joint = JointMoves(self.layouts, self.axis, self.domains, self.choice_lists)
        for tensor, domain in enumerate(self.domains):
            if len(domain) > 1:
                self.tables.append(((tensor,), preference_table(domain)))
        for index, known in self.facts.equations.items():
            self._add_equation(index, known)
        for equation, block, links in self.facts.loops:
            self._add_loop(equation, block.weight, links)
        self.input_labels = self._add_inputs(free_input)
        self.output_labels = self._add_outputs()

    def _add_equation(self, index: int, known: EquationFacts) -> None:
        found = self.choice_lists[index]
        equation = known.equation
        domains, moves = self.domains, self.mobility
        reads, outputs = known.reads, equation.outputs
        if (
            len(found) == 1
            and all(len(domains[t]) == 1 for t, _ in reads)
            and all(len(domains[t]) == 1 for t in outputs)
        ):
            return  # nothing to choose
        variable = self._variable(len(found))
        self.choice_variables[index] = variable
        bundle = equation_tables(
            equation.ruled,
            found,
            tuple(labels.choices[index] for labels in self.others),
            self.other_sizes,
            self.size,
            known.block.weight,
            self.objective.work if self._is_asked_to_split(known) else 0.0,
            tuple((positions, domains[t], moves[t]) for t, positions in reads),
            tuple((domains[t], moves[t]) for t in outputs),
            tuple(self.facts.bytes[t] for t, _ in reads),
            tuple(self.facts.bytes[t] for t in outputs),
            tuple(
                tuple([labels.stored[t][0].kind == "S" for labels in self.others]) for t in outputs
            ),
        )
        work, read_tables, store_tables = bundle
        if work is not None:
            self.tables.append(((variable,), work))
        for (tensor, _), table in zip(reads, read_tables, strict=True):
            if table is not None:
                self.tables.append(((variable, tensor), table))
        for tensor, table in zip(outputs, store_tables, strict=True):
            if table is not None:
                self.tables.append(((variable, tensor), table))
        if self.joint is not None:
            for tensor, table in self.joint.of_equation(index, known):
                self.tables.append(((variable, tensor), table))
            exchanged = self.joint.exchanged(index, known)
            if exchanged is not None:
                self.tables.append(((variable,), exchanged))

    def _is_asked_to_split(self, known: EquationFacts) -> bool:
        """Whether a given layout asks for a split that an equation can have.

        Work that nobody asks to split is not charged for: to split it all the same would send what the
        given layouts never need to be sent.
        """
        return any(c in self.asked for classes in known.factor_classes for c in classes)

    def _add_loop(self, equation: Equation, weight: float, links: tuple[Link, ...]) -> None:
        for link in links:
            given = link.given_label(self.axis)
            if given is not None:
                self._add_region_end(link, given)
                continue
            if isinstance(link.source, Constant) or link.source == link.target:
                continue
            # Stacks are read whole, piles are made slice by slice.
            size = self._stored_bytes(link.source if link.source_shift else link.target)
            table = link_table(
                link.kind, self.domains[link.source], self.domains[link.target], size, self.size,
                self.mobility[link.source], link.weight, self.objective.keep_stacks,
            )  # fmt: skip
            self.tables.append(((link.source, link.target), table))
            moved = self.joint.of_link(link) if self.joint is not None else None
            if moved is not None:
                self.tables.append(((link.source, link.target), moved))
        for atom, block in predicates(equation):
            if isinstance(atom, int):
                times = block.weight if block is not None else weight
                size = self._stored_bytes(atom)
                cost = tuple(
                    times * read_cost(o, R, size, self.size, FREE) for o in self.domains[atom]
                )
                self.tables.append(((atom,), unary(cost)))

    def _add_region_end(self, link: Link, given: Label) -> None:
        """An operand or result of a region, which lies outside as its spec says."""
        outside = link.target if link.inside else link.source
        if isinstance(outside, Constant):
            return
        moves, size = self.mobility[outside], self._stored_bytes(link.target)
        if link.inside:
            cost = [store_cost(given, o, size, self.size, moves) for o in self.domains[outside]]
        else:
            size *= self.size if given.kind == "S" else 1  # the target is one device's part
            cost = [read_cost(o, given, size, self.size, moves) for o in self.domains[outside]]
        if any(cost):
            self.tables.append(((outside,), unary(tuple(link.weight * c for c in cost))))

    def _add_inputs(self, free_input: int) -> list[Label | None]:
        """Arguments: their given label is what they come in with; what is free comes in as stored."""
        labels: list[Label | None] = []
        ends = zip(self.graph.block.inputs, self.request.inputs, strict=True)
        for position, (tensor, given) in enumerate(ends):
            domain = self.domains[tensor]
            labels.append(None if given is None else given.label(self.axis))
            if position == free_input:
                continue
            if given is None:
                size = self._stored_bytes(tensor)
                # It cannot come in partial.
                cost = tuple(
                    np.inf
                    if o[0].kind == "P"
                    else store_cost(o[0], o, size, self.size, self.mobility[tensor])
                    for o in domain
                )
            else:
                size = self._given_bytes(tensor, given)
                label = given.label(self.axis)
                cost = tuple(
                    store_cost(label, o, size, self.size, self.mobility[tensor]) for o in domain
                )
                if self.joint is not None:
                    self._add_unary(tensor, self.joint.of_end(tensor, given, leaving=False))
            if any(cost):
                self.tables.append(((tensor,), unary(cost)))
        return labels

    def _add_unary(self, tensor: int, table: Table | None) -> None:
        if table is not None:
            self.tables.append(((tensor,), table))

    def _add_outputs(self) -> list[Label | None]:
        """Results: read in their given label; what is free in any that is not partial."""
        labels: list[Label | None] = []
        ends = zip(self.graph.block.outputs, self.request.outputs, strict=True)
        for position, (atom, given) in enumerate(ends):
            labels.append(None if given is None else given.label(self.axis))
            if isinstance(atom, Constant):
                labels[-1] = labels[-1] or R
                continue
            domain, moves = self.domains[atom], self.mobility[atom]
            if given is None:
                size = self._stored_bytes(atom)
                targets = self._free_targets(position, atom)
            else:
                size = self._given_bytes(atom, given)
                targets = [given.label(self.axis)]
                if self.joint is not None:
                    self._add_unary(atom, self.joint.of_end(atom, given, leaving=True))
            cost = tuple(
                min(read_cost(o, t, size, self.size, moves) for t in targets) for o in domain
            )
            if any(cost):
                self.tables.append(((atom,), unary(cost)))
        return labels

    # The solution ------------------------------------------------------------------------------

    def _solve_once(self) -> AxisLabels:
        problem = Problem(tuple(self.sizes), tuple(self.tables))
        solution = solve(problem, negligible=COLLECTIVE_COST / 2)
        result = AxisLabels(cost=solution.cost, lower_bound=solution.lower_bound)
        picked = solution.labels
        result.stored = [domain[picked[tensor]] for tensor, domain in enumerate(self.domains)]
        for index, found in self.choice_lists.items():
            variable = self.choice_variables.get(index)
            result.choices[index] = found[0 if variable is None else picked[variable]]
        result.inputs = tuple(
            label if label is not None else result.stored[tensor][0]
            for tensor, label in zip(self.graph.block.inputs, self.input_labels, strict=True)
        )
        result.outputs = tuple(
            label if label is not None else self._free_output(position, atom, result)
            for position, (atom, label) in enumerate(
                zip(self.graph.block.outputs, self.output_labels, strict=True)
            )
        )
        return result

    def _free_targets(self, position: int, tensor: int) -> list[Label]:
        """In which labels a free result may go out, given those in which the other axes send it."""
        shape = self.graph.avals[tensor].shape
        theirs = [labels.outputs[position] for labels in self.others]
        targets = []
        for label, *more in self.domains[tensor]:
            if more or label.kind == "P":
                continue
            cuts = [n for o, n in zip(theirs, self.other_sizes, strict=True) if o == label]
            if label.kind == "R" or shape[label.dim] % (self.size * prod(cuts)) == 0:
                targets.append(label)
        return targets

    def _free_output(self, position: int, atom: Atom, result: AxisLabels) -> Label:
        assert isinstance(atom, int)  # a constant's label is R
        option = result.stored[atom]
        size, moves = self._stored_bytes(atom), self.mobility[atom]
        targets = self._free_targets(position, atom)

        def preference(target: Label) -> tuple[float, bool, int]:
            cost = read_cost(option, target, size, self.size, moves)
            return cost, target not in option, targets.index(target)

        return min(targets, key=preference)

    def _widen(self, found: AxisLabels) -> bool:
        """Lets tensors exist in two labels where that may save a conversion; whether any may.

        That is where a tensor was converted more than once; and where it was gathered, though as many readers
        want it split otherwise as an AllGather sends AllToAlls' bytes.
        """
        stored = found.stored
        conversions: dict[int, int] = {}
        split_reads: dict[int, int] = {}
        made: dict[int, Label] = dict(zip(self.graph.block.inputs, found.inputs, strict=True))
        for index, known in self.facts.equations.items():
            made |= zip(known.equation.outputs, found.choices[index].results, strict=True)

        def count(tensor: int, source: Option, target: Label) -> None:
            if target not in source and read_cost(source, target, 1e6, self.size, FREE) > 1:
                conversions[tensor] = conversions.get(tensor, 0) + 1

        def count_read(tensor: int, target: Label) -> None:
            if target.kind == "S" and target != made.get(tensor):
                split_reads[tensor] = split_reads.get(tensor, 0) + 1
            count(tensor, stored[tensor], target)

        for index, known in self.facts.equations.items():
            for tensor, positions in known.reads:
                for label in {found.choices[index].operands[p] for p in positions}:
                    count_read(tensor, label)
        for _, _, links in self.facts.loops:
            for link in links:
                given = link.given_label(self.axis)
                if given is not None and not link.inside and isinstance(link.source, int):
                    count_read(link.source, given)
        for tensor, label in made.items():
            count(tensor, (label,), stored[tensor][0])
        for atom, label in zip(self.graph.block.outputs, found.outputs, strict=True):
            if isinstance(atom, int):
                count_read(atom, label)
        bound = {t for e, _, _ in self.facts.loops for b in e.bodies for t in b.inputs}
        changed = False
        for tensor, times in conversions.items():
            singles = [o[0] for o in self.domains[tensor] if o != (R,)]
            was_gathered = stored[tensor] == (R,) and split_reads.get(tensor, 0) >= self.size
            if (times < 2 and not was_gathered) or len(singles) < 2 or tensor in bound:
                continue
            pairs = tuple(
                (a, b)
                for i, a in enumerate(singles)
                for b in singles[i + 1 :]
                if not a.kind == b.kind == "P"
            )
            self.domains[tensor] += pairs
            changed = changed or bool(pairs)
        return changed
