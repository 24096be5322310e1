"""Primitives that compare elements along a dim: argmax, argmin, top_k, sort.

Along a split dim each device finds its own candidates and where they stand in the whole; the devices
exchange these few, and each picks among them by the primitive itself. The candidates come in the order of
the dim, so that of equal ones the first is taken, as the primitive does.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Exchange, Rule, factor_rule
from pypto_spmd.collectives.rules.moving import dim_names
from pypto_spmd.collectives.rules.registry import Aval, rule

_INDEX_BYTES = 4
_MOST_WORD_BYTES = 4


@rule("argmax", "argmin")
def _argmax(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    (axis,) = params["axes"]
    names = dim_names(len(ins[0].shape))
    along = names[axis]

    def bind(ctx: Context, x: jax.Array) -> jax.Array:
        if not ctx.axes(along):
            return ctx.bind(x)
        mine = jnp.expand_dims(ctx.bind(x, index_dtype=np.dtype("int32")), axis)
        best = jnp.take_along_axis(x, mine, axis)
        values, indices = _candidates(ctx, along, best, mine, x.shape[axis], axis)
        winner = ctx.bind(values, index_dtype=np.dtype("int32"))
        found = jnp.take_along_axis(indices, jnp.expand_dims(winner, axis), axis)
        return lax.convert_element_type(lax.squeeze(found, [axis]), params["index_dtype"])

    kept = [n for n in names if n != along]
    return factor_rule(
        f"{' '.join(names)} -> {' '.join(kept)}",
        [ins[0].shape],
        [outs[0].shape],
        exchanges={along: (_candidates_exchange(ins[0], axis, 1),)},
        bind=bind,
    )


@rule("top_k")
def _top_k(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    axis, count = params["axis"] % len(ins[0].shape), params["k"]
    names = dim_names(len(ins[0].shape))
    along = names[axis]

    def bind(ctx: Context, x: jax.Array) -> Any:
        best, mine = ctx.bind(x)
        if not ctx.axes(along):
            return best, mine
        values, indices = _candidates(ctx, along, best, mine, x.shape[axis], axis)
        best, winners = ctx.bind(values)
        return best, jnp.take_along_axis(indices, winners, axis)

    right = " ".join("_" if n == along else n for n in names)
    return factor_rule(
        f"{' '.join(names)} -> {right}, {right}",
        [ins[0].shape],
        [a.shape for a in outs],
        exchanges={along: (_candidates_exchange(ins[0], axis, count),)},
        min_local={along: max(count, 1)},
        whole=() if count else (along,),
        bind=bind,
    )


@rule("approx_top_k")
def _approx_top_k(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    names = dim_names(len(ins[0].shape))
    names[params["reduction_dimension"]] = "_"
    dims = " ".join(names)
    return factor_rule(f"{dims} -> {dims}, {dims}", [ins[0].shape], [a.shape for a in outs])


@rule("sort")
def _sort(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    names = dim_names(len(ins[0].shape))
    names[params["dimension"]] = "_"
    all_dims = ", ".join([" ".join(names)] * len(ins))
    return factor_rule(f"{all_dims} -> {all_dims}", [a.shape for a in ins], [a.shape for a in outs])


def _word_bytes(dtype: np.dtype) -> int:
    return min(np.dtype(dtype).itemsize, _MOST_WORD_BYTES)


def _candidates_exchange(operand: Aval, axis: int, count: int) -> Exchange:
    """The exchange of `count` candidates a device: of each its value and its index, in one."""
    word = _word_bytes(operand.dtype)
    words = (operand.itemsize + _INDEX_BYTES) // word
    others = tuple(d for d in range(len(operand.shape)) if d != axis)
    what = "its candidate" if count == 1 else f"{count} candidates"
    return Exchange(
        "all_gather",
        others,
        float(count * words),
        word,
        per_shard=True,
        what=f"{what} of each device",
    )


def _candidates(
    ctx: Context, factor: str, values: jax.Array, indices: jax.Array, block: int, axis: int
) -> tuple[jax.Array, jax.Array]:
    """All devices' candidates along `axis`, and their indices in the whole dim.

    Args:
        ctx: the equation on this device.
        factor: the factor that splits the dim.
        values: this device's candidates.
        indices: where they stand in its block, int32.
        block: size of a block.
        axis: the dim.
    """
    indices += ctx.index(factor) * block
    dtype, shape = values.dtype, values.shape
    word = jnp.dtype(f"uint{8 * _word_bytes(dtype)}")
    if dtype == jnp.bool_:
        values = lax.convert_element_type(values, jnp.uint8)
    stored = values.dtype
    parts = [_words(values, word), _words(indices, word)]
    packed = lax.concatenate(parts, len(shape))
    packed = ctx.exchange(
        factor, 0, lambda axes: lax.all_gather(packed, axes, axis=axis, tiled=True)
    )
    cut = parts[0].shape[-1]
    values = _from_words(packed[..., :cut], stored)
    return (
        lax.convert_element_type(values, dtype),
        _from_words(packed[..., cut:], np.dtype("int32")),
    )


def _words(x: jax.Array, word: np.dtype) -> jax.Array:
    """The elements as unsigned words, in a dim of their own."""
    found = lax.bitcast_convert_type(x, word)
    return found.reshape((*x.shape, prod(found.shape[x.ndim :])))


def _from_words(words: jax.Array, dtype: np.dtype) -> jax.Array:
    if words.shape[-1] == 1:
        words = lax.squeeze(words, [words.ndim - 1])
    return lax.bitcast_convert_type(words, dtype)
