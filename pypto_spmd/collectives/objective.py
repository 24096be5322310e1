"""What a labelling costs: wire bytes, and the weights that make it the textbook plan.

`"bytes"` counts wire bytes, and charges matrix work that is not split (`WORK`). `"standard"` moves only
along dims that some given layout asks for, and makes it dear to move what a textbook layout holds still:
the data on an axis over which data is split, the state on the others (`HOLD`). No rule that looks at
shardings alone could tell fully sharded data parallelism from tensor parallelism: what is state can.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from pypto_spmd.collectives.solver.min_plus import Table, intern_table
from pypto_spmd.sharding.layout import IDEMPOTENT, Label
from pypto_spmd.sharding.redistribute import wire_bytes

WORK = 0.4
"""Bytes charged for each operand byte of a dot or conv that an axis does not split."""

HOLD = 1024.0
"""By how much moving a tensor is made dearer on an axis that should hold it still."""

COLLECTIVE_COST = 1e-3
"""Of equal bytes, fewer collectives."""

WHOLE_COST = 1e-6
"""Then, more split: charged for a tensor or equation that an axis does not split."""

MASK_COST = 2e-4
"""Masking a whole tensor to a partial one is no reason to reduce late."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The weights of one objective.

    Args:
        name: "standard" or "bytes".
        work: see `WORK`.
        hold: see `HOLD`; 1 charges bytes alone.
        closure: whether only dims that a given layout asks for may be split.
        keep_stacks: whether a stack that a loop reads slice by slice is never gathered whole (that may send
            less, but would hold the whole model).
    """

    name: str
    work: float = WORK
    hold: float = HOLD
    closure: bool = True
    keep_stacks: bool = True


OBJECTIVES = {
    "standard": Objective("standard"),
    "bytes": Objective("bytes", hold=1.0, closure=False, keep_stacks=False),
}


@dataclass(frozen=True, slots=True, eq=False)
class Mobility:
    """By how much each kind of move of one tensor is made dearer on one axis; made by `mobility`.

    Args:
        gather: AllGather and AllToAll.
        reduce: AllReduce and ReduceScatter.
        free_pairs: (from dim, to dim) of AllToAlls that cost their bytes once (token to expert dims).
        whole: AllGather and ReduceScatter, on top: of a stack of layers, which a loop moves slice by slice.
    """

    gather: float = 1.0
    reduce: float = 1.0
    free_pairs: tuple[tuple[int, int], ...] = ()
    whole: float = 1.0


@cache
def mobility(
    gather: float = 1.0,
    reduce: float = 1.0,
    free_pairs: tuple[tuple[int, int], ...] = (),
    whole: float = 1.0,
) -> Mobility:
    """The one `Mobility` with these weights."""
    return Mobility(gather, reduce, free_pairs, whole)


FREE = mobility()
"""Of a tensor that may be moved at the price of its bytes."""

Option = tuple[Label, ...]
"""The labels in which a stored tensor exists on an axis: usually one."""


@lru_cache(maxsize=100_000)
def move_cost(
    source: Label, target: Label, size: float, axis_size: int, mobility: Mobility
) -> float:
    """What it costs to relabel a tensor of `size` bytes (whole over the axis)."""
    if source == target:
        return 0.0
    if target.kind == "P":
        if source.kind == "R":
            return 0.0 if target.op in IDEMPOTENT else MASK_COST
        return move_cost(source, Label("R"), size, axis_size, mobility) + MASK_COST
    if source.kind == "R":
        return 0.0
    if source.kind == "P":
        if target.kind == "S" and source.op == "sum":
            sent = wire_bytes("reduce_scatter", size, axis_size) * mobility.whole
        else:
            sent = wire_bytes("all_reduce", size, axis_size)
        return sent * mobility.reduce + COLLECTIVE_COST
    if target.kind == "S":
        held = 1.0 if (source.dim, target.dim) in mobility.free_pairs else mobility.gather
        return wire_bytes("all_to_all", size, axis_size) * held + COLLECTIVE_COST
    held = mobility.gather * mobility.whole
    return wire_bytes("all_gather", size, axis_size) * held + COLLECTIVE_COST


@lru_cache(maxsize=100_000)
def read_cost(
    option: Option, target: Label, size: float, axis_size: int, mobility: Mobility
) -> float:
    """What it costs to read a stored tensor in `target`: the cheapest member serves."""
    return min(move_cost(member, target, size, axis_size, mobility) for member in option)


@lru_cache(maxsize=100_000)
def store_cost(
    made: Label, option: Option, size: float, axis_size: int, mobility: Mobility
) -> float:
    """What it costs to make every member of `option` from a tensor made in `made`."""
    missing, have, cost = set(option), [made], 0.0
    while missing:
        step, target = min(
            (read_cost(tuple(have), m, size, axis_size, mobility), m) for m in sorted(missing)
        )
        cost += step
        have.append(target)
        missing.remove(target)
    return cost


@lru_cache(maxsize=100_000)
def read_table(
    options: tuple[Option, ...],
    targets: tuple[tuple[Label, ...], ...],
    size: tuple[float, ...],
    axis_size: int,
    mobility: Mobility,
    weight: float,
) -> Table:
    """Table (choice, stored option) of reading one tensor.

    Args:
        options: the stored tensor's domain.
        targets: for each choice, the labels it reads the tensor in (several where one equation reads one
            tensor several times).
        size: bytes for each of those reads, local to the other axes.
        axis_size: devices along the axis.
        mobility: of the tensor on this axis.
        weight: how often it happens.
    """
    rows = []
    for wanted in targets:
        row = []
        for option in options:
            # Equal labels are read once; the conversion is shared.
            pairs = dict(zip(wanted, size, strict=True))
            row.append(
                weight * sum(read_cost(option, t, s, axis_size, mobility) for t, s in pairs.items())
            )
        rows.append(row)
    return intern_table(np.array(rows))


@lru_cache(maxsize=100_000)
def store_table(
    options: tuple[Option, ...],
    made: tuple[Label, ...],
    size: float,
    axis_size: int,
    mobility: Mobility,
    weight: float,
) -> Table:
    """Table (choice, stored option) of storing one result made in `made[choice]`."""
    return intern_table(
        np.array(
            [
                [weight * store_cost(m, option, size, axis_size, mobility) for option in options]
                for m in made
            ]
        )
    )


@lru_cache(maxsize=100_000)
def preference_table(options: tuple[Option, ...]) -> Table:
    """Unary table that prefers stored tensors to be split."""

    def cost(option: Option) -> float:
        kinds = {label.kind for label in option}
        return 0.0 if kinds == {"S"} else MASK_COST if "P" in kinds else WHOLE_COST

    return intern_table(np.array([cost(o) for o in options]))
