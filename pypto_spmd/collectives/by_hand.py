"""Collectives that a person wrote: JAX's own, in the body of a region.

Each is a step of the plan like those that are inferred. It runs as it is written, over the axes that it
names; what other axes split of its operands, it sends in pieces.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

COLLECTIVES = {
    "psum": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_reduce_product": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "collective_permute",
    "pbroadcast": "all_reduce",
}
"""Primitives that communicate -> the kind of their step."""

LOCAL = ("axis_index",)
"""Primitives that name mesh axes and send nothing."""

CHECKED = {"psum_invariant": lax.psum_p, "all_gather_invariant": lax.all_gather_p}
"""What JAX binds where it checks which values are the same on all devices -> what does the same."""

UNCHECKED = "pvary"
"""What tells that check that a value may differ, and does nothing."""

_AXES_PARAMS = ("axes", "axis_name")


def names_axes(name: str) -> bool:
    """Whether a primitive is one of these."""
    return name in COLLECTIVES or name in LOCAL


def axes_of(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The mesh axes that such a primitive names in its params."""
    named = next(params[p] for p in _AXES_PARAMS if p in params)
    return named if isinstance(named, tuple) else (named,)


def with_axes(params: Mapping[str, Any], axes: tuple[str, ...]) -> dict[str, Any]:
    """The params of such a primitive with other mesh axes in place of its own."""
    return {name: axes if name in _AXES_PARAMS else value for name, value in params.items()}


def unchecked(
    primitive: Primitive, params: Mapping[str, Any]
) -> tuple[Primitive, Mapping[str, Any]]:
    """A primitive and its params, in the form that it has where JAX does not check."""
    if primitive.name not in CHECKED:
        return primitive, params
    return CHECKED[primitive.name], {"axis_index_groups": None, **params}


def full_elements(name: str, shapes: Sequence[tuple[int, ...]], group: int) -> int:
    """Elements of the tensor that is whole over the group; for CollectivePermute what one device sends.

    Args:
        name: the primitive.
        shapes: what one device holds of each operand.
        group: number of devices that take part together.
    """
    per_device = COLLECTIVES[name] in ("all_gather", "all_to_all")
    return sum(map(prod, shapes)) * (group if per_device else 1)


def communicate(
    primitive: Primitive,
    params: Mapping[str, Any],
    operands: Sequence[Any],
    axis_sizes: Mapping[str, int],
) -> Sequence[Any]:
    """Runs a collective, or another primitive that names mesh axes, on one device's values.

    Args:
        primitive: the primitive.
        params: its params.
        operands: the values.
        axis_sizes: size of each mesh axis.
    """
    name = primitive.name
    # With nobody else there is nothing to send, which XLA does not see.
    axes = tuple(a for a in axes_of(params) if axis_sizes[a] > 1)
    if name == "axis_index":
        return [lax.axis_index(axes) if axes else jnp.int32(0)]
    if not axes:
        return [_alone(name, params, x) for x in operands]
    if name == "pbroadcast":
        return [from_root(x, axes, params["source"]) for x in operands]
    results = primitive.bind(*operands, **with_axes(params, axes))
    return results if isinstance(results, list | tuple) else [results]


def from_root(x: Any, axes: tuple[str, ...], root: int) -> Any:
    """The value that the device with index `root` along the axes has, by a sum to which it alone adds.

    JAX's own broadcast has no implementation on most platforms.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = from_root(jax.random.key_data(x), axes, root)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    mine = lax.axis_index(axes) == root
    number = x.astype(jnp.int8) if x.dtype == bool else x
    chosen = lax.psum(jnp.where(mine, number, jnp.zeros_like(number)), axes)
    return chosen.astype(x.dtype)


def _alone(name: str, params: Mapping[str, Any], x: Any) -> Any:
    """What a collective gives on an axis of one device."""
    if name.startswith("all_gather") and not params["tiled"]:
        return jnp.expand_dims(x, params["all_gather_dimension"])
    if name == "reduce_scatter" and not params["tiled"]:
        return jnp.squeeze(x, params["scatter_dimension"])
    return x
