"""Layouts: how one tensor lies on the mesh, as one label a mesh axis.

On each mesh axis a tensor is replicated (`R`), has one dim split (`S(d)`), or is partial (`P(op)`: the
true value is the `op`-reduction over that axis). Where several axes split one dim, the layout also
holds their nesting, outermost first: only the innermost axis can be gathered or moved alone.

Invariant: an axis occurs at most once in a layout, either in `dims` or in `partial`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

from jax.sharding import PartitionSpec

REDUCTIONS = ("sum", "max", "min", "prod", "or", "and")
"""The ops a partial tensor can be waiting for. All but "sum" and "prod" are idempotent."""

IDEMPOTENT = frozenset({"max", "min", "or", "and"})
"""Reductions of which a replicated tensor already is a valid partial: max(x, x) = x."""


class Label:
    """What one mesh axis does to one tensor; made by `R`, `S(dim)` and `P(op)`, one object a label.

    Inference compares and hashes labels millions of times, so equal labels are the same object.

    Attributes:
        kind: "R", "S" or "P".
        dim: the dim that is split, -1 unless the kind is "S".
        op: the reduction, "" unless the kind is "P".
    """

    __slots__ = ("dim", "kind", "op")

    kind: str
    dim: int
    op: str

    def __new__(cls, kind: str, dim: int = -1, op: str = "") -> "Label":
        return _label(kind, dim, op)

    def __lt__(self, other: "Label") -> bool:
        return (self.kind, self.dim, self.op) < (other.kind, other.dim, other.op)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Label does not change")

    def __reduce__(self) -> tuple[type["Label"], tuple[str, int, str]]:
        return Label, (self.kind, self.dim, self.op)

    def __repr__(self) -> str:
        if self.kind == "R":
            return "R"
        return f"S({self.dim})" if self.kind == "S" else f"P({self.op})"


@cache
def _label(kind: str, dim: int, op: str) -> Label:
    label = object.__new__(Label)
    for name, value in (("kind", kind), ("dim", dim), ("op", op)):
        object.__setattr__(label, name, value)
    return label


R = Label("R")


def S(dim: int) -> Label:
    """The label of a tensor whose dim `dim` is split over the axis."""
    return _label("S", dim, "")


def P(op: str = "sum") -> Label:
    """The label of a tensor whose value is the `op`-reduction over the axis."""
    if op not in REDUCTIONS:
        raise ValueError(f"unknown reduction {op!r}; known: {', '.join(REDUCTIONS)}")
    return _label("P", -1, op)


@dataclass(frozen=True, slots=True)
class Layout:
    """A label for every mesh axis, with the nesting of the axes of each dim.

    Args:
        dims: for each dim of the tensor, the mesh axes that split it, outermost first.
        partial: (mesh axis, reduction) pairs of the axes on which the tensor is partial, sorted.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def replicated(rank: int) -> "Layout":
        """The layout of a tensor of `rank` dims that every device holds whole."""
        return _replicated(rank)

    @staticmethod
    def from_spec(spec: PartitionSpec | None, rank: int) -> "Layout":
        """The layout that a `PartitionSpec` (padded with None to `rank`) states, open dims whole."""
        entries = [None if e is PartitionSpec.UNCONSTRAINED else e for e in spec or ()]
        dims = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)
        return Layout(dims + ((),) * (rank - len(dims)))

    @property
    def spec(self) -> PartitionSpec:
        """The `PartitionSpec` of the split dims (what is partial has no place in one)."""
        entries = [None if not a else a[0] if len(a) == 1 else a for a in self.dims]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def label(self, axis: str) -> Label:
        """What `axis` does to the tensor."""
        for dim, axes in enumerate(self.dims):
            if axis in axes:
                return S(dim)
        for name, op in self.partial:
            if name == axis:
                return P(op)
        return R

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes on which the tensor is not replicated."""
        return frozenset(a for axes in self.dims for a in axes) | frozenset(
            a for a, _ in self.partial
        )

    def with_label(self, axis: str, label: Label) -> "Layout":
        """This layout with `axis` relabelled; a new split is nested innermost."""
        dims = [tuple(a for a in axes if a != axis) for axes in self.dims]
        partial = [(a, op) for a, op in self.partial if a != axis]
        if label.kind == "S":
            dims[label.dim] = (*dims[label.dim], axis)
        elif label.kind == "P":
            partial.append((axis, label.op))
        return Layout(tuple(dims), tuple(sorted(partial)))

    def shards(self, dim: int, axis_sizes: Mapping[str, int]) -> int:
        """Into how many pieces `dim` is cut."""
        return prod(axis_sizes[a] for a in self.dims[dim])

    def local_shape(self, shape: tuple[int, ...], axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape that one device holds of a tensor of global `shape`."""
        return tuple(n // self.shards(d, axis_sizes) for d, n in enumerate(shape))

    def divides(self, shape: tuple[int, ...], axis_sizes: Mapping[str, int]) -> bool:
        """Whether every split dim of `shape` is cut into equal pieces."""
        return all(n % self.shards(d, axis_sizes) == 0 for d, n in enumerate(shape))

    def __str__(self) -> str:
        entries = ", ".join(
            "-" if not a else a[0] if len(a) == 1 else "(" + ",".join(a) + ")" for a in self.dims
        )
        partial = "".join(f" {op}@{axis}" for axis, op in self.partial)
        return f"[{entries}]{partial}"


def open_dims(spec: PartitionSpec) -> tuple[int, ...]:
    """The dims of which a spec says nothing: `PartitionSpec.UNCONSTRAINED`."""
    return tuple(d for d, entry in enumerate(spec) if entry is PartitionSpec.UNCONSTRAINED)


@cache
def _replicated(rank: int) -> Layout:
    return Layout(((),) * rank)
