"""The alpha-beta model: formulas by hand, the order of axes, bad links."""

import pytest

from pypto_spmd import DeviceMesh, ShardingError
from pypto_spmd.mesh import Link, Topology
from pypto_spmd.mesh.topology import (
    CPU,
    NVLINK_H100,
    PRESETS,
    TPU_V5E_ICI,
    TPU_V5P_ICI,
    link_of_device_kind,
    seconds,
    slowest_first,
)

SLOW = Link(latency_s=1.0, bandwidth_bytes_per_s=10.0)
FAST = Link(latency_s=0.5, bandwidth_bytes_per_s=100.0)


@pytest.fixture
def mesh():
    return DeviceMesh.simulate(
        (2, 4, 1), ("data", "model", "one"), topology={"data": SLOW, "model": FAST, "one": SLOW}
    )


@pytest.mark.parametrize(
    ("kind", "axes", "expected"),
    [
        ("all_reduce", ("model",), 2 * 3 * 0.5 + 300 / 100),
        ("all_gather", ("model",), 3 * 0.5 + 300 / 100),
        ("reduce_scatter", ("model",), 3 * 0.5 + 300 / 100),
        ("all_to_all", ("model",), 3 * 0.5 + 300 / 100),
        ("collective_permute", ("model",), 0.5 + 300 / 100),
        ("all_reduce", ("data",), 2 * 1 * 1.0 + 300 / 10),
        # One ring over all eight devices, at the pace of its slowest link.
        ("all_reduce", ("data", "model"), 2 * 7 * 1.0 + 300 / 10),
        # An axis of size 1 has no link to cross.
        ("all_gather", ("model", "one"), 3 * 0.5 + 300 / 100),
        ("all_gather", ("one",), 0.0),
        ("all_gather", (), 0.0),
    ],
)
def test_seconds(mesh, kind, axes, expected):
    assert seconds(kind, 300.0, axes, mesh) == pytest.approx(expected, rel=1e-12)


def test_the_slowest_axis_comes_first_and_equal_ones_in_mesh_order(mesh):
    assert slowest_first(mesh) == ("data", "one", "model")
    fast_first = mesh.with_topology({"data": FAST, "model": SLOW, "one": FAST})
    assert slowest_first(fast_first) == ("model", "data", "one")


def test_equal_bandwidths_are_told_apart_by_latency():
    mesh = DeviceMesh.simulate(
        (2, 4), ("a", "b"), topology={"a": Link(1e-6, 1e9), "b": Link(9e-6, 1e9)}
    )
    assert slowest_first(mesh) == ("b", "a")


def test_simulated_devices_have_the_cpu_s_links():
    mesh = DeviceMesh.simulate((2, 4), ("data", "model"))
    assert mesh.topology == Topology({"data": CPU, "model": CPU})
    assert slowest_first(mesh) == ("data", "model")


def test_a_topology_is_a_mapping_that_its_repr_makes_again():
    topology = Topology({"data": "infiniband_ndr", "model": FAST})
    assert topology["data"] is PRESETS["infiniband_ndr"]
    assert dict(topology) == {"data": PRESETS["infiniband_ndr"], "model": FAST}
    assert eval(repr(topology)) == topology
    assert hash(topology) == hash(Topology(topology))


@pytest.mark.parametrize(
    ("kind", "link"),
    [
        ("NVIDIA H100 80GB HBM3", NVLINK_H100),
        ("NVIDIA H200", NVLINK_H100),
        ("TPU v5 lite", TPU_V5E_ICI),
        ("TPU v5", TPU_V5P_ICI),
        ("cpu", CPU),
    ],
)
def test_links_by_device_kind(kind, link):
    assert link_of_device_kind(kind) is link


def test_bad_links():
    with pytest.raises(ValueError, match="latency_s must be >= 0 and bandwidth_bytes_per_s > 0"):
        Link(latency_s=0.0, bandwidth_bytes_per_s=0.0)
    with pytest.raises(ShardingError) as raised:
        Topology({"data": "nvlnk", "model": 3})  # pyright: ignore[reportArgumentType]
    presets = (
        "cpu, nvlink_h100, nvlink_a100, infiniband_ndr, ethernet_100g, tpu_v4_ici, tpu_v5e_ici and "
        "tpu_v5p_ici"
    )
    assert str(raised.value) == (
        "Topology: 2 things are wrong.\n"
        "  1. the link of 'data' is 'nvlnk'.\n"
        f"     A link is a Link or the name of a preset, and these are {presets}.\n"
        "     Fix: use one of these names, or Link(latency_s=..., bandwidth_bytes_per_s=...).\n"
        "  2. the link of 'model' is 3.\n"
        f"     A link is a Link or the name of a preset, and these are {presets}.\n"
        "     Fix: use one of these names, or Link(latency_s=..., bandwidth_bytes_per_s=...)."
    )


@pytest.mark.parametrize("links", ["nvlink_h100", ["cpu"], 3])
def test_links_have_an_axis_each(links):
    with pytest.raises(ShardingError) as raised:
        DeviceMesh([0, 1], ["a"], topology=links)
    assert str(raised.value) == (
        f"Topology: links is {links!r}.\n"
        "  Each mesh axis has a link of its own.\n"
        "  Fix: name them by axis: topology={'data': 'infiniband_ndr', 'model': 'nvlink_h100'}."
    )
