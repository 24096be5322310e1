"""One spatial dim of a convolution or a windowed reduction, cut into blocks.

An output row p and a tap t of the kernel meet at the input's coordinate `p * stride + t * tap_step - low`,
in which input row i stands at `i * row_step` (its dilation). So when the output's rows are cut, or the
taps are (the kernel's rows in a weight's gradient), each device needs a window of the input's rows: its
own block and a halo of its neighbours'.

Invariant: all devices' windows have one length and one phase against the input's dilation, so that one
program with one padding does for all of them.
"""

from dataclasses import dataclass
from math import gcd


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
    def is_trivial(self) -> bool:
        """Whether each output row is that of one input row, in order."""
        plain = self.stride == self.row_step == self.taps == 1
        return plain and self.low == 0 and self.rows == self.outputs

    @property
    def cuts_taps(self) -> bool:
        """Whether it is the taps that are cut with the rows, and each device has a partial output."""
        return self.taps > self.outputs

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
