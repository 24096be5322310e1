"""Inference finds the least cost: held against brute force over every labelling of small programs."""

import itertools
import random
from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pypto_spmd.collectives.axis import AxisProblem
from pypto_spmd.collectives.facts import read_graph
from pypto_spmd.collectives.flatten import build_graph
from pypto_spmd.collectives.graph import Graph
from pypto_spmd.collectives.inference import infer
from pypto_spmd.collectives.objective import (
    OBJECTIVES,
    WHOLE_COST,
    Objective,
    preference_table,
    read_cost,
    store_cost,
)
from pypto_spmd.collectives.request import Request
from pypto_spmd.sharding.layout import Layout

SIZE = 8


def random_program(draw: random.Random) -> tuple[Callable[..., jax.Array], int]:
    """A chain or DAG of two to four operations on square matrices, and its number of arguments."""
    count = draw.choice([2, 3])
    steps = [
        (draw.choice(OPERATIONS), draw.random(), draw.random())
        for _ in range(draw.choice([2, 3, 4]))
    ]

    def program(*arguments: jax.Array) -> jax.Array:
        values = list(arguments)
        for operation, first, second in steps:
            x, y = values[int(first * len(values))], values[int(second * len(values))]
            values.append(operation(x, y))
        return values[-1]

    return program, count


OPERATIONS = [
    lambda x, y: x @ y,
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: jnp.tanh(x),
    lambda x, y: x.T,
    lambda x, y: x - jnp.sum(y, axis=0),
]

SPECS = [P(), P("axis"), P(None, "axis"), None]


def request_of(draw: random.Random, objective: Objective) -> Request:
    """A request small enough for brute force."""
    while True:
        request = any_request(draw, objective)
        problem = AxisProblem(request, read_graph(request.graph), "axis", {})
        problem._prepare()
        if prod(map(len, problem.choice_lists.values())) <= 2_000:
            return request


def any_request(draw: random.Random, objective: Objective) -> Request:
    program, count = random_program(draw)
    matrix = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    graph = build_graph(jax.make_jaxpr(program)(*[matrix] * count))
    given = [draw.choice(SPECS[:3]) for _ in range(count)]
    wanted = draw.choice(SPECS)
    layout = lambda spec: None if spec is None else Layout.from_spec(spec, 2)  # noqa: E731
    return Request(
        graph,
        {"axis": 4},
        ("axis",),
        tuple(map(layout, given)),
        (layout(wanted),),
        tuple(draw.random() < 0.5 for _ in range(count)),
        objective,
    )


def brute_force(request: Request) -> float:
    """The least cost, by trying every labelling of every equation and storing each tensor at its best."""
    problem = AxisProblem(request, read_graph(request.graph), "axis", {})
    problem._prepare()
    graph, n, moves = request.graph, 4, problem.mobility
    bytes_of = problem.facts.bytes
    equations = [e for e, _ in graph.equations()]
    lists = [problem.choice_lists[e.index] for e in equations]
    best = float("inf")
    for picked in itertools.product(*lists):
        total = sum(work_cost(request, e, c) for e, c in zip(equations, picked, strict=True))
        for tensor, domain in enumerate(problem.domains):
            total += min(
                preference_table(domain).array[i] * (len(domain) > 1)
                + tensor_cost(
                    graph,
                    request,
                    equations,
                    picked,
                    tensor,
                    option,
                    bytes_of[tensor],
                    n,
                    moves,
                    domain,
                )
                for i, option in enumerate(domain)
            )
        best = min(best, total)
    return best


def work_cost(request, equation, choice) -> float:
    if choice.factor >= 0:
        return 0.0
    size = sum(request.graph.aval(a).itemsize * SIZE * SIZE for a in equation.inputs)
    work = size * request.objective.work * 3 / 4 if equation.rule.works else 0.0
    return WHOLE_COST + work


