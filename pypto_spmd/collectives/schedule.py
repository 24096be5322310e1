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

    def _equation(self, equation: Equation) -> None:
        operands = tuple(self.layouts.operand(equation, i) for i in range(len(equation.inputs)))
        results = tuple(self.layouts.result(equation, i) for i in range(len(equation.outputs)))
        for atom, layout in zip(equation.inputs, operands, strict=True):
            self._require(atom, layout, equation)
        self.items.append(DraftRun(equation, self.block, operands, results))
        self._define(equation, results)

    def _define(self, equation: Equation, results: tuple[Layout, ...]) -> None:
        for tensor, layout in zip(equation.outputs, results, strict=True):
            self.available[tensor] = [layout]

    def _require(self, atom: Atom, target: Layout, reader: Equation | None) -> None:
        """Makes a tensor available in `target`, by way of a layout in which it is stored.

        The axes' stored labels were chosen one by one, so that together they may be no station on the way:
        where it is cheaper, the tensor goes straight to the target.
        """
        if isinstance(atom, Constant) or target in self.available[atom]:
            return
        stored = self.layouts.stored(atom, {a: target.label(a) for a in self.layouts.axes})
        straight = self._path(atom, target, self.available[atom])
        if stored not in self.available[atom]:
            there = self._path(atom, stored, self.available[atom])
            onward = self._path(atom, target, [stored])
            if self._cost(atom, there + onward) <= self._cost(atom, straight):
                self._convert(atom, there, reader)
                straight = onward
        self._convert(atom, straight, reader)

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
        operands: dict[int, Layout] = {}
        results: dict[int, Layout] = {}
        position = _Positions(equation)
        for link in links_of(equation, self.block.weight):
            if link.kind in ("const", "init"):
                bound[link.target] = self.layouts.stored(link.target)
                operands[position.operand(link.target)] = bound[link.target]
            elif link.kind == "xs":
                bound[link.target] = self.layouts.stored(link.target)
                operands[position.operand(link.target)] = self.layouts.stack(link)
            elif link.kind == "same":
                bound[link.target] = self.layouts.stored(link.tensor)
            elif link.kind == "carry":
                wanted[position.body_output(link.target)] = self.layouts.stored(link.target)
            elif link.kind == "result":
                results[link.target] = self.layouts.stored(link.tensor)
            elif link.kind == "ys":
                results[link.target] = self.layouts.pile(link.target)
                place = position.pile(link.target)
                wanted[place] = self.layouts.slice_of(results[link.target])
        if equation.name == "while":
            wanted[0, 0] = Layout.replicated(0)
        read = tuple(operands[i] for i in range(len(equation.inputs)))
        made = tuple(results[t] for t in equation.outputs)
        for atom, layout in zip(equation.inputs, read, strict=True):
            self._require(atom, layout, equation)
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
        first = equation.bodies[0]
        read = (Layout.replicated(0), *(self.layouts.stored(t) for t in first.inputs))
        made = tuple(self.layouts.stored(t) for t in equation.outputs)
        for atom, layout in zip(equation.inputs, read, strict=True):
            self._require(atom, layout, equation)
        bodies = tuple(
            _BlockScheduler(self.layouts, body, read[1:], made).run() for body in equation.bodies
        )
        self.items.append(DraftRun(equation, self.block, read, made, bodies))
        self._define(equation, made)

    def _region(self, equation: Equation, region: Region) -> None:
        layouts = self.layouts
        (body,) = equation.bodies
        bound = tuple(layouts.stored(t) for t in body.inputs)
        read = tuple(map(layouts.around, region.inputs, bound))
        given_back = tuple(layouts.inside(region.axes, t) for t in equation.outputs)
        made = tuple(map(layouts.around, region.outputs, given_back))
        for atom, layout in zip(equation.inputs, read, strict=True):
            self._require(atom, layout, equation)
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
