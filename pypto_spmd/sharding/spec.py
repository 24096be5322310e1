"""What a person writes to say how an array lies on a mesh: ShardingSpec, PartitionSpec, AUTO."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from jax.sharding import NamedSharding, PartitionSpec

from pypto_spmd.errors import (
    Fault,
    count_of,
    divisibility_fix,
    listed,
    raise_faults,
    refuse,
)
from pypto_spmd.mesh import DeviceMesh

__all__ = ["AUTO", "Auto", "PartitionSpec", "ShardingSpec", "axes_of", "entries", "spec_text"]


class Auto(Enum):
    """The type of :data:`AUTO`."""

    AUTO = "AUTO"

    def __repr__(self) -> str:
        return "AUTO"

    __str__ = __repr__


AUTO = Auto.AUTO
"""In place of a spec: the planner chooses the layout."""


def entries(spec: PartitionSpec) -> Iterator[tuple[str, ...]]:
    """The mesh axes of each dim of a spec, outermost first; none of a dim left unconstrained."""
    for entry in spec.partitions:
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            yield ()
        elif isinstance(entry, tuple):
            yield entry
        else:
            yield (entry,)


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """All mesh axes that a spec names, in its order."""
    return tuple(axis for axes in entries(spec) for axis in axes)


def spec_text(spec: PartitionSpec) -> str:
    """A spec as a person writes it: ``PartitionSpec('data', None)``."""
    return f"PartitionSpec({', '.join(map(repr, spec.partitions))})"


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """How an array lies on a mesh.

    Args:
        mesh: The mesh.
        partition_spec: For each dim of the array the mesh axis that splits it, several from the
            outermost to the innermost, or None; dims it doesn't reach are whole.

    Raises:
        ShardingError: If the spec names an axis that the mesh doesn't have, or one axis twice.

    Example:
        >>> mesh = DeviceMesh([[0, 1], [2, 3]], ["row", "col"])
        >>> ShardingSpec(mesh, PartitionSpec("row", None)).shard_shape((8, 6))
        (4, 6)
    """

    mesh: DeviceMesh
    partition_spec: PartitionSpec

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, DeviceMesh):
            refuse(
                "ShardingSpec",
                f"mesh is of type {type(self.mesh).__name__}.",
                "A ShardingSpec says where an array lies on a DeviceMesh.",
                "make one: DeviceMesh([[0, 1], [2, 3]], ['row', 'col']), or of a jax.sharding.Mesh "
                "DeviceMesh.from_jax(mesh).",
            )
        if not isinstance(self.partition_spec, PartitionSpec):
            refuse(
                "ShardingSpec",
                f"partition_spec is {self.partition_spec!r}, which is no PartitionSpec.",
                "A PartitionSpec has one entry a dim: a mesh axis, a tuple of them, or None.",
                f"write PartitionSpec({_as_arguments(self.partition_spec)}).",
            )
        what = f"partition_spec is {spec_text(self.partition_spec)}."
        raise_faults("ShardingSpec", mesh_faults(self.partition_spec, self.mesh, what))

    @property
    def named_sharding(self) -> NamedSharding:
        """The same as JAX's own; starts the backend."""
        return NamedSharding(self.mesh.jax_mesh, self.partition_spec)

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one device's part.

        Args:
            shape: The shape of the whole array.

        Raises:
            ShardingError: If the array has too few dims, or one that the split doesn't divide.
        """
        what = f"the shape is {tuple(shape)}."
        raise_faults("ShardingSpec", shape_faults(self.partition_spec, self.mesh, shape, what))
        parts = [prod(self.mesh.shape[a] for a in axes) for axes in entries(self.partition_spec)]
        parts += [1] * (len(shape) - len(parts))
        return tuple(size // part for size, part in zip(shape, parts, strict=True))

    def __repr__(self) -> str:
        return f"ShardingSpec({self.mesh!r}, {spec_text(self.partition_spec)})"

    def __str__(self) -> str:
        return spec_text(self.partition_spec)


def _as_arguments(value: object) -> str:
    return ", ".join(map(repr, value)) if isinstance(value, list | tuple) else repr(value)


def mesh_faults(
    spec: PartitionSpec, mesh: DeviceMesh, what: str, *, may_be_open: bool = False
) -> list[Fault]:
    """What is wrong with a spec on a mesh, whatever array it is for.

    Args:
        spec: The spec.
        mesh: The mesh.
        what: The sentence that says where the spec stands.
        may_be_open: Whether it may leave dims unconstrained.
    """
    faults: list[Fault] = []
    text = spec_text(spec)
    names = listed([repr(name) for name in mesh.axis_names])
    strange = [e for axes in entries(spec) for e in axes if not isinstance(e, str)]
    if not may_be_open:
        strange += [e for e in spec.partitions if e is PartitionSpec.UNCONSTRAINED]
    if strange:
        why = (
            f"{text} holds {strange[0]!r}, but each entry is a mesh axis, a tuple of them, or None."
        )
        fix = f"use the mesh's axes, {names}, or AUTO in place of the whole spec."
        return [Fault(what, why, fix)]
    if spec.unreduced:
        why = f"{text} is unreduced over {listed([repr(a) for a in sorted(spec.unreduced)])}."
        fix = "leave unreduced out: partial sums stay inside the function."
        faults.append(Fault(what, why, fix))
    axes = axes_of(spec)
    for axis in dict.fromkeys(axes):
        if axis not in mesh.shape:
            close = difflib.get_close_matches(axis, mesh.axis_names, n=1)
            hint = f"write {close[0]!r}, or " if close else ""
            why = f"{text} names the mesh axis {axis!r}, but the mesh has {names}."
            faults.append(Fault(what, why, f"{hint}use one of {names}."))
    for axis in dict.fromkeys(axes):
        if axes.count(axis) > 1:
            dims = [str(dim) for dim, of_dim in enumerate(entries(spec)) if axis in of_dim]
            where = f"dims {listed(dims)}" if len(dims) > 1 else f"dim {dims[0]} twice"
            why = f"{text} has a duplicate axis: {axis!r} splits {where}, but can split once only."
            faults.append(Fault(what, why, "split one dim over each mesh axis, and once."))
    return faults


def rank_faults(spec: PartitionSpec, shape: Sequence[int], what: str) -> list[Fault]:
    """What is wrong with a spec, whatever its mesh, for an array with so many dims.

    Args:
        spec: The spec.
        shape: The shape of the array.
        what: The sentence that says which array this is.
    """
    if len(spec.partitions) <= len(shape):
        return []
    count = count_of(len(spec.partitions), "entry", "entries")
    why = f"{spec_text(spec)} has {count} but the array has rank {len(shape)}."
    fix = f"give at most {count_of(len(shape), 'entry', 'entries')}, one a dim."
    return [Fault(what, why, fix if shape else "leave a scalar whole: PartitionSpec().")]


UNEVEN = ("error", "pad")
"""What `spmd` can do about dims that their mesh axes do not divide."""


def shape_faults(
    spec: PartitionSpec, mesh: DeviceMesh, shape: Sequence[int], what: str, *, uneven: str = ""
) -> list[Fault]:
    """What is wrong with a spec, itself right on the mesh, for an array of this shape.

    Args:
        spec: The spec.
        mesh: The mesh.
        shape: The shape of the whole array.
        what: The sentence that says which array this is.
        uneven: What is done about dims that their axes do not divide, if that is a matter of choice: of
            :data:`UNEVEN`. Padded ones are right.
    """
    faults = rank_faults(spec, shape, what)
    if faults or uneven == "pad":
        return faults
    option = 'uneven="pad"' if uneven else ""
    text = spec_text(spec)
    for dim, (size, axes) in enumerate(zip(shape, entries(spec), strict=False)):
        parts = prod(mesh.shape[axis] for axis in axes)
        if size % parts == 0:
            continue
        sized = [f"{axis!r} (size {mesh.shape[axis]})" for axis in axes]
        if len(axes) == 1:
            over = f"mesh axis {sized[0]}, which does not divide it"
        else:
            over = f"mesh axes {listed(sized)}, whose product {parts} does not divide it"
        why = f"{text} splits dim {dim} (size {size}) over {over}."
        left = list(spec.partitions)
        left[dim] = None
        whole = spec_text(PartitionSpec(*left))
        faults.append(
            Fault(what, why, divisibility_fix(dim, size, parts, len(axes), whole, option))
        )
    return faults
