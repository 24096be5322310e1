"""One change of layout on one device: a `Leg` becomes one collective, slice or mask.

Each leg that moves data is exactly one collective of the optimized HLO; what is local about it
(transposing blocks into the group's order and back) happens before and after.

Invariant: runs inside `shard_map` with every mesh axis manual, on an array of the leg's source's local
shape, and gives one of its target's local shape.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pypto_spmd.collectives.product import all_reduce_product
from pypto_spmd.collectives.tagging import step_scope
from pypto_spmd.sharding.layout import Layout
from pypto_spmd.sharding.redistribute import Leg

AxisSizes = Mapping[str, int]
Scope = AbstractContextManager[None]


def run_leg(leg: Leg, x: Any, axis_sizes: AxisSizes, step: int = -1) -> Any:
    """Changes the layout of a local array.

    Args:
        leg: the change.
        x: what this device holds of a tensor in the leg's source layout.
        axis_sizes: size of each mesh axis, in mesh order.
        step: index of the plan's step that the collective is tagged with, -1 for none.

    Returns:
        What this device holds of it in the target layout.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = run_leg(leg, jax.random.key_data(x), axis_sizes, step)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    if x.size == 0:
        return jnp.zeros(_target_shape(leg, x.shape, axis_sizes), x.dtype)
    scope = nullcontext() if step < 0 else step_scope(step)
    return _KINDS[leg.kind](leg, x, axis_sizes, scope)


def place(x: Any, layout: Layout, axis_sizes: AxisSizes) -> Any:
    """This device's part of a whole value in a layout: its block, masked where that is partial."""
    for dim, axes in enumerate(layout.dims):
        if axes:
            x = _block(x, dim, axes, axis_sizes)
    for axis, op in layout.partial:
        x = _only_first(x, axis, op)
    return x


def _all_reduce(leg: Leg, x: Any, sizes: AxisSizes, scope: Scope) -> Any:
    axes = _present(leg.axes, sizes)
    if not axes:
        return x
    if leg.op == "sum":
        with scope:
            return lax.psum(x, axes)
    if leg.op == "prod":
        with scope:
            return all_reduce_product(x, axes)
    if leg.op in ("or", "and"):
        # Of truth values, "or" is the largest and "and" the least; collectives take integers.
        assert x.dtype == np.bool_, f"AllReduce '{leg.op}' of {x.dtype}"
        with scope:
            found = (lax.pmax if leg.op == "or" else lax.pmin)(x.astype(np.uint8), axes)
        return found.astype(np.bool_)
    reduce = lax.pmax if leg.op == "max" else lax.pmin
    if not jnp.issubdtype(x.dtype, jnp.floating):
        with scope:
            return reduce(x, axes)
    ordered = _ordered_integers(x, leg.op)
    with scope:
        ordered = reduce(ordered, axes)
    return _from_ordered_integers(ordered).astype(x.dtype)


def _ordered_integers(x: Any, op: str) -> Any:
    """Integers in the order of the floats `x`, a NaN being the result whatever else there is.

    A collective max may drop a NaN, which the max of an array does not.
    """
    x = x if x.dtype.itemsize >= 4 else x.astype(np.float32)
    integer = np.dtype(f"int{8 * x.dtype.itemsize}")
    limits = np.iinfo(integer)
    bits = lax.bitcast_convert_type(x, integer)
    extreme = limits.max if op == "max" else limits.min
    return jnp.where(jnp.isnan(x), integer.type(extreme), _flip(bits))


def _from_ordered_integers(ordered: Any) -> Any:
    return lax.bitcast_convert_type(_flip(ordered), np.dtype(f"float{8 * ordered.dtype.itemsize}"))


def _flip(bits: Any) -> Any:
    """Of negative numbers all bits but the sign, so that two's complement orders them; an involution."""
    return bits ^ ((bits >> (8 * bits.dtype.itemsize - 1)) & np.iinfo(bits.dtype).max)


