"""Choosing a label for every tensor and every equation, at least cost.

One mesh axis is solved at a time, exactly, by variable elimination (`axis.AxisProblem`). Sizes are local
to what the other axes' current choices make of *each* equation, and the axes are swept, slowest link
first, until nothing changes: two sweeps, and one to confirm, are what real programs need.
"""

import itertools
from collections.abc import Iterator

from pypto_spmd.collectives.assemble import Layouts, assemble
from pypto_spmd.collectives.axis import AxisProblem
from pypto_spmd.collectives.facts import GraphFacts, read_graph
from pypto_spmd.collectives.request import AxisLabels, Labelling, Request
from pypto_spmd.sharding.layout import Label

SETTLED = 1e-4
"""From the third sweep on, a relative change of an axis's cost that is not worth another one."""

MAX_SWEEPS = 4
"""A sweep that changes nothing ends them earlier; a plan that still changes then is still right."""


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


def refine(request: Request, facts: GraphFacts, start: Layouts) -> Iterator[Layouts]:
    """Labellings that lower the bytes of all axes together, each one axis further than the last.

    A layout that is as it was nests its axes as assembled; of one that would be new the best nesting is
    counted on. So what comes may be no better than what was: whoever asks measures it.

    Args:
        request: what is asked.
        facts: of its graph.
        start: the layouts to begin at, which are not given back.
    """
    labels, layouts = dict(start.labelling.axes), start
    axes = [a for a in request.axis_order if a in labels]
    unchanged = 0
    for axis in itertools.islice(itertools.cycle(axes), MAX_SWEEPS * len(axes)):
        if unchanged == len(axes):
            return
        others = {a: v for a, v in labels.items() if a != axis}
        found = AxisProblem(request, facts, axis, others, layouts).solve()
        unchanged += 1
        if not found.same_as(labels[axis]):
            unchanged = 0
            labels[axis] = found
            layouts = assemble(request, Labelling(dict(labels)))
            yield layouts


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
