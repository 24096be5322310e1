"""Devices, the axes they are arranged in, and the links between them."""

from pypto_spmd.mesh.device_mesh import DeviceMesh, current_mesh
from pypto_spmd.mesh.topology import Link, Topology

__all__ = ["DeviceMesh", "Link", "Topology", "current_mesh"]