def tensor_cost(graph, request, equations, picked, tensor, option, size, n, moves, domain) -> float:
    """Making `option` of a tensor, and all reads of it."""
    cost = 0.0
    for equation, choice in zip(equations, picked, strict=True):
        for output, label in zip(equation.outputs, choice.results, strict=True):
            if output == tensor:
                cost += store_cost(label, option, size, n, moves[tensor])
        for label in {
            c for a, c in zip(equation.inputs, choice.operands, strict=True) if a == tensor
        }:
            cost += read_cost(option, label, size, n, moves[tensor])
    for position, argument in enumerate(graph.block.inputs):
        if argument == tensor:
            given = request.inputs[position].label("axis")
            cost += store_cost(given, option, size, n, moves[tensor])
    (output,), (wanted,) = graph.block.outputs, request.outputs
    if output == tensor:
        targets = [o[0] for o in domain if o[0].kind != "P"]
        if wanted is not None:
            targets = [wanted.label("axis")]
        cost += min(read_cost(option, t, size, n, moves[tensor]) for t in targets)
    return cost


@pytest.mark.parametrize("objective", ["standard", "bytes"])
def test_single_label_solutions_are_least(objective: str) -> None:
    draw = random.Random(objective)
    for _ in range(15):
        request = request_of(draw, OBJECTIVES[objective])
        problem = AxisProblem(request, read_graph(request.graph), "axis", {})
        problem._prepare()
        problem._build()
        assert problem._solve_once().cost == pytest.approx(brute_force(request), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("objective", ["standard", "bytes"])
def test_sets_of_labels_never_cost_more(objective: str) -> None:
    draw = random.Random(objective)
    for _ in range(10):
        request = request_of(draw, OBJECTIVES[objective])
        found = infer(request).axes["axis"]
        assert found.cost <= brute_force(request) + 1e-9
        assert found.cost == found.lower_bound


def test_inference_is_deterministic() -> None:
    labels = []
    for _ in range(2):
        request = request_of(random.Random(7), OBJECTIVES["standard"])
        found = infer(request).axes["axis"]
        labels.append(
            (
                found.stored,
                found.inputs,
                found.outputs,
                [str(c.results) for c in found.choices.values()],
            )
        )
    assert labels[0] == labels[1]


def test_brute_force_can_tell() -> None:
    """The reference is not always zero, nor is every choice as good as another."""
    draw = random.Random(3)
    costs = [brute_force(request_of(draw, OBJECTIVES["standard"])) for _ in range(20)]
    assert len({round(c) for c in costs}) > 5


def graph_of(function: Callable[..., jax.Array], *shapes: tuple[int, ...]) -> Graph:
    return build_graph(
        jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    )


def test_one_conversion_serves_several_readers() -> None:
    """A weight that two products need whole is gathered once, and kept in both layouts."""
    graph = graph_of(lambda w, x: (x @ w, w * 2, (x * 2) @ w), (8, 8), (16, 8))
    inputs = (Layout.from_spec(P("axis"), 2), Layout.from_spec(P("axis"), 2))
    outputs = tuple(Layout.from_spec(P("axis"), 2) for _ in range(3))
    request = Request(
        graph, {"axis": 4}, ("axis",), inputs, outputs, (True, False), OBJECTIVES["standard"]
    )
    found = infer(request).axes["axis"]
    gather = 8 * 8 * 4 * 3 / 4
    assert found.cost == pytest.approx(gather, abs=0.01)


def test_a_tensor_is_kept_in_two_layouts_where_that_is_cheaper() -> None:
    """One AllToAll makes the second layout; one for each of its readers would be dearer than a gather."""
    graph = graph_of(lambda x: (x * 2, jnp.sin(x), jnp.cos(x), jnp.tanh(x)), (8, 8))
    rows, columns = Layout.from_spec(P("axis"), 2), Layout.from_spec(P(None, "axis"), 2)
    request = Request(
        graph,
        {"axis": 2},
        ("axis",),
        (rows,),
        (rows, *[columns] * 3),
        (False,),
        OBJECTIVES["bytes"],
    )
    found = infer(request).axes["axis"]
    assert found.cost == pytest.approx(8 * 8 * 4 / 2 / 2, abs=0.01)
    assert {str(label) for label in found.stored[graph.block.inputs[0]]} == {"S(0)", "S(1)"}


def test_constants_link_no_dims() -> None:
    def program(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros((SIZE, SIZE))
        return jnp.maximum(x, zeros), jnp.maximum(y, zeros)

    square = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    facts = read_graph(build_graph(jax.make_jaxpr(program)(square, square)))
    first, second = (set(facts.dims[tensor]) for tensor in facts.graph.block.inputs)
    assert first.isdisjoint(second)
    assert [set(facts.dims[atom]) for atom in facts.graph.block.outputs] == [first, second]
