"""What a collective costs in seconds: the alpha-beta model of the links along each mesh axis.

A message of m bytes over a link takes alpha + m / beta seconds, alpha the link's latency and beta its
bandwidth. Collectives run as rings (AllToAll as pairwise exchange), whose steps all take the time of
the slowest link they cross.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from pypto_spmd.errors import Fault, listed, raise_faults, refuse

if TYPE_CHECKING:
    from pypto_spmd.mesh.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Link:
    """One device's connection to its neighbour along a mesh axis.

    Args:
        latency_s: Seconds until the first byte arrives.
        bandwidth_bytes_per_s: Bytes a second that one device sends, in one direction.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        # A bandwidth of zero would make every plan cost infinity, and all of them equally good.
        if not self.latency_s >= 0 or not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"latency_s must be >= 0 and bandwidth_bytes_per_s > 0, not {self!r}")


# Bandwidths are the vendors' figures for one device and one direction; latencies are of the order
# that collective benchmarks (nccl-tests, OSU) show for small messages.
CPU = Link(latency_s=1e-6, bandwidth_bytes_per_s=10e9)
NVLINK_H100 = Link(latency_s=3e-6, bandwidth_bytes_per_s=450e9)
NVLINK_A100 = Link(latency_s=3e-6, bandwidth_bytes_per_s=300e9)
INFINIBAND_NDR = Link(latency_s=5e-6, bandwidth_bytes_per_s=50e9)
ETHERNET_100G = Link(latency_s=20e-6, bandwidth_bytes_per_s=12.5e9)
TPU_V4_ICI = Link(latency_s=1e-6, bandwidth_bytes_per_s=90e9)
TPU_V5E_ICI = Link(latency_s=1e-6, bandwidth_bytes_per_s=90e9)
TPU_V5P_ICI = Link(latency_s=1e-6, bandwidth_bytes_per_s=180e9)

PRESETS: Mapping[str, Link] = {
    "cpu": CPU,
    "nvlink_h100": NVLINK_H100,
    "nvlink_a100": NVLINK_A100,
    "infiniband_ndr": INFINIBAND_NDR,
    "ethernet_100g": ETHERNET_100G,
    "tpu_v4_ici": TPU_V4_ICI,
    "tpu_v5e_ici": TPU_V5E_ICI,
    "tpu_v5p_ici": TPU_V5P_ICI,
}
"""Links by name.

* ``cpu``: simulated devices share one memory; the figure is a memory copy's order, not a fact.
* ``nvlink_h100``, ``nvlink_a100``: 900 and 600 GB/s both ways (NVIDIA H100 and A100 data sheets).
* ``infiniband_ndr``: 400 Gb/s a port, a port a GPU (NVIDIA Quantum-2 data sheet).
* ``ethernet_100g``: 100 Gb/s (IEEE 802.3ba).
* ``tpu_v4_ici``, ``tpu_v5e_ici``, ``tpu_v5p_ici``: 45, 45 and 90 GB/s one way a link, and a ring along
  an axis with wrap-around uses both of its directions ("How To Scale Your Model", Austin et al. 2025,
  chapter 2).
"""

_PRESET_OF_DEVICE_KIND = (
    ("H100", NVLINK_H100),
    ("H200", NVLINK_H100),
    ("A100", NVLINK_A100),
    ("TPU v4", TPU_V4_ICI),
    ("TPU v5 lite", TPU_V5E_ICI),
    ("TPU v5", TPU_V5P_ICI),
    ("cpu", CPU),
)


@dataclass(frozen=True, slots=True, init=False)
class Topology(Mapping[str, Link]):
    """The link along each mesh axis; any mapping of axis names to links is turned into one.

    Args:
        links: Pairs of axis name and :class:`Link`, or a mapping, a link given by preset name too.

    Raises:
        ShardingError: For links that are none.

    Example:
        >>> Topology({"data": "infiniband_ndr", "model": "nvlink_h100"})["model"].latency_s
        3e-06
    """

    links: tuple[tuple[str, Link], ...]

    def __init__(self, links: Mapping[str, Link | str] | Sequence[tuple[str, Link | str]]) -> None:
        if not isinstance(links, Mapping) and (isinstance(links, str) or not _are_pairs(links)):
            refuse(
                "Topology",
                f"links is {links!r}.",
                "Each mesh axis has a link of its own.",
                "name them by axis: topology={'data': 'infiniband_ndr', 'model': 'nvlink_h100'}.",
            )
        pairs = tuple(links.items() if isinstance(links, Mapping) else links)
        faults: list[Fault] = []
        made = tuple((axis, _as_link(axis, link, faults)) for axis, link in pairs)
        raise_faults("Topology", faults)
        object.__setattr__(self, "links", made)

    def __getitem__(self, axis: str) -> Link:
        return dict(self.links)[axis]

    def __iter__(self) -> Iterator[str]:
        return (axis for axis, _ in self.links)

    def __len__(self) -> int:
        return len(self.links)


def _are_pairs(links: Any) -> bool:
    return isinstance(links, Sequence) and all(
        isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
        for pair in links
    )


def _as_link(axis: str, link: Any, faults: list[Fault]) -> Link:
    if isinstance(link, Link):
        return link
    if isinstance(link, str) and link in PRESETS:
        return PRESETS[link]
    what = f"the link of {axis!r} is {link!r}."
    why = f"A link is a Link or the name of a preset, and these are {listed([*PRESETS])}."
    fix = "use one of these names, or Link(latency_s=..., bandwidth_bytes_per_s=...)."
    faults.append(Fault(what, why, fix))
    return CPU


def link_of_device_kind(kind: str) -> Link:
    """The link between devices of one kind, by what JAX calls them; NVLink's for an unknown GPU."""
    for part, link in _PRESET_OF_DEVICE_KIND:
        if part.lower() in kind.lower():
            return link
    return NVLINK_A100


def seconds(kind: str, wire_bytes: float, axes: Sequence[str], mesh: "DeviceMesh") -> float:
    """How long a collective takes by the alpha-beta model.

    Over n devices: AllReduce 2(n−1) ring steps (reduce-scatter, then all-gather), AllGather and
    ReduceScatter n−1 (Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory,
    practice, and experience", 2007, section 5: bucket algorithms); AllToAll n−1 exchanges (Thakur,
    Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005: pairwise
    exchange); CollectivePermute one. Each step pays the latency; the bytes are paid once.

    Args:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or
            ``collective_permute``.
        wire_bytes: Bytes that each device sends in all.
        axes: The mesh axes that the collective runs over, as one ring.
        mesh: The mesh, for the sizes of these axes and its topology.
    """
    n = prod(mesh.shape[axis] for axis in axes)
    if n == 1:
        return 0.0
    links = [mesh.topology[axis] for axis in axes if mesh.shape[axis] > 1]
    steps = {
        "all_reduce": 2 * (n - 1),
        "all_gather": n - 1,
        "reduce_scatter": n - 1,
        "all_to_all": n - 1,
        "collective_permute": 1,
    }[kind]
    latency_s = max(link.latency_s for link in links)
    return steps * latency_s + wire_bytes / min(link.bandwidth_bytes_per_s for link in links)


def slowest_first(mesh: "DeviceMesh") -> tuple[str, ...]:
    """The mesh's axes, that with the least bandwidth first; equal ones in the order of the mesh."""

    def slowness(axis: str) -> tuple[float, float]:
        link = mesh.topology[axis]
        return (link.bandwidth_bytes_per_s, -link.latency_s)

    return tuple(sorted(mesh.axis_names, key=slowness))
