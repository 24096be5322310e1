"""Hold the plan against the optimized HLO: the collectives that run are those that were planned.

XLA may merge steps into one instruction, unroll a loop around one, move it out of a loop, change its
element type, or run a step and its recomputation once; those are matches. A step that is nowhere in
the HLO, an instruction that no step asked for, and one of another kind, other mesh axes or another
size are failures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pypto_spmd.collectives.hlo import HloCollective, parse_collectives
from pypto_spmd.errors import count_of, listed


class PlannedStep(Protocol):
    """What reconciling needs to know of a plan step; elements as in `HloCollective`."""

    @property
    def index(self) -> int:
        """The index of the step in its plan."""
        ...

    @property
    def kind(self) -> str:
        """The kind of the collective, "all_reduce" for one."""
        ...

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it communicates over."""
        ...

    @property
    def elements(self) -> int:
        """Elements per device of the full tensor, all members of a bucket together."""
        ...

    @property
    def repeat(self) -> int | None:
        """How often one call runs the step; None when that depends on the data."""
        ...


class VerificationError(Exception):
    """The collectives of the compiled program are not those of the plan."""


@dataclass(frozen=True, slots=True)
class Match:
    """Plan steps and the HLO instructions that carry them out.

    Attributes:
        steps: the steps; several when XLA merged them.
        collectives: the instructions; several when XLA split or unrolled a step, none when it merged the
            step with an earlier one that it recomputes.
        note: what XLA changed, in words; empty if nothing.
    """

    steps: tuple[PlannedStep, ...]
    collectives: tuple[HloCollective, ...]
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        where = _instructions_text(self.collectives) if self.collectives else "no instruction"
        return f"{_steps_text(self.steps)}: {where}{note}"


@dataclass(frozen=True, slots=True)
class Missing:
    """A plan step that no instruction of the optimized HLO carries out."""

    step: PlannedStep

    def __str__(self) -> str:
        return (
            f"{_steps_text((self.step,))} is in no instruction of the optimized HLO; XLA removed it"
            " because its result is unused, an earlier step does the same, or its operand is a"
            " constant"
        )


@dataclass(frozen=True, slots=True)
class Hidden:
    """An instruction of the optimized HLO that no plan step asked for.

    Attributes:
        collective: the instruction.
        unknown_steps: the step ids that it carries and the plan does not have; empty if it
            carries none at all.
    """

    collective: HloCollective
    unknown_steps: tuple[int, ...] = ()

    def __str__(self) -> str:
        found = self.collective
        ids = listed([str(index) for index in self.unknown_steps])
        why = f"carries step id {ids}, which the plan does not have" if ids else "has no step id"
        return f"{_collective_text(found)} ({found.name} in {found.computation}) {why}"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Plan steps whose instructions do something else.

    Attributes:
        steps: the steps.
        collectives: the instructions that carry their ids.
        reasons: what differs, each in words.
    """

    steps: tuple[PlannedStep, ...]
    collectives: tuple[HloCollective, ...]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        where = _instructions_text(self.collectives)
        return f"{_steps_text(self.steps)}: {where}: " + "; ".join(self.reasons)


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Plan and optimized HLO, held against each other.

    Attributes:
        matched: steps found as planned.
        missing: steps found nowhere.
        hidden: instructions that no step asked for.
        mismatched: steps whose instructions do something else.
    """

    matched: tuple[Match, ...]
    missing: tuple[Missing, ...]
    hidden: tuple[Hidden, ...]
    mismatched: tuple[Mismatch, ...]

    @property
    def ok(self) -> bool:
        """Whether exactly the planned collectives run."""
        return not (self.missing or self.hidden or self.mismatched)

    def check(self) -> None:
        """Raise if anything but the planned collectives runs.

        Raises:
            VerificationError: naming every failure.
        """
        if not self.ok:
            raise VerificationError(str(self))

    def __str__(self) -> str:
        steps = sum(len(match.steps) for match in self.matched)
        instructions = sum(len(match.collectives) for match in self.matched)
        if self.ok:
            summary = (
                f"The optimized HLO runs the plan: {count_of(steps, 'step')}"
                f" as {count_of(instructions, 'collective')}."
            )
        else:
            summary = (
                "The optimized HLO does not run the plan:"
                f" {len(self.missing)} missing, {len(self.hidden)} hidden,"
                f" {len(self.mismatched)} mismatched, {steps} matched."
            )
        lines = [summary]
        for title, findings in (
            ("missing", self.missing),
            ("hidden", self.hidden),
            ("mismatched", self.mismatched),
            ("matched", self.matched),
        ):
            lines += [f"  {title}: {finding}" for finding in findings]
        return "\n".join(lines)


def reconcile(
    steps: Sequence[PlannedStep], hlo_text: str, mesh_axes: Mapping[str, int]
) -> Reconciliation:
    """Compare plan steps with the collectives of optimized HLO.

    Args:
        steps: the steps of the plan, each emitted inside `step_scope(step.index)`.
        hlo_text: optimized HLO, as `jax.stages.Compiled.as_text()` gives it.
        mesh_axes: the size of each mesh axis, in mesh order; an axis of the plan may be cut into
            sub-axes (`sub_axes`) on it.

    Returns:
        What matches and what does not; nothing is raised.
    """
    planned = {step.index: step for step in steps}
    collectives = parse_collectives(hlo_text, mesh_axes)
    hidden, tagged = [], []
    for found in collectives:
        unknown = tuple(i for i in found.step_ids if i not in planned)
        if unknown or not found.step_ids:
            hidden.append(Hidden(found, unknown))
        if any(i in planned for i in found.step_ids):
            tagged.append(found)
    matched, mismatched = [], []
    for indices, instructions in _connected(tagged):
        group = tuple(planned[i] for i in indices if i in planned)
        outcome = _compare(group, instructions, mesh_axes)
        (matched if isinstance(outcome, Match) else mismatched).append(outcome)
    carried = {i for found in tagged for i in found.step_ids}
    missing = []
    for index, step in planned.items():
        if index in carried or step.repeat == 0:  # what stands in a loop of no trips never runs
            continue
        twins = [
            other for other in steps if other.index in carried and _first(other) == _first(step)
        ]
        if twins:
            matched.append(
                Match((step,), (), f"merged with step {twins[0].index}, which does the same")
            )
        else:
            missing.append(Missing(step))
    return Reconciliation(tuple(matched), tuple(missing), tuple(hidden), tuple(mismatched))


