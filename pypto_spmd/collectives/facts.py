"""What inference needs to know of a graph, whatever the axis: worked out once.

Models repeat the same few hundred equations thousands of times, so everything that costs time later is
keyed by small things that repeat: rules, classes of dims, weights.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from math import prod

from pypto_spmd.collectives.classes import DimClasses, dim_classes, factor_dims
from pypto_spmd.collectives.graph import Block, Constant, Equation, Graph, blocks_of
from pypto_spmd.collectives.links import Link, links_of


@dataclass(frozen=True, slots=True, eq=False)
class EquationFacts:
    """One equation that has a rule.

    Args:
        equation: the equation.
        block: where it stands.
        reads: its distinct operands that are tensors, each with the positions in which it is read.
        factor_classes: for each factor of its rule, the classes of the dims that it leads, or, if it leads
            none, of the dims in which it stands behind others.
    """

    equation: Equation
    block: Block
    reads: tuple[tuple[int, tuple[int, ...]], ...]
    factor_classes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Inside:
    """What is whole on a mesh axis, and nobody's to plan, being inside a region on it for instance.

    Args:
        tensors: numbers of the tensors.
        equations: indices of the equations.
    """

    tensors: frozenset[int] = frozenset()
    equations: frozenset[int] = frozenset()


NOTHING = Inside()
"""What is inside the regions on an axis that has none."""


def inside_regions(graph: Graph) -> dict[str, Inside]:
    """For each mesh axis that a region is on, what is inside."""
    found: dict[str, Inside] = {}
    for equation, _ in graph.equations():
        if equation.region is None:
            continue
        blocks = [b for body in equation.bodies for b in blocks_of(body)]
        equations = [e for block in blocks for e in block.equations]
        tensors = {t for block in blocks for t in block.inputs}
        tensors.update(t for e in equations for t in e.outputs)
        for axis in equation.region.axes:
            known = found.get(axis, NOTHING)
            found[axis] = Inside(
                known.tensors | tensors, known.equations | {e.index for e in equations}
            )
    return found


@dataclass(frozen=True, slots=True, eq=False)
class GraphFacts:
    """A graph, read once.

    Args:
        graph: the graph.
        classes: its classes of dims.
        dims: for each tensor the classes of its dims.
        bytes: for each tensor its bytes, whole.
        equations: all equations with a rule, by equation index.
        loops: all loops with the block they stand in and their links.
        order: all equations with their blocks, in program order.
        batched: classes of the dims over which matrix work is batched: with weights of their own for each
            index, what experts are.
        inside: for each mesh axis what is inside a region on it.
        constants: what is made of constants alone, without random numbers.
    """

    graph: Graph
    classes: DimClasses
    dims: tuple[tuple[int, ...], ...]
    bytes: tuple[int, ...]
    equations: dict[int, EquationFacts]
    loops: tuple[tuple[Equation, Block, tuple[Link, ...]], ...]
    order: tuple[tuple[Equation, Block], ...]
    batched: frozenset[int]
    inside: Mapping[str, Inside]
    constants: Inside


def read_graph(graph: Graph, *, inner: bool = False) -> GraphFacts:
    """The facts of a graph; `inner` as for `dim_classes`."""
    constants = made_of_constants(graph)
    classes = dim_classes(graph, constants.tensors, inner=inner)
    dims = tuple(
        tuple(classes.find(tensor, d) for d in range(len(aval.shape)))
        for tensor, aval in enumerate(graph.avals)
    )
    order = tuple(graph.equations())
    equations, loops = {}, []
    for equation, block in order:
        if equation.rule is None:
            loops.append((equation, block, links_of(equation, block.weight)))
            continue
        reads: dict[int, tuple[int, ...]] = {}
        for position, atom in enumerate(equation.inputs):
            if isinstance(atom, int):
                reads[atom] = (*reads.get(atom, ()), position)
        equations[equation.index] = EquationFacts(
            equation,
            block,
            tuple(reads.items()),
            _factor_classes(equation, dims, constants.tensors),
        )
    batched = frozenset(c for known in equations.values() for c in _batch_classes(known))
    sizes = tuple(prod(aval.shape) * aval.itemsize for aval in graph.avals)
    return GraphFacts(
        graph, classes, dims, sizes, equations, tuple(loops), order, batched, inside_regions(graph),
        constants,
    )  # fmt: skip


def made_of_constants(graph: Graph) -> Inside:
    """What every device can make whole for itself, and XLA folds: no collective may move it.

    Random numbers are not among it: they cost time, and each device makes its own part of them.
    """
    tensors: set[int] = set()
    equations: set[int] = set()
    for equation, _ in graph.equations():
        known = all(isinstance(a, Constant) or a in tensors for a in equation.inputs)
        if equation.rule is None or not known or equation.constraint is not None:
            continue
        if not equation.name.startswith(("random", "threefry", "rng")):
            equations.add(equation.index)
            tensors.update(equation.outputs)
    return Inside(frozenset(tensors), frozenset(equations))


def _batch_classes(known: EquationFacts):
    rule = known.equation.ruled
    if rule.works:
        for factor, classes in enumerate(known.factor_classes):
            tensors = (*rule.operands, *rule.results)
            if all(any(factor in dim for dim in dims) for dims in tensors):
                yield from classes


def _factor_classes(
    equation: Equation, dims: tuple[tuple[int, ...], ...], constants: Set[int]
) -> tuple[tuple[int, ...], ...]:
    found = []
    for factor, nodes in enumerate(factor_dims(equation, constants)):
        if nodes:
            found.append((dims[nodes[0][0]][nodes[0][1]],))
        else:
            found.append(tuple(_behind(equation, factor, dims)))
    return tuple(found)


def _behind(equation: Equation, factor: int, dims: tuple[tuple[int, ...], ...]):
    """Classes of the dims in which a factor stands behind another."""
    rule = equation.ruled
    for atoms, tensors in ((equation.inputs, rule.operands), (equation.outputs, rule.results)):
        for atom, tensor in zip(atoms, tensors, strict=True):
            if isinstance(atom, int):
                yield from (dims[atom][d] for d, dim in enumerate(tensor) if factor in dim)
