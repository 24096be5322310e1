"""The layouts that have names: where parameters, optimizer state and batches lie on a mesh.

A layout is made of parts, joined with `|`, each over its own mesh axes. Parts that split the batch say
which trees are split with it; parts that name dims (tensor parallelism, flax's metadata) come first,
and the others split the largest dim that is left.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any, ClassVar

from jax.sharding import PartitionSpec

from pypto_spmd.errors import Fault, listed, refuse
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.sharding.leaves import Leaf
from pypto_spmd.sharding.parameter_forms import (
    UNMATCHED,
    ParameterLayout,
    State,
    by_rules,
    compiled_rules,
    paths_text,
)
from pypto_spmd.sharding.spec import entries, mesh_faults, shape_faults, spec_text
from pypto_spmd.training.metadata import metadata_specs
from pypto_spmd.training.names import conventional_specs

MIN_SIZE = 1024
"""Elements of an array below which splitting it costs more messages than it saves memory."""

Axes = str | tuple[str, ...]
_ACCUMULATED = "acc_grads"  # of optax.MultiSteps


class _Part(ABC):
    """What one kind of parallelism does, over mesh axes of its own."""

    @property
    @abstractmethod
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it names by itself."""


@dataclass(frozen=True, slots=True)
class _DataPart(_Part):
    """The batch is split; and what else, by a table."""

    name: str
    axis: Axes
    min_size: int

    @property
    def axes(self) -> tuple[str, ...]:
        return _names(self.axis)

    def splits(self, kind: str) -> bool:
        """Whether arrays of this kind are split: parameters, gradients or moments."""
        return kind in _SPLIT[self.name]

    def split(self, leaf: Leaf, spec: PartitionSpec, mesh: DeviceMesh) -> PartitionSpec:
        """The spec with a further dim split, if the array is large enough and has one."""
        if leaf.is_counted or leaf.size < self.min_size:
            return spec
        return with_axes(leaf.shape, spec, self.axes, mesh)

    def __repr__(self) -> str:
        size = (
            f", min_size={self.min_size}" if _SPLIT[self.name] and self.min_size != MIN_SIZE else ""
        )
        return f"{self.name}({self.axis!r}{size})"


_SPLIT = {
    "data_parallel": (),
    "zero1": ("moments",),
    "zero2": ("moments", "gradients"),
    "fsdp": ("moments", "gradients", "parameters"),
}
"""What each layout splits beside the batch (Rajbhandari et al. 2020)."""


@dataclass(frozen=True, slots=True)
class _TensorPart(_Part):
    """Dims are split by rules, or by the conventional names of layers."""

    name: ClassVar[str] = "tensor_parallel"
    rules: str | tuple[Any, ...]
    axis: Axes

    @property
    def axes(self) -> tuple[str, ...]:
        return _names(self.axis)

    def specs(
        self, leaves: Sequence[Leaf], mesh: DeviceMesh, faults: list[Fault]
    ) -> list[PartitionSpec]:
        """One spec for each parameter."""
        if isinstance(self.rules, str):
            parts = prod(mesh.shape[axis] for axis in self.axes)
            found = conventional_specs(leaves, self.axes, parts)
            if leaves and self.axes and not any(any(entries(spec)) for spec in found):
                what = f"{self!r} splits no parameter."
                why = (
                    f"None has a conventional name and a size that {parts} divides. "
                    f"The paths are: {paths_text(leaves, with_shapes=True)}."
                )
                fix = "give rules: tensor_parallel([(pattern, spec), ...])."
                faults.append(Fault(what, why, fix))
            return found
        rules = compiled_rules(self.rules, mesh, self.name, faults)
        if rules is None:
            return [PartitionSpec()] * len(leaves)
        found = by_rules(rules, State(leaves, (), ()), mesh, faults)
        wrong = lambda leaf, spec: bool(shape_faults(spec, mesh, leaf.shape, ""))  # noqa: E731
        return [
            PartitionSpec() if s is UNMATCHED or s is None or wrong(leaf, s) else s
            for leaf, s in zip(leaves, found, strict=True)
        ]

    def __repr__(self) -> str:
        return f"{self.name}({self.rules!r}, axis={self.axis!r})"


@dataclass(frozen=True, slots=True, repr=False)
class _ExpertPart(_TensorPart):
    """Experts are split by rules, and the batch over the same axis."""

    name: ClassVar[str] = "expert_parallel"


