"""How large each dim is stored: given splits ask for multiples, and dims that are tied are padded alike.

This is a matter of cost alone: the rewriting is right for any sizes that are not too small.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import gcd, lcm
from typing import Any

import numpy as np

from pypto_spmd.collectives.graph import Block, Constant, Equation, Graph
from pypto_spmd.collectives.links import links_of
from pypto_spmd.collectives.padding.ties import Ties

MOST_GROWTH = 2.0
"""Dims of different sizes are not padded alike if one more than doubles that needs no such padding."""

TiesOf = Callable[[Equation], Ties]


@dataclass(frozen=True, slots=True)
class Ask:
    """A split that is asked for.

    Args:
        tensor: of which tensor.
        dim: of which of its dims.
        axes: the mesh axes, outermost first.
        parts: into how many pieces.
    """

    tensor: int
    dim: int
    axes: tuple[str, ...]
    parts: int


@dataclass(slots=True)
class _Class:
    """Dims that are padded by one factor, `blocks / unit`.

    Args:
        unit: divides all their sizes.
        asks: size of a dim -> number that its padded size must be a multiple of.
        axes: the mesh axes that ask for it.
    """

    unit: int
    asks: dict[int, int] = field(default_factory=dict)
    axes: dict[tuple[str, ...], None] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """The least number of blocks of `size / unit` rows that does for all that is asked."""
        if not self.unit:
            return 0
        step = lcm(*(parts // gcd(parts, size // self.unit) for size, parts in self.asks.items()))
        return -(-self.unit // step) * step

    @property
    def growth(self) -> float:
        return self.blocks / self.unit if self.unit else 1.0

    def with_(self, other: "_Class", unit: int) -> "_Class":
        asks = dict(self.asks)
        for size, parts in other.asks.items():
            asks[size] = lcm(parts, asks.get(size, 1))
        return _Class(gcd(self.unit, other.unit, unit), asks, self.axes | other.axes)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large dims are stored.

    Args:
        shapes: the shape in which each tensor is stored.
        axes: (tensor, dim) of a padded dim -> the splits that ask for it.
    """

    shapes: tuple[tuple[int, ...], ...]
    axes: Mapping[tuple[int, int], tuple[tuple[str, ...], ...]]


def stored_sizes(graph: Graph, asks: Sequence[Ask], ties_of: TiesOf) -> Sizes:
    """The sizes in which the dims of a graph are stored.

    Args:
        graph: the traced function.
        asks: the splits that are asked for.
        ties_of: what padding an equation bears.
    """
    return _joined(graph, asks, ties_of).sizes()


def _joined(graph: Graph, asks: Sequence[Ask], ties_of: TiesOf) -> "_Classes":
    """The classes of dims that are padded alike."""
    classes = _Classes(graph)
    for ask in asks:
        classes.ask(ask)
    blocks = list(_open_blocks(graph.block))
    for block in blocks:
        for equation in block.equations:
            classes.join_all(_bound(equation, graph))
    scaled: list[tuple[list[tuple[int, int]], int]] = []
    for block in blocks:
        for equation in block.equations:
            if equation.rule is None:
                continue
            for tie in ties_of(equation).ties:
                nodes = []
                for place in tie.places:
                    atoms = equation.outputs if place.is_result else equation.inputs
                    atom = atoms[place.position]
                    if isinstance(atom, int) and _can_be_padded(graph.avals[atom].dtype):
                        nodes.append((atom, place.dim))
                if len({graph.avals[t].shape[d] for t, d in nodes} | {tie.unit}) <= 1:
                    classes.join_all([nodes])
                else:
                    scaled.append((nodes, tie.unit))
    for nodes, unit in scaled:
        classes.join_scaled(nodes, unit)
    return classes


FEW = 4
"""Of a dim that is split, less than one row in so many is read whole."""

_Node = tuple[int, int]


def inner_asks(graph: Graph, asks: Sequence[Ask], ties_of: TiesOf) -> list[Ask]:
    """Splits of the dims that are windows of split ones, `x[1:]` of `x`, if any is of a size that they
    do not divide.

    Args:
        graph: the traced function.
        asks: the splits that are asked for.
        ties_of: what padding an equation bears.
    """
    pairs = list(_windows(graph))
    counts = {ask.parts for ask in asks}
    if not any(graph.avals[t].shape[d] % n for pair in pairs for t, d in pair for n in counts):
        return []
    classes = _joined(graph, asks, ties_of)
    wanted: dict[_Node, dict[tuple[tuple[str, ...], int], None]] = {}
    for ask in asks:
        wanted.setdefault(classes.find((ask.tensor, ask.dim)), {})[ask.axes, ask.parts] = None
    found: dict[Ask, None] = {}
    before = -1
    while before < len(found):
        before = len(found)
        for one, other in (*pairs, *((b, a) for a, b in pairs)):
            target = wanted.setdefault(classes.find(other), {})
            for axes, parts in tuple(wanted.get(classes.find(one), ())):
                size = graph.avals[other[0]].shape[other[1]]
                if (axes, parts) not in target and size > parts:
                    target[axes, parts] = None
                    found[Ask(*other, axes, parts)] = None
    is_uneven = any(graph.avals[a.tensor].shape[a.dim] % a.parts for a in found)
    return list(found) if is_uneven else []


