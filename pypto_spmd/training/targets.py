"""Where the arrays of a state are to lie that is about to be restored."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from pypto_spmd.collectives.plan import CommPlan
from pypto_spmd.errors import Fault, listed, quoted
from pypto_spmd.given_layouts import mesh_of
from pypto_spmd.mesh import DeviceMesh, current_mesh
from pypto_spmd.sharding.leaves import Leaf
from pypto_spmd.sharding.parameters import Argument, resolve_parameters


def shardings_of(
    state: Any,
    leaves: Sequence[Leaf],
    values: Sequence[Any],
    shardings: Any,
    mesh: DeviceMesh | Mesh | None,
    faults: list[Fault],
) -> list[Sharding | None]:
    """The sharding of each array; None of what lies on the host.

    Args:
        state: the state, of arrays or their descriptions.
        leaves: its leaves.
        values: their values.
        shardings: what `@spmd` takes as `parameter_shardings`, or a plan; None for as the values say.
        mesh: the mesh, if it is given.
        faults: what is wrong is added to this list.
    """
    if shardings is None:
        return _as_they_say(leaves, values, faults)
    found = mesh or mesh_of(shardings) or current_mesh()
    if found is None:
        why = "What a spec names are the axes of a mesh of devices."
        fix = "pass mesh=..., or call it inside `with mesh:`."
        faults.append(Fault("there is no mesh.", why, fix))
        return [None] * len(leaves)
    on_mesh = DeviceMesh.from_jax(found) if isinstance(found, Mesh) else found
    if isinstance(shardings, CommPlan):
        specs = _planned(leaves, shardings, on_mesh, faults)
    else:
        (specs,) = resolve_parameters(shardings, [Argument("", state)], on_mesh, faults)
        open_ = [leaf.text for leaf, spec in zip(leaves, specs, strict=True) if spec is None]
        if open_ and not faults:
            what = f"{listed(open_[:5])} {'is' if len(open_) == 1 else 'are'} the planner's to lay out."
            why = "It plans a function, and there is none here."
            faults.append(Fault(what, why, "pass the plan of the step: shardings=step.plan(...)."))
    if faults:
        return [None] * len(leaves)
    return [
        NamedSharding(on_mesh.jax_mesh, PartitionSpec() if spec is None else spec)
        if isinstance(value, jax.Array | jax.ShapeDtypeStruct)
        else None
        for spec, value in zip(specs, values, strict=True)
    ]


def _as_they_say(
    leaves: Sequence[Leaf], values: Sequence[Any], faults: list[Fault]
) -> list[Sharding | None]:
    silent = [
        leaf.text
        for leaf, value in zip(leaves, values, strict=True)
        if isinstance(value, jax.ShapeDtypeStruct) and value.sharding is None
    ]
    if silent:
        more = f" and {len(silent) - 5} more" if len(silent) > 5 else ""
        what = f"{', '.join(silent[:5])}{more} {'has' if len(silent) == 1 else 'have'} no sharding."
        why = "A jax.ShapeDtypeStruct says where an array lies only if it was made with a sharding."
        fix = (
            "pass shardings=... and mesh=..., as for parameter_shardings, or the plan of the step."
        )
        faults.append(Fault(what, why, fix))
    return [getattr(value, "sharding", None) for value in values]


def _planned(
    leaves: Sequence[Leaf], plan: CommPlan, mesh: DeviceMesh, faults: list[Fault]
) -> list[PartitionSpec | None]:
    """How the arrays lie in a plan, as the argument or result that has their paths."""
    nothing: list[PartitionSpec | None] = [None] * len(leaves)
    if dict(mesh.shape) != dict(plan.mesh):
        sizes = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
        what = f"the plan is for a mesh {sizes}, and the mesh is {mesh}."
        why = "A plan's layouts name the axes of its own mesh."
        faults.append(Fault(what, why, "plan the step on the mesh that is restored on."))
        return nothing
    for layouts in (plan.in_layouts, plan.out_layouts):
        for path in layouts:
            if not leaves or not path.endswith(leaves[0].name):
                continue
            root = path.removesuffix(leaves[0].name)
            if all(root + leaf.name in layouts for leaf in leaves):
                return [_spec(layouts[root + leaf.name]) for leaf in leaves]
    arguments = dict.fromkeys(path.partition("[")[0].partition(".")[0] for path in plan.in_layouts)
    what = f"the state is no argument or result of {quoted(plan.function)}."
    why = f"No argument of the plan has its paths. The arguments are: {', '.join(arguments)}."
    faults.append(Fault(what, why, "pass a state of the structure that the plan was made for."))
    return nothing


def _spec(text: str) -> PartitionSpec:
    """The spec of a layout in a plan's notation: `[data, (data,model), -]`."""
    entries: list[str | tuple[str, ...] | None] = []
    for entry in filter(None, text[1:-1].split(", ")):
        axes = tuple(entry.strip("()").split(","))
        entries.append(None if entry == "-" else axes[0] if len(axes) == 1 else axes)
    return PartitionSpec(*entries)
