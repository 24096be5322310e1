"""Mixed precision: parameters in one type, computing in another, gradients reduced in a third.

All of it is casts in the serial function, so that it composes with every layout. A weight is cast where it
lies and is gathered in the narrow type; in which type gradients are reduced shows in the plan's steps.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pypto_spmd.collectives.wide_sums import sum_in
from pypto_spmd.errors import listed, refuse
from pypto_spmd.sharding.leaves import Leaf, leaves_of

_SUBJECT = "Policy"
_STATISTICS = ("batch_stats", "BatchStat")


@dataclass(frozen=True, slots=True)
class Policy:
    """In which types parameters are held, a model computes, and gradients are reduced.

    Args:
        param: of parameters and optimizer state, and of gradients as the optimizer gets them.
        compute: of parameters, activations and inputs in the model.
        output: of what the model gives, such as logits and losses.
        reduce: in which gradients are summed over the batch and over devices; None for as they are
            computed, which sends the fewest bytes.
        keep: regular expressions; parameters whose path one of them is found in are not cast: of code that
            does not take norms in float32 by itself, as flax does, `("norm",)`.

    Example:
        >>> policy = Policy.named("mixed_bfloat16")
        >>> policy.cast_to_compute({"w": jnp.ones(2), "step": jnp.int32(0)})["w"].dtype
        dtype(bfloat16)
    """

    param: Any = jnp.float32
    compute: Any = jnp.float32
    output: Any = jnp.float32
    reduce: Any = None
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("param", "compute", "output", "reduce"):
            value = getattr(self, name)
            if value is None and name == "reduce":
                continue
            try:
                dtype = jnp.dtype(value)
            except TypeError:
                dtype = None
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                what = f"{name} is {value!r}."
                refuse(
                    _SUBJECT,
                    what,
                    "It is a floating-point type.",
                    "use jnp.float32 or jnp.bfloat16.",
                )
            object.__setattr__(self, name, dtype)

    @classmethod
    def named(cls, name: str) -> "Policy":
        """A policy by name.

        Args:
            name: "float32", all in it; "mixed_bfloat16", computing in it and gradients reduced in float32;
                "mixed_float16", the same, which needs a `LossScale`; "bfloat16", all in it.
        """
        if name not in _POLICIES:
            choices = listed([repr(known) for known in _POLICIES], "or")
            what = f"there is no policy {name!r}."
            refuse(_SUBJECT, what, "Policies have few names.", f"use {choices}, or Policy(...).")
        return cls(**_POLICIES[name])

    def cast_to_compute(self, tree: Any) -> Any:
        """Parameters, variables or inputs in the type that the model computes in.

        Arrays of whole numbers and keys stay as they are; so do the running statistics of batch norms
        (`batch_stats`), and what `keep` names. nnx modules are cast in place, by `computing`.

        Args:
            tree: a pytree.
        """
        return self._cast(tree, self.compute)

    def cast_to_param(self, tree: Any) -> Any:
        """The same in the type that parameters are held in."""
        return self._cast(tree, self.param)

    def cast_to_output(self, tree: Any) -> Any:
        """The same in the type that the model's results have."""
        return _cast_all(tree, self.output)

    def _cast(self, tree: Any, dtype: Any) -> Any:
        if _is_module(tree):
            what = "an nnx module is to be cast."
            why = "A copy of it would not share its statistics and random counts with it."
            refuse(_SUBJECT, what, why, "call the model inside `with policy.computing(model):`.")
        leaves, structure = jax.tree.flatten(tree)
        cast = [
            _as(value, dtype) if self._is_cast(leaf) else value
            for leaf, value in zip(leaves_of(tree), leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, cast)

    def _is_cast(self, leaf: Leaf) -> bool:
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or set(_STATISTICS) & set(leaf.path):
            return False
        return not any(re.search(pattern, leaf.text) for pattern in self.keep)

    @contextmanager
    def computing(self, model: Any) -> Iterator[Any]:
        """The parameters of an nnx module in the type it computes in, inside the block.

        Args:
            model: the module; its `nnx.Param`s are what they were when the block ends.

        Yields:
            The module.
        """
        from flax import nnx

        held = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
        before = {path: variable.get_value() for path, variable in held.items()}
        paths = {path: "/".join(map(str, path)) for path in held}
        cast = {
            path: value
            if any(re.search(pattern, paths[path]) for pattern in self.keep)
            else _as(value, self.compute)
            for path, value in before.items()
        }
        nnx.update(model, nnx.from_flat_state(cast.items()))
        try:
            yield model
        finally:
            nnx.update(model, nnx.from_flat_state(before.items()))

    def value_and_grad(
        self, loss_of: Callable[..., Any], *, has_aux: bool = False
    ) -> Callable[..., tuple[Any, Any]]:
        """`jax.value_and_grad` of a loss by its first argument, the parameters, under this policy.

        Args:
            loss_of: takes the parameters in the type to compute in, and more; gives the loss, and with
                `has_aux` a pair of it and more.
            has_aux: whether it gives a pair.

        Returns:
            A function that takes the parameters as they are held, and gives the loss in the output type,
            and gradients in the type of parameters.
        """

        def cast_loss(params: Any, *args: Any, **kwargs: Any) -> Any:
            result = loss_of(self.cast_to_compute(params), *args, **kwargs)
            loss, aux = result if has_aux else (result, None)
            loss = _as(loss, self.output)
            return (loss, aux) if has_aux else loss

        def value_and_grad(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            value, grads = jax.value_and_grad(cast_loss, has_aux=has_aux)(params, *args, **kwargs)
            return value, self.reduced(grads)

        return value_and_grad

    def reduced(self, grads: Any) -> Any:
        """Gradients as the optimizer takes them, reduced in the type of this policy on the way.

        `value_and_grad` does it; it is for gradients that are taken otherwise.

        Args:
            grads: the gradients.
        """

        def of_leaf(grad: Any) -> Any:
            if not jnp.issubdtype(jnp.result_type(grad), jnp.floating):
                return grad
            if self.reduce is None:
                return _as(grad, self.param)
            return _as(sum_in(jnp.asarray(grad), self.reduce), self.param)

        return jax.tree.map(of_leaf, grads)


_POLICIES: dict[str, dict[str, Any]] = {
    "float32": {},
    "mixed_bfloat16": {"compute": jnp.bfloat16, "reduce": jnp.float32},
    "mixed_float16": {"compute": jnp.float16, "reduce": jnp.float32},
    "bfloat16": {"param": jnp.bfloat16, "compute": jnp.bfloat16, "output": jnp.bfloat16},
}


def _as(value: Any, dtype: Any) -> Any:
    return jnp.asarray(value).astype(dtype)


def _cast_all(tree: Any, dtype: Any) -> Any:
    is_float = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: _as(x, dtype) if is_float(x) else x, tree)


def _is_module(tree: Any) -> bool:
    return any(
        cls.__module__.startswith("flax.nnx") and cls.__name__ == "Module"
        for cls in type(tree).__mro__
    )
