"""Collectives: those that are inferred, and those that a person writes by hand."""

from pypto_spmd.collectives.primitives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    permute,
    reduce_scatter,
)

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "permute", "reduce_scatter"]
