"""Several arrays of one shape as one array of words, so that they are sent together."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_MOST_WORD_BYTES = 4


def word_bytes(itemsizes: Iterable[int]) -> int:
    """Bytes of a word of which elements of these sizes are made."""
    return min(*itemsizes, _MOST_WORD_BYTES)


def words_of(itemsize: int, word: int) -> int:
    """How many words an element has."""
    return itemsize // word


def to_words(arrays: Sequence[jax.Array], word: int) -> jax.Array:
    """The arrays' elements as unsigned words of `word` bytes, side by side in a last dim."""
    return lax.concatenate([_words(x, word) for x in arrays], arrays[0].ndim)


def from_words(words: jax.Array, like: Sequence[Any], word: int) -> list[jax.Array]:
    """The arrays again, with the dtypes of `like`."""
    arrays, first = [], 0
    for x in like:
        count = words_of(x.dtype.itemsize, word)
        part = words[..., first : first + count]
        stored = jnp.uint8 if x.dtype == jnp.bool_ else x.dtype
        if count == 1:
            part = lax.squeeze(part, [part.ndim - 1])
        arrays.append(lax.bitcast_convert_type(part, stored).astype(x.dtype))
        first += count
    return arrays


def _words(x: jax.Array, word: int) -> jax.Array:
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    found = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * word}"))
    return found.reshape((*x.shape, prod(found.shape[x.ndim :])))
