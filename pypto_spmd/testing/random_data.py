"""Random arrays, and random parts of an array that reduce to it."""

from collections.abc import Mapping
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from pypto_spmd.sharding.layout import Layout


def as_data(value: jax.Array) -> jax.Array:
    """The words of random keys; other arrays as they are."""
    return jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value


_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def draw(random: np.random.Generator, like: jax.ShapeDtypeStruct) -> jax.Array:
    """A random array of a shape and dtype; integers are small."""
    dtype = like.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        words = draw(random, jax.eval_shape(jax.random.key_data, like))
        return jax.random.wrap_key_data(words, impl=_KEYS[str(dtype)])
    if dtype == np.dtype(bool):
        return jnp.asarray(random.random(like.shape) < 0.5)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(random.integers(0, 8, like.shape), dtype)
    value = random.standard_normal(like.shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        value = value + 1j * random.standard_normal(like.shape)
    return jnp.asarray(value, dtype)


def parts_of(
    random: np.random.Generator, value: jax.Array, layout: Layout, axis_sizes: Mapping[str, int]
) -> jax.Array:
    """Random values, one per device of the partial axes, that reduce to `value`."""
    if not layout.partial:
        return value
    count = prod(axis_sizes[axis] for axis, _ in layout.partial)
    op = layout.partial[0][1]
    whole = np.asarray(value)
    shape = (count, *whole.shape)
    owner = random.integers(0, count, whole.shape)
    owns = np.arange(count).reshape((count,) + (1,) * whole.ndim) == owner
    if op == "sum":
        parts = np.asarray(draw(random, jax.ShapeDtypeStruct(shape, whole.dtype))).copy()
        parts[0] = whole - parts[1:].sum(0, dtype=whole.dtype)
    elif op == "prod":
        parts = np.where(owns, whole, np.ones((), whole.dtype))
    elif op in ("max", "min"):
        by = random.integers(1, 5, shape).astype(whole.dtype)
        with np.errstate(over="ignore"):
            other = whole - by if op == "max" else whole + by
        kept = other <= whole if op == "max" else other >= whole  # unsigned integers may wrap
        parts = np.where(owns | ~kept, whole, other)
    else:
        mask = np.asarray(draw(random, jax.ShapeDtypeStruct(shape, whole.dtype)))
        parts = np.where(owns, whole, whole & mask if op == "or" else whole | mask)
    return jnp.asarray(parts, value.dtype)
