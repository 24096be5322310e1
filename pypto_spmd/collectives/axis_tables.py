"""The domains and tables of one axis's problem, which depend on small things that repeat, worked out once.

Models repeat the same few hundred equations thousands of times: everything here is kept by its arguments,
and equal tables are one object, which the solver recognises.
"""

from functools import lru_cache
from math import prod

import numpy as np

from pypto_spmd.collectives.objective import (
    COLLECTIVE_COST,
    WHOLE_COST,
    Mobility,
    Option,
    move_cost,
    read_cost,
    read_table,
    store_cost,
    store_table,
)
from pypto_spmd.collectives.rules import Choice, Rule, choices
from pypto_spmd.collectives.solver.elimination import Table, intern_table
from pypto_spmd.sharding.layout import Label, P, R, S
from pypto_spmd.sharding.redistribute import wire_bytes


@lru_cache(maxsize=100_000)
def local_sizes(rule: Rule, theirs: tuple[Choice, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of a rule's factors, local to the other axes' choices."""
    local = [f.size for f in rule.factors]
    for choice, n in zip(theirs, sizes, strict=True):
        if choice.factor >= 0:
            local[choice.factor] //= n
    return tuple(local)


def whole_choices(
    rule: Rule, theirs: tuple[Choice, ...], sizes: tuple[int, ...], axis_size: int
) -> tuple[Choice, ...]:
    """The one choice of what an axis must not split."""
    return choices(rule, local_sizes(rule, theirs, sizes), axis_size)[:1]


@lru_cache(maxsize=100_000)
def choice_list(
    rule: Rule,
    theirs: tuple[Choice, ...],
    sizes: tuple[int, ...],
    mask: tuple[bool, ...],
    axis_size: int,
) -> tuple[Choice, ...]:
    """What an equation may choose: split first, since of equal costs the first is taken."""
    found = choices(rule, local_sizes(rule, theirs, sizes), axis_size)
    split = tuple(c for c in found if c.factor >= 0 and mask[c.factor])
    return split + tuple(c for c in found if c.factor < 0)


@lru_cache(maxsize=100_000)
def domain_of(
    shape: tuple[int, ...],
    mask: tuple[bool, ...],
    cuts: tuple[Option, ...],
    sizes: tuple[int, ...],
    axis_size: int,
    ops: frozenset[str],
) -> tuple[Option, ...]:
    """In which labels a tensor may be stored, split first.

    Args:
        shape: global shape.
        mask: which dims may be split.
        cuts: how the other axes store it (empty if no dim may be split).
        sizes: sizes of the other axes.
        axis_size: size of this one.
        ops: reductions that it may be waiting for.
    """
    found: list[Option] = []
    for dim, size in enumerate(shape):
        if not mask[dim]:
            continue
        pieces = axis_size * prod(
            n for option, n in zip(cuts, sizes, strict=True) if S(dim) in option
        )
        if size % pieces == 0:
            found.append((S(dim),))
    found.append((R,))
    found.extend((P(op),) for op in sorted(ops))
    return tuple(found)


@lru_cache(maxsize=100_000)
def partial_makers(
    found: tuple[Choice, ...],
) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]:
    """(reduction, operands of which one must be partial, results that are) of a list of choices."""
    makers = []
    for choice in found:
        for op in {label.op for label in choice.results if label.kind == "P"}:
            needs = tuple(i for i, label in enumerate(choice.operands) if label == P(op))
            results = tuple(i for i, label in enumerate(choice.results) if label == P(op))
            makers.append((op, needs if choice.linear >= 0 else (), results))
    return tuple(makers)


@lru_cache(maxsize=100_000)
def equation_tables(
    rule: Rule,
    found: tuple[Choice, ...],
    theirs: tuple[Choice, ...],
    sizes: tuple[int, ...],
    axis_size: int,
    weight: float,
    work: float,
    reads: tuple[tuple[tuple[int, ...], tuple[Option, ...], Mobility], ...],
    results: tuple[tuple[tuple[Option, ...], Mobility], ...],
    read_bytes: tuple[int, ...],
    result_bytes: tuple[int, ...],
    scattered: tuple[tuple[bool, ...], ...],
) -> tuple[Table | None, tuple[Table | None, ...], tuple[Table | None, ...]]:
    """The tables of one equation: of its choice, and of its choice with each operand and result."""

    def local_bytes(whole: int, labels: list[Label]) -> float:
        return whole / prod(n for label, n in zip(labels, sizes, strict=True) if label.kind == "S")

    read_tables = []
    operand_bytes = 0.0
    for (positions, options, moves), whole in zip(reads, read_bytes, strict=True):
        size = tuple(local_bytes(whole, [c.operands[p] for c in theirs]) for p in positions)
        operand_bytes += sum(size)
        targets = tuple(tuple(c.operands[p] for p in positions) for c in found)
        table = read_table(options, targets, size, axis_size, moves, weight)
        read_tables.append(table if table.array.any() else None)
    store_tables = []
    for position, ((options, moves), whole) in enumerate(zip(results, result_bytes, strict=True)):
        labels = [c.results[position] for c in theirs]
        size = local_bytes(whole, labels)
        for label, n, split in zip(labels, sizes, scattered[position], strict=True):
            # What another axis scatters is scattered before this one moves it, or together with it.
            size /= n if split and label.kind == "P" else 1
        made = tuple(c.results[position] for c in found)
        table = store_table(options, made, size, axis_size, moves, weight)
        store_tables.append(table if table.array.any() else None)
    local = local_sizes(rule, theirs, sizes)
    costs = []
    for choice in found:
        if choice.factor < 0:
            unsplit = operand_bytes * work * (axis_size - 1) / axis_size if rule.works else 0.0
            costs.append(WHOLE_COST + weight * unsplit)
            continue
        after = list(local)
        after[choice.factor] //= axis_size
        costs.append(
            weight
            * sum(
                wire_bytes(e.kind, e.full_elements(after, axis_size) * e.itemsize, axis_size)
                + COLLECTIVE_COST
                for e in rule.factors[choice.factor].exchanges_for(
                    rule.factors[choice.factor].size // after[choice.factor]
                )
            )
        )
    return unary(tuple(costs)), tuple(read_tables), tuple(store_tables)


@lru_cache(maxsize=100_000)
def unary(costs: tuple[float, ...]) -> Table:
    return intern_table(np.array(costs, dtype=float))


@lru_cache(maxsize=100_000)
def link_table(
    kind: str,
    source: tuple[Option, ...],
    target: tuple[Option, ...],
    size: float,
    axis_size: int,
    mobility: Mobility,
    weight: float,
    keep_stacks: bool,
) -> Table:
    """Table (stored source, stored target) of binding one tensor to another."""
    rows = [
        [
            _bind_cost(kind, s, t[0], size, axis_size, mobility, weight, keep_stacks)
            + weight * store_cost(t[0], t, size, axis_size, mobility)
            for t in target
        ]
        for s in source
    ]
    return intern_table(np.array(rows))


def _bind_cost(
    kind: str,
    source: Option,
    delivered: Label,
    size: float,
    axis_size: int,
    mobility: Mobility,
    weight: float,
    keep_stacks: bool,
) -> float:
    """What it costs to bind a tensor stored as `source` to one that is bound as `delivered`."""
    if kind == "same":
        return 0.0 if source == (delivered,) else np.inf
    if kind == "ys":
        cost = weight * read_cost(source, slice_label(delivered), size, axis_size, mobility)
        if piled_label(source, delivered) != delivered:
            cost -= (weight - 1) * COLLECTIVE_COST  # reduced once
        return cost
    if kind != "xs":
        return weight * read_cost(source, delivered, size, axis_size, mobility)
    best = np.inf
    for wanted in stack_labels(delivered):
        for member in source:
            if keep_stacks and member.kind != "R" and wanted.kind == "R":
                continue  # a stack is never gathered whole: its slices are, inside the loop
            best = min(best, weight * move_cost(member, wanted, size, axis_size, mobility))
    return best


def slice_label(stack: Label) -> Label:
    """The label of one slice of a stack that is made slice by slice; the leading dim is cut after it."""
    if stack.kind != "S":
        return stack
    return S(stack.dim - 1) if stack.dim else R


def piled_label(inner: Option, stack: Label) -> Label:
    """The label in which a stack is made of slices: partial ones are reduced together, after the loop."""
    if stack.kind == "R" and all(member.kind == "P" for member in inner):
        return inner[0]
    return R if stack == S(0) else stack


def stack_labels(inner: Label) -> tuple[Label, ...]:
    """In which labels a stack can be read slice by slice so that a slice is `inner`."""
    if inner == P("sum"):
        return (P("sum"), S(0))  # only the owner of the slice has it
    return (S(inner.dim + 1) if inner.kind == "S" else inner,)
