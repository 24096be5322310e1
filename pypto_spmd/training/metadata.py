"""What flax's own sharding metadata says about parameters, without importing flax.

linen boxes an array in a `Partitioned` with `names`; nnx's variables have `out_sharding` among their
metadata (`sharding_names`, `sharding` in older versions). A name is a mesh axis, or a logical axis that
rules map to one.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from pypto_spmd.errors import Fault, listed
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.sharding.leaves import Leaf
from pypto_spmd.sharding.parameter_forms import paths_text
from pypto_spmd.sharding.spec import entries

_NNX_NAMES = ("out_sharding", "sharding_names", "sharding")
Rules = Sequence[tuple[str, Any]]


def metadata_specs(
    leaves: Sequence[Leaf], rules: Rules, mesh: DeviceMesh, faults: list[Fault]
) -> list[PartitionSpec]:
    """The spec of each parameter by its annotation; those without one are whole.

    Args:
        leaves: the parameters.
        rules: logical axis name -> mesh axis, before those that flax knows itself.
        mesh: the mesh.
        faults: gets one for each name that is neither a mesh axis nor has a rule, and one if nothing is
            annotated at all.
    """
    annotated = [_annotation(leaf.box) for leaf in leaves]
    if leaves and not any(names is not None for names, _ in annotated):
        what = f"no parameter has flax metadata: {paths_text(leaves)}."
        why = "Annotations stand on arrays in flax's boxes: nn.Partitioned, or nnx variables."
        fix = "annotate them with with_partitioning, and pass the tree before nn.unbox."
        faults.append(Fault(what, why, fix))
    unknown: dict[str, list[Leaf]] = {}
    specs = []
    for leaf, (names, own_rules) in zip(leaves, annotated, strict=True):
        known = (*rules, *own_rules, *_rules_in_context())
        specs.append(_spec(leaf, names or (), known, mesh, unknown))
    for name, of_name in unknown.items():
        axes = listed([repr(axis) for axis in mesh.axis_names])
        what = f"flax metadata names the axis {name!r}, of {paths_text(of_name)}."
        why = f"It has no rule and is no mesh axis; the mesh has {axes}."
        faults.append(
            Fault(what, why, f"give it a rule: flax_metadata([({name!r}, 'axis')]), or None there.")
        )
    return specs


def _annotation(box: Any) -> tuple[tuple[Any, ...] | None, Rules]:
    """The names of a box's dims, if it has any, and the rules that come with it."""
    if box is None:
        return None, ()
    if hasattr(box, "get_metadata"):
        metadata: Mapping[str, Any] = box.get_metadata()
        names = next((metadata[key] for key in _NNX_NAMES if metadata.get(key)), None)
        rules = metadata.get("sharding_rules") or ()
    else:
        names, rules = getattr(box, "names", None), getattr(box, "rules", None) or ()
    if names is None:
        return None, ()
    partitions = names.partitions if isinstance(names, PartitionSpec) else names
    return tuple(partitions), tuple(rules)


def _rules_in_context() -> Rules:
    """The rules of an enclosing `nn.logical_axis_rules`."""
    flax_rules = sys.modules.get("flax.core.spmd")
    return tuple(flax_rules.get_logical_axis_rules()) if flax_rules is not None else ()


def _spec(
    leaf: Leaf,
    names: Sequence[Any],
    rules: Rules,
    mesh: DeviceMesh,
    unknown: dict[str, list[Leaf]],
) -> PartitionSpec:
    """Each dim by the first rule for its name whose mesh axes are free."""
    taken: set[str] = set()
    dims: list[Any] = []
    for of_dim in entries(PartitionSpec(*names)):
        axes: tuple[str, ...] = ()
        for name in of_dim:
            choices = [_as_axes(axis) for rule, axis in rules if rule == name]
            if not choices and name in mesh.shape:
                choices = [(name,)]
            if not choices:
                unknown.setdefault(name, []).append(leaf)
            axes += next((free for free in choices if not taken & {*free, *axes}), ())
        taken.update(axes)
        dims.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    return PartitionSpec(*dims)


def _as_axes(axis: Any) -> tuple[str, ...]:
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(axis)
