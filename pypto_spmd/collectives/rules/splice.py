"""Splices: rows of several arrays, and zeros, one after the other along a dim.

No program has a splice to begin with: `collectives.splices` makes one of slices, pads and concatenations
whose sizes no mesh axis divides, but whose source and outcome it does. A roll is a splice, and so is a
shift. On a split dim each device gets the rows it lacks from the devices that hold them: one
CollectivePermute for each distance, around the ring, of as many rows as the neediest device wants.
Operands of few rows are whole, and each device takes of them what it needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Exchange, Rule, factor_rule
from pypto_spmd.collectives.rules.halo import permute
from pypto_spmd.collectives.rules.moving import dim_names, moves
from pypto_spmd.collectives.rules.registry import Aval, rule

Segment = tuple[int, int, int]
"""Operand (-1 for zeros), its first row, and the number of rows."""

ZEROS = -1

splice_p = Primitive("splice")


@splice_p.def_impl
def splice(
    *operands: jax.Array, dim: int, segments: Sequence[Segment], whole: Sequence[int] = ()
) -> jax.Array:
    """Puts rows of the operands one after the other along `dim`; those in `whole` are not to be split."""
    first = operands[0]

    def rows(segment: Segment) -> jax.Array:
        operand, start, count = segment
        if operand == ZEROS:
            return jnp.zeros((*first.shape[:dim], count, *first.shape[dim + 1 :]), first.dtype)
        return lax.slice_in_dim(operands[operand], start, start + count, axis=dim)

    return lax.concatenate([rows(s) for s in segments], dim)


@splice_p.def_abstract_eval
def _abstract(
    *operands: Any, dim: int, segments: Sequence[Segment], whole: Sequence[int] = ()
) -> Any:
    first = operands[0]
    size = sum(count for _, _, count in segments)
    return first.update(shape=(*first.shape[:dim], size, *first.shape[dim + 1 :]), weak_type=False)


mlir.register_lowering(splice_p, mlir.lower_fun(splice, multiple_results=False))


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one operand that all receivers get from the block `shift` pieces further round the ring.

    A whole operand is as many blocks, all the same, of which each piece has its own.

    Args:
        operand: the operand.
        shift: piece j receives from piece (j + shift) mod n.
        size: rows sent, the same for all pieces.
        pairs: (from piece, to piece).
        offsets: for each pair, the first row sent, in the sender's block.
        positions: for each pair, where that row belongs in the receiver's block.
        fills: for each pair, the receiver's rows that are wanted, from and to.
    """

    operand: int
    shift: int
    size: int
    pairs: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    positions: tuple[int, ...]
    fills: tuple[tuple[int, int], ...]


@lru_cache(maxsize=10_000)
def _parts(
    segments: tuple[Segment, ...], sizes: tuple[int, ...], pieces: int, whole: tuple[int, ...] = ()
) -> tuple[_Part, ...]:
    """What each piece of the result needs of the pieces of the operands, of `sizes`."""
    size = sum(count for _, _, count in segments) // pieces
    wanted: dict[tuple[int, int, int], list[tuple[int, int, int, int, int]]] = {}
    for piece in range(pieces):
        taken: dict[tuple[int, int], int] = {}
        at = 0
        for operand, start, count in segments:
            low, high = max(at, piece * size), min(at + count, (piece + 1) * size)
            row, position = start + low - at, low - piece * size
            at += count
            while operand != ZEROS and low < high:
                block = sizes[operand] // (1 if operand in whole else pieces)
                source = row // block
                rows = min(high - low, (source + 1) * block - row)
                first = row - source * block
                if operand in whole:
                    source = piece
                key = (operand, (source - piece) % pieces)
                turn = taken[key] = taken.get(key, -1) + 1
                need = (source, piece, first, position, rows)
                wanted.setdefault((*key, turn), []).append(need)
                low, row, position = low + rows, row + rows, position + rows
    found = []
    for (operand, shift, _), needs in sorted(wanted.items()):
        most = max(rows for *_, rows in needs)
        block = sizes[operand] // (1 if operand in whole else pieces)
        offsets = [min(row, block - most) for _, _, row, _, _ in needs]
        found.append(
            _Part(
                operand,
                shift,
                most,
                tuple((source, piece) for source, piece, *_ in needs),
                tuple(offsets),
                tuple(p - (row - o) for (_, _, row, p, _), o in zip(needs, offsets, strict=True)),
                tuple((p, p + rows) for _, _, _, p, rows in needs),
            )
        )
    return tuple(found)


