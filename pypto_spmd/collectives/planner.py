"""From a graph to a program: infer the labels, assemble layouts, schedule, number the steps."""

import gc
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from operator import attrgetter

import numpy as np
from jax.sharding import PartitionSpec

from pypto_spmd.collectives.assemble import Layouts, assemble
from pypto_spmd.collectives.by_hand import COLLECTIVES, axes_of, full_elements
from pypto_spmd.collectives.drafts import DraftBlock, DraftConvert, DraftRun
from pypto_spmd.collectives.effects import ACTIONS
from pypto_spmd.collectives.explore import explorer
from pypto_spmd.collectives.facts import GraphFacts, inside_regions, read_graph
from pypto_spmd.collectives.graph import Graph
from pypto_spmd.collectives.hand_faults import hand_faults
from pypto_spmd.collectives.inference import infer, refine
from pypto_spmd.collectives.narrate import Narrator
from pypto_spmd.collectives.objective import OBJECTIVES
from pypto_spmd.collectives.plan import CommPlan, CommStep, show_bytes
from pypto_spmd.collectives.program import BlockSchedule, Convert, Program, Run, RunLoop
from pypto_spmd.collectives.recomputation import originals
from pypto_spmd.collectives.request import Request
from pypto_spmd.collectives.rules import Aval, Exchange
from pypto_spmd.collectives.rules.registry import NO_RULE
from pypto_spmd.collectives.schedule import schedule
from pypto_spmd.collectives.sub_axes import (
    Parts,
    coarsened,
    cut,
    cut_graph,
    join,
    joined,
    needed_parts,
)
from pypto_spmd.errors import Fault, raise_faults, spmd_function
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.mesh.topology import seconds, slowest_first
from pypto_spmd.sharding.layout import Layout, R
from pypto_spmd.sharding.redistribute import wire_bytes

PATIENCE = 2
"""Refined labellings that send no less, after which no more are tried."""

NOTABLE = 0.7
"""The plan says so when the objective "bytes" would move less than this share of its wire bytes."""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection: planning makes many small objects that live, and its passes over them
    would take a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_uncollected()
def make_program(
    graph: Graph,
    *,
    mesh: DeviceMesh,
    inputs: Sequence[PartitionSpec | None],
    outputs: Sequence[PartitionSpec | None],
    is_state: Sequence[bool],
    objective: str = "standard",
    strict: bool = False,
    function_name: str = "function",
    result_names: Sequence[str] = (),
) -> Program:
    """Plans a traced function.

    Args:
        graph: the traced function.
        mesh: the mesh to run on.
        inputs: the spec of each flat argument, None where the planner is to choose.
        outputs: the spec of each flat result, None where the planner is to choose.
        is_state: for each flat argument, whether it is parameters or train state.
        objective: "standard" or "bytes".
        strict: whether a primitive without a rule is an error.
        function_name: name of the function, for the plan and for errors.
        result_names: names of the flat results, for the plan.

    Raises:
        ShardingError: for what is written by hand and can't be planned; under `strict`, for a primitive
            without a rule.
    """
    missing = _without_rule(graph)
    faults = hand_faults(graph, mesh)
    if strict:
        faults += [_missing_fault(n, s) for n, s in missing]
    raise_faults(spmd_function(function_name), faults)
    facts = read_graph(graph)
    given = _layouts(inputs, [graph.avals[t] for t in graph.block.inputs], mesh)
    wanted = _layouts(outputs, [graph.aval(a) for a in graph.block.outputs], mesh)
    ends = [
        *zip(graph.block.inputs, given, strict=True),
        *zip(graph.block.outputs, wanted, strict=True),
    ]
    parts = needed_parts(facts, mesh, ends)
    fine_mesh = mesh
    if parts:
        graph = cut_graph(graph, parts)
        fine_mesh, facts = mesh.refined(parts), read_graph(graph, inner=True)
    request = Request(
        graph,
        dict(fine_mesh.shape),
        slowest_first(fine_mesh),
        tuple(cut(layout, parts) for layout in given),
        tuple(cut(layout, parts) for layout in wanted),
        tuple(is_state),
        OBJECTIVES[objective],
    )
    found = _least(request, facts, fine_mesh, parts)
    if parts:
        settled = _settle_ends(found.layouts, parts)
        if settled.inputs != request.inputs or settled.outputs != request.outputs:
            request = settled
            found = _least(request, facts, fine_mesh, parts)
    block = found.block
    on_mesh = [
        tuple(joined(layout, parts) or layout for layout in ends)
        for ends in (block.inputs, block.outputs)
    ]
    notes = [
        f"no rule for {name} at {place or 'an unknown line'}: runs whole" for name, place in missing
    ]
    if (gap := found.layouts.labelling.gap) > 1e-9:
        notes.append(f"the plan may cost up to {gap:.1%} more than the least one")
    names = [graph.names.get(t, f"argument {i}") for i, t in enumerate(graph.block.inputs)]
    results = list(result_names) or [f"result[{i}]" for i in range(len(graph.block.outputs))]
    plan = CommPlan(
        function_name,
        dict(mesh.shape),
        objective,
        found.steps,
        dict(zip(names, map(str, on_mesh[0]), strict=True)),
        dict(zip(results, map(str, on_mesh[1]), strict=True)),
        tuple(notes),
        gap,
        explorer(request, found.layouts.labelling, names),
    )
    return Program(graph, plan, block, on_mesh[0], on_mesh[1], fine_mesh, parts)


@dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """Layouts, and what comes of them."""

    layouts: Layouts
    block: BlockSchedule
    steps: tuple[CommStep, ...]

    @property
    def wire_bytes(self) -> float:
        return sum(step.wire_bytes * step.times for step in self.steps)


def _least(request: Request, facts: GraphFacts, mesh: DeviceMesh, parts: Parts) -> _Planned:
    """The best plan that is found.

    Under the objective "bytes" labellings are refined, axis after axis, as long as that sends less; and
    the textbook labelling is another one to begin at, since it is where a person would.
    """

    def planned(layouts: Layouts) -> _Planned:
        numbering = _Numbering(layouts, mesh, parts)
        return _Planned(layouts, numbering.block(schedule(layouts)), tuple(numbering.steps))

    best = planned(assemble(request, infer(request, facts)))
    if request.objective.closure or len(best.layouts.axes) < 2:
        return best
    textbook = replace(request, objective=OBJECTIVES["standard"])
    for start in (best, planned(assemble(request, infer(textbook, facts)))):
        best = min(best, start, key=attrgetter("wire_bytes"))
        patience = PATIENCE
        for layouts in refine(request, facts, start.layouts):
            found = planned(layouts)
            patience = PATIENCE if found.wire_bytes < best.wire_bytes else patience - 1
            best = min(best, found, key=attrgetter("wire_bytes"))
            if not patience:
                break
    return best


def _settle_ends(layouts: Layouts, parts: Parts) -> Request:
    """The request with its free ends given, where they would lie on a part of an axis."""
    request = layouts.request

    def settled(layout: Layout | None, found: Layout) -> Layout | None:
        if layout is not None or joined(found, parts) is not None:
            return layout
        return cut(coarsened(found, parts), parts)

    return replace(
        request,
        inputs=tuple(settled(g, layouts.argument(i)) for i, g in enumerate(request.inputs)),
        outputs=tuple(settled(g, layouts.output(i)) for i, g in enumerate(request.outputs)),
    )


def note_cheaper(program: Program, cheapest: Program) -> Program:
    """The program with a note in its plan, if another moves notably less."""
    mine, least = program.plan.wire_bytes, cheapest.plan.wire_bytes
    if least >= NOTABLE * mine:
        return program
    note = (
        f'objective="{cheapest.plan.objective}" would send {show_bytes(least)} instead of '
        f"{show_bytes(mine)} from each device"
    )
    return replace(program, plan=replace(program.plan, notes=(*program.plan.notes, note)))


def _layouts(
    specs: Sequence[PartitionSpec | None], avals: Sequence[Aval], mesh: DeviceMesh
) -> tuple[Layout | None, ...]:
    """The given layouts; axes of one device split nothing and are left out."""
    single = [axis for axis, size in mesh.shape.items() if size == 1]
    found: list[Layout | None] = []
    for spec, aval in zip(specs, avals, strict=True):
        if spec is None:
            found.append(None)
            continue
        layout = Layout.from_spec(spec, len(aval.shape))
        for axis in single:
            layout = layout.with_label(axis, R)
        found.append(layout)
    return tuple(found)


def _without_rule(graph: Graph) -> list[tuple[str, str]]:
    found: dict[tuple[str, str], None] = {}
    for equation, _ in graph.equations():
        if equation.rule is not None and equation.rule.reason.startswith(NO_RULE):
            what = equation.rule.reason.removeprefix(NO_RULE)
            found[what, str(equation.source)] = None
    return list(found)


_CALLS_BY_NAME = {"ffi_call": "ffi_target", "pallas_call": "pallas_kernel"}