@dataclass(frozen=True, slots=True)
class _MetadataPart(_Part):
    """Dims are split as flax's own metadata says."""

    rules: tuple[tuple[str, Any], ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return ()

    def specs(
        self, leaves: Sequence[Leaf], mesh: DeviceMesh, faults: list[Fault]
    ) -> list[PartitionSpec]:
        """One spec for each parameter."""
        return metadata_specs(leaves, self.rules, mesh, faults)

    def __repr__(self) -> str:
        return f"flax_metadata({list(self.rules)!r})" if self.rules else "flax_metadata()"


@dataclass(frozen=True, slots=True, repr=False)
class Layout(ParameterLayout):
    """Where parameters, optimizer state and batches lie; give it as `parameter_shardings`.

    Args:
        parts: what it is made of.

    Example:
        >>> from pypto_spmd.training import fsdp, tensor_parallel
        >>> layout = fsdp("data") | tensor_parallel([("up", PartitionSpec(None, "model"))])
        >>> layout.batch
        P('data',)
    """

    parts: tuple[_DataPart | _TensorPart | _MetadataPart, ...]

    def __post_init__(self) -> None:
        axes = [axis for part in self.parts for axis in part.axes]
        twice = sorted({axis for axis in axes if axes.count(axis) > 1})
        if twice:
            refuse(
                repr(self),
                f"{listed([repr(axis) for axis in twice])} is used by two of its parts.",
                "Each kind of parallelism has mesh axes of its own.",
                "give them different axes, or use one of them.",
            )

    def __or__(self, other: "Layout") -> "Layout":
        """Both layouts, each over its own axes."""
        return Layout(self.parts + other.parts) if isinstance(other, Layout) else NotImplemented

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))

    @property
    def batch(self) -> PartitionSpec:
        """The spec of what has the batch as its first dim: split over the axes of data and experts."""
        parts = [part for part in self.parts if isinstance(part, _DataPart | _ExpertPart)]
        return _spec([tuple(axis for part in parts for axis in part.axes)])

    @property
    def _data_parts(self) -> tuple[_DataPart, ...]:
        return tuple(part for part in self.parts if isinstance(part, _DataPart))

    def parameter_specs(
        self, leaves: Sequence[Leaf], mesh: DeviceMesh, faults: list[Fault]
    ) -> Sequence[PartitionSpec | None]:
        """One spec for each parameter; see `ParameterLayout`."""
        axes = PartitionSpec(*(axis for part in self.parts for axis in part.axes))
        found = mesh_faults(axes, mesh, f"the layout is {self!r}.")
        if found:
            faults.extend(found)
            return [None] * len(leaves)
        named = [part for part in self.parts if not isinstance(part, _DataPart)]
        by_part = [part.specs(leaves, mesh, faults) for part in named]
        specs = [reduce(merged, of_leaf, PartitionSpec()) for of_leaf in zip(*by_part, strict=True)]
        specs = specs or [PartitionSpec()] * len(leaves)
        for i, leaf in enumerate(leaves):
            wrong = _conflicts(leaf, specs[i], mesh)
            faults.extend(wrong)
            for part in self._data_parts:
                if part.splits("parameters") and not wrong:
                    specs[i] = part.split(leaf, specs[i], mesh)
        return specs

    def optimizer_spec(
        self, leaf: Leaf, mirrored: PartitionSpec, mesh: DeviceMesh
    ) -> PartitionSpec:
        """The spec of a leaf of the optimizer's state; see `ParameterLayout`."""
        kind = "gradients" if _ACCUMULATED in leaf.path else "moments"
        for part in self._data_parts:
            if part.splits(kind) and not part.splits("parameters"):
                mirrored = part.split(leaf, mirrored, mesh)
        return mirrored


def _conflicts(leaf: Leaf, spec: PartitionSpec, mesh: DeviceMesh) -> list[Fault]:
    """What is wrong with a spec that several parts made together."""
    what = f"the parts of the layout lay out {leaf.text} as {spec_text(spec)}."
    return mesh_faults(spec, mesh, what) or shape_faults(spec, mesh, leaf.shape, what)


def merged(first: PartitionSpec, second: PartitionSpec) -> PartitionSpec:
    """Both splits; where they split one dim, the second inside the first."""
    ours, theirs = list(entries(first)), list(entries(second))
    rank = max(len(ours), len(theirs))
    ours += [()] * (rank - len(ours))
    theirs += [()] * (rank - len(theirs))
    return _spec([a + b for a, b in zip(ours, theirs, strict=True)])


