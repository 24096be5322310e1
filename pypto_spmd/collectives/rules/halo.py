"""Moving rows of a split dim to the devices that need them, by CollectivePermutes."""

from collections.abc import Iterable, Sequence
from typing import Any

from jax import lax

from pypto_spmd.collectives.rules.context import Context


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
            return _ravel([(at[a], ctx.axis_sizes[a]) for a in ordered])

        return lax.ppermute(x, ordered, [(device(a), device(b)) for a, b in pairs])

    return ctx.exchange(factor, exchange, run)


def _ravel(digits: Sequence[tuple[int, int]]) -> int:
    number = 0
    for digit, size in digits:
        number = number * size + digit
    return number
