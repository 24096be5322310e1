"""Putting every conversion and every equation in order.

A block is scheduled in program order. An operand is converted just before its first use, each leg once,
then AllReduces that can travel together are put together (`buckets`).
"""

from pypto_spmd.collectives.assemble import Layouts
from pypto_spmd.collectives.buckets import bucket
from pypto_spmd.collectives.drafts import DraftBlock, DraftConvert, DraftRun
from pypto_spmd.collectives.graph import Atom, Block, Constant, Equation
from pypto_spmd.collectives.links import links_of
from pypto_spmd.collectives.region import Region
from pypto_spmd.sharding.layout import Layout
from pypto_spmd.sharding.redistribute import Leg, redistribute


def schedule(layouts: Layouts) -> DraftBlock:
    """The draft schedule of a whole program, its AllReduces bucketed."""
    graph = layouts.request.graph
    inputs = tuple(layouts.argument(i) for i in range(len(graph.block.inputs)))
    outputs = tuple(layouts.output(i) for i in range(len(graph.block.outputs)))
    return _BlockScheduler(layouts, graph.block, inputs, outputs).run()


class _BlockScheduler:
    """Schedules one block; what is available starts with the block's inputs."""

    def __init__(
        self,
        layouts: Layouts,
        block: Block,
        inputs: tuple[Layout, ...],
        outputs: tuple[Layout, ...],
    ) -> None:
        self.layouts = layouts
        self.graph = layouts.request.graph
        self.axis_sizes = layouts.request.axis_sizes
        self.block = block
        self.inputs = inputs
        self.outputs = outputs
        self.items: list[DraftConvert | DraftRun] = []
        self.available: dict[int, list[Layout]] = {}
        self.wanted = self._wanted()
        self.stores: dict[int, bool] = {}

    def _wanted(self) -> dict[int, list[Layout]]:
        """The layouts in which each tensor is read in this block, in order."""
        wanted: dict[int, list[Layout]] = {}
        reads = [
            *((e.inputs, self._operands(e)) for e in self.block.equations),
            (self.block.outputs, self.outputs),
        ]
        for atoms, layouts in reads:
            for atom, layout in zip(atoms, layouts, strict=True):
                if not isinstance(atom, Constant):
                    wanted.setdefault(atom, []).append(layout)
        return wanted

    def run(self) -> DraftBlock:
        for tensor, layout in zip(self.block.inputs, self.inputs, strict=True):
            self.available.setdefault(tensor, []).append(layout)
        for equation in self.block.equations:
            if equation.rule is None:
                self._loop(equation)
            else:
                self._equation(equation)
        for atom, layout in zip(self.block.outputs, self.outputs, strict=True):
            self._require(atom, layout, None)
        items = bucket(self._read_later(), self.graph, self.axis_sizes)
        return DraftBlock(self.block, self.inputs, items, self.outputs)

    def _read_later(self) -> list[DraftConvert | DraftRun]:
        """The items without conversions that nothing reads, a cheaper way having been found since."""
        read = set(zip(self.block.outputs, self.outputs, strict=True))
        kept = []
        for item in reversed(self.items):
            if isinstance(item, DraftRun):
                read.update(zip(item.equation.inputs, item.operands, strict=True))
            elif (item.tensor, item.leg.target) in read:
                read.add((item.tensor, item.leg.source))
            else:
                continue
            kept.append(item)
        return kept[::-1]

    def _operands(self, equation: Equation) -> tuple[Layout, ...]:
        """The layouts in which an equation reads its operands."""
        layouts = self.layouts
        if equation.rule is not None:
            return tuple(layouts.operand(equation, i) for i in range(len(equation.inputs)))
        if equation.name == "cond":
            first = equation.bodies[0]
            return (Layout.replicated(0), *(layouts.stored(t) for t in first.inputs))
        if equation.region is not None:
            (body,) = equation.bodies
            bound = map(layouts.stored, body.inputs)
            return tuple(map(layouts.around, equation.region.inputs, bound))
        position = _Positions(equation)
        found: dict[int, Layout] = {}
        for link in links_of(equation, self.block.weight):
            if link.kind in ("const", "init"):
                found[position.operand(link.target)] = layouts.stored(link.target)
            elif link.kind == "xs":
                found[position.operand(link.target)] = layouts.stack(link)
        return tuple(found[i] for i in range(len(equation.inputs)))

    def _read(self, equation: Equation) -> tuple[Layout, ...]:
        """Makes an equation's operands available, and tells their layouts."""
        operands = self._operands(equation)
        for atom, layout in zip(equation.inputs, operands, strict=True):
            self._require(atom, layout, equation)
        return operands

    def _equation(self, equation: Equation) -> None:
        results = tuple(self.layouts.result(equation, i) for i in range(len(equation.outputs)))
        operands = self._read(equation)
        self.items.append(DraftRun(equation, self.block, operands, results))
        self._define(equation, results)

    def _define(self, equation: Equation, results: tuple[Layout, ...]) -> None:
        for tensor, layout in zip(equation.outputs, results, strict=True):
            self.available[tensor] = [layout]

    def _require(self, atom: Atom, target: Layout, reader: Equation | None) -> None:
        """Makes a tensor available in `target`."""
        if isinstance(atom, Constant) or target in self.available[atom]:
            return
        if atom not in self.stores:
            self.stores[atom] = self._total(atom, stores=True) <= self._total(atom, stores=False)
        self._convert(
            atom, self._legs(atom, target, self.available[atom], self.stores[atom]), reader
        )

    def _legs(
        self, tensor: int, target: Layout, available: list[Layout], stores: bool
    ) -> tuple[Leg, ...]:
        """How a tensor gets to `target`: by way of a layout in which it is stored, or straight.

        The axes' stored labels were chosen one by one, so that together they may be no station on the way.
        """
        straight = self._path(tensor, target, available)
        stored = self.layouts.stored(tensor, {a: target.label(a) for a in self.layouts.axes})
        if stored in available:
            return straight
        there = self._path(tensor, stored, available)
        onward = self._path(tensor, target, [stored])
        if stores or self._cost(tensor, there + onward) <= self._cost(tensor, straight):
            return there + onward
        return straight

    def _total(self, tensor: int, *, stores: bool) -> tuple[float, int]:
        """What all readers of a tensor cost: a station may be dear for one of them and serve the others."""
        available = list(self.available[tensor])
        legs: list[Leg] = []
        for target in self.wanted[tensor]:
            if target not in available:
                for leg in self._legs(tensor, target, available, stores):
                    if leg.target not in available:
                        available.append(leg.target)
                        legs.append(leg)
        return self._cost(tensor, tuple(legs))

    def _path(self, tensor: int, target: Layout, sources: list[Layout]) -> tuple[Leg, ...]:
        """The cheapest legs to `target` from any of several layouts."""
        aval = self.graph.avals[tensor]
        paths = [
            redistribute(source, target, aval.shape, aval.itemsize, self.axis_sizes)
            for source in sources
        ]
        return min(paths, key=lambda legs: self._cost(tensor, legs))

    def _cost(self, tensor: int, legs: tuple[Leg, ...]) -> tuple[float, int]:
        """Bytes sent by some legs, and how many collectives they are."""
        aval = self.graph.avals[tensor]
        sent = sum(leg.wire_bytes(aval.shape, aval.itemsize, self.axis_sizes) for leg in legs)
        return sent, sum(leg.is_collective for leg in legs)

    def _convert(self, tensor: int, legs: tuple[Leg, ...], reader: Equation | None) -> None:
        for leg in legs:
            if leg.target not in self.available[tensor]:
                self.items.append(DraftConvert(tensor, leg, reader, self.block))
                self.available[tensor].append(leg.target)

    # Loops -------------------------------------------------------------------------------------

    def _loop(self, equation: Equation) -> None:
        if equation.name == "cond":
            self._cond(equation)
            return
        if equation.region is not None:
            self._region(equation, equation.region)
            return
        bound: dict[int, Layout] = {}
        wanted: dict[tuple[int, int], Layout] = {}
        results: dict[int, Layout] = {}
        position = _Positions(equation)
        for link in links_of(equation, self.block.weight):
            if link.kind in ("const", "init", "xs"):
                bound[link.target] = self.layouts.stored(link.target)
            elif link.kind == "same":
                bound[link.target] = self.layouts.stored(link.tensor)
            elif link.kind == "carry":
                wanted[position.body_output(link.target)] = self.layouts.stored(link.target)
            elif link.kind == "result":
                results[link.target] = self.layouts.stored(link.tensor)
            elif link.kind == "ys":
                results[link.target] = self.layouts.pile(link)
                place = position.pile(link.target)
                wanted[place] = self.layouts.slice_of(results[link.target])
        if equation.name == "while":
            wanted[0, 0] = Layout.replicated(0)
        made = tuple(results[t] for t in equation.outputs)
        read = self._read(equation)
        bodies = tuple(
            _BlockScheduler(
                self.layouts,
                body,
                tuple(bound[t] for t in body.inputs),
                tuple(wanted[b, i] for i in range(len(body.outputs))),
            ).run()
            for b, body in enumerate(equation.bodies)
        )
        self.items.append(DraftRun(equation, self.block, read, made, bodies))
        self._define(equation, made)

    def _cond(self, equation: Equation) -> None:
        made = tuple(self.layouts.stored(t) for t in equation.outputs)
        read = self._read(equation)
        bodies = tuple(
            _BlockScheduler(self.layouts, body, read[1:], made).run() for body in equation.bodies
        )
        self.items.append(DraftRun(equation, self.block, read, made, bodies))
        self._define(equation, made)

    def _region(self, equation: Equation, region: Region) -> None:
        layouts = self.layouts
        (body,) = equation.bodies
        bound = tuple(layouts.stored(t) for t in body.inputs)
        given_back = tuple(layouts.inside(region.axes, t) for t in equation.outputs)
        made = tuple(map(layouts.around, region.outputs, given_back))
        read = self._read(equation)
        inside = _BlockScheduler(layouts, body, bound, given_back).run()
        self.items.append(DraftRun(equation, self.block, read, made, (inside,)))
        self._define(equation, made)


