"""Random numbers: every device makes its own part of the serial ones, and nothing is sent.

Threefry (Salmon et al. 2011) is a hash of a key and a counter, and with `jax_threefry_partitionable`, the
default, the counter of an element is its row-major index in the whole array. So a device hashes the
indices of its own part. Keys are whole, but for the dims that `vmap` gave them, which pass.

Invariant: results are bit for bit those of the primitive. Other generators do not have the property,
and run whole.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.elementwise import elementwise
from pypto_spmd.collectives.rules.factor import Factor, Rule, factor_rule, whole_rule
from pypto_spmd.collectives.rules.moving import dim_names
from pypto_spmd.collectives.rules.registry import Aval, rule

_WORD = 32
_HALF_WORD = 16


@rule("random_seed", "random_clone", "random_fold_in", "threefry2x32")
def _per_key(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    if _generator(outs[0]) in ("urbg", "?"):
        return _whole(ins, outs)  # a batched fold_in of unsafe_rbg mixes the keys
    return elementwise(ins, outs, ())


@rule("random_wrap", "random_unwrap")
def _base_array(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    names = dim_names(min(len(ins[0].shape), len(outs[0].shape)))
    left, right = (" ".join(names + ["_"] * (len(a.shape) - len(names))) for a in (ins[0], outs[0]))
    return factor_rule(f"{left} -> {right}", [ins[0].shape], [outs[0].shape])


@rule("random_bits")
def _random_bits(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    def bits(high: jax.Array, low: jax.Array, keys: jax.Array) -> jax.Array:
        dtype = outs[0].dtype
        if params["bit_width"] > _WORD:
            upper = lax.shift_left(lax.convert_element_type(high, dtype), dtype.type(_WORD))
            return upper | lax.convert_element_type(low, dtype)
        return lax.convert_element_type(high ^ low, dtype)

    return _counted(params, ins, outs, bits)


@rule("random_split")
def _random_split(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    def keys_of(high: jax.Array, low: jax.Array, keys: jax.Array) -> jax.Array:
        words = jnp.stack([high, low], axis=high.ndim)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(keys))

    return _counted(params, ins, outs, keys_of)


@rule("random_gamma")
def _random_gamma(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    if _generator(ins[0]) != "fry":
        return _whole(ins, outs)
    # A key is split into one per element of the dims that the keys lack, by their index.
    names = dim_names(len(ins[0].shape))
    rest = ["_"] * (len(outs[0].shape) - len(names))
    full = " ".join(names + rest)
    return factor_rule(
        f"{' '.join(names)}, {full} -> {full}", [a.shape for a in ins], [outs[0].shape]
    )


def _generator(aval: Aval) -> str:
    """The tag of a key array's generator, "" of another array, "?" of an unknown key."""
    if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return ""
    tag = str(aval.dtype).removeprefix("key<").removesuffix(">")
    return tag if tag in ("fry", "rbg", "urbg") else "?"


def _whole(ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    return whole_rule(
        [a.shape for a in ins],
        [a.shape for a in outs],
        reason="only threefry makes each element from its index alone",
    )


def _counted(
    params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...], make: Any
) -> Rule:
    """The rule of a primitive that hashes, for each key, the indices of an array of `params["shape"]`.

    Args:
        params: the primitive's.
        ins: the keys' aval.
        outs: the result's aval.
        make: `(high words, low words, keys) -> result`.
    """
    if _generator(ins[0]) != "fry":
        return _whole(ins, outs)
    shape, batch = params["shape"], len(ins[0].shape)
    names = dim_names(batch + len(shape))

    def bind(ctx: Context, keys: jax.Array) -> jax.Array:
        if not any(ctx.axes(n) for n in names[batch:]):
            return ctx.bind(keys)
        local, start = ctx.out_shape(), ctx.out_start()
        if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
            made = ctx.bind(keys)  # the older counters are no element's own: make all, keep a part
            kept = [jnp.int32(0)] * batch + list(start[batch:])
            return lax.dynamic_slice(made, kept, local)
        words = jax.random.key_data(keys)
        key_words = [words[..., i].reshape((*keys.shape, *(1,) * len(shape))) for i in range(2)]
        if batch:
            key_words = [jnp.broadcast_to(k, local) for k in key_words]
        else:
            key_words = [k.reshape(()) for k in key_words]
        counter = [
            jnp.broadcast_to(c, local) for c in _indices(shape, local[batch:], start[batch:])
        ]
        return make(*threefry2x32_p.bind(*key_words, *counter), keys)

    factors = tuple(Factor(n, s) for n, s in zip(names, outs[0].shape, strict=True))
    dims = tuple((d,) for d in range(len(names)))
    return Rule((dims[:batch],), (dims,), factors, bind=bind)


def _indices(
    shape: Sequence[int], local: Sequence[int], start: Sequence[Any]
) -> tuple[jax.Array, jax.Array]:
    """The high and low words of the row-major indices, in an array of `shape`, of one part of it."""
    high = low = jnp.zeros(local, jnp.uint32)
    wide = prod(shape) > 1 << _WORD
    for dim in range(len(shape)):
        stride = prod(shape[dim + 1 :])
        first = lax.convert_element_type(start[dim], jnp.uint32)
        index = lax.broadcasted_iota(jnp.uint32, local, dim) + first
        term = index * jnp.uint32(stride % (1 << _WORD))
        if wide:
            high += _high_word(index, stride) + index * jnp.uint32(stride >> _WORD)
        low += term
        if wide:
            high += lax.convert_element_type(low < term, jnp.uint32)
    return high, low


def _high_word(index: jax.Array, stride: int) -> jax.Array:
    """The high word of the product of `index` and the low word of `stride`, by half words."""
    half = jnp.uint32((1 << _HALF_WORD) - 1)
    major, minor = index >> _HALF_WORD, index & half
    stride_minor = jnp.uint32(stride & int(half))
    stride_major = jnp.uint32((stride >> _HALF_WORD) & int(half))
    middle = minor * stride_major + ((minor * stride_minor) >> _HALF_WORD)
    other = major * stride_minor + (middle & half)
    return major * stride_major + (middle >> _HALF_WORD) + (other >> _HALF_WORD)


@rule("rng_bit_generator")
def _rng_bit_generator(
    params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]
) -> Rule:
    return _whole(ins, outs)
