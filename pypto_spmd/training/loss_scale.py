"""Loss scaling: small gradients kept from vanishing in float16, and steps that overflow skipped.

All of it is a pytree and pure functions of it, so that it is part of the train state, is saved with it,
and is planned like the rest of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from pypto_spmd.errors import refuse


def all_finite(tree: Any) -> jax.Array:
    """Whether all elements of all arrays of inexact types are finite, as a scalar.

    On a mesh it costs one reduction of one number for each array that is split, which travel together.

    Args:
        tree: a pytree, such as the gradients.
    """
    arrays: Sequence[Any] = [
        x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    ]
    return jnp.stack([jnp.isfinite(x).all() for x in arrays] or [jnp.bool_(True)]).all()


def choose(finite: Any, new: Any, old: Any) -> Any:
    """The new state if the step counts, and the old one if it is skipped.

    Args:
        finite: whether it counts, a scalar.
        new: the state after the step.
        old: the state before it, of the same structure.
    """
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The factor that keeps small gradients from vanishing in float16: a part of the train state.

    Make one with `static` or `dynamic`. A dynamic one is halved when gradients overflow, a step that is to
    be skipped, and doubled after so many that did not (Micikevicius et al. 2018).

    Args:
        value: the factor.
        good_steps: how many steps in a row were finite.
        skipped_steps: how many were skipped in all.
        growth_every: after how many good steps it grows; None if it is static.
        factor: by what it grows and shrinks.
        least: what it never is below.

    Example:
        >>> scale = LossScale.dynamic(8.0)
        >>> float(scale.update(jnp.bool_(False)).value)
        4.0
    """

    value: jax.Array
    good_steps: jax.Array
    skipped_steps: jax.Array
    growth_every: int | None = field(default=None, metadata={"static": True})
    factor: float = field(default=2.0, metadata={"static": True})
    least: float = field(default=1.0, metadata={"static": True})

    @classmethod
    def static(cls, value: float) -> "LossScale":
        """A factor that stays; steps that overflow can be skipped with it too."""
        return cls._of(value, None, 2.0, 1.0)

    @classmethod
    def dynamic(
        cls,
        value: float = 2.0**15,
        *,
        growth_every: int = 2000,
        factor: float = 2.0,
        least: float = 1.0,
    ) -> "LossScale":
        """A factor that follows the gradients; see the class."""
        return cls._of(value, growth_every, factor, least)

    @classmethod
    def _of(
        cls, value: float, growth_every: int | None, factor: float, least: float
    ) -> "LossScale":
        if not value > 0 or not factor > 1 or (growth_every is not None and growth_every < 1):
            what = f"value is {value}, factor is {factor} and growth_every is {growth_every}."
            why = "The factor is positive, and grows by more than 1 after one step or more."
            refuse("LossScale", what, why, "use LossScale.dynamic() with its usual values.")
        zero = jnp.zeros((), jnp.int32)
        return cls(jnp.float32(value), zero, zero, growth_every, factor, least)

    def scale(self, loss: jax.Array) -> jax.Array:
        """The loss times the factor, in float32."""
        return loss.astype(jnp.float32) * self.value

    def unscale(self, grads: Any) -> Any:
        """The gradients without the factor."""
        return jax.tree.map(lambda g: g / self.value.astype(g.dtype), grads)

    def update(self, finite: jax.Array) -> "LossScale":
        """The factor for the next step.

        Args:
            finite: whether all gradients were; if not, the step is to be skipped.
        """
        skipped = self.skipped_steps + jnp.where(finite, 0, 1)
        if self.growth_every is None:
            return replace(self, skipped_steps=skipped)
        good = jnp.where(finite, self.good_steps + 1, 0)
        grows = good >= self.growth_every
        grown = jnp.where(grows, self.value * self.factor, self.value)
        # One that would overflow itself stays.
        grown = jnp.where(jnp.isfinite(grown), grown, self.value)
        shrunk = jnp.maximum(self.value / self.factor, self.least)
        return replace(
            self,
            value=jnp.where(finite, grown, shrunk),
            good_steps=jnp.where(grows, 0, good),
            skipped_steps=skipped,
        )