def _reduce_scatter(leg: Leg, x: Any, sizes: AxisSizes, scope: Scope) -> Any:
    axes, dims = _moves(leg, sizes)
    if not axes:
        return x
    if len(set(dims)) == 1:
        with scope:
            return lax.psum_scatter(x, axes, scatter_dimension=dims[0], tiled=True)
    # Every dim is cut into (its axes..., rest), and the axes' parts go to the front in group order.
    cut: list[int] = []
    place_of: dict[int, int] = {}
    rest: list[int] = []
    for d, size in enumerate(x.shape):
        parts = [i for i, dim in enumerate(dims) if dim == d]
        for i in parts:
            place_of[i] = len(cut)
            cut.append(sizes[axes[i]])
        rest.append(len(cut))
        cut.append(size // prod(sizes[axes[i]] for i in parts))
    order = [place_of[i] for i in range(len(axes))]
    blocks = x.reshape(cut).transpose(order + rest)
    blocks = blocks.reshape((-1, *(cut[p] for p in rest)))
    with scope:
        return lax.psum_scatter(blocks, axes, scatter_dimension=0, tiled=False)


def _all_gather(leg: Leg, x: Any, sizes: AxisSizes, scope: Scope) -> Any:
    axes, dims = _moves(leg, sizes)
    if not axes:
        return x
    if len(set(dims)) == 1:
        with scope:
            return lax.all_gather(x, axes, axis=dims[0], tiled=True)
    with scope:
        blocks = lax.all_gather(x, axes, axis=0, tiled=False)
    blocks = blocks.reshape([*(sizes[a] for a in axes), *x.shape])
    order: list[int] = []
    shape: list[int] = []
    for d, size in enumerate(x.shape):
        parts = [i for i, dim in enumerate(dims) if dim == d]
        order += [*parts, len(axes) + d]
        shape.append(size * prod(sizes[axes[i]] for i in parts))
    return blocks.transpose(order).reshape(shape)


def _all_to_all(leg: Leg, x: Any, sizes: AxisSizes, scope: Scope) -> Any:
    axes = tuple(a for a in leg.axes if sizes[a] > 1)
    if not axes:
        return x
    with scope:
        return lax.all_to_all(x, axes, split_axis=leg.dims[0], concat_axis=leg.from_dim, tiled=True)


def _collective_permute(leg: Leg, x: Any, sizes: AxisSizes, scope: Scope) -> Any:
    # JAX takes the axes of a permutation in mesh order only.
    involved = leg.source.axes | leg.target.axes
    axes = tuple(a for a in sizes if a in involved and sizes[a] > 1)
    pairs = _owner_pairs(leg.source, leg.target, axes, tuple(sizes.items()))
    x = _block_to_send(leg, x, axes, sizes, pairs)
    if all(source == target for source, target in pairs):
        return x
    with scope:
        return lax.ppermute(x, axes, pairs)


def _block_to_send(
    leg: Leg, x: Any, axes: tuple[str, ...], sizes: AxisSizes, pairs: tuple[tuple[int, int], ...]
) -> Any:
    """The part of this device's block that its taker wants, where the target's blocks are smaller."""
    rank = len(leg.source.dims)  # a key's words are dims behind these
    finer = [leg.target.shards(d, sizes) // leg.source.shards(d, sizes) for d in range(rank)]
    if all(n == 1 for n in finer):
        return x
    shape = [size // n for size, n in zip(x.shape, finer, strict=False)] + list(x.shape[rank:])
    devices = _places(axes, sizes)
    starts = np.zeros((len(devices), x.ndim), np.int32)
    for source, target in pairs:
        block = _block_index(leg.target, devices[target], sizes)
        # A block of the source holds `finer` blocks of the target along each dim.
        starts[source, :rank] = [
            b % n * size for b, n, size in zip(block, finer, shape, strict=False)
        ]
    mine = jnp.asarray(starts)[lax.axis_index(axes)]
    return lax.dynamic_slice(x, [mine[d] for d in range(x.ndim)], shape)


@lru_cache(maxsize=10_000)
def _owner_pairs(
    source: Layout, target: Layout, axes: tuple[str, ...], sizes: tuple[tuple[str, int], ...]
) -> tuple[tuple[int, int], ...]:
    """Who sends to whom along `axes`, so that every device has the block that `target` gives it."""
    lengths = dict(sizes)
    dims = range(len(source.dims))
    finer = [target.shards(d, lengths) // source.shards(d, lengths) for d in dims]
    holders: dict[tuple[int, ...], list[int]] = {}
    takers: dict[tuple[int, ...], list[int]] = {}
    for number, device in enumerate(_places(axes, lengths)):
        holders.setdefault(_block_index(source, device, lengths), []).append(number)
        wanted = _block_index(target, device, lengths)
        outer = tuple(b // n for b, n in zip(wanted, finer, strict=True))
        takers.setdefault(outer, []).append(number)
    pairs = []
    for block, has in holders.items():
        wants = takers[block]
        stays = set(has) & set(wants)
        pairs += [(device, device) for device in stays]
        pairs += zip(
            [d for d in has if d not in stays], [d for d in wants if d not in stays], strict=True
        )
    return tuple(sorted(pairs))


def _places(axes: tuple[str, ...], lengths: AxisSizes) -> list[dict[str, int]]:
    """The index on each axis of every device along `axes`, in order."""
    places = itertools.product(*(range(lengths[a]) for a in axes))
    return [dict(zip(axes, place, strict=True)) for place in places]


def _block_index(layout: Layout, device: Mapping[str, int], lengths: AxisSizes) -> tuple[int, ...]:
    """Which block of a layout a device holds, along each dim; axes of size 1 have index 0."""
    block = []
    for names in layout.dims:
        index = 0
        for name in names:
            index = index * lengths[name] + device.get(name, 0)
        block.append(index)
    return tuple(block)


def _slice(leg: Leg, x: Any, sizes: AxisSizes, scope: Scope) -> Any:
    for axis, dim in zip(leg.axes, leg.dims, strict=True):
        x = _block(x, dim, (axis,), sizes)
    return x


def _mask(leg: Leg, x: Any, sizes: AxisSizes, scope: Scope) -> Any:
    for axis in _present(leg.axes, sizes):
        x = _only_first(x, axis, leg.op)
    return x


_KINDS: dict[str, Callable[[Leg, Any, AxisSizes, Scope], Any]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "collective_permute": _collective_permute,
    "slice": _slice,
    "mask": _mask,
}


def _block(x: Any, dim: int, axes: tuple[str, ...], sizes: AxisSizes) -> Any:
    """This device's block of `x` along `dim`, which `axes` split."""
    count = prod(sizes[a] for a in axes)
    if count == 1:
        return x
    size = x.shape[dim] // count
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)


_NEUTRAL = {"sum": 0, "prod": 1}
"""What to reduce with to change nothing; an idempotent reduction needs none, as max(x, x) = x."""


def _only_first(x: Any, axis: str, op: str) -> Any:
    """`x` on the first device of `axis`, what changes nothing elsewhere."""
    if op not in _NEUTRAL:
        return x
    return lax.select(lax.axis_index(axis) == 0, x, lax.full_like(x, _NEUTRAL[op]))


def _present(axes: Sequence[str], sizes: AxisSizes) -> tuple[str, ...]:
    """The axes along which there is more than one device."""
    return tuple(a for a in axes if sizes[a] > 1)


def _moves(leg: Leg, sizes: AxisSizes) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The axes of a gather or scatter that have more than one device, and their dims."""
    kept = [(a, d) for a, d in zip(leg.axes, leg.dims, strict=True) if sizes[a] > 1]
    return tuple(a for a, _ in kept), tuple(d for _, d in kept)


def _target_shape(leg: Leg, local: tuple[int, ...], sizes: AxisSizes) -> tuple[int, ...]:
    shape = list(local)
    for d in range(len(leg.source.dims)):
        shape[d] = shape[d] * leg.source.shards(d, sizes) // leg.target.shards(d, sizes)
    return tuple(shape)