@rule("splice")
def _splice(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    dim, segments, shape = params["dim"], tuple(params["segments"]), outs[0].shape
    apart = tuple(params.get("whole", ()))
    names = dim_names(len(shape))
    along = names[dim]
    operand_sizes = tuple(a.shape[dim] for a in ins)
    common = gcd(shape[dim], *(n for i, n in enumerate(operand_sizes) if i not in apart))
    factors = {along: common}

    def dims(size: int, rest: str) -> str:
        if size == common:
            return " ".join(names)
        factors[rest] = size // common
        return " ".join([*names[:dim], f"({along} {rest})", *names[dim + 1 :]])

    alone = " ".join([*names[:dim], "_", *names[dim + 1 :]])
    left = ", ".join(
        alone if i in apart else dims(n, f"rest{i}") for i, n in enumerate(operand_sizes)
    )
    right = dims(shape[dim], "rest")

    def bind(ctx: Context, *operands: jax.Array) -> jax.Array:
        if not ctx.axes(along):
            return splice(*operands, dim=dim, segments=segments)
        pieces = ctx.shards(along)
        found = _parts(segments, operand_sizes, pieces, apart)
        exchange = 0
        chunks = []
        for part in found:
            chunk = _sent(ctx, along, operands[part.operand], dim, part)
            if part.shift:
                chunk = permute(ctx, along, exchange, chunk, part.pairs)
                exchange += 1
            chunks.append(chunk)
        return _joined(ctx, along, chunks, found, dim, operands[0])

    def exchanges(pieces: int) -> tuple[Exchange, ...]:
        others = tuple(f for d in range(len(shape)) if d != dim for f in made.results[0][d])
        whole = prod(n for d, n in enumerate(shape) if d != dim and not made.results[0][d])
        return tuple(
            Exchange(
                "collective_permute",
                others,
                float(part.size * whole),
                ins[0].itemsize,
                what="rows that change owner",
            )
            for part in _parts(segments, operand_sizes, pieces, apart)
            if part.shift
        )

    made = factor_rule(
        f"{left} -> {right}",
        [a.shape for a in ins],
        [shape],
        sizes=factors,
        whole=[n for n in factors if n != along],
        linear=moves(range(len(ins)), outs[0].dtype),
        exchanges={along: exchanges},
        bind=bind,
    )
    return made


def _sent(ctx: Context, factor: str, x: jax.Array, dim: int, part: _Part) -> jax.Array:
    if part.size == x.shape[dim]:
        return x
    table = [part.offsets[0]] * ctx.shards(factor)
    for (source, _), offset in zip(part.pairs, part.offsets, strict=True):
        table[source] = offset
    return lax.dynamic_slice_in_dim(x, _entry(ctx, factor, table), part.size, dim)


def _joined(
    ctx: Context,
    factor: str,
    chunks: Sequence[jax.Array],
    found: Sequence[_Part],
    dim: int,
    like: jax.Array,
) -> jax.Array:
    """This device's block of the result, from the chunks it has received."""
    pieces, size = ctx.shards(factor), ctx.out_shape()[dim]
    alike = all(
        len(part.pairs) == pieces and len(set(part.fills)) == 1 and len(set(part.positions)) == 1
        for part in found
    )
    if alike and sum(part.size for part in found) == size:
        order = sorted(range(len(found)), key=lambda i: found[i].fills[0])
        return lax.concatenate([chunks[i] for i in order], dim)
    made = jnp.zeros(ctx.out_shape(), like.dtype)
    for part, chunk in zip(found, chunks, strict=True):
        tables = [[0] * pieces for _ in range(3)]
        for (_, piece), position, fill in zip(part.pairs, part.positions, part.fills, strict=True):
            tables[0][piece] = position + part.size
            tables[1][piece], tables[2][piece] = fill
        at, low, high = (_entry(ctx, factor, table) for table in tables)
        # Rows that are not wanted here lie beside the block, or are overruled by the mask.
        room = jnp.zeros(
            (*made.shape[:dim], size + 2 * part.size, *made.shape[dim + 1 :]), made.dtype
        )
        room = lax.dynamic_update_slice_in_dim(room, chunk, at, dim)
        placed = lax.slice_in_dim(room, part.size, part.size + size, axis=dim)
        row = lax.iota(jnp.int32, size)
        mine = lax.broadcast_in_dim((row >= low) & (row < high), made.shape, (dim,))
        made = lax.select(mine, placed, made)
    return made


def _entry(ctx: Context, factor: str, table: Sequence[int]) -> Any:
    """This piece's entry of a table; an int if all are equal."""
    if len(set(table)) == 1:
        return table[0]
    return jnp.asarray(np.asarray(table, np.int32))[ctx.index(factor)]
