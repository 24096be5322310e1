"""How tensors lie on a mesh: what a person writes, and what it means for each array."""

from pypto_spmd.sharding.spec import AUTO, PartitionSpec, ShardingSpec

__all__ = ["AUTO", "PartitionSpec", "ShardingSpec"]