def _missing_fault(what: str, place: str) -> Fault:
    name, _, called = what.partition(" ")
    option, subject = f"primitive={what!r}", f"primitive {what!r}"
    if name in _CALLS_BY_NAME:
        option, subject = f"{_CALLS_BY_NAME[name]}={called}", what
    return Fault(
        f"{subject}{' at ' + place if place else ''} has no rule.",
        "Without one its operands are gathered and it runs whole, which strict=True forbids.",
        f"register one with register_rule(..., {option}), or decorate with strict=False.",
    )


def _sent(
    draft: DraftRun, exchange: Exchange, axes: tuple[str, ...], axis_sizes: Mapping[str, int]
) -> Hashable | None:
    """What an exchange sends: equal for two equations of a block that can share it."""
    if exchange.sent is None:
        return None
    operand, rows, others = exchange.sent
    atom, layout = draft.equation.inputs[operand], draft.operands[operand]
    shards = {dim: layout.shards(dim, axis_sizes) for dim in others}
    held = tuple((dim, others[dim](count)) for dim, count in shards.items() if count > 1)
    return id(draft.block), atom, layout, axes, rows, held


def _straight_code(graph: Graph) -> dict[int, int]:
    """For each block, by its id, the one that it is straight code of: of a region's the one around."""
    found = {id(block): id(block) for block in graph.blocks()}
    for equation, block in graph.equations():
        if equation.region is not None:
            found.update({id(body): found[id(block)] for body in equation.bodies})
    return found


