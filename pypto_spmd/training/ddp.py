"""`DistributedDataParallel`: the layout `data_parallel` under the name and options people know."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from pypto_spmd.collectives.buckets import bucketed
from pypto_spmd.errors import refuse
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.spmd import SPMDFunction, spmd
from pypto_spmd.training.layouts import data_parallel

_SUBJECT = "DistributedDataParallel"
_BYTES_PER_MB = 2**20


def DistributedDataParallel(
    step: Callable[..., Any],
    device_ids: Sequence[int] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    bucket_cap_mb: float = 25,
    overlap_allreduce: bool = True,
    **options: Any,
) -> SPMDFunction:
    """A serial train step over whole batches, run on parts of the batch on several devices.

    Parameters and optimizer state are whole on each device, the other arguments are split by their first
    dim, and gradients are summed by AllReduces. There are no hooks: the step is planned and compiled as a
    whole, and `.plan(...)` shows its AllReduces.

    Args:
        step: the train step, `step(state, batch)`, written for one device. Not a model alone, as the
            gradients are taken in the step.
        device_ids: indices into `jax.devices()`; by default all.
        mesh: a mesh of one axis, in place of `device_ids`.
        bucket_cap_mb: the most MiB that travel in one AllReduce of gradients; an array that has more travels
            alone.
        overlap_allreduce: whether gradients travel in such buckets, each from when its last gradient is
            known, so that XLA may send it while others are still computed. It does on GPUs and TPUs, by
            its own schedule; on CPUs it does not. Otherwise all travel in one AllReduce after the last.
        **options: more options of `spmd`, such as `donate_argnames`, or `in_shardings` for batches that are
            not split by their first dim.

    Returns:
        The step on the devices.

    Raises:
        ShardingError: For what is no function, and for options that can't be.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def step(params, x):
        ...     loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
        ...     return {"w": params["w"] - 0.1 * grads["w"]}, loss
        >>> parallel = DistributedDataParallel(step, device_ids=[0, 1])
        >>> params, x = {"w": jnp.ones((4, 2))}, jnp.ones((8, 4))
        >>> parallel.plan(params, x).counts()["all_reduce"]
        2
    """
    if not callable(step) or hasattr(step, "init") or _is_module(step):
        what = f"it was given a value of type {type(step).__name__}."
        why = "The gradients are reduced in the train step, which a model alone does not have."
        fix = "pass the step: DistributedDataParallel(train_step), with train_step(state, batch)."
        refuse(_SUBJECT, what, why, fix)
    if not bucket_cap_mb > 0:
        what = f"bucket_cap_mb is {bucket_cap_mb}."
        refuse(_SUBJECT, what, "A bucket has some bytes.", "use bucket_cap_mb=25, as is usual.")
    if mesh is not None and device_ids is not None:
        what = "both device_ids and mesh are given."
        refuse(_SUBJECT, what, "Each says which devices to use.", "keep one of them.")
    if mesh is None:
        mesh = DeviceMesh(_all_devices() if device_ids is None else list(device_ids), ["data"])
    if len(mesh.axis_names) != 1:
        what = f"the mesh is {mesh}."
        why = "Data parallelism has one axis, over which the batch is split."
        fix = "use a mesh of one axis, or spmd with a layout of pypto_spmd.training."
        refuse(_SUBJECT, what, why, fix)
    (axis,) = mesh.axis_names
    run = _in_buckets(step, bucket_cap_mb) if overlap_allreduce else step
    options.setdefault("in_shardings", PartitionSpec(axis))
    options.setdefault("parameter_shardings", data_parallel(axis))
    return spmd(run, mesh=mesh, **options)


def _in_buckets(step: Callable[..., Any], bucket_cap_mb: float) -> Callable[..., Any]:
    most_bytes = max(int(bucket_cap_mb * _BYTES_PER_MB), 1)

    @functools.wraps(step)
    def bucketed_step(*args: Any, **kwargs: Any) -> Any:
        with bucketed(most_bytes):
            return step(*args, **kwargs)

    return bucketed_step


def _all_devices() -> np.ndarray:

    return np.arange(jax.device_count())


def _is_module(value: Any) -> bool:
    """Whether it is a model of flax."""
    return any(
        cls.__name__ == "Module" and cls.__module__.startswith("flax.")
        for cls in type(value).__mro__
    )
