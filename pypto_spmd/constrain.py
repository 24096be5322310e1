"""Asking for a layout in the middle of a function."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from pypto_spmd.call import inlining_mesh, inlining_pads
from pypto_spmd.collectives.source import said_here
from pypto_spmd.errors import Fault, listed, raise_faults
from pypto_spmd.numpy_body.array import NumpyArray
from pypto_spmd.placing import mesh_of, parts_of
from pypto_spmd.sharding.resolve import resolve
from pypto_spmd.sharding.spec import axes_of, spec_text


def constrain(x: Any, spec: Any) -> Any:
    """Asks that a value lie on the mesh as a spec says; the value stays what it is.

    In an SPMD function the planner grants it, and works out what that takes. So does `jax.jit` where a mesh
    is given, by the spec or by an enclosing `with mesh:`; without a mesh nothing is asked for. As
    `jax.lax.with_sharding_constraint` it passes derivatives on, asking the same of them.

    Args:
        x: an array, or a pytree of arrays.
        spec: a PartitionSpec, ShardingSpec or NamedSharding; or a pytree prefix of them, AUTO or None where
            nothing is asked for. A dim that is `PartitionSpec.UNCONSTRAINED` is the planner's to lay out.

    Returns:
        The same as `x`.

    Raises:
        ShardingError: for a spec that does not fit the mesh or the arrays, all faults at once.

    Example:
        >>> mesh = DeviceMesh([0, 1, 2, 3], ["data"])
        >>> @spmd(mesh)
        ... def total(x):
        ...     return constrain(x * 2, PartitionSpec("data")).sum()
        >>> total.plan(jax.ShapeDtypeStruct((8,), "float32")).counts()["all_reduce"]
        1
    """
    mesh = mesh_of(spec)
    if mesh is None:
        return x
    leaves, tree = jax.tree.flatten(x)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    faults: list[Fault] = []
    value = jax.tree.unflatten(tree, arrays)
    uneven = ("pad" if inlining_pads() else "error") if inlining_mesh() is not None else ""
    specs = resolve(spec, value, mesh.described, role="value", uneven=uneven, faults=faults)
    raise_faults(said_here("constrain"), faults or _part_faults(specs))
    results = [
        leaf if wanted is None else _constrained(array, leaf, mesh.placed, wanted)
        for leaf, array, wanted in zip(leaves, arrays, specs, strict=True)
    ]
    return jax.tree.unflatten(tree, results)


def _constrained(array: Any, leaf: Any, mesh: Mesh | AbstractMesh, spec: Any) -> Any:
    result = jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))
    return NumpyArray(result) if isinstance(leaf, NumpyArray) else result


def _part_faults(specs: list[Any]) -> list[Fault]:
    """What asks to split a part of an array over an axis along which it is one."""
    faults = []
    for spec in filter(None, specs):
        named = [a for a in axes_of(spec) if a in parts_of()]
        if named:
            over = listed([repr(a) for a in named])
            what = f"spec is {spec_text(spec)}, in a function that runs on parts along {over}."
            why = "There a value is one device's own, and lies nowhere else."
            fix = "leave the axis out, or constrain the whole array outside of that function."
            faults.append(Fault(what, why, fix))
    return faults