class _Numbering:
    """Numbers the steps of a draft schedule in order of execution, and describes them."""

    def __init__(self, layouts: Layouts, mesh: DeviceMesh, parts: Parts) -> None:
        self.layouts = layouts
        self.mesh = mesh
        self.parts = parts
        self.axis_sizes = layouts.request.axis_sizes
        self.narrator = Narrator(layouts, parts)
        self.steps: list[CommStep] = []
        self.originals = originals(layouts.request.graph)
        self.inside = inside_regions(layouts.request.graph)
        self.runs_in = _straight_code(layouts.request.graph)
        self.first: dict[Hashable, int] = {}
        # Steps that do for every equation that asks for the same.
        self.sent: dict[Hashable, int] = {}

    def block(self, draft: DraftBlock) -> BlockSchedule:
        """The final schedule of a draft block."""
        buckets: dict[int, int] = {}
        members: dict[int, list[DraftConvert]] = {}
        for item in draft.items:
            if isinstance(item, DraftConvert) and item.bucket >= 0 and 0 not in self._shape(item):
                members.setdefault(item.bucket, []).append(item)
        items: list[Convert | Run | RunLoop] = []
        for item in draft.items:
            if isinstance(item, DraftRun):
                items.append(self._run(item))
            elif not item.leg.is_collective or 0 in self._shape(item):
                # Of nothing, nothing is sent.
                items.append(Convert(item.tensor, item.leg, -1))
            elif item.bucket >= 0:
                if item.bucket not in buckets:
                    buckets[item.bucket] = self._convert_step(members[item.bucket])
                items.append(Convert(item.tensor, item.leg, buckets[item.bucket]))
            else:
                items.append(Convert(item.tensor, item.leg, self._convert_step([item])))
        return BlockSchedule(draft.inputs, tuple(items), draft.outputs)

    def _shape(self, draft: DraftConvert) -> tuple[int, ...]:
        return self.layouts.request.graph.avals[draft.tensor].shape

    def _run(self, draft: DraftRun) -> Run | RunLoop:
        equation = draft.equation
        if equation.rule is None:
            bodies = tuple(self.block(b) for b in draft.bodies)
            return RunLoop(equation, draft.operands, draft.results, bodies)
        splits = self.layouts.splits(equation)
        steps: dict[tuple[int, int], int] = {}
        for factor, axes in splits.items():
            for index, exchange in enumerate(
                equation.rule.factors[factor].exchanges_for(prod(self.axis_sizes[a] for a in axes))
            ):
                sent = _sent(draft, exchange, axes, self.axis_sizes)
                if sent is not None and sent in self.sent:
                    steps[factor, index] = self.sent[sent]
                    continue
                local = [
                    f.size // prod(self.axis_sizes[a] for a in splits.get(i, ()))
                    for i, f in enumerate(equation.rule.factors)
                ]
                group = prod(self.axis_sizes[a] for a in axes)
                full = exchange.full_elements(local, group)
                steps[factor, index] = self._add(
                    exchange.kind,
                    axes,
                    full,
                    exchange.itemsize,
                    repeat=draft.block.repeat,
                    op=equation.name,
                    tensor=self.narrator.tensor(equation.outputs[0]),
                    source=str(equation.source),
                    reason=f"{equation.name} along a dim split over "
                    f"{' and '.join(map(repr, axes))} exchanges {exchange.what or 'what it lacks'}",
                    dtype="",
                    does=(
                        self.runs_in[id(draft.block)],
                        self._original(equation.outputs[0]),
                        factor,
                        index,
                    ),
                )
                if sent is not None:
                    self.sent[sent] = steps[factor, index]
        by_hand = -1
        if equation.name in COLLECTIVES:
            by_hand = self._by_hand(draft)
        elif equation.name in ACTIONS and equation.outputs:
            by_hand = self._sent_to_all(draft)
        return Run(equation, draft.operands, draft.results, splits, steps, by_hand)

    def _sent_to_all(self, draft: DraftRun) -> int:
        """The step that sends what a callback returns on one device to all; -1 if there are no others."""
        equation = draft.equation
        local = {a for a, inside in self.inside.items() if equation.index in inside.equations}
        axes = tuple(a for a, n in self.axis_sizes.items() if n > 1 and a not in local)
        avals = [self.layouts.request.graph.avals[t] for t in equation.outputs]
        full = sum(prod(aval.shape) for aval in avals)
        if not axes or not full:
            return -1
        return self._add(
            "all_reduce",
            axes,
            full,
            avals[0].itemsize,
            repeat=draft.block.repeat,
            op=equation.name,
            tensor=self.narrator.tensor(equation.outputs[0]),
            source=str(equation.source),
            reason=f"{equation.name} runs on one device, and all need what it returns",
            dtype=str(avals[0].dtype),
            tensors=len(avals),
            does=("sent to all", equation.index),
        )

    def _by_hand(self, draft: DraftRun) -> int:
        """The step of a collective that a person wrote; -1 if there is nobody to communicate with."""
        equation, graph = draft.equation, self.layouts.request.graph
        axes = tuple(a for a in axes_of(equation.params) if self.axis_sizes[a] > 1)
        avals = [graph.aval(atom) for atom in equation.inputs]
        shapes = [
            layout.local_shape(aval.shape, self.axis_sizes)
            for layout, aval in zip(draft.operands, avals, strict=True)
        ]
        full = full_elements(equation.name, shapes, prod(self.axis_sizes[a] for a in axes))
        if not axes or not full:
            return -1
        return self._add(
            COLLECTIVES[equation.name],
            axes,
            full,
            avals[0].itemsize,
            repeat=draft.block.repeat,
            op=equation.name,
            tensor=self.narrator.tensor(equation.outputs[0]),
            source=str(equation.source),
            reason="written by hand"
            if not equation.is_backward
            else "the derivative of what is written by hand",
            dtype=str(avals[0].dtype),
            tensors=len(avals),
            does=("by hand", self._original(equation.outputs[0])),
        )

    def _convert_step(self, members: list[DraftConvert]) -> int:
        first = members[0]
        graph = self.layouts.request.graph
        full = sum(
            m.leg.full_elements(graph.avals[m.tensor].shape, self.axis_sizes) for m in members
        )
        aval = graph.avals[first.tensor]
        tensor = self.narrator.tensor(first.tensor)
        if len(members) > 1:
            tensor = f"{tensor} and {len(members) - 1} more"
        return self._add(
            first.leg.kind,
            first.leg.axes,
            full,
            aval.itemsize,
            repeat=first.block.repeat,
            op=self.narrator.op(first),
            tensor=tensor,
            source=self.narrator.source(first),
            reason=self.narrator.reason(first),
            dtype=str(aval.dtype),
            tensors=len(members),
            does=(
                self.runs_in[id(first.block)],
                *((self._original(m.tensor), m.leg) for m in members),
            ),
        )

    def _original(self, tensor: int) -> int:
        return self.originals.get(tensor, tensor)

    def _add(
        self, kind: str, axes: tuple[str, ...], full: float, itemsize: float, *,
        repeat: int | None, op: str, tensor: str, source: str, reason: str, dtype: str, tensors: int = 1,
        does: Hashable,
    ) -> int:  # fmt: skip
        group = prod(self.axis_sizes[a] for a in axes)
        sent = wire_bytes(kind, full * itemsize, group)
        # Of an AllToAll no device ever holds more than its share.
        held = full / group if kind == "all_to_all" else full
        first = self.first.setdefault(does, len(self.steps))
        self.steps.append(
            CommStep(
                len(self.steps), kind, join(axes, self.parts), full * itemsize, sent,
                seconds(kind, sent, axes, self.mesh),
                repeat, op, tensor, source, reason, int(np.ceil(held)), dtype, tensors,
                None if first == len(self.steps) else first,
            )
        )  # fmt: skip
        return len(self.steps) - 1
