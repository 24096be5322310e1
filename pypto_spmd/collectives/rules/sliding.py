"""One spatial dim of a convolution or a windowed reduction, cut into blocks.

An output row p and a tap t of the kernel meet at the input's coordinate `p * stride + t * tap_step - low`,
in which input row i stands at `i * row_step` (its dilation). So when the output's rows are cut, or the
taps are (the kernel's rows in a weight's gradient), each device needs a window of the input's rows: its
own block and a halo of its neighbours'.

Invariant: all devices' windows have one length and one phase against the input's dilation, so that one
program with one padding does for all of them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd, prod
from typing import Any

import jax.numpy as jnp
from jax import lax

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Exchange, Rule
from pypto_spmd.collectives.rules.halo import Part, give_back, parts, window
from pypto_spmd.collectives.rules.registry import Aval


@dataclass(frozen=True, slots=True)
class Sliding:
    """The sizes of one spatial dim.

    Args:
        rows: rows of the input.
        taps: rows of the kernel or window.
        outputs: rows of the output.
        stride: distance of two outputs.
        row_step: distance of two input rows (base dilation).
        tap_step: distance of two taps (window dilation).
        low: padding before the first row.
    """

    rows: int
    taps: int
    outputs: int
    stride: int
    row_step: int
    tap_step: int
    low: int

    @property
    def cuts_taps(self) -> bool:
        """Whether it is the taps that are cut with the rows, and each device has a partial output."""
        return self.taps > self.outputs

    @property
    def is_apart(self) -> bool:
        """Whether windows neither overlap nor leave gaps, so that each block has its own."""
        is_plain = self.row_step == self.tap_step == 1 and self.low == 0
        return is_plain and self.taps == self.stride and self.outputs * self.stride == self.rows

    @property
    def blocks(self) -> int:
        """The number of blocks that any number of shards must divide."""
        moved, step = self._cut
        if moved * step % self.row_step:
            return 1
        most = gcd(self.rows, moved, moved * step // self.row_step)
        return most if most > 1 and self._span(most)[1] > 0 else 1

    @property
    def _cut(self) -> tuple[int, int]:
        """What is cut beside the rows, and how far one of it moves along the input."""
        return (self.taps, self.tap_step) if self.cuts_taps else (self.outputs, self.stride)

    def _span(self, shards: int) -> tuple[int, int, int, int]:
        """First row (may be negative) and number of rows of the first window, low and high padding."""
        outputs = self.outputs if self.cuts_taps else self.outputs // shards
        taps = self.taps // shards if self.cuts_taps else self.taps
        first = -self.low
        last = first + (outputs - 1) * self.stride + (taps - 1) * self.tap_step
        row = -(-first // self.row_step)
        length = last // self.row_step - row + 1
        low = row * self.row_step - first
        return row, length, low, last - (row + length - 1) * self.row_step

    def length(self, shards: int) -> int:
        """Rows of one device's window."""
        return self._span(shards)[1]

    def starts(self, shards: int) -> tuple[int, ...]:
        """First row of each device's window; it may lie outside the input."""
        moved, step = self._cut
        shift = moved // shards * step // self.row_step
        return tuple(self._span(shards)[0] + piece * shift for piece in range(shards))

    def padding(self, shards: int) -> tuple[int, int]:
        """Low and high padding of a window, less than a row step each."""
        return self._span(shards)[2:]

    def parts(self, shards: int) -> tuple[Part, ...]:
        """What the devices need of each other's rows."""
        return parts(self.rows // shards, self.starts(shards), self.length(shards))


def blocked(name: str, size: int, blocks: int) -> tuple[str, dict[str, int]]:
    """A dim in factor notation whose major factor `name` counts its blocks.

    Returns:
        The dim, and the name and size of what remains of it, if anything, which must be whole.
    """
    if size == blocks:
        return name, {}
    rest = f"{name}x{size // blocks}"
    return f"({name} {rest})", {rest: size // blocks}


def slide(
    ctx: Context,
    name: str,
    sliding: Sliding,
    x: Any,
    dim: int,
    *,
    position: int = 0,
    fill: Any = 0,
) -> Any:
    """This device's window of the rows of one operand.

    Args:
        ctx: the equation on this device.
        name: the factor that is split.
        sliding: its sizes.
        x: this device's block.
        dim: the dim that slides.
        position: which of the sliding operands it is.
        fill: value of rows outside the dim.
    """
    shards = ctx.shards(name)
    starts, length = sliding.starts(shards), sliding.length(shards)
    exchanges = sum(1 for part in sliding.parts(shards) if part.shift)
    x = window(ctx, name, position * exchanges, x, dim, starts, length)
    inside = starts[0] >= 0 and starts[-1] + length <= sliding.rows
    if inside or (isinstance(fill, int) and fill == 0):
        return x
    first = starts[0] + ctx.index(name) * (starts[1] - starts[0])
    rows = first + lax.broadcasted_iota(jnp.int32, x.shape, dim)
    return jnp.where((rows >= 0) & (rows < sliding.rows), x, jnp.asarray(fill, x.dtype))


def returned(ctx: Context, name: str, sliding: Sliding, x: Any, dim: int) -> Any:
    """This device's block of what all devices hold of it in their windows, added up.

    Args:
        ctx: the equation on this device.
        name: the factor that is split.
        sliding: its sizes.
        x: this device's window; only one operand slid.
        dim: the dim.
    """
    shards = ctx.shards(name)
    exchanges = sum(1 for part in sliding.parts(shards) if part.shift)
    return give_back(ctx, name, exchanges, x, dim, sliding.starts(shards), sliding.rows // shards)


def with_halos(
    made: Rule,
    operands: Sequence[Aval],
    slidings: Mapping[str, Sliding],
    dims: Mapping[str, int],
    fill: str | None = "",
    *,
    first: int = 0,
    returns: bool = False,
) -> Rule:
    """A rule with the exchanges that `slide` makes for its spatial factors.

    Args:
        made: the rule without them; its `bind` slides the factors in the order of `slidings`.
        operands: the operands that slide.
        slidings: by factor.
        dims: the operands' dim of each factor.
        fill: what fills rows outside a dim, in any words; None if only the equation knows.
        first: the place of the first of these operands.
        returns: whether `bind` then calls `returned`, in the opposite order.
    """
    factors = list(made.factors)
    for name in slidings:
        at = made.factor(name)
        halos = _Halos(made, operands, slidings, dims, fill, name, first, returns)
        factors[at] = replace(factors[at], exchanges=halos)
    return replace(made, factors=tuple(factors))


@dataclass(frozen=True, slots=True, eq=False)
class _Halos:
    """The exchanges of one spatial factor, by the number of its shards."""

    rule: Rule
    operands: Sequence[Aval]
    slidings: Mapping[str, Sliding]
    dims: Mapping[str, int]
    fill: str | None
    name: str
    first: int
    returns: bool

    def __call__(self, shards: int) -> tuple[Exchange, ...]:
        moved = [part for part in self.slidings[self.name].parts(shards) if part.shift]
        fetched = [self._exchange(n, part) for n in range(len(self.operands)) for part in moved]
        back = [self._exchange(0, part, "the sums of") for part in moved if self.returns]
        return (*fetched, *back)

    def _exchange(self, position: int, part: Part, does: str = "") -> Exchange:
        halo = f"a halo of {part.size} {'row' if part.size == 1 else 'rows'}"
        return Exchange(
            "collective_permute",
            (),
            0.0,
            self.operands[position].itemsize,
            what=f"{does} {halo}".strip(),
            count=lambda local_sizes: float(part.size * self._beside(position, local_sizes)),
            sent=None if does else self._sent(position, part),
        )

    def _sent(
        self, position: int, part: Part
    ) -> tuple[int, Hashable, dict[int, Callable[[int], Hashable]]]:
        before = list(self.slidings)[: list(self.slidings).index(self.name)]
        before = [name for name in before if not self.slidings[name].is_apart]
        held = {self.dims[name]: partial(self._held, self.slidings[name]) for name in before}
        return self.first + position, (self.dims[self.name], part.rows), held

    def _held(self, sliding: Sliding, shards: int) -> Hashable:
        """Which rows of an earlier dim are there by then, and what fills those outside it."""
        fill = object() if self.fill is None else self.fill  # what nobody knows equals nothing
        return sliding.starts(shards), sliding.length(shards), fill

    def _beside(self, position: int, local_sizes: Sequence[int]) -> int:
        """Elements of one row, with the halos of the dims that have theirs already."""
        shape = self.operands[position].shape
        sizes = [
            prod(local_sizes[f] for f in factors) if factors else size
            for size, factors in zip(shape, self.rule.operands[self.first + position], strict=True)
        ]
        for other, sliding in self.slidings.items():
            if other == self.name:
                break
            dim = self.dims[other]
            if sizes[dim] < shape[dim]:
                sizes[dim] = sliding.length(shape[dim] // sizes[dim])
        return prod(size for dim, size in enumerate(sizes) if dim != self.dims[self.name])
