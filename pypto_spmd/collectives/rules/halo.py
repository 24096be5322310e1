"""Windows of a split dim: every device gets the rows it needs from the devices that hold them.

A dim cut into n blocks is wanted as n windows: piece j needs `length` rows from `starts[j]` on. Rows that
lie in the block of piece j + s are sent by one CollectivePermute for each shift s, as many as the neediest
device wants, so that only rows that change owner move. Slice, pad, concatenate and the halo of a
convolution are windows.

Invariant: rows outside the dim are zeros.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Exchange, Rule
from pypto_spmd.collectives.rules.registry import Aval


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of all windows that come from the block `shift` pieces further on.

    Args:
        shift: piece j receives from piece j + shift.
        size: rows sent, the same for all pieces.
        pairs: (from piece, to piece), only of pieces that need some.
        offsets: for each receiving piece, the first row sent, in the sender's block.
        positions: for each receiving piece, where that row belongs in its window (it may lie before it:
            a piece that needs fewer rows than are sent has the others fall outside its window).
    """

    shift: int
    size: int
    pairs: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    positions: tuple[int, ...]

    @property
    def rows(self) -> tuple[Any, ...]:
        """Which rows go where, wherever they are put."""
        return self.size, self.pairs, self.offsets


@lru_cache(maxsize=10_000)
def parts(block: int, starts: tuple[int, ...], length: int) -> tuple[Part, ...]:
    """What each piece needs of the other pieces' blocks.

    Args:
        block: rows of each of the `len(starts)` blocks.
        starts: first row of each piece's window, in the whole dim; it may lie outside.
        length: rows of each window.
    """
    needs: dict[int, list[tuple[int, int, int]]] = {}
    for piece, start in enumerate(starts if block and length else ()):
        first = max(0, start // block)
        last = min(len(starts) - 1, (start + length - 1) // block)
        for source in range(first, last + 1):
            low = max(start, source * block)
            high = min(start + length, (source + 1) * block)
            needs.setdefault(source - piece, []).append((piece, low, high - low))
    found = []
    for shift, wanted in sorted(needs.items()):
        size = max(count for _, _, count in wanted)
        pairs, offsets, positions = [], [], []
        for piece, low, _ in wanted:
            source = piece + shift
            offset = min(low - source * block, block - size)
            pairs.append((source, piece))
            offsets.append(offset)
            positions.append(source * block + offset - starts[piece])
        found.append(Part(shift, size, tuple(pairs), tuple(offsets), tuple(positions)))
    return tuple(found)


Rows = Callable[[int], tuple[tuple[int, ...], int]]
"""For a number of pieces: the first row of each piece's window, and the rows of a window."""


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """A dim of an operand that a primitive wants as windows when it is split.

    Args:
        factor: the factor that cuts the dim.
        operand: the operand.
        dim: its dim.
        rows: where the windows lie.
        what: what is sent, in words.
    """

    factor: str
    operand: int
    dim: int
    rows: Rows
    what: str


def cut_alike(name: str, left: int, right: int) -> tuple[str, str, dict[str, int], list[str]]:
    """A dim that changes its size and is cut into as many pieces before and after.

    Returns:
        The dim before and after in factor notation, the sizes of their factors, and the names of those
        that only complete the dim and must be whole.
    """
    common = gcd(left, right)
    sizes = {name: common}
    rests = []
    written = []
    for side, size in (("before", left), ("after", right)):
        if size == common:
            written.append(name)
        else:
            rests.append(f"{name}_{side}")
            sizes[rests[-1]] = size // common
            written.append(f"({name} {rests[-1]})")
    return written[0], written[1], sizes, rests


def with_windows(
    rule: Rule, ins: Sequence[Aval], outs: Sequence[Aval], windows: Sequence[Window]
) -> Rule:
    """The rule with the exchanges that fetching these windows, in this order, takes.

    What a window moves is as large as the operand then is: its dims before the window's have the size
    of the first result's already, those after it their own.
    """

    def others(window: Window) -> tuple[tuple[int, ...], int]:
        factors, whole = [], 1
        for d, (before, after) in enumerate(
            zip(rule.operands[window.operand], rule.results[0], strict=True)
        ):
            dim, shape = (
                (after, outs[0].shape) if d < window.dim else (before, ins[window.operand].shape)
            )
            if d != window.dim:
                factors += dim
                whole *= 1 if dim else shape[d]
        return tuple(factors), whole

    def exchanges_of(mine: Sequence[Window]) -> Callable[[int], tuple[Exchange, ...]]:
        around = [others(w) for w in mine]

        def exchanges(shards: int) -> tuple[Exchange, ...]:
            return tuple(
                Exchange(
                    "collective_permute",
                    factors,
                    float(part.size * whole),
                    ins[w.operand].itemsize,
                    what=w.what,
                )
                for w, (factors, whole) in zip(mine, around, strict=True)
                for part in parts(ins[w.operand].shape[w.dim] // shards, *w.rows(shards))
                if part.shift
            )

        return exchanges

    factors = list(rule.factors)
    for name in dict.fromkeys(w.factor for w in windows):
        index = rule.factor(name)
        mine = [w for w in windows if w.factor == name]
        factors[index] = replace(factors[index], exchanges=exchanges_of(mine))
    return replace(rule, factors=tuple(factors))


def fetch(ctx: Context, windows: Sequence[Window], index: int, x: jax.Array) -> jax.Array:
    """This device's window of a dim that is split, the `index`-th of the equation's windows.

    Args:
        ctx: the equation on this device.
        windows: all windows of the equation, as the rule was given them.
        index: which of them.
        x: this device's block of the operand.
    """
    wanted = windows[index]
    shards = ctx.shards(wanted.factor)
    exchange = sum(
        part.shift != 0
        for w in windows[:index]
        if w.factor == wanted.factor
        for part in parts(ctx.ins[w.operand].shape[w.dim] // shards, *w.rows(shards))
    )
    return window(ctx, wanted.factor, exchange, x, wanted.dim, *wanted.rows(shards))


def window(
    ctx: Context,
    factor: str,
    exchange: int,
    x: jax.Array,
    dim: int,
    starts: tuple[int, ...],
    length: int,
) -> jax.Array:
    """This device's window of a dim that `factor` splits; one exchange for each of `parts` with a shift.

    Args:
        ctx: the equation on this device.
        factor: the factor that is split.
        exchange: index of the first of these exchanges among the factor's.
        x: this device's block.
        dim: the dim.
        starts: first row of each piece's window.
        length: rows of each window.
    """
    block, shards = x.shape[dim], len(starts)
    pieces: list[tuple[Part, jax.Array]] = []
    for part in parts(block, starts, length):
        rows = _take(ctx, factor, x, dim, part)
        if part.shift:
            rows = permute(ctx, factor, exchange, rows, part.pairs)
            exchange += 1
        pieces.append((part, rows))
    if all(start - starts[0] == piece * block for piece, start in enumerate(starts)):
        return _side_by_side(pieces, x, dim, length)
    # Rows beyond the window fall into a margin, and so does what a device receives without need.
    margin = max((part.size for part, _ in pieces), default=0)
    made = jnp.zeros(_resized(x.shape, dim, length + 2 * margin), x.dtype)
    for part, rows in pieces:
        table = [margin + length] * shards
        for (_, piece), position in zip(part.pairs, part.positions, strict=True):
            table[piece] = margin + position
        made = lax.dynamic_update_slice_in_dim(made, rows, _entry(ctx, factor, table), dim)
    return lax.slice_in_dim(made, margin, margin + length, axis=dim)


def give_back(
    ctx: Context,
    factor: str,
    exchange: int,
    x: jax.Array,
    dim: int,
    starts: tuple[int, ...],
    block: int,
) -> jax.Array:
    """What all windows hold of this device's block, added up: `window` the other way round.

    Args:
        ctx: the equation on this device.
        factor: the factor that is split.
        exchange: index of the first exchange among the factor's, one for each of `parts` with a shift.
        x: this device's window, as `window` made it.
        dim: the dim.
        starts: first row of each piece's window.
        block: rows of a block.
    """
    length, shards = x.shape[dim], len(starts)
    found = parts(block, starts, length)
    # A piece that got fewer rows than were sent has nothing to give back for the others.
    margin = max((part.size for part in found), default=0)
    ends = [(margin if d == dim else 0,) * 2 for d in range(x.ndim)]
    x = jnp.pad(x, ends)
    made = jnp.zeros(_resized(x.shape, dim, block), x.dtype)
    for part in found:
        table = [margin + length] * shards
        for (_, piece), position in zip(part.pairs, part.positions, strict=True):
            table[piece] = margin + position
        rows = lax.dynamic_slice_in_dim(x, _entry(ctx, factor, table), part.size, dim)
        if part.shift:
            back = [(piece, source) for source, piece in part.pairs]
            rows = permute(ctx, factor, exchange, rows, back)
            exchange += 1
        places = [0] * shards
        for (source, _), offset in zip(part.pairs, part.offsets, strict=True):
            places[source] = offset
        at = _entry(ctx, factor, places)
        old = lax.dynamic_slice_in_dim(made, at, part.size, dim)
        made = lax.dynamic_update_slice_in_dim(made, old + rows, at, dim)
    return made


def _take(ctx: Context, factor: str, x: jax.Array, dim: int, part: Part) -> jax.Array:
    """The rows of this device's block that another needs."""
    table = [part.offsets[0]] * ctx.shards(factor)
    for (source, _), offset in zip(part.pairs, part.offsets, strict=True):
        table[source] = offset
    if part.size == x.shape[dim]:
        return x
    return lax.dynamic_slice_in_dim(x, _entry(ctx, factor, table), part.size, dim)


def _entry(ctx: Context, factor: str, table: Sequence[int]) -> Any:
    """This piece's entry of a table; an int if all are equal."""
    if len(set(table)) == 1:
        return table[0]
    return jnp.asarray(table, jnp.int32)[ctx.index(factor)]


def _side_by_side(
    pieces: Sequence[tuple[Part, jax.Array]], x: jax.Array, dim: int, length: int
) -> jax.Array:
    """The window where all windows lie alike to their blocks: its parts in order.

    A device beside which there is no block has received zeros in its place.
    """
    rows, at = [], 0
    for part, piece in pieces:
        if part.positions[0] > at:
            rows.append(jnp.zeros(_resized(x.shape, dim, part.positions[0] - at), x.dtype))
        rows.append(piece)
        at = part.positions[0] + part.size
    if at < length:
        rows.append(jnp.zeros(_resized(x.shape, dim, length - at), x.dtype))
    return rows[0] if len(rows) == 1 else lax.concatenate(rows, dim)


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def permute(
    ctx: Context, factor: str, exchange: int, x: Any, pairs: Iterable[tuple[int, int]]
) -> Any:
    """Sends `x` along the pieces of a split factor, as its exchange of that index.

    Args:
        ctx: the equation on this device.
        factor: the split factor.
        exchange: index of the exchange among those of the factor.
        x: what this device sends.
        pairs: (from piece, to piece), at most one from and one to each piece; what nothing is sent to
            receives zeros.
    """

    def run(axes: tuple[str, ...]) -> Any:
        # JAX numbers the devices of a permutation in the mesh's order of axes, not the nesting's.
        ordered = tuple(a for a in ctx.axis_sizes if a in axes)

        def device(piece: int) -> int:
            at = {}
            for axis in reversed(axes):
                piece, at[axis] = divmod(piece, ctx.axis_sizes[axis])
            number = 0
            for axis in ordered:
                number = number * ctx.axis_sizes[axis] + at[axis]
            return number

        return lax.ppermute(x, ordered, [(device(a), device(b)) for a, b in pairs])

    return ctx.exchange(factor, exchange, run)


def read_rows(x: jax.Array, dim: int, start: Any, count: int) -> jax.Array:
    """Rows `start` to `start + count` of a block, zeros where the block has none of them.

    Args:
        x: this device's block.
        dim: the dim.
        start: first row wanted, counted from the block's own first; it may lie outside.
        count: number of rows.
    """
    block = x.shape[dim]
    kept = min(block, count)
    first = jnp.clip(start, 0, block - kept)
    rows = lax.dynamic_slice_in_dim(x, first, kept, dim)
    made = jnp.zeros(_resized(x.shape, dim, count + 2 * kept), x.dtype)
    at = jnp.clip(first - start, -kept, count) + kept
    made = lax.dynamic_update_slice_in_dim(made, rows, at, dim)
    return lax.slice_in_dim(made, kept, kept + count, axis=dim)