def _windows(graph: Graph):
    """Pairs of dims of which one is made of rows of the other, and as many, or nearly."""
    for block in _open_blocks(graph.block):
        for equation in block.equations:
            for one, other in _resized(equation, graph):
                sizes = [graph.avals[t].shape[d] for t, d in (one, other)]
                if max(sizes) < FEW * min(sizes):
                    yield one, other


def _resized(equation: Equation, graph: Graph):
    """The dims of operands and results that differ in size because rows are taken or added."""
    if equation.name not in _RESIZING:
        return
    made = equation.outputs[0]
    if equation.name == "conv_general_dilated":
        numbers = equation.params["dimension_numbers"]
        dims = list(zip(numbers.lhs_spec[2:], numbers.out_spec[2:], strict=True))
    else:
        dims = [(d, d) for d in range(len(graph.avals[made].shape))]
    count = len(equation.inputs) if equation.name == "concatenate" else 1
    read = [atom for atom in equation.inputs[:count] if isinstance(atom, int)]
    for (before, after), atom, result in product(dims, read, equation.outputs):
        if graph.avals[atom].shape[before] != graph.avals[result].shape[after]:
            yield (atom, before), (result, after)


_RESIZING = {
    "concatenate", "conv_general_dilated", "pad", "reduce_window_max", "reduce_window_min",
    "reduce_window_sum", "slice", "split",
}  # fmt: skip


def _can_be_padded(dtype: Any) -> bool:
    """Whether there are elements to pad with: there are no random keys of no meaning."""
    return isinstance(dtype, np.dtype)


def _open_blocks(block: Block):
    """The blocks whose equations are planned, those inside regions not being."""
    yield block
    for equation in block.equations:
        for body in equation.bodies if equation.region is None else ():
            yield from _open_blocks(body)


def _bound(equation: Equation, graph: Graph):
    """The dims that a loop binds to each other."""
    if equation.rule is not None or equation.region is not None:
        return
    for link in links_of(equation, 1.0):
        if isinstance(link.source, Constant) or not _can_be_padded(graph.avals[link.target].dtype):
            continue
        shift, rank = link.source_shift, len(graph.avals[link.target].shape)
        for dim in range(max(0, -shift), rank):
            yield [(link.source, dim + shift), (link.target, dim)]


class _Classes:
    """Union-find over the dims of all tensors."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.parents: dict[tuple[int, int], tuple[int, int]] = {}
        self.classes: dict[tuple[int, int], _Class] = {}

    def find(self, node: tuple[int, int]) -> tuple[int, int]:
        parents = self.parents
        if node not in parents:
            parents[node] = node
            self.classes[node] = _Class(self._size(node))
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    def ask(self, ask: Ask) -> None:
        if not _can_be_padded(self.graph.avals[ask.tensor].dtype):
            return
        found = self.classes[self.find((ask.tensor, ask.dim))]
        size = self._size((ask.tensor, ask.dim))
        found.asks[size] = lcm(ask.parts, found.asks.get(size, 1))
        if size % ask.parts:
            found.axes[ask.axes] = None

    def join_all(self, groups: Any) -> None:
        for nodes in groups:
            for node in nodes[1:]:
                self._join(nodes[0], node, self._size(node))

    def join_scaled(self, nodes: Sequence[tuple[int, int]], unit: int) -> None:
        """Joins dims of different sizes, unless that makes one of them much larger."""
        for node in nodes[1:]:
            one, other = (self.classes[self.find(n)] for n in (nodes[0], node))
            joint = one.with_(other, unit)
            if joint.growth <= max(MOST_GROWTH, one.growth, other.growth):
                self._join(nodes[0], node, unit)

    def sizes(self) -> Sizes:
        shapes = []
        axes: dict[tuple[int, int], tuple[tuple[str, ...], ...]] = {}
        for tensor, aval in enumerate(self.graph.avals):
            shape = list(aval.shape)
            for dim, size in enumerate(shape):
                if (tensor, dim) not in self.parents:
                    continue
                found = self.classes[self.find((tensor, dim))]
                if found.axes and size:
                    shape[dim] = size // found.unit * found.blocks
                if shape[dim] != size:
                    axes[tensor, dim] = tuple(found.axes)
            shapes.append(tuple(shape))
        return Sizes(tuple(shapes), axes)

    def _join(self, first: tuple[int, int], second: tuple[int, int], unit: int) -> None:
        a, b = self.find(first), self.find(second)
        if a != b:
            a, b = min(a, b), max(a, b)
            self.parents[b] = a
            self.classes[a] = self.classes[a].with_(self.classes.pop(b), unit)
        else:
            self.classes[a].unit = gcd(self.classes[a].unit, unit)

    def _size(self, node: tuple[int, int]) -> int:
        return self.graph.avals[node[0]].shape[node[1]]
