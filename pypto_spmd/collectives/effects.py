"""What acts on the world: callbacks with effects, once for a call.

In `shard_map` every device would act. So operands are whole, the first device of the mesh acts alone, and
what its callback returns is sent to all. In a region that a person wrote for parts, each device acts with
its own, as in JAX's own.

JAX has no ordered effects on several devices. Here each ordered action hands a token to the next, which
cannot start without it: order is that of data.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Primitive

ACTIONS = ("debug_callback", "debug_print", "io_callback")
"""Primitives that act on the world."""

INSPECTION = "inspect_sharding"
"""The primitive that tells how an array lies, as the plan says, when the program is lowered."""

UNCHECKED = "check"
"""The primitive of `checkify.check`, which nothing can run that `checkify.checkify` has not made code."""


def has_effects(name: str) -> bool:
    """Whether a primitive is there for what it does, whatever becomes of its results."""
    return name in ACTIONS or name in (INSPECTION, UNCHECKED)


def is_ordered(params: Mapping[str, Any]) -> bool:
    """Whether an action with these params is to come after the ordered ones before it."""
    return bool(params.get("ordered")) or _is_ordered_effect(params.get("effect"))


def first_token() -> Any:
    """The token that the first ordered action takes."""
    return jnp.int32(0)


def act(
    primitive: Primitive,
    params: Mapping[str, Any],
    operands: Sequence[Any],
    token: Any,
    axes: tuple[str, ...] = (),
) -> tuple[Sequence[Any], Any]:
    """Runs an action.

    Args:
        primitive: one of `ACTIONS`.
        params: its params.
        operands: its operands, whole.
        token: of the ordered action before it; None if it is not ordered.
        axes: mesh axes of which the first device acts alone, and the results are zero on the others.

    Returns:
        Its results; and the token for the next ordered action.
    """
    wanted = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in params.get("result_avals", ())]
    if token is None and not wanted:
        call: Callable[..., Any] = lambda *values: _plain(primitive, params, values)  # noqa: E731
        skip: Callable[..., Any] = lambda *values: ()  # noqa: E731
    else:
        host = _with_token(primitive, params)
        told = jax.ShapeDtypeStruct((), np.int32)
        call = lambda *values: tuple(io_callback(host, (told, *wanted), *values))  # noqa: E731
        skip = lambda before, *values: (before, *map(_zeros, wanted))  # noqa: E731
        operands = (first_token() if token is None else token, *operands)
    alone = lambda *values: lax.cond(lax.axis_index(axes) == 0, call, skip, *values)  # noqa: E731
    results = alone(*operands) if axes else call(*operands)
    if not results:
        return (), token
    after, *rest = results
    return rest, None if token is None else after


def sent_to_all(x: Any, axes: tuple[str, ...]) -> Any:
    """What the first device along the axes has, the others having zeros."""
    if x.dtype == bool:
        return lax.psum(x.astype(np.int8), axes).astype(bool)
    return lax.psum(x, axes)


def unordered(effects: Set[Any]) -> Set[Any]:
    """The effects that a program has on several devices, where JAX knows of no order.

    Args:
        effects: those of the serial function.
    """
    kept = {effect for effect in effects if not _is_ordered_effect(effect)}
    return kept if len(kept) == len(effects) else kept | _unordered_effects()


def _plain(primitive: Primitive, params: Mapping[str, Any], operands: Sequence[Any]) -> tuple[()]:
    """Binds an action without results, which is not ordered, or no longer."""
    if primitive.name == "debug_callback":
        jax.debug.callback(params["callback"], *operands)
    else:
        primitive.bind(*operands, **{**params, "ordered": False})
    return ()


def _with_token(primitive: Primitive, params: Mapping[str, Any]) -> Callable[..., Any]:
    """What runs on the host for an action that takes a token and gives one."""
    if primitive.name == "debug_print":
        run = lambda *values: primitive.impl(*values, **params)  # noqa: E731
    else:
        run = params["callback"]
    return lambda token, *values: (np.int32(token), *run(*values))


def _zeros(struct: jax.ShapeDtypeStruct) -> Any:
    return jnp.zeros(struct.shape, struct.dtype)


def _is_ordered_effect(effect: Any) -> bool:
    return "Ordered" in str(effect)  # JAX has no public name for them


@lru_cache(maxsize=1)
def _unordered_effects() -> Set[Any]:
    def run() -> None:
        jax.debug.callback(lambda: None)
        io_callback(lambda: None, None)

    return frozenset(jax.make_jaxpr(run)().effects)
