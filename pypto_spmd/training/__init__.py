"""What repeats in every training script: layouts by name."""

from pypto_spmd.sharding.parameters import ParameterLayout, parameter_specs
from pypto_spmd.training.layouts import (
    Layout,
    combine,
    data_parallel,
    flax_metadata,
    fsdp,
    tensor_parallel,
    zero1,
    zero2,
)

__all__ = [
    "Layout",
    "ParameterLayout",
    "combine",
    "data_parallel",
    "flax_metadata",
    "fsdp",
    "parameter_specs",
    "tensor_parallel",
    "zero1",
    "zero2",
]