def with_axes(
    shape: Sequence[int], spec: PartitionSpec, axes: tuple[str, ...], mesh: DeviceMesh
) -> PartitionSpec:
    """The spec with one more dim split: the largest that is whole, else one inside a dim that is split.

    Args:
        shape: the array's shape.
        spec: how it lies already.
        axes: the mesh axes, of which none splits it already.
        mesh: the mesh.

    Returns:
        The new spec; the old one if the axes divide no dim.
    """
    dims = [*entries(spec), *[()] * (len(shape) - len(spec.partitions))]
    parts = prod(mesh.shape[axis] for axis in axes)
    local = [size // prod(mesh.shape[a] for a in of) for size, of in zip(shape, dims, strict=True)]
    able = [dim for dim, size in enumerate(local) if size and size % parts == 0]
    if not able or parts == 1 or set(axes) & {axis for of in dims for axis in of}:
        return spec
    # Of equal dims the last: the first may be that of stacked layers, which are read one at a time.
    best = max(able, key=lambda dim: (not dims[dim], local[dim], dim))
    dims[best] += axes
    return _spec(dims)


def _names(axis: Axes) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else tuple(axis)


def _spec(dims: Sequence[tuple[str, ...]]) -> PartitionSpec:
    kept = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims]
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


# The layouts


def data_parallel(axis: Axes = "data") -> Layout:
    """Parameters and optimizer state whole, the batch split: gradients are summed by an AllReduce.

    Args:
        axis: the mesh axis that splits the batch, or several from the outermost to the innermost.
    """
    return Layout((_DataPart("data_parallel", axis, 0),))


def zero1(axis: Axes = "data", *, min_size: int = MIN_SIZE) -> Layout:
    """Optimizer state split too: a ReduceScatter of each gradient, an AllGather of each new parameter.

    Gradients that `optax.MultiSteps` accumulates stay whole.

    Args:
        axis: the mesh axis that splits the batch, or several from the outermost to the innermost.
        min_size: arrays with fewer elements stay whole.
    """
    return Layout((_DataPart("zero1", axis, min_size),))


def zero2(axis: Axes = "data", *, min_size: int = MIN_SIZE) -> Layout:
    """As `zero1`, and the gradients that `optax.MultiSteps` accumulates are split.

    Args:
        axis: the mesh axis that splits the batch, or several from the outermost to the innermost.
        min_size: arrays with fewer elements stay whole.
    """
    return Layout((_DataPart("zero2", axis, min_size),))


def fsdp(axis: Axes = "data", *, min_size: int = MIN_SIZE) -> Layout:
    """Parameters split too (ZeRO-3): each is gathered where it is used, its gradient is reduce-scattered.

    Args:
        axis: the mesh axis that splits the batch, or several from the outermost to the innermost.
        min_size: arrays with fewer elements stay whole.
    """
    return Layout((_DataPart("fsdp", axis, min_size),))


def tensor_parallel(
    rules: str | Sequence[tuple[Any, PartitionSpec]] = "auto", *, axis: Axes = "model"
) -> Layout:
    """Layers split over an axis: the first of a pair of matrices by its columns, the second by its rows.

    Args:
        rules: pairs of a pattern and a spec, as for `parameter_shardings`, what none matches being whole;
            or "auto" for the usual names of the layers of attention, two-layer networks, embeddings and
            heads, where what the axis doesn't divide stays whole.
        axis: the mesh axis, or several from the outermost to the innermost; of none, nothing is split.
    """
    if isinstance(rules, str) and rules != "auto":
        what = f"rules is {rules!r}."
        fix = 'use rules="auto", or [(pattern, spec), ...].'
        refuse("tensor_parallel", what, "Rules are pairs of a pattern and a spec.", fix)
    return Layout((_TensorPart(rules if isinstance(rules, str) else tuple(rules), axis),))


def expert_parallel(rules: Sequence[tuple[Any, PartitionSpec]], *, axis: Axes = "expert") -> Layout:
    """Experts split over an axis, and the batch too: tokens travel to their experts, and back, by AllToAll.

    All other parameters are whole, and their gradients summed over the axis as in data parallelism.

    Args:
        rules: pairs of a pattern and a spec that say which parameters are experts', and which of their dims
            counts the experts: `[("experts/", PartitionSpec("expert"))]`.
        axis: the mesh axis, or several from the outermost to the innermost.
    """
    return Layout((_ExpertPart(tuple(rules), axis),))


def flax_metadata(rules: Sequence[tuple[str, Any]] = ()) -> Layout:
    """Parameters as flax's own annotations say (`nn.with_partitioning`, `nnx.with_partitioning`).

    What has no annotation is whole, as for flax.

    Args:
        rules: pairs of a logical axis name and a mesh axis (or None, or several); before those of the
            annotation itself, and those of `nn.logical_axis_rules`.
    """
    return Layout((_MetadataPart(tuple((name, axis) for name, axis in rules)),))


def combine(*layouts: Layout) -> Layout:
    """All of them together, each over its own mesh axes; the same as `|`."""
    return Layout(tuple(part for layout in layouts for part in layout.parts))
