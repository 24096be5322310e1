"""What families of rules share: names of dims, and what lets partial values through.

A reduction over devices works element by element, so it may come before or after a primitive that only
moves or repeats elements.
"""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pypto_spmd.collectives.rules.factor import Linear


def dim_names(rank: int) -> list[str]:
    """A factor name for each of `rank` dims."""
    return [f"d{d}" for d in range(rank)]


def is_inexact(dtype: Any) -> bool:
    """Whether `dtype` is of real or complex floating-point numbers."""
    return isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.inexact)


def moving_ops(dtype: Any) -> tuple[str, ...]:
    """The reductions that commute with moving elements of `dtype` (none for PRNG keys)."""
    if not isinstance(dtype, np.dtype):
        return ()
    if dtype.kind == "b":
        return ("or", "and")
    return ("sum",) if dtype.kind == "c" else ("sum", "max", "min")


def moves(operands: Iterable[int], dtype: Any) -> tuple[Linear, ...]:
    """The linear group of a primitive that only moves the elements of `operands`."""
    ops = moving_ops(dtype)
    return (Linear(frozenset(operands), ops),) if ops else ()
