"""What repeats in every training script: layouts by name, input, metrics, checkpoints, precision."""

from pypto_spmd.sharding.parameter_forms import ParameterLayout
from pypto_spmd.sharding.parameters import parameter_specs
from pypto_spmd.training.checkpoint import CheckpointError, CheckpointManager
from pypto_spmd.training.ddp import DistributedDataParallel
from pypto_spmd.training.input import Prefetched, prefetch
from pypto_spmd.training.layouts import (
    Layout,
    combine,
    data_parallel,
    expert_parallel,
    flax_metadata,
    fsdp,
    tensor_parallel,
    zero1,
    zero2,
)
from pypto_spmd.training.loss_scale import LossScale, all_finite, choose
from pypto_spmd.training.metrics import MetricsLogger, NonFiniteError
from pypto_spmd.training.position import Batches, Resumable
from pypto_spmd.training.precision import Policy
from pypto_spmd.training.stopping import Stop, graceful_stop

__all__ = [
    "Batches",
    "CheckpointError",
    "CheckpointManager",
    "DistributedDataParallel",
    "Layout",
    "LossScale",
    "MetricsLogger",
    "NonFiniteError",
    "ParameterLayout",
    "Policy",
    "Prefetched",
    "Resumable",
    "Stop",
    "all_finite",
    "choose",
    "combine",
    "data_parallel",
    "expert_parallel",
    "flax_metadata",
    "fsdp",
    "graceful_stop",
    "parameter_specs",
    "prefetch",
    "tensor_parallel",
    "zero1",
    "zero2",
]
