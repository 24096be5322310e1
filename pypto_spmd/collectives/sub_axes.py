"""Mesh axes cut into sub-axes, where a reshape splits a dim more finely than an axis can follow.

A dim of 8 heads split over an axis of 4, reshaped to (2 groups, 4 heads), lies on the axis as 2 of one and
2 of the other: no single label says that. With the axis seen as two, of 2 and of 2, each has a label of
its own, and everything else stays as it is. Only planning sees the finer mesh; arguments, results and the
plan speak of the mesh that was given.

Invariant: a sub-axis is called after its axis, `model.0` being the outer part of `model`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from pypto_spmd.collectives.by_hand import axes_of, names_axes, with_axes
from pypto_spmd.collectives.facts import NOTHING, EquationFacts, GraphFacts
from pypto_spmd.collectives.graph import Block, Equation, Graph
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.sharding.layout import Layout

Parts = Mapping[str, tuple[int, ...]]
"""For each axis that is cut, the sizes of its sub-axes, outermost first."""


def needed_parts(
    facts: GraphFacts, mesh: DeviceMesh, ends: Iterable[tuple[object, Layout | None]]
) -> Parts:
    """Which axes have to be cut.

    Args:
        facts: of the traced function.
        mesh: the mesh.
        ends: its arguments and results (tensors or constants) with their given layouts.
    """
    asked: dict[str, set[int]] = {axis: set() for axis in mesh.axis_names}
    for atom, layout in (*ends, *_ends_within(facts)):
        if layout is None or not isinstance(atom, int):
            continue
        for dim, axes in enumerate(layout.dims):
            for axis in axes:
                asked[axis].add(facts.dims[atom][dim])
    found: dict[str, tuple[int, ...]] = {}
    for index, known in facts.equations.items():
        for first, rest, classes in _leading_factors(known):
            for axis, size in mesh.shape.items():
                if index in facts.inside.get(axis, NOTHING).equations:
                    continue
                # The first factor takes part of the axis, those behind it the remainder.
                outer = first
                if not 1 < outer < size or size % outer or rest % (size // outer):
                    continue
                if asked[axis] & classes:
                    found.setdefault(axis, (outer, size // outer))
    return found


def _ends_within(facts: GraphFacts) -> Iterable[tuple[object, Layout | None]]:
    """What constraints ask for, and how regions' operands and results lie."""
    for known in facts.equations.values():
        equation = known.equation
        if equation.constraint is not None:
            (output,) = equation.outputs
            yield output, Layout.from_spec(equation.constraint, len(facts.dims[output]))
    for _, _, links in facts.loops:
        for link in links:
            yield (link.target if link.inside else link.source), link.given


def _leading_factors(known: EquationFacts) -> Iterable[tuple[int, int, set[int]]]:
    """Size of the first factor of a dim of several, size of the second, and the classes of all its dims."""
    rule = known.equation.ruled
    for dims in (*rule.operands, *rule.results):
        for dim in dims:
            factors = [f for f in dim if rule.factors[f].size > 1]
            if len(factors) > 1:
                classes = {c for f in factors for c in known.factor_classes[f]}
                sizes = [rule.factors[f].size for f in factors]
                yield sizes[0], sizes[1], classes


def cut(layout: Layout | None, parts: Parts) -> Layout | None:
    """A layout of the given mesh, told in sub-axes."""
    if layout is None:
        return None
    return replace(layout, dims=tuple(_cut_axes(axes, parts) for axes in layout.dims))


def cut_graph(graph: Graph, parts: Parts) -> Graph:
    """The graph with what it says itself of the mesh told in sub-axes: constraints and regions."""
    return replace(graph, block=_cut_block(graph.block, parts))


def _cut_block(block: Block, parts: Parts) -> Block:
    return replace(block, equations=tuple(_cut_equation(e, parts) for e in block.equations))


def _cut_equation(equation: Equation, parts: Parts) -> Equation:
    bodies = tuple(_cut_block(body, parts) for body in equation.bodies)
    params, constraint, region = equation.params, equation.constraint, equation.region
    if names_axes(equation.name):
        params = with_axes(params, _cut_axes(axes_of(params), parts))
    if constraint is not None:
        constraint = PartitionSpec(*(_cut_entry(entry, parts) for entry in constraint))
    if region is not None:
        layouts = lambda found: tuple(cut(layout, parts) for layout in found)  # noqa: E731
        axes = _cut_axes(region.axes, parts)
        region = replace(
            region, axes=axes, inputs=layouts(region.inputs), outputs=layouts(region.outputs)
        )
    return replace(equation, bodies=bodies, params=params, constraint=constraint, region=region)


def _cut_entry(entry: Any, parts: Parts) -> Any:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return entry
    return _cut_axes((entry,) if isinstance(entry, str) else entry, parts)


def _cut_axes(axes: Sequence[str], parts: Parts) -> tuple[str, ...]:
    return tuple(n for a in axes for n in (sub_axes(a, parts[a]) if a in parts else (a,)))


def sub_axes(axis: str, sizes: Sequence[int]) -> tuple[str, ...]:
    """Names of the sub-axes of an axis."""
    return tuple(f"{axis}.{i}" for i in range(len(sizes)))


def join(axes: Sequence[str], parts: Parts) -> tuple[str, ...]:
    """Axes of the given mesh in place of all their sub-axes, where these stand together in order."""
    joined = list(axes)
    for axis, sizes in parts.items():
        names = list(sub_axes(axis, sizes))
        for start in range(len(joined) - len(names) + 1):
            if joined[start : start + len(names)] == names:
                joined[start : start + len(names)] = [axis]
                break
    return tuple(joined)


def joined(layout: Layout, parts: Parts) -> Layout | None:
    """A layout told in axes of the given mesh; None if it splits something over a part of an axis."""
    dims = tuple(join(axes, parts) for axes in layout.dims)
    names = {n for axis, sizes in parts.items() for n in sub_axes(axis, sizes)}
    return None if any(a in names for axes in dims for a in axes) else replace(layout, dims=dims)


def coarsened(layout: Layout, parts: Parts) -> Layout:
    """The layout without what only a part of an axis splits."""
    names = {n for axis, sizes in parts.items() for n in sub_axes(axis, sizes)}
    dims = tuple(tuple(a for a in join(axes, parts) if a not in names) for axes in layout.dims)
    return replace(layout, dims=dims)
