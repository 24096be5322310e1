"""Whether parts, put together by a layout, are the whole."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from pypto_spmd.sharding.layout import Layout

ROUNDINGS = 64
"""By how many roundings, relative to the largest element, a result may differ."""

_REDUCE = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "or": np.bitwise_or,
    "and": np.bitwise_and,
}


def compare(
    parts: np.ndarray, whole: np.ndarray, layout: Layout, axis_sizes: Mapping[str, int]
) -> str:
    """What is wrong with the devices' parts of a result, "" if nothing."""
    names = list(axis_sizes)
    grid = parts.reshape(*axis_sizes.values(), *parts.shape[1:])
    for axis, op in layout.partial:
        at = names.index(axis)
        shape = grid.shape
        reduced = _REDUCE[op].reduce(grid, axis=at, dtype=grid.dtype, keepdims=True)
        grid = np.broadcast_to(reduced, shape)
    for place in np.ndindex(*axis_sizes.values()):
        coordinates = dict(zip(names, place, strict=True))
        expected = whole
        for dim, axes in enumerate(layout.dims):
            block = 0
            for axis in axes:
                block = block * axis_sizes[axis] + coordinates[axis]
            size = whole.shape[dim] // layout.shards(dim, axis_sizes)
            expected = expected.take(range(block * size, (block + 1) * size), axis=dim)
        if not close(grid[place], expected, whole):
            return f"is wrong on device {place}: {_largest_error(grid[place], expected)}"
    return ""


def close(found: np.ndarray, expected: np.ndarray, whole: np.ndarray) -> bool:
    """Whether numbers are equal but for rounding, which the largest of `whole` bounds."""
    if found.shape != expected.shape:
        return False
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return bool(np.array_equal(found, expected))
    tolerance = min(ROUNDINGS * float(jnp.finfo(expected.dtype).eps), 0.05)
    wide = np.complex128 if jnp.issubdtype(expected.dtype, jnp.complexfloating) else np.float64
    found, expected, whole = (a.astype(wide) for a in (found, expected, whole))
    finite = np.abs(whole[np.isfinite(whole)])
    scale = max(1.0, float(finite.max())) if finite.size else 1.0
    return bool(np.allclose(found, expected, tolerance, tolerance * scale, equal_nan=True))


def _largest_error(found: np.ndarray, expected: np.ndarray) -> str:
    differs = np.asarray(found != expected)
    at = tuple(int(i) for i in np.argwhere(differs)[0]) if differs.any() else ()
    count = int(differs.sum())
    return (
        f"{count} of {differs.size} elements differ, at {at} {found[at]} instead of {expected[at]}"
    )