def _first(step: PlannedStep) -> int:
    """The index of the first step that does what this one does."""
    original = getattr(step, "recomputes", None)
    return step.index if original is None else original


def _connected(
    collectives: Sequence[HloCollective],
) -> list[tuple[tuple[int, ...], tuple[HloCollective, ...]]]:
    """Group instructions that share steps, directly or through others; least step first."""
    groups: list[tuple[set[int], list[HloCollective]]] = []
    for found in collectives:
        ids, members = set(found.step_ids), [found]
        apart = []
        for group in groups:
            if group[0] & ids:
                ids |= group[0]
                members = group[1] + members
            else:
                apart.append(group)
        groups = [*apart, (ids, members)]
    return sorted((tuple(sorted(ids)), tuple(members)) for ids, members in groups)


def _compare(
    steps: tuple[PlannedStep, ...],
    collectives: tuple[HloCollective, ...],
    mesh_axes: Mapping[str, int],
) -> Match | Mismatch:
    reasons = [
        reason
        for step in steps
        for found in collectives
        if step.index in found.step_ids
        for reason in _differences(step, found, mesh_axes)
    ]
    planned = sum(step.elements for step in steps)
    found = sum(each.elements for each in collectives)
    planned_in_all = _sum_known([_in_all(step.elements, step.repeat) for step in steps])
    found_in_all = _sum_known([_in_all(each.elements, each.trip_count) for each in collectives])
    note = ""
    if planned_in_all is None or found_in_all is None:
        # Runs are unknown where the trip count of a loop is: sizes alone are compared.
        planned_in_all = found_in_all = 0
    if planned != found and (planned_in_all != found_in_all or found_in_all == 0):
        reasons.append(f"planned {count_of(planned, 'element')}, found {found}")
    elif planned != found:
        note = "a loop around it is unrolled"
    elif planned_in_all < found_in_all:
        reasons.append(
            f"planned {count_of(planned_in_all, 'element')} in all runs, found {found_in_all}"
        )
    elif planned_in_all > found_in_all:
        note = (
            f"moved out of a loop: {count_of(found_in_all, 'element')} in all runs"
            f" instead of {planned_in_all}"
        )
    if reasons:
        return Mismatch(steps, collectives, tuple(dict.fromkeys(reasons)))
    return Match(steps, collectives, note)


def _differences(
    step: PlannedStep, found: HloCollective, mesh_axes: Mapping[str, int]
) -> list[str]:
    reasons = []
    if step.kind != found.kind:
        reasons.append(f"planned {_kind_text(step.kind)}, found {_kind_text(found.kind)}")
    # An axis of size 1 has no one to talk to, so it never shows in the HLO.
    planned = {axis for axis in _on_mesh(step.axes, mesh_axes) if mesh_axes.get(axis, 0) != 1}
    actual = set(found.axes)
    # A permutation over several axes may happen to move data along only some of them.
    same = bool(actual) and (
        actual <= planned if found.kind == "collective_permute" else actual == planned
    )
    if not same:
        reasons.append(f"planned {_axes_text(step.axes)}, found {_axes_text(found.axes)}")
    return reasons


def _in_all(elements: int, runs: int | None) -> int | None:
    return None if runs is None else elements * runs


def _sum_known(amounts: Sequence[int | None]) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None


def _kind_text(kind: str) -> str:
    return "".join(word.capitalize() for word in kind.split("_"))


def _on_mesh(axes: tuple[str, ...], mesh_axes: Mapping[str, int]) -> tuple[str, ...]:
    """A plan's axes as those of the mesh, on which an axis may be cut into `axis.0`, `axis.1`, ..."""
    found = []
    for axis in axes:
        parts = [name for name in mesh_axes if name.rpartition(".")[0] == axis]
        found += [axis] if axis in mesh_axes or not parts else parts
    return tuple(found)


def _axes_text(axes: tuple[str, ...]) -> str:
    names = listed([f"'{axis}'" for axis in axes])
    return f"over {names}" if names else "over groups of devices that are no mesh axes"


def _runs_text(runs: int | None) -> str:
    return "" if runs == 1 else ", in a loop" if runs is None else f", {runs} times"


def _steps_text(steps: tuple[PlannedStep, ...]) -> str:
    return " + ".join(
        f"step {step.index} ({_kind_text(step.kind)} {_axes_text(step.axes)},"
        f" {count_of(step.elements, 'element')}{_runs_text(step.repeat)})"
        for step in steps
    )


def _collective_text(found: HloCollective) -> str:
    return (
        f"{_kind_text(found.kind)} {_axes_text(found.axes)}, {found.dtype},"
        f" {count_of(found.elements, 'element')}{_runs_text(found.trip_count)}"
    )


def _instructions_text(collectives: tuple[HloCollective, ...]) -> str:
    return " + ".join(f"{found.name} in {found.computation}" for found in collectives)
