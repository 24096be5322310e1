"""Rules that users state: a factor string, checked when it is registered and again at each equation.

The notation is that of `factor`, with `...` for any number of leading or inner dims that correspond to each
other: `"... d, d -> ... d"`. Letters stand for dims; `_` is a dim that must be whole; `()` is a scalar.

Invariant: a `UserRule` is right in itself (its names exist, its reductions are known). Whether it fits
an equation's shapes is known only there, and told by `Misfit`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NoReturn

import numpy as np

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Bind, Dims, Factor, Linear, Rule
from pypto_spmd.collectives.rules.registry import Aval
from pypto_spmd.errors import Fault, count_of, listed, quoted, raise_faults, refuse, shape_text
from pypto_spmd.sharding.layout import REDUCTIONS

ELLIPSIS = "..."
_TOKEN = re.compile(r"\(([^()]*)\)|([^\s()]+)|(.)")
_NAME = re.compile(r"[^\W\d]\w*$")

NamedDims = tuple[tuple[str, ...], ...]
"""For each dim of one tensor, the names of its factors, major first; `()` where it must be whole."""


class Misfit(ValueError):
    """A user's rule does not fit an equation.

    Args:
        fault: what, why and the way out.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(" ".join(fault.lines()))
        self.fault = fault

    def refuse(self, subject: str) -> NoReturn:
        """Raises the error that a user sees, about `subject`."""
        refuse(subject, self.fault.what, self.fault.why, self.fault.fix)


@dataclass(frozen=True, slots=True, eq=False)
class UserRule:
    """A rule as a user states it; make one with `user_rule`.

    Args:
        notation: the factor string.
        operands: its left side.
        results: its right side.
        reduce: factor -> reduction of the results that lack it.
        linear: groups of operands in which the function is linear.
        whole: factors that must not be split.
        bind: runs it on shards; None for the primitive or function itself.
        local_params: param -> the factors whose local sizes it holds.
    """

    notation: str
    operands: tuple[NamedDims, ...]
    results: tuple[NamedDims, ...]
    reduce: Mapping[str, str]
    linear: tuple[Linear, ...]
    whole: frozenset[str]
    bind: Bind | None = None
    local_params: Mapping[str, tuple[str, ...]] | None = None

    def at(
        self, ins: Sequence[Aval], outs: Sequence[Aval], *, bind: Bind, knows_results: bool = False
    ) -> Rule:
        """The rule of one equation.

        Args:
            ins: its operands.
            outs: its results.
            bind: what runs it on shards, if the user gave nothing.
            knows_results: whether that can make results whose local sizes no operand has.

        Raises:
            Misfit: if the notation does not fit the shapes.
        """
        fitted = self.expanded([len(a.shape) for a in ins], ins, outs)
        sizes = _sizes(fitted, ins, outs)
        names = list(sizes)
        of_operands = names_in(fitted.operands)
        made = {n for held in (self.local_params or {}).values() for n in held}
        free = knows_results or self.bind is not None
        factors = tuple(
            Factor(
                name,
                size,
                reduce=fitted.reduce.get(name, ""),
                splittable=name not in fitted.whole
                and (free or name in of_operands or name in made),
            )
            for name, size in sizes.items()
        )
        dims = lambda tensors: tuple(_indices(names, t) for t in tensors)  # noqa: E731
        return Rule(
            dims(fitted.operands), dims(fitted.results), factors, self.linear, self.bind or bind
        )

    def expanded(
        self, ranks: Sequence[int], ins: Sequence[Aval] = (), outs: Sequence[Aval] = ()
    ) -> "UserRule":
        """The rule with `...` written out for operands of these ranks.

        Raises:
            Misfit: if the numbers of operands or of their dims do not fit.
        """
        if len(ranks) != len(self.operands):
            has = count_of(len(self.operands), "operand")
            raise self.misfit(
                ins, outs, f"It has {has}, the call {len(ranks)}.", _SCALARS_ARE_STATIC
            )
        free = [
            rank - len(dims) + 1
            for dims, rank in zip(self.operands, ranks, strict=True)
            if (ELLIPSIS,) in dims
        ]
        count = max(free[0], 0) if free else 0
        widen = lambda dims: _widened(dims, count)  # noqa: E731
        more = {f"{ELLIPSIS}{i}" for i in range(count)} if ELLIPSIS in self.whole else set()
        op = self.reduce.get(ELLIPSIS)
        reduce = {n: r for n, r in self.reduce.items() if n != ELLIPSIS}
        reduce |= {f"{ELLIPSIS}{i}": op for i in range(count)} if op else {}
        return replace(
            self,
            operands=tuple(map(widen, self.operands)),
            results=tuple(map(widen, self.results)),
            whole=frozenset(self.whole | more) - {ELLIPSIS},
            reduce=reduce,
        )

    def misfit(self, ins: Sequence[Aval], outs: Sequence[Aval], why: str, fix: str) -> Misfit:
        """The error that the rule does not fit these operands and results."""
        left, right = (", ".join(shape_text(a.shape, a.dtype) for a in s) for s in (ins, outs))
        shapes = f" {left} -> {right}" if ins or outs else " its operands"
        return Misfit(Fault(f"its rule {self.notation!r} does not fit{shapes}.", why, fix))

    def local_values(self, ctx: Context) -> dict[str, Any]:
        """The params that hold local sizes, for one device."""
        changed = {}
        for param, names in (self.local_params or {}).items():
            local = tuple(ctx.local_size(n) for n in names)
            scalar = isinstance(ctx.params[param], int | np.integer)
            changed[param] = prod(local) if scalar else local
        return changed


