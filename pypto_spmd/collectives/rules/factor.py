"""Rules as data: how the dims of a primitive's operands and results correspond.

A rule is written in einsum form, `"b i k, b k j -> b i j"`: every letter is a *factor*, a dim that
operands and results share. Which labels are legal on a mesh axis then follows for all rules in one
place (`choices`):

- a factor may be split over the axis: the operands and results that have it are `S` there, the
  operands that lack it are `R`, and the results that lack it are partial (if the factor is reduced),
  or whole (if the primitive itself exchanges what is missing);
- a group of operands in which the primitive is linear may be partial, and then so are the results;
- all may be replicated.

Parentheses give a dim several factors, major first (`"(a b) c -> a b c"`), of which only the first
that is not yet exhausted can be split. `_` is a dim that must be whole.

Invariant: a rule is stated for global shapes. How large a factor is on one device depends on the other
axes, and is asked of the equation (`local_sizes`).
"""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any

from pypto_spmd.sharding.layout import Label, P, R, S

Dims = tuple[tuple[int, ...], ...]
"""For each dim of one tensor, the indices of its factors, major first; `()` where it must be whole."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective that a primitive runs itself when a factor is split.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "collective_permute".
        factors: the factors whose local sizes multiply to the number of elements...
        elements: ... times this constant. The product counts the tensor that is whole over the group, as
            `redistribute.wire_bytes` does; for CollectivePermute what one device sends.
        itemsize: bytes of one element.
        per_shard: whether each of the n devices contributes that many (the whole is n times larger).
        what: what is exchanged, in words, for the plan ("block totals", "the halo of 2 rows").
        reduce_op: reduction of an AllReduce or ReduceScatter.
        count: where the number of elements is no such product, a function that gives it from the local
            sizes of all factors (the halos of two dims meet in a corner).
        sent: an operand, what of it is sent, and for other dims what they hold by then, given their number
            of shards. Of exchanges over the same axes that send the same of one tensor in one layout, the
            first does for all (a convolution and its gradient need one halo).
    """

    kind: str
    factors: tuple[int, ...]
    elements: float
    itemsize: int
    per_shard: bool = False
    what: str = ""
    reduce_op: str = ""
    count: Callable[[Sequence[int]], float] | None = None
    sent: tuple[int, Hashable, Mapping[int, Callable[[int], Hashable]]] | None = None

    def full_elements(self, local_sizes: Sequence[int], group: int) -> float:
        """Elements of the whole tensor, when `group` devices take part."""
        if self.count is not None:
            return self.count(local_sizes)
        count = self.elements * prod(local_sizes[f] for f in self.factors)
        return count * group if self.per_shard else count


@dataclass(frozen=True, slots=True)
class Factor:
    """One dim that operands and results share.

    Args:
        name: the letter in the notation.
        size: global size.
        reduce: reduction that results lacking this factor are waiting for when it is split ("" if none).
        partial_operands: operands that lack the factor and must be partial, not replicated, when it is
            split (the accumulator of a scatter-add, of which only one device may count).
        exchanges: collectives the primitive runs itself when the factor is split, or a function that gives
            them for a number of shards; read them by `exchanges_for`. With exchanges and no `reduce`, a
            result that lacks the factor comes out whole.
        min_local: least size on one device (a halo must fit in the neighbour's block).
        splittable: whether it may be split at all.
    """

    name: str
    size: int
    reduce: str = ""
    partial_operands: tuple[int, ...] = ()
    exchanges: tuple[Exchange, ...] | Callable[[int], tuple[Exchange, ...]] = ()
    min_local: int = 1
    splittable: bool = True

    def exchanges_for(self, shards: int) -> tuple[Exchange, ...]:
        """The collectives that the primitive runs itself when the factor is cut into `shards` pieces."""
        return self.exchanges(shards) if callable(self.exchanges) else self.exchanges


@dataclass(frozen=True, slots=True)
class Linear:
    """A group of operands that may be partial together; then every result is.

    Args:
        operands: indices of the operands that must be partial; the others are replicated.
        ops: the reductions for which this holds ("sum" for linear maps, "max" for monotone ones, ...).
    """

    operands: frozenset[int]
    ops: tuple[str, ...] = ("sum",)


