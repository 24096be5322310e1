"""Primitives that pick elements along a dim: argmax, argmin, top_k.

Along a split dim each device finds its own candidates and where they stand in the whole; the devices
exchange these few, and each picks among them by the primitive itself. The candidates come in the order of
the dim, so that of equal ones the first is taken, as the primitive does.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Exchange, Rule, factor_rule
from pypto_spmd.collectives.rules.moving import dim_names
from pypto_spmd.collectives.rules.packing import from_words, to_words, word_bytes, words_of
from pypto_spmd.collectives.rules.registry import Aval, rule

_INDEX_BYTES = 4


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
    axis = params["axis"] % len(ins[0].shape)
    return _selection(ins[0], outs, axis, params["k"], lambda ctx, x: ctx.bind(x), {})


@rule("approx_top_k")
def _approx_top_k(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    axis = params["reduction_dimension"] % len(ins[0].shape)
    size = params["reduction_input_size_override"]
    recall_of = size if size >= 0 else ins[0].shape[axis]

    def select(ctx: Context, x: jax.Array) -> Any:
        return ctx.bind(x, reduction_input_size_override=recall_of)

    # What is not aggregated to k depends on the size of the dim, and so on the number of devices.
    count = params["k"] if params["aggregate_to_topk"] else 0
    exact = {"recall_target": 1.0, "reduction_input_size_override": -1}
    return _selection(ins[0], outs, axis, count, select, exact)


def _selection(
    operand: Aval,
    outs: tuple[Aval, ...],
    axis: int,
    count: int,
    select: Callable[[Context, jax.Array], Any],
    changed: Mapping[str, Any],
) -> Rule:
    """The rule of a primitive that gives the `count` best values of a dim, and their indices.

    Args:
        operand: its operand.
        outs: its results.
        axis: the dim.
        count: how many; 0 if the dim must stay whole.
        select: takes those of a block.
        changed: params of the primitive for taking them among the candidates.
    """
    names = dim_names(len(operand.shape))
    along = names[axis]

    def bind(ctx: Context, x: jax.Array) -> Any:
        if not ctx.axes(along):
            return ctx.bind(x)
        best, mine = select(ctx, x)
        values, indices = _candidates(ctx, along, best, mine, x.shape[axis], axis)
        best, winners = ctx.bind(values, **changed)
        return best, jnp.take_along_axis(indices, winners, axis)

    right = " ".join("_" if n == along else n for n in names)
    return factor_rule(
        f"{' '.join(names)} -> {right}, {right}",
        [operand.shape],
        [a.shape for a in outs],
        exchanges={along: (_candidates_exchange(operand, axis, count),)},
        min_local={along: max(count, 1)},
        whole=() if count else (along,),
        bind=bind,
    )


def _candidates_exchange(operand: Aval, axis: int, count: int) -> Exchange:
    """The exchange of `count` candidates a device: of each its value and its index, in one."""
    sizes = (operand.itemsize, _INDEX_BYTES)
    word = word_bytes(sizes)
    words = sum(words_of(size, word) for size in sizes)
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
    word = word_bytes((values.dtype.itemsize, _INDEX_BYTES))
    packed = to_words([values, indices], word)
    packed = ctx.exchange(
        factor, 0, lambda axes: lax.all_gather(packed, axes, axis=axis, tiled=True)
    )
    values, indices = from_words(packed, [values, indices], word)
    return values, indices
