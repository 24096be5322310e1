"""Which rules a call follows: NumPy's, or JAX's as under `jax.jit`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pypto_spmd.numpy_body.evidence import uses_no_library, uses_numpy
from pypto_spmd.numpy_body.functions import STOP_AT_NUMPY, NumpyApplied
from pypto_spmd.numpy_body.rewrite import as_jax


def numpy_body(
    fn: Callable, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Callable | None:
    """The function to trace instead, if a call of a function is a call of NumPy code.

    It is, if the code refers to NumPy and not to JAX, and either all arrays are NumPy's or the code
    applies a NumPy function to one of them. So `x * np.sqrt(2.0)` on JAX arrays keeps JAX's rules,
    and on NumPy arrays NumPy's: both as the undecorated function does. Code that refers to no library
    (`a @ b`) means what its arrays mean.

    Args:
        fn: the function.
        args: its arguments, or `jax.ShapeDtypeStruct`s in their place.
        kwargs: its keywords, likewise.

    Returns:
        `as_jax(fn)`, to be traced and run under `jax.enable_x64(True)`; None if JAX's rules hold.
    """
    leaves = jax.tree.leaves((args, kwargs or {}))
    arrays = [leaf for leaf in leaves if hasattr(leaf, "dtype") and hasattr(leaf, "shape")]
    if uses_numpy(fn):
        if all(isinstance(array, np.ndarray | np.generic) for array in arrays):
            return as_jax(fn)
        return as_jax(fn) if _applies_numpy(fn, args, kwargs or {}) else None
    # Where nothing is of 64 bits, JAX's rules do as well.
    are_numpy = any(map(_is_wide, arrays)) and all(
        isinstance(array, np.ndarray | np.generic) or _is_wide(array) for array in arrays
    )
    return as_jax(fn) if are_numpy and uses_no_library(fn) else None


def _is_wide(array: Any) -> bool:
    """Whether an array is of a type that NumPy has and JAX narrows, unless it is asked not to."""
    dtype = array.dtype
    return isinstance(dtype, np.dtype) and jax.dtypes.canonicalize_dtype(dtype) != dtype


def _applies_numpy(fn: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Trace the code until it applies a NumPy function to an array, and tell whether it did."""
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]

    def from_arrays(arrays: list[Any]) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        positional, keywords = tree.unflatten(filled)
        return as_jax(fn)(*positional, **keywords)

    asked = STOP_AT_NUMPY.set(True)
    try:
        with jax.enable_x64(True):
            jax.eval_shape(from_arrays, [leaves[place] for place in places])
    except NumpyApplied:
        return True
    except Exception:
        # Code that can't be read as NumPy code (it uses x.at, say) is JAX code; JAX will judge it.
        return False
    finally:
        STOP_AT_NUMPY.reset(asked)
    return False
