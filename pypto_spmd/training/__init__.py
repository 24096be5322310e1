"""What repeats in every training script: layouts by name, input, metrics, checkpoints, precision."""

from pypto_spmd.sharding.parameters import ParameterLayout, parameter_specs
from pypto_spmd.training.input import Prefetched, prefetch
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
from pypto_spmd.training.position import Batches, Resumable

__all__ = [
    "Batches",
    "Layout",
    "ParameterLayout",
    "Prefetched",
    "Resumable",
    "combine",
    "data_parallel",
    "flax_metadata",
    "fsdp",
    "parameter_specs",
    "prefetch",
    "tensor_parallel",
    "zero1",
    "zero2",
]
