"""A graph whose given layouts split dims that the mesh does not divide, made one whose dims it divides.

Arguments come and results go in their true sizes, which no device array can be split into unevenly: on
such a dim they are whole at the boundary. Inside, an argument is padded, which every device does for
itself, and lies as was asked; a result is gathered, and cut to its true size.

Invariant: a program whose layouts divide all their dims stays as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from jax.sharding import PartitionSpec

from pypto_spmd.collectives.facts import made_of_constants
from pypto_spmd.collectives.graph import Atom, Equation, Graph
from pypto_spmd.collectives.padding.plain_moves import with_plain_moves
from pypto_spmd.collectives.padding.rewrite import Code, Rewriter
from pypto_spmd.collectives.padding.sizes import Ask, Sizes, inner_asks, stored_sizes
from pypto_spmd.collectives.padding.ties import Ties, ties_of
from pypto_spmd.collectives.pruning import pruned
from pypto_spmd.collectives.rules import Rule
from pypto_spmd.sharding.spec import entries

Specs = tuple[PartitionSpec | None, ...]

GARBAGE = False
"""Whether padding is filled with what would show in a result, everywhere: for tests."""


@dataclass(frozen=True, slots=True)
class Uneven:
    """A graph whose dims are padded where they need it.

    Args:
        graph: the graph, its arguments and results of their true sizes.
        inputs: the given layout of each argument, with dims whole that are padded.
        outputs: the same for each result.
        notes: what is padded, in words, for the plan.
    """

    graph: Graph
    inputs: Specs
    outputs: Specs
    notes: tuple[str, ...] = ()


def is_uneven(spec: PartitionSpec | None, shape: Sequence[int], mesh: Mapping[str, int]) -> bool:
    """Whether a layout splits a dim that it does not divide.

    Args:
        spec: the layout.
        shape: the array's shape.
        mesh: size of each mesh axis.
    """
    return spec is not None and any(size % parts for _, size, parts in _splits(spec, shape, mesh))


def pad_uneven(
    graph: Graph,
    inputs: Specs,
    outputs: Specs,
    mesh: Mapping[str, int],
    result_names: Sequence[str] = (),
) -> Uneven:
    """Pads the dims that given layouts and constraints split unevenly, and those that go with them.

    Args:
        graph: the traced function.
        inputs: the given layout of each argument, None where the planner chooses.
        outputs: the same for each result.
        mesh: size of each mesh axis.
        result_names: names of the results, for the notes.
    """
    asks = list(_asks(graph, inputs, outputs, mesh))
    if not any(graph.avals[ask.tensor].shape[ask.dim] % ask.parts for ask in asks):
        return Uneven(graph, *_relaxed(graph, inputs, outputs, mesh))
    ties = _known_ties(graph)
    sizes = stored_sizes(graph, asks, ties)
    return _bounded(graph, inputs, outputs, mesh, sizes, ties, result_names)


def pad_inner(
    graph: Graph,
    inputs: Specs,
    outputs: Specs,
    mesh: Mapping[str, int],
    result_names: Sequence[str] = (),
) -> Uneven | None:
    """Pads also what lies between the ends: of 32 rows that are split, `x[1:]` is stored as 32 again.

    Args:
        graph: the traced function.
        inputs: the given layout of each argument, None where the planner chooses.
        outputs: the same for each result.
        mesh: size of each mesh axis.
        result_names: names of the results, for the notes.

    Returns:
        None if there is nothing to pad that `pad_uneven` does not. Otherwise the plan may be cheaper; it
        need not be.
    """
    asks = list(_asks(graph, inputs, outputs, mesh))
    graph = with_plain_moves(graph)
    ties = _known_ties(graph)
    inner = inner_asks(graph, asks, ties)
    if not inner:
        return None
    sizes = stored_sizes(graph, [*asks, *inner], ties)
    return _bounded(graph, inputs, outputs, mesh, sizes, ties, result_names)


def _known_ties(graph: Graph) -> Callable[[Equation], Ties]:
    """What padding an equation bears; worked out once for each rule."""
    known: dict[Rule, Ties] = {}

    def ties(equation: Equation) -> Ties:
        assert equation.rule is not None
        if equation.rule not in known:
            ins = tuple(map(graph.aval, equation.inputs))
            known[equation.rule] = ties_of(
                equation, ins, tuple(graph.avals[t] for t in equation.outputs)
            )
        return known[equation.rule]

    return ties


def _splits(spec: PartitionSpec, shape: Sequence[int], mesh: Mapping[str, int]):
    """Each dim that a spec splits, its size, and the number of parts."""
    for dim, (axes, size) in enumerate(zip(entries(spec), shape, strict=False)):
        if axes:
            yield dim, size, prod(mesh[axis] for axis in axes)


def _asks(graph: Graph, inputs: Specs, outputs: Specs, mesh: Mapping[str, int]):
    """All splits that are asked for, by ends and constraints."""
    ends: list[tuple[Atom, PartitionSpec | None]] = [
        *zip(graph.block.inputs, inputs, strict=True),
        *zip(graph.block.outputs, outputs, strict=True),
    ]
    ends += [(e.outputs[0], e.constraint) for e, _ in graph.equations() if e.constraint is not None]
    for atom, spec in ends:
        if not isinstance(atom, int) or spec is None:
            continue
        axes_of = list(entries(spec))
        for dim, _, parts in _splits(spec, graph.avals[atom].shape, mesh):
            yield Ask(atom, dim, axes_of[dim], parts)


def _bounded(
    graph: Graph,
    inputs: Specs,
    outputs: Specs,
    mesh: Mapping[str, int],
    sizes: Sizes,
    ties: Callable[[Equation], Ties],
    result_names: Sequence[str],
) -> Uneven:
    rewriter = Rewriter(graph, sizes.shapes, ties, garbage=GARBAGE)
    block = graph.block
    arguments = tuple(rewriter.new(graph.avals[t]) for t in block.inputs)
    code = Code(rewriter, {})
    padded: dict[int, int] = {}
    for position, (tensor, argument, spec) in enumerate(
        zip(block.inputs, arguments, inputs, strict=True)
    ):
        shape = sizes.shapes[tensor]
        code.known[tensor] = code.entered(argument, graph.avals[tensor].shape, shape)
        if spec is not None and shape != graph.avals[tensor].shape:
            placed = code.constrained(code.known[tensor], spec)
            assert isinstance(placed, int)  # an argument is no constant
            padded[placed] = position
            code.known[tensor] = placed
    names = dict(zip(arguments, (graph.names.get(t, "") for t in block.inputs), strict=True))
    names |= {placed: names[arguments[position]] for placed, position in padded.items()}
    code.run(block)
    constants = made_of_constants(graph).tensors  # whole everywhere, as they are
    results: list[Atom] = []
    for i, (atom, spec) in enumerate(zip(block.outputs, outputs, strict=True)):
        true = graph.aval(atom).shape
        is_split = isinstance(atom, int) and sizes.shapes[atom] != true and atom not in constants
        if is_split and spec is not None and isinstance(atom, int):
            placed = code.constrained(code.known[atom], spec)
            assert isinstance(placed, int)  # nor is what is split
            names[placed] = _name(result_names, i)
            results.append(code.fitted(placed, true, true))
        else:
            results.append(code.read(atom, true))
    made = Graph(
        tuple(rewriter.avals),
        {tensor: name for tensor, name in names.items() if name},
        replace(block, inputs=arguments, equations=tuple(code.equations), outputs=tuple(results)),
        padded,
    )
    stored_in, stored_out = (
        [sizes.shapes[a] if isinstance(a, int) else a.aval.shape for a in atoms]
        for atoms in (block.inputs, block.outputs)
    )
    return Uneven(
        pruned(made),
        tuple(map(partial(_whole, graph, mesh), block.inputs, stored_in, inputs)),
        tuple(map(partial(_whole, graph, mesh), block.outputs, stored_out, outputs)),
        tuple(_notes(graph, outputs, mesh, sizes, result_names)),
    )


def _relaxed(
    graph: Graph, inputs: Specs, outputs: Specs, mesh: Mapping[str, int]
) -> tuple[Specs, Specs]:
    """The layouts, with dims whole that cannot be split: those of random keys, and of literals."""
    found = []
    for atoms, specs in ((graph.block.inputs, inputs), (graph.block.outputs, outputs)):
        shapes = [graph.aval(atom).shape for atom in atoms]
        found.append(tuple(map(partial(_whole, graph, mesh), atoms, shapes, specs)))
    return found[0], found[1]


def _whole(
    graph: Graph,
    mesh: Mapping[str, int],
    atom: Atom,
    stored: tuple[int, ...],
    spec: PartitionSpec | None,
) -> PartitionSpec | None:
    """A layout of an array of the true size, whole on the dims that are padded."""
    if spec is None:
        return None
    true = graph.aval(atom).shape
    parts = list(spec.partitions)
    for dim, size, pieces in _splits(spec, true, mesh):
        if size % pieces or stored[dim] != size:
            parts[dim] = None
    return PartitionSpec(*parts)


def _notes(
    graph: Graph,
    outputs: Specs,
    mesh: Mapping[str, int],
    sizes: Sizes,
    result_names: Sequence[str],
):
    """Which dims of arguments are padded, and which of the results that were to be split there."""
    told: list[tuple[int, str, set[int] | None]] = [
        (tensor, graph.names.get(tensor, f"argument {i}"), None)
        for i, tensor in enumerate(graph.block.inputs)
    ]
    for i, (atom, spec) in enumerate(zip(graph.block.outputs, outputs, strict=True)):
        if isinstance(atom, int) and atom not in graph.block.inputs and spec is not None:
            told.append(
                (
                    atom,
                    _name(result_names, i),
                    {dim for dim, *_ in _splits(spec, graph.avals[atom].shape, mesh)},
                )
            )
    for tensor, name, dims in told:
        for dim, (true, stored) in enumerate(
            zip(graph.avals[tensor].shape, sizes.shapes[tensor], strict=True)
        ):
            if true != stored and (dims is None or dim in dims):
                axes = dict.fromkeys(a for of_ask in sizes.axes[tensor, dim] for a in of_ask)
                over = " and ".join(map(repr, axes))
                yield f"{name} dim {dim}: {true} padded to {stored} over {over}"


def _name(result_names: Sequence[str], position: int) -> str:
    return result_names[position] if result_names else f"result[{position}]"
