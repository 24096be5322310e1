"""On which mesh code runs that says itself where arrays lie, and on which axes it runs on parts."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pypto_spmd.call import inlining_mesh
from pypto_spmd.mesh import DeviceMesh, current_mesh
from pypto_spmd.sharding.spec import ShardingSpec


@dataclass(frozen=True, slots=True)
class Place:
    """A mesh.

    Args:
        described: as specs are checked on it.
        placed: as JAX is told of it: without devices while an SPMD function is traced, whose plan needs none.
    """

    described: DeviceMesh
    placed: Mesh | AbstractMesh


def mesh_of(specs: Any) -> Place | None:
    """The mesh of the SPMD function that is traced; else that of the specs, else of `with mesh:`."""
    if (traced := inlining_mesh()) is not None:
        # Where JAX has a current mesh it insists on it; in a function on parts that says which axes are.
        current = jax.sharding.get_abstract_mesh()
        return Place(traced, traced.abstract_mesh if current.empty else current)
    mesh = _of_specs(specs) or current_mesh()
    return None if mesh is None else Place(mesh, mesh.jax_mesh)


def parts_of() -> tuple[str, ...]:
    """The mesh axes along which the code that is traced now works on parts."""
    return jax.sharding.get_abstract_mesh().manual_axes


def _of_specs(specs: Any) -> DeviceMesh | None:
    for leaf in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)):
        if isinstance(leaf, ShardingSpec):
            return leaf.mesh
        if isinstance(leaf, NamedSharding) and isinstance(leaf.mesh, Mesh):
            return DeviceMesh.from_jax(leaf.mesh)
    return None
