"""Fourier transforms: linear; batch dims pass.

A transformed dim that is split is made whole by an AllToAll that splits another dim instead, transformed,
and brought back by a second one: the slabs and pencils of parallel FFTs. The transform of several dims is
that of one dim after another, real ones over their last dim first and back last.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
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
    partners = {d: _partner(d, moved.shape) for d in transformed} if rank > 1 else {}

    def bind(ctx: Context, x: jax.Array) -> jax.Array:
        if not any(ctx.axes(names[d]) for d in transformed):
            return ctx.bind(x)
        if kind == lax.FftType.RFFT:
            x = _along(x, rank - 1, kind, length_of[rank - 1])
        for d in transformed:
            run = lambda y, d=d: _along(y, d, between, length_of[d])  # noqa: E731
            x = _with_whole(ctx, x, names[d], d, partners[d], run) if ctx.axes(names[d]) else run(x)
        if kind == lax.FftType.IRFFT:
            x = _along(x, rank - 1, kind, length_of[rank - 1])
        return x

    def exchanges(d: int) -> Callable[[int], tuple[Exchange, ...]]:
        partner = partners[d]

        def made(shards: int) -> tuple[Exchange, ...]:
            def count(local: Sequence[int]) -> float:
                sizes = [
                    *local,
                    *moved.shape[len(local) :],
                ]  # the last dim of a real one is no factor
                sizes[partner] = _padded(sizes[partner], shards)
                return float(prod(sizes) * shards)

            there = f"dim {partner} is split instead of dim {d}"
            back = f"dim {d} is split again"
            return tuple(
                Exchange("all_to_all", (), 0.0, moved.itemsize, what=what, count=count)
                for what in (there, back)
            )

        return made

    return factor_rule(
        f"{' '.join(dims)} -> {' '.join(dims)}",
        [ins[0].shape],
        [outs[0].shape],
        linear=(Linear(frozenset({0})),),
        exchanges={names[d]: exchanges(d) for d in partners},
        whole=() if partners else [names[d] for d in transformed],
        bind=bind,
    )


def _partner(dim: int, shape: Sequence[int]) -> int:
    """The dim to split in place of `dim`: the one that is cut most evenly, and of these the largest."""
    others = [d for d in range(len(shape)) if d != dim]
    return max(others, key=lambda d: (shape[d] & -shape[d], shape[d]))


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
