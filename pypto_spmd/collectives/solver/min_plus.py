"""Cost tables and their memoised min-plus operations.

A cost table holds one float64 per combination of labels; ``inf`` forbids the combination. The layers
of a network give the same few hundred tables thousands of times, so tables are *hash-consed*: equal
arrays are one :class:`Table` object, and every operation is remembered by the identity of its
operands. Every operation returns its result as ``(constant, table)``, where the table's least entry
is 0 and the constant holds what was subtracted: big costs then never hide small differences, and
the messages of repeated layers are the same tables. ``None`` stands for a table of zeros.

Invariant: an operation's result depends on the contents of its operands alone, so forgetting what is
remembered changes the running time and nothing else.
"""

import hashlib
import math
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike

CACHED_ENTRIES_PER_TABLE = 200_000
"""Larger tables are neither hash-consed nor remembered: they rarely repeat, and they fill the memory."""

CACHED_ENTRIES = 30_000_000
"""All remembered results together; beyond it everything is forgotten at once."""

_SMALL_UNION = 20_000
_SHORT_KEY_BYTES = 256


class Table:
    """An immutable cost table; equal small tables are the same object.

    Made by :func:`intern_table`.

    Attributes:
        array: the costs, read-only float64, one axis per variable of the scope.
        shape: the shape of ``array``.
        views: one :class:`View` per axis.
    """

    __slots__ = ("__weakref__", "array", "shape", "views")

    def __init__(self, array: np.ndarray) -> None:
        array.setflags(write=False)
        self.array = array
        self.shape = array.shape
        self.views = tuple([View(self, axis) for axis in range(array.ndim)])

    def __repr__(self) -> str:
        return f"Table(shape={self.shape})"


class View:
    """A table as seen by the variable on one of its axes: the unit by which results are remembered."""

    __slots__ = ("_regret", "_restricted", "axis", "cached", "table")

    def __init__(self, table: Table, axis: int) -> None:
        self.table = table
        self.axis = axis
        self.cached = table.array.size <= CACHED_ENTRIES_PER_TABLE
        self._restricted: dict[tuple[int, ...], Normalised] = {}
        self._regret: tuple[np.ndarray, np.ndarray] | None = None

    def restrict(self, keep: tuple[int, ...]) -> "Normalised":
        """Keeps only some labels of this axis's variable; a single one removes the axis.

        Args:
            keep: positions of the labels that stay, ascending.
        """
        result = self._restricted.get(keep)
        if result is None:
            array = self.table.array
            index = keep[0] if len(keep) == 1 else list(keep)
            result = normalise(array[(slice(None),) * self.axis + (index,)])
            if self.cached:
                self._restricted[keep] = result
        return result

    def regret(self) -> tuple[np.ndarray, np.ndarray]:
        """What it costs at least, in this table, to have one label rather than another.

        Returns:
            ``possible``, (labels,): whether any combination allows the label; and ``regret``,
            (labels, labels): the least of ``table[r] - table[t]`` over the other variables' labels,
            +inf where ``r`` is forbidden throughout and -inf where ``t`` is forbidden but ``r`` is not.
        """
        if self._regret is None:
            rows = _own_axis_first(self)
            rows = rows.reshape(rows.shape[0], -1)
            with np.errstate(invalid="ignore"):
                if rows.size * rows.shape[0] <= CACHED_ENTRIES_PER_TABLE:
                    # inf - inf is nan: no constraint, which fmin passes over.
                    regret = np.fmin.reduce(rows[:, None, :] - rows[None, :, :], axis=2)
                else:
                    regret = np.stack([np.fmin.reduce(row - rows, axis=1) for row in rows])
            regret[np.isnan(regret)] = math.inf
            self._regret = rows.min(axis=1) < math.inf, regret
        return self._regret


Normalised = tuple[float, Table | None]


@dataclass(frozen=True, slots=True)
class Elimination:
    """The result of minimising a variable out of its tables.

    Attributes:
        constant: the least sum over everything; inf if no combination is allowed.
        message: least sum over the variable, less ``constant``; its axes are the neighbours, ascending.
        choice: the least best label of the variable, with the same axes.
    """

    constant: float
    message: Table | None
    choice: np.ndarray


