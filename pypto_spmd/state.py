"""Which arguments are parameters or train state, and which results are their next values.

The standard objective tells data from state: gathering a weight is usual on an axis that splits the
batch, and odd elsewhere. State is what is named or typed so, and what comes back as a result.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax

from pypto_spmd.arguments import signed

_STATE_NAME = re.compile(
    r"params?|parameters?|weights?|states?|optimizer|opt|models?|modules?|variables|vars|batch_stats"
    r"|(ema|old|new|model|module|train|opt|optimizer|target|student|teacher)_(params|state|weights|model)"
    r"|moments?|momentum|mu|nu|theta|kernel|bias|embeddings?|cache"
    # the usual names of single weights: w, w1, wq, w_out, b2, kernel_0
    r"|w[a-z]?\d*|[a-z]+_w|w_[a-z]+|b\d+|(weight|bias|kernel|theta|param)_?\d+"
)
"""Names that say that an argument is state."""

_DATA_NAME = re.compile(
    r"[a-ln-z]s?|data|batch(es)?|inputs?|images?|labels?|targets?|tokens?|ids|masks?|quer(y|ies)|keys?|values?"
    r"|logits|features|scores|hidden|rng|noise"
)
"""Names that say that an argument is none, though a result may look like it (`m` is often a moment)."""

_PARAMETER_TYPES = (("flax", "TrainState"), ("flax", "Module"), ("flax", "State"))


def is_parameter(name: str, value: Any) -> bool:
    """Whether an argument is named or typed as parameters or train state."""
    return _is_named(name) or _is_typed(value)


def state_flags(
    names: Sequence[str], values: Sequence[Any], result: Any, declared: frozenset[str] = frozenset()
) -> tuple[bool, ...]:
    """For each argument whether it is state.

    Args:
        names: the arguments' names.
        values: their values.
        result: what the function returns, with arrays or their descriptions as leaves.
        declared: arguments that are said to be parameters.
    """
    returned = [_form(part) for part in _parts(result)]
    return tuple(
        name in declared
        or is_parameter(name, value)
        or (_can_return(name, value) and _form(value) in returned)
        for name, value in zip(names, values, strict=True)
    )


def next_values(values: Sequence[Any], is_state: Sequence[bool], result: Any) -> dict[int, int]:
    """For leaves of the result that are the next value of an argument's leaf, that leaf.

    A result that looks like several arguments is the next value of the first that isn't taken. A single
    array is none: `x @ w` has the shape of `w` whenever both are square.

    Returns:
        Index of a leaf of `result` -> index of a leaf of `values`.
    """
    if jax.tree_util.all_leaves([result]):
        return {}
    starts, start = [], 0
    for value in values:
        starts.append(start)
        start += len(jax.tree.leaves(value))
    free = [i for i, flag in enumerate(is_state) if flag]
    pairs: dict[int, int] = {}
    offset = 0
    for part in _parts(result):
        count = len(jax.tree.leaves(part))
        owner = next((i for i in free if _form(values[i]) == _form(part)), None)
        if owner is not None:
            free.remove(owner)
            pairs.update((offset + k, starts[owner] + k) for k in range(count))
        offset += count
    return pairs


def _bare(name: str) -> str:
    return re.sub(r"\[.*", "", name).lower().strip("_")


def _is_named(name: str) -> bool:
    bare = _bare(name)
    return _STATE_NAME.fullmatch(bare) is not None or bare.endswith(
        ("_params", "_state", "_weights")
    )


def _is_typed(value: Any) -> bool:
    """Flax train states and modules, and optax states, without importing either."""
    for cls in type(value).__mro__:
        package = cls.__module__.partition(".")[0]
        if (package, cls.__name__) in _PARAMETER_TYPES:
            return True
        if package == "optax" and cls.__name__.endswith("State"):
            return True
    # optax chains states in plain tuples
    return type(value) is tuple and bool(value) and all(_is_optax(part) for part in value)


def _is_optax(value: Any) -> bool:
    if type(value) is tuple:
        return all(_is_optax(part) for part in value)
    return type(value).__module__.partition(".")[0] == "optax"


def _can_return(name: str, value: Any) -> bool:
    """One array that comes back in its own shape is no evidence when its name says that it is data."""
    if not jax.tree.leaves(value):
        return False
    return not jax.tree_util.all_leaves([value]) or _DATA_NAME.fullmatch(_bare(name)) is None


def _parts(result: Any) -> list[Any]:
    """The results in which a state may come back: the elements of a returned tuple, or all of it."""
    if type(result) in (tuple, list):
        return list(result)
    return [result]


def _form(value: Any) -> Any:
    leaves, tree = jax.tree.flatten(value)
    return tree, tuple(signed(leaf)[:2] for leaf in leaves)
