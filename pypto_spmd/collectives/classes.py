"""Dims that go together: the classes of dims that the rules say are one and the same.

Two dims are in one class if a chain of factors links them, so a class is what people call "the batch",
"the heads" or "the vocabulary". Which classes a given layout asks to split decides what may be split at
all, and which dims count as data.

What is made of constants alone links nothing: the zeros that two unrelated activations are compared with
may be one tensor, and it is whole anyway.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import lru_cache

from pypto_spmd.collectives.graph import Constant, Equation, Graph
from pypto_spmd.collectives.links import links_of
from pypto_spmd.collectives.rules import Rule


@dataclass(slots=True)
class DimClasses:
    """Union-find over the dims of all tensors of a graph.

    Args:
        offsets: number of the first dim of each tensor.
        parents: parent of each dim.
    """

    offsets: list[int]
    parents: list[int]

    def find(self, tensor: int, dim: int) -> int:
        """The class of one dim of one tensor."""
        node = self.offsets[tensor] + dim
        parents = self.parents
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    def of(self, tensor: int, dims: Iterable[int]) -> set[int]:
        """The classes of several dims of one tensor."""
        return {self.find(tensor, d) for d in dims}

    def join(self, first: tuple[int, int], second: tuple[int, int]) -> None:
        """Makes two (tensor, dim)s one class; the earlier dim stands for it."""
        a, b = self.find(*first), self.find(*second)
        if a != b:
            self.parents[max(a, b)] = min(a, b)


def dim_classes(graph: Graph, constants: Set[int], *, inner: bool = False) -> DimClasses:
    """The classes of all dims of `graph`.

    Args:
        graph: the graph.
        constants: the tensors that are made of constants alone.
        inner: whether a dim of several factors is one class with the dims of all of them, and not with
            those of the first alone: where an axis is cut, its parts may split one factor each.
    """
    offsets, total = [], 0
    for aval in graph.avals:
        offsets.append(total)
        total += len(aval.shape)
    classes = DimClasses(offsets, list(range(total)))
    for equation, _ in graph.equations():
        if equation.rule is not None:
            for nodes in factor_dims(equation, constants):
                for node in nodes[1:]:
                    classes.join(nodes[0], node)
            for nodes in inner_dims(equation, constants) if inner else ():
                for node in nodes[1:]:
                    classes.join(nodes[0], node)
        else:
            for link in links_of(equation, 1.0):
                if isinstance(link.source, Constant) or link.source in constants:
                    continue
                rank = len(graph.avals[link.target].shape)
                shift = link.source_shift
                for dim in range(min(rank, rank + shift)):
                    source_dim, target_dim = (
                        (dim + shift, dim) if shift >= 0 else (dim, dim - shift)
                    )
                    classes.join((link.source, source_dim), (link.target, target_dim))
    return classes


def factor_dims(equation: Equation, constants: Set[int]) -> list[list[tuple[int, int]]]:
    """For each factor of an equation's rule, the (tensor, dim)s that it leads, of constants none."""
    rule = equation.ruled
    found = []
    for places in _leading(rule):
        nodes = []
        for side, position, dim in places:
            atom = (equation.outputs if side else equation.inputs)[position]
            if isinstance(atom, int) and atom not in constants:
                nodes.append((atom, dim))
        found.append(nodes)
    return found


def inner_dims(equation: Equation, constants: Set[int]) -> list[list[tuple[int, int]]]:
    """For each factor of an equation's rule, all (tensor, dim)s that it is part of, likewise."""
    rule = equation.ruled
    found: list[list[tuple[int, int]]] = [[] for _ in rule.factors]
    for atoms, tensors in ((equation.inputs, rule.operands), (equation.outputs, rule.results)):
        for atom, dims in zip(atoms, tensors, strict=True):
            if not isinstance(atom, int) or atom in constants:
                continue
            for d, dim in enumerate(dims):
                for factor in dim:
                    if rule.factors[factor].size > 1:
                        found[factor].append((atom, d))
    return found


@lru_cache(maxsize=100_000)
def _leading(rule: Rule) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """For each factor, the (0 for operands or 1 for results, position, dim)s that it leads."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in rule.factors]
    for side, tensors in enumerate((rule.operands, rule.results)):
        for position, dims in enumerate(tensors):
            for d, dim in enumerate(dims):
                if dim:
                    first = next((f for f in dim if rule.factors[f].size > 1), dim[0])
                    found[first].append((side, position, d))
    return tuple(map(tuple, found))
