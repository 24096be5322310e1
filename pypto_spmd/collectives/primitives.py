"""Collectives to write by hand, in a function that `pypto_spmd.local` runs on each device's parts.

They are those of `jax.lax` under the names of the plan. Arguments are arrays or pytrees of them; `axis` is
a mesh axis, or several from the outermost to the innermost, whose devices then count as one row. In a
decorated function each is a step of the plan, with the reason "written by hand".
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import jax
from jax import lax

from pypto_spmd.collectives.by_hand import from_root
from pypto_spmd.errors import Fault, listed, raise_faults, refuse

Axis = str | Sequence[str]

_REDUCTIONS: dict[str, Callable[[Any, tuple[str, ...]], Any]] = {
    "sum": lax.psum,
    "mean": lax.pmean,
    "max": lax.pmax,
    "min": lax.pmin,
}


def all_reduce(x: Any, axis: Axis, op: str = "sum") -> Any:
    """The sum, mean, maximum or minimum of all devices' values, which each device gets.

    Args:
        x: this device's value.
        axis: the mesh axes.
        op: "sum", "mean", "max" or "min". The last two have no derivative.

    Raises:
        ShardingError: for an unknown reduction, or outside of a function that runs on parts.
    """
    axes = _axes("all_reduce", axis)
    if op not in _REDUCTIONS:
        known = listed([repr(name) for name in _REDUCTIONS], "or")
        refuse("all_reduce", f"op is {op!r}.", "There is no such reduction.", f"use {known}.")
    return _REDUCTIONS[op](x, axes)


def all_gather(x: Any, axis: Axis, dim: int = 0, *, tiled: bool = True) -> Any:
    """All devices' values, one after the other along a dim.

    Args:
        x: this device's value.
        axis: the mesh axes.
        dim: along which dim.
        tiled: whether the values are joined along that dim; if not, they are stacked along a new one.

    Raises:
        ShardingError: outside of a function that runs on parts.
    """
    return lax.all_gather(x, _axes("all_gather", axis), axis=dim, tiled=tiled)


def reduce_scatter(x: Any, axis: Axis, dim: int = 0, *, tiled: bool = True) -> Any:
    """The sum of all devices' values, of which each device gets its part.

    Args:
        x: this device's value.
        axis: the mesh axes.
        dim: the dim that is cut, the device's place along the axes being that of its part.
        tiled: whether the part keeps the dim; if not, its size is that of the axes, and it goes.

    Raises:
        ShardingError: outside of a function that runs on parts, or if the axes do not divide the dim.
    """
    axes = _axes("reduce_scatter", axis)
    _raise_indivisible("reduce_scatter", x, axes, dim)
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=tiled)


def all_to_all(x: Any, axis: Axis, split_dim: int, concat_dim: int) -> Any:
    """Each device cuts its value in as many parts as there are devices, and sends each its own.

    Args:
        x: this device's value.
        axis: the mesh axes.
        split_dim: the dim that is cut.
        concat_dim: the dim along which a device joins what it is sent.

    Raises:
        ShardingError: outside of a function that runs on parts, or if the axes do not divide the dim.
    """
    axes = _axes("all_to_all", axis)
    _raise_indivisible("all_to_all", x, axes, split_dim)
    return lax.all_to_all(x, axes, split_axis=split_dim, concat_axis=concat_dim, tiled=True)


def permute(x: Any, axis: Axis, pairs: Iterable[tuple[int, int]]) -> Any:
    """Each device sends its value to another one; who is sent nothing gets zeros.

    Args:
        x: this device's value.
        axis: the mesh axes.
        pairs: (from, to) for each value that is sent, devices counted along the axes.

    Raises:
        ShardingError: outside of a function that runs on parts, or for pairs that can't be.
    """
    axes, pairs = _axes("permute", axis), [(int(source), int(target)) for source, target in pairs]
    sizes = [lax.axis_size(a) for a in axes]
    raise_faults("permute", _pair_faults(pairs, prod(sizes)))
    # JAX counts devices in mesh order, whatever the order of the axes.
    order = [a for a in jax.sharding.get_abstract_mesh().axis_names if a in axes]
    if tuple(order) != axes:
        places = list(itertools.product(*map(range, sizes)))

        def counted(device: int) -> int:
            at = dict(zip(axes, places[device], strict=True))
            count = 0
            for a in order:
                count = count * lax.axis_size(a) + at[a]
            return count

        pairs = [(counted(source), counted(target)) for source, target in pairs]
    return lax.ppermute(x, tuple(order), pairs)


def broadcast(x: Any, axis: Axis, root: int = 0) -> Any:
    """The value of one device, which each device gets.

    It is an AllReduce to which that device alone adds something: a collective that all platforms have.

    Args:
        x: this device's value; those of the others count for nothing.
        axis: the mesh axes.
        root: which device, counted along the axes.

    Raises:
        ShardingError: outside of a function that runs on parts, or if there is no such device.
    """
    axes = _axes("broadcast", axis)
    count = prod(lax.axis_size(a) for a in axes)
    if not 0 <= root < count:
        why = f"Over {_over(axes)} there are devices 0 to {count - 1}."
        refuse("broadcast", f"root is {root}.", why, "name one of them.")
    return jax.tree.map(lambda leaf: from_root(jax.numpy.asarray(leaf), axes, root), x)


def _axes(name: str, axis: Axis) -> tuple[str, ...]:
    """The axes as a tuple, all of them axes whose parts this code works on."""
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    for each in axes:
        try:
            lax.axis_size(each)
        except NameError:
            manual = jax.sharding.get_abstract_mesh().manual_axes
            here = listed([repr(a) for a in manual])
            refuse(
                name,
                f"it is over mesh axis {each!r}, but this code does not run on parts along it.",
                f"A collective is between the parts that devices hold: here those along {here}."
                if manual
                else "A serial function works on whole arrays, which have no parts.",
                f"call it in a function that pypto_spmd.local runs on parts along {each!r}.",
            )
    return axes


def _raise_indivisible(name: str, x: Any, axes: tuple[str, ...], dim: int) -> None:
    count = prod(lax.axis_size(a) for a in axes)
    faults = [
        Fault(
            f"the value on each device has shape {tuple(leaf.shape)}.",
            f"Its dim {dim} (size {leaf.shape[dim]}) is cut into {count} parts, over {_over(axes)}, which "
            "does not divide it.",
            "cut another dim, or pad this one.",
        )
        for leaf in jax.tree.leaves(x)
        if leaf.shape[dim] % count
    ]
    raise_faults(name, faults)


def _pair_faults(pairs: Sequence[tuple[int, int]], count: int) -> list[Fault]:
    faults = []
    for pair in pairs:
        if not all(0 <= device < count for device in pair):
            what, why = f"pairs has {pair}.", f"The devices are 0 to {count - 1}."
            faults.append(Fault(what, why, "name devices that there are."))
    for side, devices, verb in (
        (0, [source for source, _ in pairs], "sends"),
        (1, [target for _, target in pairs], "is sent"),
    ):
        twice = next((d for d in devices if devices.count(d) > 1), None)
        if twice is not None:
            both = [str(pair) for pair in pairs if pair[side] == twice]
            what = f"pairs has {listed(both)}."
            why = f"Device {twice} {verb} two values, but a permutation is of one value each."
            faults.append(Fault(what, why, "use two calls, or all_gather or broadcast."))
    return faults


def _over(axes: tuple[str, ...]) -> str:
    return listed([repr(axis) for axis in axes])
