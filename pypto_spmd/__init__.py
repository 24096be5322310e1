"""Serial code in, communication plan out: run whole-array JAX and NumPy functions on a mesh."""

from pypto_spmd.errors import ShardingError
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.sharding import AUTO, PartitionSpec, ShardingSpec

__all__ = ["AUTO", "DeviceMesh", "PartitionSpec", "ShardingError", "ShardingSpec"]