Bind = Callable[..., Any]
"""`bind(context, *local_operands) -> result or sequence of results`, see `context.Context`."""


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """What one equation allows on a mesh axis, and how it runs on shards.

    Args:
        operands: for each operand, the factors of its dims.
        results: the same for the results.
        factors: the factors that the indices above mean.
        linear: groups of operands in which the primitive is linear.
        bind: runs the primitive on local operands; None binds it with its own params.
        works: whether it is matrix work (a dot or conv), which ought to be split.
        reason: why the primitive must run whole, or why some of its dims must be.

    Rules are compared by identity: `registry.rule_for` makes one a signature.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    factors: tuple[Factor, ...] = ()
    linear: tuple[Linear, ...] = ()
    bind: Bind | None = None
    works: bool = False
    reason: str = ""

    def factor(self, name: str) -> int:
        """Index of the factor called `name`."""
        for index, factor in enumerate(self.factors):
            if factor.name == name:
                return index
        raise KeyError(name)

    def __str__(self) -> str:
        def show(tensors: tuple[Dims, ...]) -> str:
            return ", ".join(" ".join(self._show_dim(d) for d in dims) for dims in tensors)

        return f"{show(self.operands)} -> {show(self.results)}"

    def _show_dim(self, dim: tuple[int, ...]) -> str:
        names = [self.factors[f].name for f in dim]
        return "_" if not names else names[0] if len(names) == 1 else "(" + " ".join(names) + ")"


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One legal labelling of an equation on one mesh axis; one object a rule and labelling.

    Args:
        operands: label of each operand.
        results: label of each result.
        factor: index of the factor that is split, -1 if none.
        linear: index of the linear group that is partial, -1 if none.
        op: the reduction of that group.
    """

    operands: tuple[Label, ...]
    results: tuple[Label, ...]
    factor: int = -1
    linear: int = -1
    op: str = ""


@cache
def choices(rule: Rule, local_sizes: tuple[int, ...], axis_size: int) -> tuple[Choice, ...]:
    """Every legal labelling of an equation on an axis of `axis_size`, all-replicated first.

    Args:
        rule: the equation's rule.
        local_sizes: for each factor its size on one device, the other axes' splits counted.
        axis_size: size of the mesh axis.
    """
    whole, linear = _unsplit_choices(rule)
    found = [whole]
    for index in range(len(rule.factors)):
        if _may_split(rule, index, local_sizes, axis_size):
            choice = _split_choice(rule, index)
            if choice is not None:
                found.append(choice)
    return (*found, *linear)


@cache
def _unsplit_choices(rule: Rule) -> tuple[Choice, tuple[Choice, ...]]:
    """All replicated; and the linear groups, each for each of its reductions."""
    whole = Choice((R,) * len(rule.operands), (R,) * len(rule.results))
    linear = []
    for index, group in enumerate(rule.linear):
        for op in group.ops:
            operands = tuple(P(op) if i in group.operands else R for i in range(len(rule.operands)))
            linear.append(Choice(operands, (P(op),) * len(rule.results), linear=index, op=op))
    return whole, tuple(linear)


def can_split(rule: Rule, factor: int) -> bool:
    """Whether there is a size at which a factor may be split over an axis."""
    return rule.factors[factor].splittable and _split_choice(rule, factor) is not None


def _may_split(rule: Rule, index: int, local_sizes: Sequence[int], axis_size: int) -> bool:
    factor = rule.factors[index]
    size = local_sizes[index]
    if not factor.splittable or size % axis_size or size // axis_size < factor.min_local:
        return False
    # In a dim of several factors, only the first that is not exhausted can carry another axis.
    for dims in (*rule.operands, *rule.results):
        for dim in dims:
            if index in dim and any(local_sizes[f] > 1 for f in dim[: dim.index(index)]):
                return False
    return True


@cache
def _split_choice(rule: Rule, index: int) -> Choice | None:
    factor = rule.factors[index]
    operands, results = [], []
    for position, dims in enumerate(rule.operands):
        at = [d for d, dim in enumerate(dims) if index in dim]
        if len(at) > 1:
            return None
        lacking = P(factor.reduce or "sum") if position in factor.partial_operands else R
        operands.append(S(at[0]) if at else lacking)
    for dims in rule.results:
        at = [d for d, dim in enumerate(dims) if index in dim]
        if len(at) > 1:
            return None
        if at:
            results.append(S(at[0]))
        elif factor.reduce:
            results.append(P(factor.reduce))
        elif factor.exchanges:
            results.append(R)
        else:
            return None
    return Choice(tuple(operands), tuple(results), factor=index)


