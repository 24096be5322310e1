"""Choosing a label for every tensor and every equation, at least cost.

One mesh axis is solved at a time, exactly, by variable elimination (`axis.AxisProblem`). Sizes are local
to what the other axes' current choices make of *each* equation, and the axes are swept, slowest link
first, until nothing changes: two sweeps, and one to confirm, are what real programs need.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pypto_spmd.collectives.axis import AxisLabels, AxisProblem, Request
from pypto_spmd.collectives.facts import GraphFacts, read_graph
from pypto_spmd.sharding.layout import Label

SETTLED = 1e-4
"""From the third sweep on, a relative change of an axis's cost that is not worth another one."""

MAX_SWEEPS = 4
"""A sweep that changes nothing ends them earlier; a plan that still changes then is still right."""


@dataclass(frozen=True, slots=True, eq=False)
class Labelling:
    """The labels of every axis of more than one device, in mesh order."""

    axes: Mapping[str, AxisLabels]

    @property
    def gap(self) -> float:
        """By how much (relatively) the cost may exceed the least one, axis by axis; 0 when exact."""
        gaps = [(a.cost - a.lower_bound) / a.cost for a in self.axes.values() if a.cost > 0]
        return max(gaps, default=0.0)


def infer(request: Request, facts: GraphFacts | None = None) -> Labelling:
    """The least-cost labels of all axes.

    Args:
        request: what is asked.
        facts: of its graph, if they are known.
    """
    facts = facts or read_graph(request.graph)
    axes = [a for a in request.axis_order if request.axis_sizes[a] > 1]
    labels: dict[str, AxisLabels] = {}
    seen: dict[str, tuple[AxisLabels, ...]] = {}
    for sweep in range(MAX_SWEEPS):
        changed = False
        for axis in axes:
            others = {a: v for a, v in labels.items() if a != axis}
            context = tuple(others.values())
            if seen.get(axis) == context:
                continue  # nothing it depends on has changed
            seen[axis] = context
            found = AxisProblem(request, facts, axis, others).solve()
            if sweep >= 2 and abs(found.cost - labels[axis].cost) <= SETTLED * found.cost:
                # Going round between labellings of nearly one cost; those at hand fit each other.
                return Labelling({a: labels[a] for a in request.axis_sizes if a in labels})
            if axis not in labels or not found.same_as(labels[axis]):
                labels[axis] = found
                changed = True
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
    problem = AxisProblem(request, read_graph(request.graph), axis, others)
    return problem.input_marginals(position, labelling.axes[axis].inputs[position])
