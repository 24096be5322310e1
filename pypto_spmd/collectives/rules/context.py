"""What a rule's `bind` may ask when it runs one equation on the shards of one device.

Invariant: `bind` runs inside `shard_map`, with every mesh axis manual. It may communicate only through
`Context.exchange`, so that each collective is a step of the plan.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from pypto_spmd.collectives.rules.factor import Rule
from pypto_spmd.collectives.rules.registry import Aval
from pypto_spmd.collectives.tagging import step_scope


@dataclass(frozen=True, slots=True)
class Context:
    """One equation as it runs on one device.

    Args:
        primitive: the primitive.
        params: its params, for global shapes.
        ins: global `Aval`s of the operands.
        outs: global `Aval`s of the results.
        rule: the equation's rule.
        splits: factor index -> mesh axes that split it, outermost first.
        axis_sizes: size of each mesh axis.
        steps: (factor index, exchange index) -> index of the plan's step.
        exchanged: what steps that several equations share have given, by the index of the step.
    """

    primitive: Primitive
    params: Mapping[str, Any]
    ins: tuple[Aval, ...]
    outs: tuple[Aval, ...]
    rule: Rule
    splits: Mapping[int, tuple[str, ...]]
    axis_sizes: Mapping[str, int]
    steps: Mapping[tuple[int, int], int]
    exchanged: dict[int, Any] = field(default_factory=dict)

    def axes(self, factor: str) -> tuple[str, ...]:
        """The mesh axes that split `factor`, outermost first; `()` if it is whole."""
        return self.splits.get(self.rule.factor(factor), ())

    def shards(self, factor: str) -> int:
        """Into how many pieces `factor` is cut."""
        return prod(self.axis_sizes[a] for a in self.axes(factor))

    def index(self, factor: str) -> Any:
        """Which of the pieces of `factor` this device holds, an int32 scalar (0 if it is whole)."""
        axes = self.axes(factor)
        return lax.axis_index(axes) if axes else jnp.int32(0)

    def local_size(self, factor: str) -> int:
        """Size of `factor` on one device."""
        return self.rule.factors[self.rule.factor(factor)].size // self.shards(factor)

    def in_shape(self, operand: int) -> tuple[int, ...]:
        """Shape that this device holds of an operand."""
        return self._local(self.ins[operand].shape, self.rule.operands[operand])

    def out_shape(self, result: int = 0) -> tuple[int, ...]:
        """Shape that this device is to make of a result."""
        return self._local(self.outs[result].shape, self.rule.results[result])

    def out_start(self, result: int = 0) -> tuple[Any, ...]:
        """Global index of the first element of this device's part of a result."""
        local = self.out_shape(result)
        return tuple(
            self._dim_index(dim) * size
            for dim, size in zip(self.rule.results[result], local, strict=True)
        )

    def exchange(self, factor: str, index: int, run: Callable[[tuple[str, ...]], Any]) -> Any:
        """Runs the `index`-th exchange of `factor`: `run(axes)`, tagged as its step of the plan.

        A step that an equation before has run with the same rows is not run again.
        """
        step = self.steps[self.rule.factor(factor), index]
        if step not in self.exchanged:
            with step_scope(step):
                self.exchanged[step] = run(self.axes(factor))
        return self.exchanged[step]

    def bind(self, *operands: Any, **changed: Any) -> Any:
        """Binds the primitive with its params, those in `changed` replaced."""
        return self.primitive.bind(*operands, **{**self.params, **changed})

    def _local(self, shape: Sequence[int], dims: Sequence[Sequence[int]]) -> tuple[int, ...]:
        return tuple(
            n // prod(self.axis_sizes[a] for f in dim for a in self.splits.get(f, ()))
            for n, dim in zip(shape, dims, strict=True)
        )

    def _dim_index(self, dim: Sequence[int]) -> Any:
        axes = tuple(a for f in dim for a in self.splits.get(f, ()))
        return lax.axis_index(axes) if axes else 0
