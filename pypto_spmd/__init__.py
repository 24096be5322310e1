"""Serial code in, communication plan out: run whole-array JAX and NumPy functions on a mesh."""

from pypto_spmd import collectives
from pypto_spmd.collectives.plan import CommPlan, CommStep
from pypto_spmd.collectives.rules import register_rule
from pypto_spmd.constrain import constrain
from pypto_spmd.errors import ShardingError
from pypto_spmd.local import local
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.sharding import AUTO, PartitionSpec, ShardingSpec
from pypto_spmd.show import show_shardings
from pypto_spmd.spmd import SPMDFunction, spmd

__all__ = [
    "AUTO",
    "CommPlan",
    "CommStep",
    "DeviceMesh",
    "PartitionSpec",
    "SPMDFunction",
    "ShardingError",
    "ShardingSpec",
    "collectives",
    "constrain",
    "local",
    "register_rule",
    "show_shardings",
    "spmd",
]