_tables: WeakValueDictionary[object, Table] = WeakValueDictionary()
_normalised: dict[Table, Normalised] = {}
_transposed: dict[tuple[Table, tuple[int, ...]], Table] = {}
_sums: dict[tuple[Table, Table], Normalised] = {}
_eliminations: dict[object, Elimination] = {}
_kept: dict[tuple[View, ...], tuple[int, ...] | None] = {}
_remembered_entries = 0


def forget() -> None:
    """Drops every remembered result."""
    global _remembered_entries
    for memo in (_normalised, _transposed, _sums, _eliminations, _kept):
        memo.clear()
    _remembered_entries = 0


def intern_table(array: ArrayLike) -> Table:
    """Gives the one :class:`Table` that holds these costs.

    Args:
        array: costs, one axis per variable; inf forbids a combination.

    Returns:
        The same object for equal arrays (but for tables too large to remember).

    Raises:
        ValueError: an entry is nan or -inf.
    """
    costs = np.array(array, dtype=np.float64, order="C")
    if not np.all(costs > -math.inf):
        raise ValueError("a cost table must not hold nan or -inf")
    return _intern(costs)


def _intern(array: np.ndarray) -> Table:
    """``intern_table`` for an array that is ours, contiguous and free of nan."""
    if array.size > CACHED_ENTRIES_PER_TABLE:
        return Table(array)
    array += 0.0  # -0.0 and 0.0 are one cost, but two bit patterns
    content = array.tobytes()
    if len(content) > _SHORT_KEY_BYTES:
        content = hashlib.blake2b(content, digest_size=20).digest()
    key = (array.shape, content)
    table = _tables.get(key)
    if table is None:
        table = _tables[key] = Table(array)
        _count(array.size)
    return table


def _count(entries: int) -> None:
    global _remembered_entries
    _remembered_entries += entries
    if _remembered_entries > CACHED_ENTRIES:
        forget()


def normalise(array: np.ndarray) -> Normalised:
    """Splits costs into their least entry and the table of differences to it."""
    least = float(array.min())
    if least == math.inf:
        return least, None
    if array.ndim == 0:
        return least, None
    if least:
        array = array - least
    if not array.any():
        return least, None
    return least, _intern(np.array(array, order="C"))


def normalise_table(table: Table) -> Normalised:
    """:func:`normalise` of a table."""
    result = _normalised.get(table)
    if result is None:
        result = normalise(table.array)
        if table.array.size <= CACHED_ENTRIES_PER_TABLE:
            _normalised[table] = result
    return result


def transpose(table: Table, axes: tuple[int, ...]) -> Table:
    """The table with its axes in another order, as ``numpy.transpose``."""
    key = (table, axes)
    result = _transposed.get(key)
    if result is None:
        result = _intern(np.array(table.array.transpose(axes), order="C"))
        if table.array.size <= CACHED_ENTRIES_PER_TABLE:
            _transposed[key] = result
    return result


def add(first: Table, second: Table) -> Normalised:
    """The sum of two tables of one scope."""
    key = (first, second)
    result = _sums.get(key)
    if result is None:
        result = normalise(first.array + second.array)
        if first.array.size <= CACHED_ENTRIES_PER_TABLE:
            _sums[key] = result
    return result


