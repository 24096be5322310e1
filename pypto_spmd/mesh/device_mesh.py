"""DeviceMesh: devices in an array whose dims have names. Immutable, and no backend starts for it.

A mesh is described by indices into the process's devices; which devices these are is looked up when
somebody asks for them. So meshes are compared, hashed, printed and planned for without a backend.
"""

import contextvars
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import FrozenInstanceError
from math import prod
from types import MappingProxyType
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from pypto_spmd.errors import Fault, count_of, listed, raise_faults, refuse
from pypto_spmd.mesh import simulate
from pypto_spmd.mesh.topology import CPU, INFINIBAND_NDR, Link, Topology, link_of_device_kind

_entered: contextvars.ContextVar[tuple["DeviceMesh", ...]] = contextvars.ContextVar(
    "pypto_spmd_entered_meshes", default=()
)


def current_mesh() -> "DeviceMesh | None":
    """The mesh of the innermost ``with mesh:`` block around this call in this thread, if any."""
    entered = _entered.get()
    return entered[-1] if entered else None


class DeviceMesh:
    """Devices arranged along named axes.

    Args:
        devices: A nested list (or array) of any rank, one level a mesh axis, of integers (indices
            into ``jax.devices()``) or of ``jax.Device``.
        axis_names: One name an axis, outermost first.
        topology: The link along each axis, as a :class:`Topology` or a mapping; by default that which
            the devices' kind has, and InfiniBand along axes that cross processes.

    Raises:
        ShardingError: For devices that form no array, don't exist or appear twice, for names that
            don't fit, and for a mesh larger than the devices.

    Example:
        >>> mesh = DeviceMesh([[0, 1], [2, 3]], ["row", "col"])
        >>> dict(mesh.shape), mesh.size
        ({'row': 2, 'col': 2}, 4)
        >>> mesh
        DeviceMesh([[0, 1], [2, 3]], ('row', 'col'))
    """

    __slots__ = (
        "_devices",
        "_given_topology",
        "_jax_mesh",
        "_members",
        "_platform",
        "_topology",
        "axis_names",
        "shape",
    )

    axis_names: tuple[str, ...]
    """The axes' names, outermost first."""
    shape: Mapping[str, int]
    """Axis name to size, in the order of the axes."""

    def __init__(
        self,
        devices: Sequence[Any] | np.ndarray,
        axis_names: Sequence[str],
        *,
        topology: Topology | Mapping[str, Link | str] | None = None,
    ) -> None:
        self._fill(devices, axis_names, topology, None)

    @classmethod
    def simulate(
        cls,
        shape: Sequence[int],
        axis_names: Sequence[str],
        *,
        topology: Topology | Mapping[str, Link | str] | None = None,
    ) -> "DeviceMesh":
        """A mesh of CPU devices, made for it where the process hasn't as many.

        Args:
            shape: One size an axis.
            axis_names: One name an axis.
            topology: As for :class:`DeviceMesh`.

        Example:
            >>> DeviceMesh.simulate((2, 2), ("data", "model"))
            DeviceMesh([[0, 1], [2, 3]], ('data', 'model'))
        """
        sizes = tuple(shape)
        bad = [size for size in sizes if not _is_index(size) or size < 1]
        if bad or not sizes:
            found = f"an axis of size {bad[0]!r}" if bad else "no axis"
            refuse(
                "DeviceMesh.simulate",
                f"shape {sizes!r} has {found}.",
                "A mesh has at least one axis, each of size 1 or more.",
                "give the axes' sizes, such as DeviceMesh.simulate((2, 4), ('data', 'model')).",
            )
        mesh = cls.__new__(cls)
        platform = None if simulate.cpu_only() else "cpu"
        indices = np.arange(prod(sizes)).reshape(sizes)
        mesh._fill(indices, axis_names, topology, platform)
        return mesh

    @classmethod
    def from_jax(
        cls, mesh: Mesh, *, topology: Topology | Mapping[str, Link | str] | None = None
    ) -> "DeviceMesh":
        """The same devices and axis names as a ``jax.sharding.Mesh`` (its axis types aside)."""
        return cls(mesh.devices, mesh.axis_names, topology=topology)

    def with_topology(self, topology: Topology | Mapping[str, Link | str]) -> "DeviceMesh":
        """The same mesh with other links."""
        mesh = type(self).__new__(type(self))
        mesh._fill(self._nested_members(), self.axis_names, topology, self._platform)
        return mesh

    def refined(self, parts: Mapping[str, tuple[int, ...]]) -> "DeviceMesh":
        """The same devices with some axes cut into sub-axes, each of its axis's link.

        Args:
            parts: axis -> sizes of its sub-axes, outermost first; sub-axis i is called "axis.i".
        """
        names, sizes, links = [], [], {}
        for axis, size in self.shape.items():
            for i, part in enumerate(parts.get(axis, (size,))):
                names.append(f"{axis}.{i}" if axis in parts else axis)
                sizes.append(part)
                links[names[-1]] = self.topology[axis]
        members = np.empty(self.size, dtype=object)
        members[:] = self._members
        mesh = type(self).__new__(type(self))
        mesh._fill(members.reshape(sizes), names, links, self._platform)
        return mesh

    def _fill(
        self,
        devices: Sequence[Any] | np.ndarray,
        axis_names: Sequence[str],
        topology: Topology | Mapping[str, Link | str] | None,
        platform: str | None,
    ) -> None:
        members, sizes = _flatten(devices)
        platform, members = _as_indices(members, platform)
        names = _checked_names(axis_names, sizes)
        _check_members(members)
        links = None if topology is None else _checked_topology(topology, names)
        found = _look_up_early(members, platform)
        for name, value in (
            ("axis_names", names),
            ("shape", MappingProxyType(dict(zip(names, sizes, strict=True)))),
            ("_members", members),
            ("_platform", platform),
            ("_given_topology", links),
            ("_topology", links),
            ("_devices", None if found is None else _as_array(found, sizes)),
            ("_jax_mesh", None),
        ):
            object.__setattr__(self, name, value)

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self._members)

    @property
    def devices(self) -> np.ndarray:
        """The devices as an array with one dim a mesh axis; starts the backend."""
        if self._devices is None:
            found = _look_up(self._members, self._platform)
            object.__setattr__(self, "_devices", _as_array(found, tuple(self.shape.values())))
        return self._devices  # pyright: ignore[reportReturnType]

    @property
    def jax_mesh(self) -> Mesh:
        """The mesh as JAX's own, its axis types Auto; starts the backend."""
        if self._jax_mesh is None:
            types = (AxisType.Auto,) * len(self.axis_names)
            mesh = Mesh(self.devices, self.axis_names, axis_types=types)
            object.__setattr__(self, "_jax_mesh", mesh)
        return self._jax_mesh  # pyright: ignore[reportReturnType]

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """The mesh as JAX's own without its devices, its axis types Auto; starts no backend."""
        types = (AxisType.Auto,) * len(self.axis_names)
        return AbstractMesh(tuple(self.shape.values()), self.axis_names, axis_types=types)

    @property
    def is_simulated(self) -> bool:
        """Whether several of its devices are parts of one CPU; looks the devices up."""
        here = jax.process_index()
        mine = [d for d in self.devices.flat if d.process_index == here]
        return len(mine) > 1 and mine[0].platform == "cpu"

    @property
    def known_platform(self) -> str | None:
        """What the devices are ("cpu"), if that can be told without starting the backend."""
        is_cpu = self._platform == "cpu" or (self._platform is None and simulate.cpu_only())
        return "cpu" if is_cpu else None

    @property
    def topology(self) -> Topology:
        """The link along each axis: as given, or else as the devices' kind suggests."""
        if self._topology is None:
            object.__setattr__(self, "_topology", self._usual_topology())
        return self._topology  # pyright: ignore[reportReturnType]

    def _usual_topology(self) -> Topology:
        if self.known_platform == "cpu":
            return Topology(dict.fromkeys(self.axis_names, CPU))
        inside = link_of_device_kind(self.devices.flat[0].device_kind)
        processes = np.vectorize(lambda device: device.process_index, otypes=[int])(self.devices)
        links = {}
        for dim, axis in enumerate(self.axis_names):
            crosses = bool((np.diff(processes, axis=dim) != 0).any())
            links[axis] = INFINIBAND_NDR if crosses else inside
        return Topology(links)

    def same_places(self, other: "DeviceMesh") -> bool:
        """Whether both have the same devices on the same axes, whatever their topologies."""
        return self._places() == other._places()

    def _places(self) -> Hashable:
        return (self._members, tuple(self.shape.items()), self._platform)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        same = self is other or self._places() == other._places()
        return same and self._given_topology == other._given_topology

    def __hash__(self) -> int:
        return hash((self._places(), self._given_topology))

    def _nested_members(self) -> list[Any]:
        return _as_array(self._members, tuple(self.shape.values())).tolist()

    def __repr__(self) -> str:
        links = "" if self._given_topology is None else f", topology={self._given_topology!r}"
        if self._platform == "cpu" and self._members == tuple(range(self.size)):
            sizes = tuple(self.shape.values())
            return f"DeviceMesh.simulate({sizes!r}, {self.axis_names!r}{links})"
        return f"DeviceMesh({self._nested_members()!r}, {self.axis_names!r}{links})"

    def __str__(self) -> str:
        return " × ".join(f"{axis}={size}" for axis, size in self.shape.items())

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self._nested_members(), self.axis_names, self._given_topology, self._platform)
        return (_rebuild, state)

    def __enter__(self) -> "DeviceMesh":
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(self, *exception: object) -> None:
        _entered.set(_entered.get()[:-1])

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")