class _Positions:
    """Where the tensors of a scan or while stand among its operands and its bodies' outputs."""

    def __init__(self, equation: Equation) -> None:
        self.operands: dict[int, int] = {}
        self.outputs: dict[int, tuple[int, int]] = {}
        if equation.name == "scan":
            consts, carry, _ = equation.counts
            (body,) = equation.bodies
            self.operands = {t: i for i, t in enumerate(body.inputs)}
            self.outputs = {body.inputs[consts + i]: (0, i) for i in range(carry)}
            piles = range(carry, len(equation.outputs))
            self.piles = {equation.outputs[i]: (0, i) for i in piles}
        else:
            cond_consts, body_consts, carry = equation.counts
            cond, body = equation.bodies
            self.operands = {cond.inputs[i]: i for i in range(cond_consts)}
            self.operands |= {t: cond_consts + i for i, t in enumerate(body.inputs)}
            self.outputs = {body.inputs[body_consts + i]: (1, i) for i in range(carry)}
            self.piles = {}

    def operand(self, body_input: int) -> int:
        """Which operand is bound to a body input."""
        return self.operands[body_input]

    def body_output(self, body_input: int) -> tuple[int, int]:
        """Which (body, output) is the next trip's value of a carry."""
        return self.outputs[body_input]

    def pile(self, result: int) -> tuple[int, int]:
        """Which (body, output) is piled up into a result."""
        return self.piles[result]