_SCALARS_ARE_STATIC = (
    "write one group of dims for each array, separated by commas, in the order of the arguments; "
    "Python numbers and other values that are no arrays are not operands of a function."
)
_NO_DIMS = "write one letter for each dim, _ for one that must be whole, or ... for any number."


def user_rule(
    subject: str,
    notation: str,
    *,
    reduce: Mapping[str, str] | None = None,
    linear: Iterable[int | Sequence[int]] = (),
    whole: str | Iterable[str] = (),
    bind: Bind | None = None,
    local_params: Mapping[str, str] | None = None,
) -> UserRule:
    """Reads and checks a user's rule.

    Args:
        subject: what the rule is for, for the error.
        notation: the factor string.
        reduce: see `UserRule`.
        linear: indices of operands in each of which the function is linear, or groups of them.
        whole: names of factors, in one string or several.
        bind: see `UserRule`.
        local_params: param -> factors, as a string.

    Raises:
        ShardingError: with all that is wrong.
    """
    faults: list[Fault] = []
    left, right = _parse(notation, faults)
    raise_faults(subject, faults)
    known = names_in((*left, *right))
    groups = []
    for entry in linear:
        group = frozenset([entry] if isinstance(entry, int) else entry)
        if any(i < 0 or i >= len(left) for i in group):
            what = f"linear names operand {max(group, key=abs)}."
            why = f"{notation!r} has {count_of(len(left), 'operand')}, counted from 0."
            faults.append(Fault(what, why, "give indices of operands, or tuples of them."))
        groups.append(Linear(group))
    held = frozenset(whole.split() if isinstance(whole, str) else whole)
    params = {name: tuple(names.split()) for name, names in (local_params or {}).items()}
    said = [("reduce", n) for n in reduce or {}] + [("whole", n) for n in sorted(held)]
    said += [(f"local_params[{p!r}]", n) for p, names in params.items() for n in names]
    for option, name in said:
        if name not in known:
            what = f"{option} names {quoted(name)}."
            why = f"The factors of {notation!r} are {listed(sorted(known)) or 'none'}."
            faults.append(Fault(what, why, "name one of these."))
    for name, op in (reduce or {}).items():
        if op not in REDUCTIONS:
            what = f"reduce[{name!r}] is {op!r}."
            why = "Devices' parts of a result can be reduced by some operations only."
            ops = listed([repr(r) for r in REDUCTIONS], "or")
            faults.append(Fault(what, why, f"use {ops}, or keep the factor whole."))
    raise_faults(subject, faults)
    return UserRule(
        notation, left, right, dict(reduce or {}), tuple(groups), held, bind, params or None
    )