_TOKEN = re.compile(r"\([^)]*\)|\S+")


@lru_cache(maxsize=10_000)
def _parse(notation: str) -> tuple[tuple[tuple[tuple[str, ...], ...], ...], ...]:
    sides = notation.split("->")
    if len(sides) != 2:
        raise ValueError(f"factor notation {notation!r} needs exactly one '->'")

    def tensor(text: str) -> tuple[tuple[str, ...], ...]:
        dims = []
        for token in _TOKEN.findall(text):
            names = token[1:-1].split() if token.startswith("(") else [token]
            dims.append(tuple(n for n in names if n != "_"))
        return tuple(dims)

    def side(text: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
        return (
            tuple(tensor(t) for t in text.split(",")) if text.strip(" ,") or "," in text else ((),)
        )

    return side(sides[0]), side(sides[1])


def factor_rule(
    notation: str,
    ins: Sequence[tuple[int, ...]],
    outs: Sequence[tuple[int, ...]],
    *,
    sizes: Mapping[str, int] | None = None,
    reduce: Mapping[str, str] | None = None,
    linear: Sequence[Linear] = (),
    whole: Sequence[str] = (),
    exchanges: Mapping[str, Sequence[Exchange] | Callable[[int], tuple[Exchange, ...]]]
    | None = None,
    partial_operands: Mapping[str, Sequence[int]] | None = None,
    min_local: Mapping[str, int] | None = None,
    bind: Bind | None = None,
    works: bool = False,
) -> Rule:
    """A rule from its notation and the equation's global shapes.

    Args:
        notation: for example `"b i k, b k j -> b i j"`; a scalar is an empty tensor (`", i -> i"`).
        ins: global shape of each operand.
        outs: global shape of each result.
        sizes: sizes of factors that stand only in dims of several factors.
        reduce: factor name -> reduction of the results that lack it.
        linear: groups of operands in which the primitive is linear.
        whole: names of factors that must not be split.
        exchanges: factor name -> collectives run by the primitive itself, see `Factor`.
        partial_operands: factor name -> operands that must be partial when it is split.
        min_local: factor name -> least local size.
        bind: see `Rule`.
        works: see `Rule`.

    Raises:
        ValueError: if the notation does not fit the shapes.
    """
    left, right = _parse(notation)
    known: dict[str, int] = dict(sizes or {})
    order: dict[str, int] = {}
    for what, tensors, shapes in (("operand", left, ins), ("result", right, outs)):
        if len(tensors) != len(shapes):
            raise ValueError(f"{notation!r} has {len(tensors)} {what}s, the equation {len(shapes)}")
        for position, (dims, shape) in enumerate(zip(tensors, shapes, strict=True)):
            if len(dims) != len(shape):
                raise ValueError(
                    f"{notation!r}: {what} {position} has {len(dims)} dims, its shape is {tuple(shape)}"
                )
            for names, size in zip(dims, shape, strict=True):
                for name in names:
                    order.setdefault(name, len(order))
                if len(names) == 1 and known.setdefault(names[0], size) != size:
                    raise ValueError(
                        f"{notation!r}: factor {names[0]!r} is {known[names[0]]} and {size} at once"
                    )
    factors = tuple(
        Factor(
            name,
            known[name],
            reduce=(reduce or {}).get(name, ""),
            partial_operands=tuple((partial_operands or {}).get(name, ())),
            exchanges=made if callable(made := (exchanges or {}).get(name, ())) else tuple(made),
            min_local=(min_local or {}).get(name, 1),
            splittable=name not in whole,
        )
        for name in order
    )

    def dims_of(tensors: tuple[tuple[tuple[str, ...], ...], ...]) -> tuple[Dims, ...]:
        return tuple(tuple(tuple(order[n] for n in names) for names in dims) for dims in tensors)

    return Rule(dims_of(left), dims_of(right), factors, tuple(linear), bind, works)


def whole_rule(
    ins: Sequence[tuple[int, ...]], outs: Sequence[tuple[int, ...]], reason: str
) -> Rule:
    """The rule of a primitive that runs on whole operands, and why."""
    return Rule(
        tuple(((),) * len(s) for s in ins), tuple(((),) * len(s) for s in outs), reason=reason
    )
