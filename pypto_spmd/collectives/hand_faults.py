"""What a person may write and a plan can't hold: other meshes, groups that are no mesh axes, checks."""

from collections.abc import Iterator

from jax.sharding import PartitionSpec

from pypto_spmd.collectives.by_hand import names_axes
from pypto_spmd.collectives.effects import UNCHECKED
from pypto_spmd.collectives.facts import inside_regions
from pypto_spmd.collectives.graph import Equation, Graph
from pypto_spmd.errors import Fault, listed
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.sharding.resolve import is_of
from pypto_spmd.sharding.spec import spec_text


def hand_faults(graph: Graph, mesh: DeviceMesh) -> list[Fault]:
    """The faults of regions, constraints, collectives and checks.

    Args:
        graph: the traced function.
        mesh: the mesh that it is planned for.
    """
    inside = {e for found in inside_regions(graph).values() for e in found.equations}
    return [
        fault
        for equation, _ in graph.equations()
        for fault in _faults(equation, mesh, equation.index in inside)
    ]


def _faults(equation: Equation, mesh: DeviceMesh, is_inside: bool) -> Iterator[Fault]:
    sharding = equation.params.get("sharding") if equation.constraint is not None else None
    other = equation.region.mesh if equation.region is not None else getattr(sharding, "mesh", None)
    if other is not None and not is_of(other, mesh):
        if equation.region is not None:
            does, use = f"shard_map{_place(equation)} is", "pypto_spmd.local"
        else:
            spec = getattr(sharding, "spec", PartitionSpec())
            does = f"with_sharding_constraint{_place(equation)} asks for {spec_text(spec)}"
            use = "pypto_spmd.constrain"
        shape = " × ".join(f"{axis}={size}" for axis, size in other.shape.items())
        shape += " of other devices" if shape == str(mesh) else ""
        yield Fault(
            f"{does} on the mesh {shape}.",
            f"It is in a function on the mesh {mesh}, and both run on one mesh.",
            f"use {use}, which takes the function's mesh, or give both the same mesh.",
        )
    if equation.params.get("axis_index_groups") is not None and names_axes(equation.name):
        yield Fault(
            f"{equation.name}{_place(equation)} has axis_index_groups.",
            "A step of the plan is between all devices along mesh axes.",
            "make a mesh that has the groups as an axis of its own.",
        )
    if equation.name == UNCHECKED:
        yield Fault(
            f"checkify.check{_place(equation)} is in no checkified function.",
            "An error that depends on values is a result, which checkify.checkify makes of it.",
            "put checkify.checkify around it, inside or outside of @spmd, and throw() the error that it "
            "returns.",
        )
    axes = _unplanned_axes(equation, mesh) if is_inside else []
    if axes:
        yield Fault(
            f"{equation.name}{_place(equation)} communicates over {listed([repr(a) for a in axes])}.",
            "It is none of the collectives that a plan is made of.",
            "use those of pypto_spmd.collectives, or call it outside of the @spmd function.",
        )


def _place(equation: Equation) -> str:
    """Where an equation stands, if that is known; looking it up takes time."""
    text = str(equation.source)
    return f" at {text}" if text else ""


def _unplanned_axes(equation: Equation, mesh: DeviceMesh) -> list[str]:
    """The mesh axes over which an equation communicates in a way that is not known."""
    if names_axes(equation.name) or equation.rule is None or not equation.rule.reason:
        return []
    found: list[str] = []
    for name in ("axes", "axis_name"):
        value = equation.params.get(name, ())
        value = value if isinstance(value, tuple) else (value,)
        found += [axis for axis in value if isinstance(axis, str) and axis in mesh.shape]
    return found
