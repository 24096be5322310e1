"""The equations of a traced function with their operands, and the labellings of each that its rule allows."""

import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive

from pypto_spmd.collectives.rules import Aval, Rule, choices, has_rule, rule_for
from pypto_spmd.collectives.rules.user_rule import Misfit
from pypto_spmd.errors import listed, shape_text
from pypto_spmd.sharding.layout import Layout

AXES = ("x", "y", "z")


@dataclass(frozen=True, slots=True, eq=False)
class Application:
    """One equation with the arrays it was applied to."""

    primitive: Primitive
    params: Mapping[str, Any]
    operands: tuple[jax.Array, ...]
    results: tuple[jax.Array, ...]
    ins: tuple[Aval, ...]
    outs: tuple[Aval, ...]
    rule: Rule

    def __str__(self) -> str:
        left, right = (
            ", ".join(shape_text(a.shape, a.dtype) for a in s) for s in (self.ins, self.outs)
        )
        return f"{self.primitive.name}({left}) -> {right} by the rule '{self.rule}'"

    def misfits(self) -> list[str]:
        """Where the rule does not fit the equation's shapes."""
        found = []
        for what, tensors, avals in (
            ("operand", self.rule.operands, self.ins),
            ("result", self.rule.results, self.outs),
        ):
            if len(tensors) != len(avals):
                return [f"{self}: the rule has {len(tensors)} {what}s"]
            for position, (dims, aval) in enumerate(zip(tensors, avals, strict=True)):
                sizes = [prod(self.rule.factors[f].size for f in dim) for dim in dims]
                fits = len(sizes) == len(aval.shape) and all(
                    not dim or size == n
                    for dim, size, n in zip(dims, sizes, aval.shape, strict=True)
                )
                if not fits:
                    found.append(f"{self}: {what} {position} has sizes {sizes} by the rule")
        return found


def applications(
    jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]
) -> Generator[Application, None, list[Any]]:
    """Evaluates a jaxpr and gives every equation with its operands; calls are looked into."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def read(variable: Any) -> Any:
        if isinstance(variable, Literal):
            return jnp.asarray(variable.val, getattr(variable.aval, "dtype", None))
        return values[variable]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        inner = _called(eqn)
        if inner is not None:
            results = yield from applications(*inner, operands)
        else:
            results = eqn.primitive.bind(*operands, **eqn.params)
            results = results if isinstance(results, list | tuple) else [results]
            ins = tuple(_aval(v) for v in eqn.invars)
            outs = tuple(_aval(v) for v in eqn.outvars)
            try:
                rule = rule_for(eqn.primitive.name, eqn.params, ins, outs)
            except Misfit as misfit:
                misfit.refuse(repr(eqn.primitive.name))
            yield Application(
                eqn.primitive, eqn.params, tuple(operands), tuple(results), ins, outs, rule
            )
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _called(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """The jaxpr that a call such as `jit` runs on its operands."""
    if has_rule(eqn.primitive.name) or eqn.primitive.name in ("scan", "while", "cond"):
        return None
    for value in eqn.params.values():
        jaxpr, consts = (value.jaxpr, value.consts) if hasattr(value, "jaxpr") else (value, ())
        if hasattr(jaxpr, "eqns") and len(jaxpr.invars) == len(eqn.invars):
            return jaxpr, consts
    return None


def _aval(variable: Any) -> Aval:
    aval = variable.aval
    if isinstance(variable, Literal) and not aval.shape and isinstance(aval.dtype, np.dtype):
        return Aval((), aval.dtype, np.asarray(variable.val).item())
    return Aval(tuple(aval.shape), aval.dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """One combination of choices: which axes split each factor, and how all tensors then lie."""

    splits: tuple[tuple[int, tuple[str, ...]], ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]

    @property
    def is_nested(self) -> bool:
        """Whether several axes do something."""
        return len(frozenset().union(*(t.axes for t in (*self.operands, *self.results)))) > 1

    def in_words(self, rule: Rule) -> str:
        """What is split and what is partial over which axes."""
        done = [
            f"factor {rule.factors[f].name!r} split over {listed([repr(a) for a in axes])}"
            for f, axes in self.splits
        ]
        for position, layout in enumerate(self.operands):
            for axis, op in layout.partial:
                done.append(f"operand {position} partial ({op}) over {axis!r}")
        return f"with {listed(done)}" if done else "with all whole"

    def advice(self, rule: Rule, failed: bool) -> list[str]:
        """What to change in a user's rule if this case is wrong by itself, or did not run at all."""
        found = []
        for f, _ in self.splits:
            name = rule.factors[f].name
            how = "how the parts combine" if not rule.factors[f].reduce else "another reduction"
            way = f"say {how}, reduce={{{name!r}: ...}}"
            if failed:
                way = "have it run at local shapes, local_params= or bind="
            found.append(f"keep {name!r} whole, whole={name!r}, or {way}.")
        if not self.splits:
            linear = [i for i, layout in enumerate(self.operands) if layout.partial]
            if linear:
                operands = listed([str(i) for i in linear])
                found.append(f"leave operand {operands} out of linear=.")
        return found