def _rebuild(
    devices: list[Any], names: tuple[str, ...], topology: Topology | None, platform: str | None
) -> DeviceMesh:
    mesh = DeviceMesh.__new__(DeviceMesh)
    mesh._fill(devices, names, topology, platform)
    return mesh


def _is_index(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _as_array(members: Sequence[Any], sizes: tuple[int, ...]) -> np.ndarray:
    array = np.empty(len(members), dtype=object)
    array[:] = members
    return array.reshape(sizes)


def _flatten(devices: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The devices in row-major order, and the size of each level of nesting."""
    if isinstance(devices, np.ndarray):
        devices = devices.tolist()
    if not isinstance(devices, list | tuple):
        refuse(
            "DeviceMesh",
            f"devices is {devices!r}, which is no list.",
            "Each level of nesting is one mesh axis, so there is at least one.",
            "nest the devices in lists, such as [[0, 1], [2, 3]].",
        )
    sizes: list[int] = []
    level = devices
    while isinstance(level, list | tuple):
        sizes.append(len(level))
        if not level:
            what = f"devices is empty along dim {len(sizes) - 1}."
            why = "A mesh has at least one device along each axis."
            refuse("DeviceMesh", what, why, "list the indices of the devices to use, such as [0].")
        level = level[0]
    return tuple(_members_of(devices, tuple(sizes), "devices")), tuple(sizes)


def _members_of(level: Any, sizes: tuple[int, ...], path: str) -> Iterator[Any]:
    nested = isinstance(level, list | tuple)
    if nested != bool(sizes):
        found = "a list where its neighbours are devices" if nested else "a device, not a list"
        _refuse_ragged(f"{path} is {found}")
    if nested and len(level) != sizes[0]:
        found, wanted = (count_of(n, "entry", "entries") for n in (len(level), sizes[0]))
        _refuse_ragged(f"{path} has {found} where its neighbours have {wanted}")
    if not nested:
        yield level
        return
    for position, entry in enumerate(level):
        yield from _members_of(entry, sizes[1:], f"{path}[{position}]")


def _refuse_ragged(where: str) -> NoReturn:
    refuse(
        "DeviceMesh",
        f"devices is ragged: {where}.",
        "The devices must form a full array, one dim a mesh axis.",
        "give all lists at one level the same length.",
    )


def _as_indices(
    members: tuple[Any, ...], platform: str | None
) -> tuple[str | None, tuple[Any, ...]]:
    """Devices as their indices among their platform's, so that one mesh has one description."""
    indices = [_is_index(member) for member in members]
    if all(indices):
        return platform, tuple(int(member) for member in members)
    wrong = [m for m, index in zip(members, indices, strict=True) if not index]
    wrong = [member for member in wrong if not isinstance(member, jax.Device)]
    if wrong or any(indices):
        found = f"{wrong[0]!r}" if wrong else "both integers and jax.Devices"
        refuse(
            "DeviceMesh",
            f"devices holds {found}.",
            "A mesh is made of integers (indices into jax.devices()) or of jax.Devices.",
            "use one kind: DeviceMesh([0, 1], ...) or DeviceMesh(jax.devices(), ...).",
        )
    default = {device: index for index, device in enumerate(jax.devices())}
    if all(member in default for member in members):
        return None, tuple(default[member] for member in members)
    kind = members[0].platform
    others = {device: index for index, device in enumerate(members[0].client.devices())}
    if kind == "cpu" and all(member in others for member in members):
        return kind, tuple(others[member] for member in members)
    return None, members  # devices of a topology description, which this process doesn't have


def _checked_names(axis_names: Sequence[str], sizes: tuple[int, ...]) -> tuple[str, ...]:
    faults: list[Fault] = []
    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    example = f"axis_names={tuple(f'axis{i}' for i in range(len(sizes)))!r}"
    wrong = [name for name in names if not isinstance(name, str) or not name]
    if wrong:
        what = f"axis_names holds {listed([repr(name) for name in wrong])}."
        why = "Specs name the axes, so each name is a string that isn't empty."
        faults.append(Fault(what, why, f"use strings, such as {example}."))
    repeated = sorted({name for name in names if names.count(name) > 1}, key=names.index)
    if repeated:
        what = f"axis_names {names!r} has {listed([repr(name) for name in repeated])} twice."
        why = "A spec that names this axis could mean either."
        faults.append(Fault(what, why, "give each axis a name of its own."))
    if len(names) != len(sizes):
        what = (
            f"devices has {count_of(len(sizes), 'dim')} (shape {sizes}) but axis_names has "
            f"{count_of(len(names), 'name')}: {names!r}."
        )
        why = "Each dim of devices is one mesh axis and has one name."
        fix = f"give {count_of(len(sizes), 'name')}, or nest the devices {len(names)} deep."
        faults.append(Fault(what, why, fix))
    raise_faults("DeviceMesh", faults)
    return names


def _check_members(members: tuple[Any, ...]) -> None:
    faults: list[Fault] = []
    negative = [member for member in members if isinstance(member, int) and member < 0]
    if negative:
        what = f"devices holds the negative index {negative[0]}."
        why = "Indices count jax.devices() from its start, from 0 on."
        faults.append(Fault(what, why, "use the device's index from the start."))
    repeated = {member: count for member, count in Counter(members).items() if count > 1}
    if repeated:
        shown = [f"{member} ({count} times)" for member, count in repeated.items()]
        what = f"devices uses {listed(shown)} more than once."
        why = "Each device holds one place in the mesh."
        fix = f"list {len(members)} different devices, such as 0 to {len(members) - 1}."
        faults.append(Fault(what, why, fix))
    raise_faults("DeviceMesh", faults)


def _checked_topology(
    topology: Topology | Mapping[str, Link | str], names: tuple[str, ...]
) -> Topology:
    links = topology if isinstance(topology, Topology) else Topology(topology)
    missing = [repr(name) for name in names if name not in links]
    unknown = [repr(axis) for axis in links if axis not in names]
    faults: list[Fault] = []
    if missing:
        what = f"topology has no link for {listed(missing)}."
        why = "Each mesh axis has one link."
        faults.append(Fault(what, why, f"add {listed(missing)} to topology."))
    if unknown:
        what = f"topology has a link for {listed(unknown)}, which is no axis of this mesh."
        why = f"The mesh axes are {listed([repr(name) for name in names])}."
        faults.append(Fault(what, why, "name the links as the axes are named."))
    raise_faults("DeviceMesh", faults)
    return links


def _look_up_early(members: tuple[Any, ...], platform: str | None) -> tuple[Any, ...] | None:
    """Has missing CPU devices made; the devices, if the backend is up already."""
    if not isinstance(members[0], int):
        return members
    if platform == "cpu" or (platform is None and simulate.cpu_only()):
        simulate.request_cpu_devices(max(members) + 1)
    return _look_up(members, platform) if simulate.backend_is_up() else None


def _look_up(members: tuple[Any, ...], platform: str | None) -> tuple[Any, ...]:
    there = jax.devices(platform)
    needed = max(members) + 1
    if needed <= len(there):
        return tuple(there[member] for member in members)
    have = f"there {'is' if len(there) == 1 else 'are'} {count_of(len(there), 'device')}"
    what = f"the mesh needs device {needed - 1}, so {needed} devices, but {have}."
    kind = there[0].platform
    if kind == "cpu":
        why = "JAX's backend is up already, and keeps the number of devices it started with."
        fix = (
            "move this DeviceMesh(...) above the first call that runs JAX (jnp arrays, jax.devices(), "
            f'random keys), or say jax.config.update("jax_num_cpu_devices", {needed}) first thing, or '
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={needed}."
        )
    else:
        why = f"JAX runs on {there[0].device_kind}, and devices of that kind aren't simulated."
        fix = (
            f"use indices 0 to {len(there) - 1}, DeviceMesh.simulate(shape, axis_names), or "
            f"JAX_PLATFORMS=cpu to simulate all devices on the CPU."
        )
    refuse("DeviceMesh", what, why, fix)
