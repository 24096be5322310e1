"""Fourier transforms: linear; batch dims pass.

A transformed dim that is split is made whole by an AllToAll that splits another dim instead, transformed,
and brought back by a second one: the slabs and pencils of parallel FFTs. The transform of several dims is
that of one dim after another, real ones over their last dim first and back last.

Where there is no other dim to split, N elements on n devices are transformed in four steps (Bailey 1990):
over the devices, by twiddle factors, over the blocks, and each element to its place. Three AllToAlls send
less than gathering from four devices on; fewer, or blocks that n does not divide, are gathered.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Exchange, Linear, Rule, factor_rule
from pypto_spmd.collectives.rules.moving import dim_names
from pypto_spmd.collectives.rules.registry import Aval, rule


@rule("fft")
def _fft(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    lengths, kind = params["fft_lengths"], lax.FftType(params["fft_type"])
    rank = len(ins[0].shape)
    is_real = kind in (lax.FftType.RFFT, lax.FftType.IRFFT)
    forward = kind in (lax.FftType.FFT, lax.FftType.RFFT)
    between = lax.FftType.FFT if forward else lax.FftType.IFFT
    # The complex array, on which dims are exchanged.
    moved = ins[0] if kind == lax.FftType.IRFFT else outs[0]
    names = dim_names(rank)
    dims = [*names[:-1], "_"] if is_real else names
    length_of = dict(zip(range(rank - len(lengths), rank), lengths, strict=True))
    transformed = [d for d in length_of if d != rank - 1 or not is_real]
    partners = {d: _partner(d, moved.shape) for d in transformed}

    def has_partner(d: int, shards: int) -> bool:
        """Whether another dim has a row for most devices, so that filling it up costs little."""
        return partners[d] is not None and 2 * moved.shape[partners[d]] > shards

    def bind(ctx: Context, x: jax.Array) -> jax.Array:
        if not any(ctx.axes(names[d]) for d in transformed):
            return ctx.bind(x)
        if kind == lax.FftType.RFFT:
            x = _along(x, rank - 1, kind, length_of[rank - 1])
        for d in transformed:
            run = lambda y, d=d: _along(y, d, between, length_of[d])  # noqa: E731
            if not ctx.axes(names[d]):
                x = run(x)
            elif has_partner(d, ctx.shards(names[d])):
                x = _with_whole(ctx, x, names[d], d, partners[d], run)
            elif _has_four_steps(length_of[d], ctx.shards(names[d])):
                x = _in_four_steps(ctx, x, names[d], d, between)
            else:
                x = _gathered(ctx, x, names[d], d, run)
        if kind == lax.FftType.IRFFT:
            x = _along(x, rank - 1, kind, length_of[rank - 1])
        return x

    def exchanges(d: int) -> Callable[[int], tuple[Exchange, ...]]:
        partner = partners[d]

        def made(shards: int) -> tuple[Exchange, ...]:
            swaps = has_partner(d, shards)

            def count(local: Sequence[int]) -> float:
                sizes = [
                    *local,
                    *moved.shape[len(local) :],
                ]  # the last dim of a real one is no factor
                if swaps:
                    sizes[partner] = _padded(sizes[partner], shards)
                return float(prod(sizes) * shards)

            kind = "all_to_all"
            if swaps:
                there = f"dim {partner} is split instead of dim {d}"
                whats = (there, f"dim {d} is split again")
            elif _has_four_steps(length_of[d], shards):
                whats = ("the blocks' parts", "their transforms", "each element to its place")
            else:
                kind, whats = "all_gather", ("all blocks",)
            return tuple(
                Exchange(kind, (), 0.0, moved.itemsize, what=what, count=count) for what in whats
            )

        return made

    return factor_rule(
        f"{' '.join(dims)} -> {' '.join(dims)}",
        [ins[0].shape],
        [outs[0].shape],
        linear=(Linear(frozenset({0})),),
        exchanges={names[d]: exchanges(d) for d in partners},
        bind=bind,
    )


def _partner(dim: int, shape: Sequence[int]) -> Any:
    """The dim to split in place of `dim`: the one that is cut most evenly, and of these the largest."""
    others = [d for d in range(len(shape)) if d != dim]
    return max(others, key=lambda d: (shape[d] & -shape[d], shape[d])) if others else None


def _has_four_steps(size: int, shards: int) -> bool:
    return shards > 3 and size % shards**2 == 0


def _padded(size: int, shards: int) -> int:
    return -(-size // shards) * shards


def _along(x: jax.Array, dim: int, kind: lax.FftType, length: int) -> jax.Array:
    """The transform of one dim."""
    moved = jnp.moveaxis(x, dim, -1)
    return jnp.moveaxis(lax.fft(moved, kind, (length,)), -1, dim)


def _with_whole(
    ctx: Context,
    x: jax.Array,
    factor: str,
    dim: int,
    partner: int,
    run: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Runs a transform of a split dim: whole, while the partner is split."""
    size = x.shape[partner]
    ends = [(0, 0)] * x.ndim
    ends[partner] = (0, _padded(size, ctx.shards(factor)) - size)
    padded = jnp.pad(x, ends)
    whole = ctx.exchange(
        factor,
        0,
        lambda axes: lax.all_to_all(padded, axes, split_axis=partner, concat_axis=dim, tiled=True),
    )
    made = run(whole)
    back = ctx.exchange(
        factor,
        1,
        lambda axes: lax.all_to_all(made, axes, split_axis=dim, concat_axis=partner, tiled=True),
    )
    return lax.slice_in_dim(back, 0, size, axis=partner)


