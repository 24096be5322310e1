"""The graph of a traced function, as the planner sees it: blocks of equations over numbered tensors.

Invariant: tensors are numbered in program order, and every tensor is defined once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend.core import Literal, Primitive
from jax.sharding import PartitionSpec

from pypto_spmd.collectives.effects import ACTIONS, is_ordered
from pypto_spmd.collectives.region import Region
from pypto_spmd.collectives.rules import Aval, Rule
from pypto_spmd.collectives.source import Source


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A value known while tracing: a literal or a small captured array."""

    value: Any
    aval: Aval


Atom = int | Constant
"""What an equation reads: a tensor by its number, or a constant."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Straight-line code.

    Args:
        inputs: tensors defined outside and bound on entry.
        equations: in program order.
        outputs: what the block gives back.
        weight: how often it runs in one call (of a loop without a known trip count: an assumption).
        repeat: how often it runs, None if that is not known before it runs.
    """

    inputs: tuple[int, ...]
    equations: "tuple[Equation, ...]"
    outputs: tuple[Atom, ...]
    weight: float = 1.0
    repeat: int | None = 1


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """One primitive application, or one with bodies: a loop, or a region.

    Args:
        index: number of the equation in the whole graph.
        primitive: the JAX primitive.
        params: its params.
        inputs: tensors and constants that it reads.
        outputs: tensors that it defines.
        rule: its rule; None if it has bodies.
        source: where in the user's code it stands.
        scope: its name scope ("jvp(Block_6)/Dense_0"); tells the layer, and the backward pass.
        bodies: of `scan` and `shard_map` (body,), of `while` (cond, body), of `cond` the branches.
        counts: of `scan` (consts, carry, xs), of `while` (cond consts, body consts, carry).
        constraint: the layout that `with_sharding_constraint` asks for here.
        region: of `shard_map`, what its specs fix.
    """

    index: int
    primitive: Primitive
    params: Mapping[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    rule: Rule | None
    source: Source
    scope: str
    bodies: tuple[Block, ...] = ()
    counts: tuple[int, ...] = ()
    constraint: PartitionSpec | None = None
    region: Region | None = None

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return self.primitive.name

    @property
    def ruled(self) -> Rule:
        """The rule of an equation that is no loop."""
        assert self.rule is not None
        return self.rule

    @property
    def entered(self) -> Region:
        """The region of an equation that is one."""
        assert self.region is not None
        return self.region

    @property
    def is_backward(self) -> bool:
        """Whether the equation was made by transposing, that is, belongs to a backward pass."""
        return "transpose(" in self.scope

    @property
    def acts_in_order(self) -> bool:
        """Whether it acts on the world and has to come after what acted before, itself or in a body."""
        if self.bodies:
            return any(e.acts_in_order for body in self.bodies for e in body.equations)
        return self.name in ACTIONS and is_ordered(self.params)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A whole traced function.

    Args:
        avals: the `Aval` of every tensor, by number.
        names: name of a tensor that has one (argument paths, outputs), by number.
        block: the function's body; its inputs are the function's flat arguments.
        padded: tensors that are an argument, padded and laid out as it was to be -> which argument.
    """

    avals: tuple[Aval, ...]
    names: Mapping[int, str]
    block: Block
    padded: Mapping[int, int] = field(default_factory=dict)

    def blocks(self) -> Iterator[Block]:
        """All blocks, outer before inner."""
        yield from blocks_of(self.block)

    def equations(self) -> Iterator[tuple[Equation, Block]]:
        """All equations with the block they stand in, in program order, loops before their bodies."""
        for block in self.blocks():
            for equation in block.equations:
                yield equation, block

    def aval(self, atom: Atom) -> Aval:
        """The `Aval` of a tensor or constant."""
        return atom.aval if isinstance(atom, Constant) else self.avals[atom]


def blocks_of(block: Block) -> Iterator[Block]:
    """A block and all blocks in it, outer before inner."""
    yield block
    for equation in block.equations:
        for body in equation.bodies:
            yield from blocks_of(body)


def aval_of(value: Any) -> Aval:
    """The `Aval` of a jaxpr variable or literal."""
    aval = value.aval
    shape = tuple(int(n) for n in getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", np.dtype(bool))
    if isinstance(value, Literal) and not shape and isinstance(dtype, np.dtype):
        return Aval(shape, dtype, np.asarray(value.val).item())
    return Aval(shape, dtype)