def cases_of(application: Application, axis_sizes: Mapping[str, int]) -> tuple[Case, ...]:
    """Every legal combination of choices; axes that split one factor are nested in every order."""
    rule = application.rule
    found: dict[Case, None] = {}
    for order in itertools.permutations(axis_sizes):
        sizes = tuple(f.size for f in rule.factors)
        partial = [()] * (len(rule.operands) + len(rule.results))
        for splits, labels in _combinations(rule, order, axis_sizes, sizes, {}, partial):
            tensors = (*rule.operands, *rule.results)
            layouts = [
                Layout(tuple(tuple(a for f in dim for a in splits.get(f, ())) for dim in dims), p)
                for dims, p in zip(tensors, labels, strict=True)
            ]
            count = len(rule.operands)
            case = Case(
                tuple(sorted(splits.items())), tuple(layouts[:count]), tuple(layouts[count:])
            )
            if all(map(_reducible, layouts, (*application.ins, *application.outs))):
                found[case] = None
    return tuple(found)


def _combinations(
    rule: Rule,
    order: Sequence[str],
    axis_sizes: Mapping[str, int],
    local_sizes: tuple[int, ...],
    splits: dict[int, tuple[str, ...]],
    partial: list[tuple[tuple[str, str], ...]],
) -> Iterator[tuple[dict[int, tuple[str, ...]], list[tuple[tuple[str, str], ...]]]]:
    if not order:
        yield splits, partial
        return
    axis, *rest = order
    for choice in choices(rule, local_sizes, axis_sizes[axis]):
        labels = (*choice.operands, *choice.results)
        more = [
            tuple(sorted((*p, (axis, label.op)))) if label.kind == "P" else p
            for p, label in zip(partial, labels, strict=True)
        ]
        sizes, inner = local_sizes, splits
        if choice.factor >= 0:
            at = choice.factor
            sizes = (*sizes[:at], sizes[at] // axis_sizes[axis], *sizes[at + 1 :])
            inner = splits | {at: (*splits.get(at, ()), axis)}
        yield from _combinations(rule, rest, axis_sizes, sizes, inner, more)


def _reducible(layout: Layout, aval: Aval) -> bool:
    """Whether a tensor can be partial so: no sums of bools, no max over one axis and sum over another."""
    ops = {op for _, op in layout.partial}
    if not ops:
        return True
    if len(ops) > 1 or not isinstance(aval.dtype, np.dtype):
        return False
    (op,) = ops
    if aval.dtype == np.dtype(bool):
        return op in ("or", "and")
    if np.issubdtype(aval.dtype, np.complexfloating):
        return op in ("sum", "prod")
    return op not in ("or", "and") or np.issubdtype(aval.dtype, np.integer)


def shards_of(
    splits: Iterable[tuple[int, tuple[str, ...]]], axis_sizes: Mapping[str, int]
) -> dict[int, int]:
    """Into how many pieces each split factor is cut."""
    return {f: prod(axis_sizes[a] for a in axes) for f, axes in splits}


def steps_of(rule: Rule, shards: Mapping[int, int]) -> dict[tuple[int, int], int]:
    """A number for each exchange of the split factors of a rule."""
    pairs = [
        (f, e) for f, n in shards.items() for e in range(len(rule.factors[f].exchanges_for(n)))
    ]
    return {pair: number for number, pair in enumerate(pairs)}
