"""Sorting along a split dim: blocks are sorted, then merged pairwise as in a bitonic network (Batcher 1968).

In each round a device and its partner swap their blocks, and each keeps the lower or the upper half of both.
A network that sorts numbers by comparing them in pairs sorts blocks by merging them in pairs (Knuth,
volume 3, 5.3.4). For 2^p devices there are p (p + 1) / 2 rounds, so that from eight devices on less is
sent than by gathering the dim, and no device ever holds more than two blocks. Where it is not 2^p, or an
element's place, which merging has to send along, makes it more, all blocks are gathered.

Invariant: the result is that of the whole, elements that are equal by their keys included: where more than
the keys is sorted stably, an element's place is its last key.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Exchange, Rule, factor_rule
from pypto_spmd.collectives.rules.halo import permute
from pypto_spmd.collectives.rules.moving import dim_names
from pypto_spmd.collectives.rules.packing import from_words, to_words, word_bytes, words_of
from pypto_spmd.collectives.rules.registry import Aval, rule

_PLACE_BYTES = 4


@rule("sort")
def _sort(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    axis, keys = params["dimension"], params["num_keys"]
    names = dim_names(len(ins[0].shape))
    along = names[axis]
    needs_place = params["is_stable"] and len(ins) > keys
    sizes = [a.itemsize for a in ins]
    word = word_bytes(sizes)
    words = sum(words_of(size, word) for size in sizes)
    place_words = words_of(_PLACE_BYTES, word) if needs_place else 0
    every = tuple(range(len(names)))

    def merges(shards: int) -> bool:
        if not _is_power_of_two(shards):
            return False
        return (words + place_words) * len(_rounds(shards)) <= words * (shards - 1)

    def exchanges(shards: int) -> tuple[Exchange, ...]:
        if merges(shards):
            kind, what = "collective_permute", "the block of the partner in a round of merging"
            one = Exchange(kind, every, float(words + place_words), word, what=what)
            return (one,) * len(_rounds(shards))
        what = "all blocks"
        return (Exchange("all_gather", every, float(words), word, per_shard=True, what=what),)

    def bind(ctx: Context, *operands: jax.Array) -> Sequence[jax.Array]:
        shards = ctx.shards(along)
        if shards == 1:
            return ctx.bind(*operands)
        blocks = list(operands)
        if not merges(shards):
            return _gathered(ctx, along, axis, blocks, ctx.bind, word)
        if needs_place:
            block = operands[0].shape[axis]
            place = lax.broadcasted_iota(jnp.int32, operands[0].shape, axis)
            blocks.append(place + ctx.index(along) * block)
        num_keys = keys + needs_place

        def ordered(arrays: Sequence[jax.Array]) -> list[jax.Array]:
            if needs_place:  # the last key, and not the last operand
                arrays = [*arrays[:keys], arrays[-1], *arrays[keys:-1]]
            made = list(lax.sort(arrays, axis, params["is_stable"], num_keys))
            return [*made[:keys], *made[keys + 1 :], made[keys]] if needs_place else made

        return _merged(ctx, along, axis, blocks, ordered, word)[: len(operands)]

    dims = " ".join(names)
    every_operand = ", ".join([dims] * len(ins))
    has_words = all(a.dtype.kind != "c" for a in ins)
    return factor_rule(
        f"{every_operand} -> {every_operand}",
        [a.shape for a in ins],
        [a.shape for a in outs],
        exchanges={along: exchanges},
        whole=() if has_words else (along,),
        bind=bind,
    )


def _is_power_of_two(shards: int) -> bool:
    return shards & (shards - 1) == 0


def _rounds(shards: int) -> list[tuple[int, int]]:
    """The rounds of a bitonic network: the size of the sequences it makes, and the partners' distance."""
    found = []
    length = 2
    while length <= shards:
        distance = length // 2
        while distance:
            found.append((length, distance))
            distance //= 2
        length *= 2
    return found


def _merged(
    ctx: Context, along: str, axis: int, blocks: list[jax.Array], ordered: Any, word: int
) -> list[jax.Array]:
    shards, me = ctx.shards(along), ctx.index(along)
    block = blocks[0].shape[axis]
    blocks = ordered(blocks)
    for number, (length, distance) in enumerate(_rounds(shards)):
        pairs = [(device, device ^ distance) for device in range(shards)]
        packed = to_words(blocks, word)
        received = permute(ctx, along, number, packed, pairs)
        others = from_words(received, blocks, word)
        first = (me & distance) == 0
        # Both sort the same array, so that they agree on which element goes where.
        both = ordered(
            [
                lax.concatenate([lax.select(first, a, b), lax.select(first, b, a)], axis)
                for a, b in zip(blocks, others, strict=True)
            ]
        )
        keeps_lower = first == ((me & length) == 0)
        start = jnp.where(keeps_lower, 0, block)
        blocks = [lax.dynamic_slice_in_dim(x, start, block, axis) for x in both]
    return blocks


def _gathered(
    ctx: Context, along: str, axis: int, blocks: list[jax.Array], sort: Any, word: int
) -> list[jax.Array]:
    block = blocks[0].shape[axis]
    packed = to_words(blocks, word)
    whole = ctx.exchange(along, 0, lambda axes: lax.all_gather(packed, axes, axis=axis, tiled=True))
    start = ctx.index(along) * block
    made = sort(*from_words(whole, blocks, word))
    return [lax.dynamic_slice_in_dim(x, start, block, axis) for x in made]
