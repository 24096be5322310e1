"""The one door to what JAX has no public name for: how `checkify` is told of a new primitive.

`checkify` knows what runs a jaxpr of its own by a table that it does not publish. Without an entry it would
take the primitive to be one operation, and check nothing inside.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import checkify
from jax.extend.core import ClosedJaxpr, Primitive

Derive = Callable[[ClosedJaxpr, int, int, dict[str, Any]], Callable[..., Sequence[Any]]]
"""From a checked jaxpr, the numbers of its leading operands and results that are errors, and the params of
the unchecked primitive: what runs it."""


def checkify_inside(primitive: Primitive, derive: Derive) -> None:
    """Has `checkify` look into the `jaxpr` param of a primitive.

    Args:
        primitive: the primitive.
        derive: how to run the checked jaxpr in its place.
    """

    def check(*values: Any, **params: Any) -> tuple[Any, Sequence[Any]]:
        first = next(i for i, value in enumerate(values) if isinstance(value, checkify.Error))
        context, (error, enabled, *operands) = values[:first], values[first:]
        errors, tree = jax.tree.flatten(error)
        avals = map(jax.typeof, [*errors, *operands])
        checked, result_tree, _ = checkify.jaxpr_to_checkify_jaxpr(
            *context, params["jaxpr"], enabled, tree, *avals
        )
        made = result_tree.num_leaves - len(params["jaxpr"].out_avals)
        results = derive(checked, len(errors), made, params)(*errors, *operands)
        return jax.tree.unflatten(result_tree, results)

    checkify.error_checks[primitive] = check
