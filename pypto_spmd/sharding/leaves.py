"""The arrays of models and train states: their paths, and which of them are an optimizer's.

A leaf's path is what a person would write with slashes, `state/params/dense/kernel`: the argument's
name, then the steps into it, without the steps into flax's boxes around arrays. Parameters and the
optimizer's copies of them are told apart by type (optax states, nnx's optimizer variables) and by name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

OPTIMIZER_NAMES = frozenset(
    {"opt", "opt_state", "optim_state", "optimizer_state", "moments", "momentum", "velocity"}
)
"""Steps below which all is an optimizer's, whatever its type."""

_KEY_LENGTHS = (2, 4)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a model or train state.

    Args:
        path: its steps, the argument's name first, which may be "".
        name: the same as a person would write it: `state.params['dense']['kernel']`.
        root: how many steps lead to the tree of parameters that it is in.
        shape: its shape.
        dtype: its dtype.
        is_optimizer: whether it is an optimizer's.
        box: flax's box around it, which may say how it lies.
    """

    path: tuple[str, ...]
    name: str
    root: int
    shape: tuple[int, ...]
    dtype: Any
    is_optimizer: bool
    box: Any = None

    @property
    def text(self) -> str:
        """The path, with slashes."""
        return "/".join(self.path).removeprefix("/")

    @property
    def size(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def is_counted(self) -> bool:
        """Whether it is a scalar, counter or random key, which is whole unless somebody names it."""
        if not self.shape:
            return True
        kind = np.dtype(self.dtype).kind if isinstance(self.dtype, np.dtype) else "key"
        return kind == "key" or (kind in "iu" and np.dtype(self.dtype).itemsize >= 4)

    @property
    def is_random_key(self) -> bool:
        """Whether it is a random key, or looks like the words of one."""
        if not isinstance(self.dtype, np.dtype):
            return jnp.issubdtype(self.dtype, jax.dtypes.prng_key)
        return self.dtype == np.uint32 and self.shape[-1:] in [(n,) for n in _KEY_LENGTHS]


def leaves_of(value: Any, name: str = "") -> list[Leaf]:
    """The arrays of an argument, in the order of `jax.tree.leaves`.

    Args:
        value: the argument, with arrays or their descriptions as leaves.
        name: its name.
    """
    optimizers: list[tuple[str, ...]] = []
    found = list(_walk(value, (name,), name, False, optimizers))
    states = {steps[:-1] for steps in optimizers if len(steps) > 1}
    return [_rooted(leaf, states) for leaf in found]


def _walk(
    node: Any,
    path: tuple[str, ...],
    name: str,
    is_optimizer: bool,
    optimizers: list[tuple[str, ...]],
) -> Iterator[Leaf]:
    """The leaves below a node; notes the outermost nodes that are an optimizer's."""
    if node is None:
        return
    if not is_optimizer and (path[-1] in OPTIMIZER_NAMES or _is_optimizers(node)):
        is_optimizer = True
        optimizers.append(path)
    if is_box(node):
        for leaf in jax.tree.leaves(node):
            yield Leaf(path, name, 0, tuple(leaf.shape), leaf.dtype, is_optimizer, node)
        return
    children = one_level(node)
    if children is None:
        shape, dtype = _described(node)
        yield Leaf(path, name, 0, shape, dtype, is_optimizer)
        return
    for step, text, child in children:
        yield from _walk(child, (*path, step), name + text, is_optimizer, optimizers)


def _rooted(leaf: Leaf, states: set[tuple[str, ...]]) -> Leaf:
    """The leaf with its root: beside the optimizer's state if there is one, else the argument."""
    if leaf.is_optimizer:
        return leaf
    above = [len(state) for state in states if leaf.path[: len(state)] == state]
    root = min(max(above) + 1, len(leaf.path)) if above else 1
    return Leaf(leaf.path, leaf.name, root, leaf.shape, leaf.dtype, False, leaf.box)


def one_level(node: Any) -> list[tuple[str, str, Any]] | None:
    """Step, step as text of code, and value of each child of a pytree node; None of a leaf."""
    if jax.tree_util.all_leaves([node]):
        return None
    pairs = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda below: below is not node)[0]
    return [(keystr(path, simple=True), keystr(path), child) for path, child in pairs]


def is_box(value: Any) -> bool:
    """Whether a value is flax's box around one array: a linen `Partitioned`, or an nnx variable."""
    if isinstance(value, type):
        return False
    return hasattr(value, "get_partition_spec") or (
        hasattr(value, "get_metadata") and hasattr(value, "get_value")
    )


def _is_optimizers(node: Any) -> bool:
    """Whether a node is an optax state, a chain of them, or a variable of an nnx optimizer."""
    if type(node) is tuple:
        return bool(node) and all(_is_optimizers(part) for part in node)
    for cls in type(node).__mro__:
        if cls.__module__.partition(".")[0] == "optax":
            return True
        if cls.__name__ == "OptState" and cls.__module__.startswith("flax."):
            return True
    return False


def _described(leaf: Any) -> tuple[tuple[int, ...], Any]:
    if not hasattr(leaf, "dtype"):
        leaf = jax.typeof(leaf)
    return tuple(leaf.shape), leaf.dtype