def _gathered(
    ctx: Context, x: jax.Array, factor: str, dim: int, run: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Runs a transform of a split dim on all of it; each device keeps its block."""
    block = x.shape[dim]
    whole = ctx.exchange(factor, 0, lambda axes: lax.all_gather(x, axes, axis=dim, tiled=True))
    return lax.dynamic_slice_in_dim(run(whole), ctx.index(factor) * block, block, dim)


def _in_four_steps(
    ctx: Context, x: jax.Array, factor: str, dim: int, kind: lax.FftType
) -> jax.Array:
    """A transform of a split dim of n blocks of B elements.

    With t = jB + i and k = q + nr, the sum over t of x[t] w^(tk) is that over i of w^(iq) w^(inr) times
    that over j of x[jB + i] w^(jBq): a transform over the blocks j for each i, and one over i for each q.
    """
    shards = ctx.shards(factor)
    x = jnp.moveaxis(x, dim, -1)
    *lead, block = x.shape
    rank = len(lead) + 2
    parts = (*lead, shards, block // shards)

    def swapped(step: int, y: jax.Array) -> jax.Array:
        return ctx.exchange(
            factor, step, lambda axes: lax.all_to_all(y, axes, rank - 2, rank - 2, tiled=True)
        )

    blocks = swapped(0, x.reshape(parts))  # (j, this device's i)
    mixed = _along(blocks, rank - 2, kind, shards)  # (q, i)
    i = ctx.index(factor) * parts[-1] + lax.iota(jnp.int32, parts[-1])
    turns = lax.iota(jnp.int32, shards)[:, None] * i[None] / (shards * block)
    sign = -2j if kind == lax.FftType.FFT else 2j
    twiddled = mixed * jnp.exp(sign * np.pi * turns.astype(mixed.real.dtype)).astype(x.dtype)
    own = swapped(1, twiddled).reshape(*lead, block)  # this device's q: all i
    made = _along(own, rank - 2, kind, block).reshape(parts)  # (device of r, r)
    placed = jnp.swapaxes(swapped(2, made), -1, -2).reshape(*lead, block)  # (r, q)
    return jnp.moveaxis(placed, -1, dim)
