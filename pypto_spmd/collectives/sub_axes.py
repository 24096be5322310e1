"""Mesh axes cut into sub-axes, where a reshape splits a dim more finely than an axis can follow.

A dim of 8 heads split over an axis of 4, reshaped to (2 groups, 4 heads), lies on the axis as 2 of one and
2 of the other: no single label says that. With the axis seen as two, of 2 and of 2, each has a label of
its own, and everything else stays as it is. Only planning sees the finer mesh; arguments, results and the
plan speak of the mesh that was given.

Invariant: a sub-axis is called after its axis, `model.0` being the outer part of `model`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pypto_spmd.collectives.facts import EquationFacts, GraphFacts
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
    for atom, layout in ends:
        if layout is None or not isinstance(atom, int):
            continue
        for dim, axes in enumerate(layout.dims):
            for axis in axes:
                asked[axis].add(facts.dims[atom][dim])
    found: dict[str, tuple[int, ...]] = {}
    for known in facts.equations.values():
        for first, rest, classes in _leading_factors(known):
            for axis, size in mesh.shape.items():
                # The first factor takes part of the axis, those behind it the remainder.
                outer = first
                if not 1 < outer < size or size % outer or rest % (size // outer):
                    continue
                if asked[axis] & classes:
                    found.setdefault(axis, (outer, size // outer))
    return found


def _leading_factors(known: EquationFacts) -> Iterable[tuple[int, int, set[int]]]:
    """Size of the first factor of a dim of several, size of the second, and the classes of all its dims."""
    rule = known.equation.rule
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
    names = {axis: sub_axes(axis, sizes) for axis, sizes in parts.items()}
    dims = tuple(tuple(n for a in axes for n in names.get(a, (a,))) for axes in layout.dims)
    return replace(layout, dims=dims)


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
