"""The table of how a model or train state lies: path, shape, dtype, layout, and bytes on each device."""

from collections.abc import Mapping, Sequence
from io import StringIO
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pypto_spmd.collectives.plan import CommPlan, show_bytes
from pypto_spmd.errors import listed, quoted, refuse
from pypto_spmd.given_layouts import mesh_of
from pypto_spmd.mesh import DeviceMesh, current_mesh
from pypto_spmd.nnx_body import split_modules
from pypto_spmd.sharding.layout import Layout
from pypto_spmd.sharding.leaves import Leaf, leaves_of
from pypto_spmd.sharding.parameters import parameter_specs
from pypto_spmd.sharding.resolve import is_spec
from pypto_spmd.sharding.spec import AUTO, axes_of

_SUBJECT = "show_shardings"

_Lies = tuple[str, int]
"""How an array lies, as text, and into how many different parts it is split."""


def show_shardings(
    state: Any, shardings: Any = None, *, mesh: DeviceMesh | Mesh | None = None
) -> None:
    """Prints how each array of a model or train state lies, and what it takes on each device.

    Args:
        state: arrays or `jax.ShapeDtypeStruct`s in a pytree, or an nnx module.
        shardings: how they lie or would lie: what `@spmd` takes as `parameter_shardings`, or a plan of
            which the state is an argument or a result; by default as the arrays do.
        mesh: the mesh, for shardings that name none; by default that of the enclosing `with mesh:`.

    Raises:
        ShardingError: for shardings that can't be, and without a mesh where one is needed.

    Example:
        >>> mesh = DeviceMesh.simulate((2, 4), ("data", "model"))
        >>> params = {"w": jax.ShapeDtypeStruct((8, 1024), "float32")}
        >>> show_shardings(params, PartitionSpec(None, "model"), mesh=mesh)
        path      shape    dtype     layout       bytes per device
        ──────────────────────────────────────────────────────────
        w         8×1024   float32   [-, model]                8KB
        ──────────────────────────────────────────────────────────
        1 array   32KB                                         8KB
    """
    (state,), _ = split_modules([state])
    leaves = leaves_of(state)
    if isinstance(shardings, CommPlan):
        lies = _planned(leaves, shardings)
    elif shardings is None:
        arrays = jax.tree.leaves(state)
        lies = [_lying(leaf, array) for leaf, array in zip(leaves, arrays, strict=True)]
    else:
        lies = _asked(leaves, state, shardings, mesh)
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
    local = [size // parts for size, (_, parts) in zip(sizes, lies, strict=True)]
    table = Table(box=box.SIMPLE, show_footer=True, pad_edge=False, show_edge=False)
    table.add_column("path", f"{len(leaves)} array{'' if len(leaves) == 1 else 's'}")
    table.add_column("shape", show_bytes(sum(sizes)))
    table.add_column("dtype")
    table.add_column("layout")
    table.add_column("bytes per device", show_bytes(sum(local)), justify="right")
    for leaf, (text, _), size in zip(leaves, lies, local, strict=True):
        shape = "×".join(map(str, leaf.shape)) or "scalar"
        cells = (leaf.text, shape, str(leaf.dtype), text, show_bytes(size))
        table.add_row(*map(Text, cells))  # a layout in brackets is no markup
    _print(table)


def _lying(leaf: Leaf, array: Any) -> _Lies:
    """How an array lies now."""
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return _by_spec(leaf, sharding.spec, sharding.mesh.shape)
    if sharding is None:
        return "on no device", 1
    if len(sharding.device_set) == 1:
        return "on one device", 1
    return type(sharding).__name__, leaf.size // max(prod(sharding.shard_shape(leaf.shape)), 1)


def _by_spec(leaf: Leaf, spec: PartitionSpec, sizes: Mapping[str, int]) -> _Lies:
    layout = Layout.from_spec(PartitionSpec(*spec.partitions), len(leaf.shape))
    return str(layout), prod(sizes[axis] for axis in axes_of(spec))


def _asked(
    leaves: Sequence[Leaf], state: Any, shardings: Any, mesh: DeviceMesh | Mesh | None
) -> list[_Lies]:
    """How the arrays would lie."""
    mesh = mesh or current_mesh() or mesh_of(shardings)
    if mesh is None:
        why = "What a spec names are the axes of a mesh of devices."
        fix = "pass it, show_shardings(state, shardings, mesh=mesh), or call this inside `with mesh:`."
        refuse(_SUBJECT, "there is no mesh.", why, fix)
    mesh = DeviceMesh.from_jax(mesh) if isinstance(mesh, Mesh) else mesh
    specs = jax.tree.leaves(parameter_specs(state, shardings, mesh), is_leaf=is_spec)
    return [
        ("by the planner", 1) if spec is AUTO else _by_spec(leaf, spec, mesh.shape)
        for leaf, spec in zip(leaves, specs, strict=True)
    ]


def _planned(leaves: Sequence[Leaf], plan: CommPlan) -> list[_Lies]:
    """How the arrays lie in a plan, as the argument or result with their paths."""
    for layouts in (plan.in_layouts, plan.out_layouts):
        names = [p.removesuffix(leaves[0].name) for p in layouts if p.endswith(leaves[0].name)]
        found = [n for n in names if all(_has_dims(layouts.get(n + x.name), x) for x in leaves)]
        if len(found) > 1:
            what = f"the state could be any of {listed([quoted(name) for name in found])}."
            why = f"They are arguments of {quoted(plan.function)} of the same structure."
            refuse(_SUBJECT, what, why, "read the plan's in_layouts and out_layouts.")
        if found:
            return [_parsed(layouts[found[0] + leaf.name], plan.mesh) for leaf in leaves]
    arguments = dict.fromkeys(path.partition("[")[0].partition(".")[0] for path in plan.in_layouts)
    refuse(
        _SUBJECT,
        f"the state is no argument or result of {quoted(plan.function)}.",
        f"No argument of the plan has its paths. The arguments are: {', '.join(arguments)}.",
        "pass the argument that the plan was made for, or a tree of its structure.",
    )


def _has_dims(layout: str | None, leaf: Leaf) -> bool:
    """Whether a layout in a plan's notation has as many dims as the leaf."""
    return layout is not None and len(layout[1:-1].split(", ")) == max(len(leaf.shape), 1)


def _parsed(text: str, sizes: Mapping[str, int]) -> _Lies:
    """A layout in a plan's notation."""
    axes = [axis for entry in text[1:-1].split(", ") for axis in entry.strip("()").split(",")]
    return text, prod(sizes.get(axis, 1) for axis in axes)


def _print(table: Table) -> None:
    """Prints a table: fitted to a terminal, and elsewhere as wide as it is."""
    console = Console()
    if console.is_terminal:
        console.print(table)
        return
    width = table.__rich_measure__(console, console.options.update(width=10_000)).maximum
    text = StringIO()
    Console(file=text, width=width).print(table)
    print("\n".join(line.rstrip() for line in text.getvalue().splitlines()))