def _parse(
    notation: str, faults: list[Fault]
) -> tuple[tuple[NamedDims, ...], tuple[NamedDims, ...]]:
    example = 'write it as "i j, j k -> i k".'
    sides = notation.split("->")
    if len(sides) != 2:
        found = count_of(len(sides) - 1, "arrow")
        faults.append(Fault(f"the rule {notation!r} has {found}.", "It needs one '->'.", example))
        return (), ()
    tensors = [tuple(_dims(t, notation, faults) for t in side.split(",")) for side in sides]
    for side in tensors:
        for dims in side:
            names = [n for dim in dims for n in dim]
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                what = f"the rule {notation!r} has {listed([quoted(n) for n in twice])} twice in one array."
                why = "An axis can split one dim of an array only."
                faults.append(Fault(what, why, "give each dim of an array a letter of its own."))
    if any((ELLIPSIS,) in dims for dims in tensors[1]) and not any(
        (ELLIPSIS,) in dims for dims in tensors[0]
    ):
        what, why = f"the rule {notation!r} has '...' in results only.", "Operands say its rank."
        faults.append(Fault(what, why, "name the dims."))
    return tensors[0], tensors[1]


def _dims(text: str, notation: str, faults: list[Fault]) -> NamedDims:
    dims = []
    if text.strip() == "()":
        return ()
    for group, token, stray in _TOKEN.findall(text.strip()):
        if stray.isspace():
            continue
        names = group.split() if group else [token or stray]
        for name in names:
            allowed = ("_", ELLIPSIS) if not group else ()
            if name not in allowed and (not _NAME.match(name) or name == "_"):
                what = f"the rule {notation!r} has {quoted(name)}."
                why = "A dim is a name, '_' if it must be whole, or several names in parentheses."
                faults.append(Fault(what, why, 'write it as "i j, j k -> i k".'))
        dims.append(tuple(n for n in names if n != "_"))
    return tuple(dims)


def _widened(dims: NamedDims, count: int) -> NamedDims:
    found: list[tuple[str, ...]] = []
    for names in dims:
        if names == (ELLIPSIS,):
            found += [(f"{ELLIPSIS}{i}",) for i in range(count)]
        else:
            found.append(names)
    return tuple(found)


def names_in(tensors: Iterable[NamedDims]) -> list[str]:
    """The factors of some tensors, each once, in order."""
    return list(dict.fromkeys(name for dims in tensors for names in dims for name in names))


def _indices(order: list[str], dims: NamedDims) -> Dims:
    return tuple(tuple(order.index(n) for n in names) for names in dims)


def _sizes(rule: UserRule, ins: Sequence[Aval], outs: Sequence[Aval]) -> dict[str, int]:
    """The size of every factor, in the order of the notation."""
    for what, tensors, avals in (("operand", rule.operands, ins), ("result", rule.results, outs)):
        if len(tensors) != len(avals):
            has = count_of(len(tensors), what)
            raise rule.misfit(
                ins, outs, f"It has {has}, the call {len(avals)}.", _SCALARS_ARE_STATIC
            )
        for position, (dims, aval) in enumerate(zip(tensors, avals, strict=True)):
            if len(dims) != len(aval.shape):
                why = f"It gives {what} {position} {count_of(len(dims), 'dim')}, which has {len(aval.shape)}."
                raise rule.misfit(ins, outs, why, _NO_DIMS)
    places = [
        (names, size, f"dim {d} of {what} {position}")
        for what, tensors, avals in (
            ("operand", rule.operands, ins),
            ("result", rule.results, outs),
        )
        for position, (dims, aval) in enumerate(zip(tensors, avals, strict=True))
        for d, (names, size) in enumerate(zip(dims, aval.shape, strict=True))
    ]
    known: dict[str, tuple[int, str]] = {}
    for names, size, place in places:
        if len(names) == 1:
            before, there = known.setdefault(names[0], (size, place))
            if before != size:
                why = f"Factor {quoted(names[0])} is {before} in {there} and {size} in {place}."
                fix = (
                    "give dims of different sizes different letters, or _ where they must be whole."
                )
                raise rule.misfit(ins, outs, why, fix)
    for names, size, place in places:
        if len(names) < 2:
            continue
        unknown = [n for n in names if n not in known]
        rest = prod(known[n][0] for n in names if n in known)
        if len(unknown) > 1 or (unknown and (not rest or size % rest)):
            why = f"The sizes of {listed(unknown)} in {place}, of size {size}, are not known."
            raise rule.misfit(
                ins, outs, why, "let each stand alone in a dim somewhere, but for one."
            )
        if unknown:
            known[unknown[0]] = size // rest, place
        elif rest != size:
            why = f"Factors {listed(names)} multiply to {rest} in {place}, of size {size}."
            raise rule.misfit(ins, outs, why, "give dims of different sizes different letters.")
    order = dict.fromkeys(n for names, _, _ in places for n in names)
    return {name: known[name][0] for name in order}
