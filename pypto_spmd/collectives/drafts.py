"""Items of a schedule before their collectives are numbered."""

from dataclasses import dataclass

from pypto_spmd.collectives.graph import Block, Equation
from pypto_spmd.sharding.layout import Layout
from pypto_spmd.sharding.redistribute import Leg


@dataclass(slots=True, eq=False)
class DraftConvert:
    """A leg to be run; `bucket` is shared by those that travel together."""

    tensor: int
    leg: Leg
    reader: Equation | None
    block: Block
    bucket: int = -1


@dataclass(slots=True, eq=False)
class DraftRun:
    """An equation to be run."""

    equation: Equation
    block: Block
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    bodies: "tuple[DraftBlock, ...]" = ()


@dataclass(slots=True, eq=False)
class DraftBlock:
    """A block's items in order, with the layouts of its ends."""

    block: Block
    inputs: tuple[Layout, ...]
    items: list[DraftConvert | DraftRun]
    outputs: tuple[Layout, ...]
