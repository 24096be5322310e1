"""What one axis's labels make the moves of the others cost, held against redistributions in full."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pypto_spmd.collectives.assemble import Layouts, assemble
from pypto_spmd.collectives.axis import AxisProblem
from pypto_spmd.collectives.facts import read_graph
from pypto_spmd.collectives.flatten import build_graph
from pypto_spmd.collectives.inference import infer
from pypto_spmd.collectives.joint import JointMoves
from pypto_spmd.collectives.objective import OBJECTIVES
from pypto_spmd.collectives.request import Labelling, Request
from pypto_spmd.sharding.layout import Label, Layout, R, S
from pypto_spmd.sharding.redistribute import redistribution_bytes, wire_bytes

SIZES = {"data": 2, "model": 4}
SHAPE = (16, 16)


def layout(spec: P) -> Layout:
    return Layout.from_spec(spec, len(SHAPE))


def planned(function, source: P, target: P) -> Layouts:
    """The layouts of a function of one matrix, axis by axis."""
    graph = build_graph(jax.make_jaxpr(function)(jax.ShapeDtypeStruct(SHAPE, jnp.float32)))
    ends = (layout(source),), (layout(target),)
    request = Request(graph, SIZES, tuple(SIZES), *ends, (False,), OBJECTIVES["bytes"])
    return assemble(request, infer(request))


def joint_of(layouts: Layouts, axis: str) -> tuple[JointMoves, AxisProblem]:
    labels = dict(layouts.labelling.axes)
    del labels[axis]
    request = layouts.request
    problem = AxisProblem(request, read_graph(request.graph), axis, labels)
    problem._prepare()
    return JointMoves(layouts, axis, problem.domains, problem.choice_lists), problem


def stored_whole_or(layouts: Layouts, tensor: int, label: Label) -> Layouts:
    """The layouts with a tensor stored in `label` on `data`, and whole on `model`."""
    axes = {}
    for axis, theirs in layouts.labelling.axes.items():
        stored = list(theirs.stored)
        stored[tensor] = (label if axis == "data" else R,)
        axes[axis] = replace(theirs, stored=stored)
    return Layouts(layouts.request, Labelling(axes), {}, {})


def test_an_end_counts_what_all_axes_send():
    """`model` slices for nothing; what `data` then sends depends on whether that is sliced already."""
    target = layout(P("model", "data"))
    layouts = planned(jnp.sin, P("data"), P("model", "data"))
    (result,) = layouts.request.graph.block.outputs
    assert isinstance(result, int)
    layouts = stored_whole_or(layouts, result, S(0))
    joint, problem = joint_of(layouts, "model")
    table = joint.of_end(result, target, leaving=True)
    assert table is not None
    costs = dict(zip(problem.domains[result], table.array, strict=True))
    # `model` itself counts nothing for a slice, and an AllToAll of what `data` leaves of it for S(1).
    sent = redistribution_bytes(layout(P("data")), target, SHAPE, 4, SIZES)
    assert costs[R,] == pytest.approx(sent, abs=0.01)
    sent = redistribution_bytes(layout(P("data", "model")), target, SHAPE, 4, SIZES)
    own = wire_bytes("all_to_all", 16 * 16 * 4 / 2, 4)
    assert costs[S(1),] == pytest.approx(sent - own, abs=0.01)


def test_an_argument_comes_the_other_way():
    source = layout(P("model", "data"))
    layouts = planned(jnp.sin, P("model", "data"), P("data"))
    (argument,) = layouts.request.graph.block.inputs
    joint, problem = joint_of(stored_whole_or(layouts, argument, S(0)), "model")
    table = joint.of_end(argument, source, leaving=False)
    assert table is not None
    costs = dict(zip(problem.domains[argument], table.array, strict=True))
    sent = redistribution_bytes(source, layout(P("data")), SHAPE, 4, SIZES)
    own = wire_bytes("all_gather", 16 * 16 * 4 / 2, 4)
    assert costs[R,] == pytest.approx(sent - own, abs=0.01)


def test_what_another_axis_exchanges_shrinks_with_a_split():
    layouts = planned(lambda x: jnp.cumsum(x, axis=0), P("data"), P("data"))
    joint, problem = joint_of(layouts, "model")
    (index,) = [i for i, e in problem.facts.equations.items() if e.equation.name == "cumsum"]
    assert layouts.labelling.axes["data"].choices[index].factor >= 0
    table = joint.exchanged(index, problem.facts.equations[index])
    assert table is not None
    costs = {c.results[0]: t for c, t in zip(problem.choice_lists[index], table.array, strict=True)}
    assert costs[R] == 4 * costs[S(1)] > 0


def test_where_nothing_moves_there_is_no_difference():
    layouts = planned(jnp.sin, P("data"), P("data"))
    joint, problem = joint_of(layouts, "model")
    (result,) = layouts.request.graph.block.outputs
    assert isinstance(result, int)
    assert joint.of_end(result, layout(P("data")), leaving=True) is None
    for index, known in problem.facts.equations.items():
        assert list(joint.of_equation(index, known)) == []
        assert joint.exchanged(index, known) is None