def kept_labels(views: tuple[View, ...]) -> tuple[int, ...] | None:
    """Which labels of a variable can't be dispensed with (Goldstein's dead-end elimination).

    Label ``r`` goes when some label ``t`` that stays is never worse, whatever the neighbours do:
    the sum over the tables of the least ``table[r] - table[t]`` is at least 0. Labels are tried from
    the last to the first, so of two equal ones the lower stays, and never do both go.

    Args:
        views: the variable's tables; if one of them is large, nothing is tried.

    Returns:
        Positions of the labels that stay, empty if none is possible; None if all stay.
    """
    try:
        return _kept[views]
    except KeyError:
        if not all(view.cached for view in views):
            return None
    possible, total = views[0].regret()
    with np.errstate(invalid="ignore"):
        for view in views[1:]:
            also_possible, regret = view.regret()
            possible = possible & also_possible
            total = total + regret  # nan at most where one of the two labels is impossible
    labels = [label for label, is_possible in enumerate(possible.tolist()) if is_possible]
    never_better = (total >= 0.0).tolist()
    kept = list(labels)
    for label in reversed(labels):
        if any(never_better[label][other] for other in kept if other != label):
            kept.remove(label)
    keep = tuple(kept)
    result = None if len(keep) == len(possible) else keep
    _kept[views] = result
    _count(16)
    return result


def aligned(view: View, positions: tuple[int, ...], rank: int) -> np.ndarray:
    """The view's costs with its own axis first and the others at ``1 + positions``, to broadcast."""
    array = _own_axis_first(view)
    shape = [array.shape[0]] + [1] * rank
    for position, size in zip(positions, array.shape[1:], strict=True):
        shape[1 + position] = size
    return array.reshape(shape)


def least_loss(views: tuple[View, ...]) -> tuple[float, int]:
    """Which label of a variable can be dropped at the least loss, whatever the neighbours do.

    Args:
        views: the variable's tables; each allows every label somewhere.

    Returns:
        The most that could be lost (inf if one of the tables is large), and the position of the label.
    """
    if not all(view.cached for view in views):
        return math.inf, 0
    total = sum(view.regret()[1] for view in views)
    losses = np.maximum(-total, 0.0)
    np.fill_diagonal(losses, math.inf)
    least = losses.min(axis=1)
    label = len(least) - 1 - int(least[::-1].argmin())
    return float(least[label]), label


def _own_axis_first(view: View) -> np.ndarray:
    array, axis = view.table.array, view.axis
    return array.transpose(axis, *range(axis), *range(axis + 1, array.ndim)) if axis else array


def eliminate(
    views: tuple[View, ...],
    pattern: tuple[tuple[int, ...], ...] | None,
    labels: int,
    shape: tuple[int, ...],
) -> Elimination:
    """Adds the tables of a variable and minimises over it.

    Args:
        views: the variable's tables, each with its other axes in ascending order of variables.
        pattern: for each view, the positions of its other variables among the neighbours; None if
            each has at most one other variable, and these are the neighbours in order.
        labels: number of labels of the variable.
        shape: numbers of labels of the neighbours.
    """
    key = (views, pattern)
    result = _eliminations.get(key)
    if result is not None:
        return result
    if pattern is None:
        places = iter(range(len(shape)))
        pattern = tuple([() if view.table.array.ndim == 1 else (next(places),) for view in views])
    operands = [
        aligned(view, positions, len(shape)) for view, positions in zip(views, pattern, strict=True)
    ]
    operands.sort(key=np.size)  # small sums first, so that few of them are of the full size
    entries = math.prod(shape)
    if not operands:
        least, choice = np.zeros(shape), np.zeros(shape, dtype=np.uint8)
    elif entries * labels <= _SMALL_UNION:
        total = np.broadcast_to(_total(operands), (labels, *shape))
        choice = total.argmin(axis=0)
        choice = choice.astype(np.min_scalar_type(labels))
        least = total.min(axis=0)
    else:
        # Label by label: the full union never exists, only tables of the message's size.
        least = np.array(np.broadcast_to(_total([cost[0] for cost in operands]), shape))
        choice = np.zeros(shape, dtype=np.min_scalar_type(labels))
        for label in range(1, labels):
            total = _total([cost[label] for cost in operands])
            better = total < least
            np.copyto(least, total, where=better)
            choice[better] = label
    constant, message = normalise(least)
    result = Elimination(constant, message, choice)
    if entries <= CACHED_ENTRIES_PER_TABLE and all(view.cached for view in views):
        _eliminations[key] = result
        _count(entries)
    return result


def _total(operands: list[np.ndarray]) -> np.ndarray:
    total = operands[0]
    for operand in operands[1:]:
        total = total + operand
    return total
