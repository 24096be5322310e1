"""Large arrays inside of a traced function made consts of its own.

JAX hands an array that a loop or branch takes from outside to the function around it, but leaves that of a
`jax.jit` inside where it is, and so it would become part of the program. A function that holds such an
array, however deep, is traced anew: calls that hold one are spelled out, their equations in their place, and
loops, branches and recomputations around them take it from outside, which JAX hands on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from pypto_spmd.collectives.flatten import scan_counts
from pypto_spmd.collectives.source import Source

LARGE_BYTES = 1024
"""From this size on a const of an inner call is moved out; a smaller one does no harm in a program."""


def lift_consts(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with the large consts of calls in it among its own, the new ones last.

    Args:
        closed: a traced function.
    """
    held = _held_in(closed.jaxpr)
    if not held:
        return closed
    own = [_described(v.aval) for v in closed.jaxpr.constvars]
    structs = [_described(aval) for aval in closed.in_avals]

    def run(consts: Sequence[Any], outside: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        known = dict(zip(held, outside, strict=True))
        return _evaluate(known, closed.jaxpr, consts, args, None)

    outside = [_described(v.aval) for v, _ in held.values()]
    traced = jax.make_jaxpr(run)(own, outside, structs)
    jaxpr, count = traced.jaxpr, len(own) + len(held)
    constvars = [*jaxpr.invars[:count], *jaxpr.constvars]
    consts = [*closed.consts, *(const for _, const in held.values()), *traced.consts]
    return ClosedJaxpr(jaxpr.replace(constvars=constvars, invars=jaxpr.invars[count:]), consts)


def hoist_consts(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[Any, ...]]:
    """The jaxpr with its consts as leading operands, and the consts."""
    jaxpr = closed.jaxpr
    hoisted = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    return ClosedJaxpr(hoisted, []), tuple(closed.consts)


def _described(aval: Any) -> jax.ShapeDtypeStruct:
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)


Held = dict[int, tuple[Var, Any]]
"""Large consts by identity, each with a variable of its kind."""
Known = Mapping[int, Any]
"""The values to take for large consts, by the consts' identity."""


def _held_in(jaxpr: Jaxpr) -> Held:
    """The large consts of what a jaxpr calls, however deep."""
    found: Held = {}
    for eqn in jaxpr.eqns:
        found |= _held_by(eqn)
    return found


def _held_by(eqn: JaxprEqn) -> Held:
    found: Held = {}
    if eqn.primitive.name in _SPELLED_OUT:
        for inner, consts in _inner_of(eqn):
            for var, const in zip(inner.constvars, consts, strict=True):
                if getattr(const, "nbytes", 0) >= LARGE_BYTES:
                    found[id(const)] = var, const
            found |= _held_in(inner)
    return found


def _inner_of(eqn: JaxprEqn) -> Iterator[tuple[Jaxpr, Sequence[Any]]]:
    """The jaxprs that an equation runs, each with its consts."""
    for param in ("jaxpr", "cond_jaxpr", "body_jaxpr", "branches"):
        value = eqn.params.get(param)
        for inner in value if isinstance(value, list | tuple) else (value,):
            if inner is not None:  # closed, or by JAX version open with consts
                yield getattr(inner, "jaxpr", inner), tuple(getattr(inner, "consts", ()))


def _evaluate(
    known: Known,
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    call: JaxprEqn | None,
) -> list[Any]:
    """Traces the equations of a jaxpr, those that hold large consts spelled out.

    Args:
        known: what to take for large consts.
        jaxpr: the equations.
        consts: the jaxpr's own consts.
        args: its arguments.
        call: the call that it is the inside of.
    """
    values: dict[Var, Any] = {}
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        values[var] = known.get(id(const), const)
    values.update(zip(jaxpr.invars, args, strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]  # noqa: E731
    for original in jaxpr.eqns:
        eqn = _placed(original, call)
        operands = [read(atom) for atom in eqn.invars]
        if _held_by(eqn):
            info = eqn.source_info
            with source_info_util.user_context(info.traceback, name_stack=info.name_stack):
                results = _SPELLED_OUT[eqn.primitive.name](known, eqn, operands)
        else:
            results = _as_it_is(jaxpr, eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _as_it_is(jaxpr: Jaxpr, eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    places = [i for i, atom in enumerate(eqn.invars) if not isinstance(atom, Literal)]
    taken = {eqn.invars[i]: operands[i] for i in places}
    outvars = [var for var in eqn.outvars if type(var) is Var]
    alone = jaxpr.replace(constvars=[], invars=list(taken), eqns=[eqn], outvars=outvars)
    made = iter(jaxpr_as_fun(ClosedJaxpr(alone, []))(*taken.values()))
    return [next(made) if type(var) is Var else None for var in eqn.outvars]


def _inside(known: Known, eqn: JaxprEqn) -> list[Callable[..., list[Any]]]:
    """What an equation runs, as functions; of a large const they take what is known."""

    def function(inner: Jaxpr, consts: Sequence[Any]) -> Callable[..., list[Any]]:
        return lambda *args: _evaluate(known, inner, consts, args, None)

    return [function(*pair) for pair in _inner_of(eqn)]


def _call(known: Known, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    ((inner, consts),) = _inner_of(eqn)
    return _evaluate(known, inner, consts, operands, eqn)


def _scan(known: Known, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    (body,) = _inside(known, eqn)
    count, carried, _ = scan_counts(eqn)
    consts, init, xs = (
        operands[:count],
        list(operands[count : count + carried]),
        list(operands[count + carried :]),
    )

    def trip(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body(*consts, *carry, *slices)
        return results[:carried], results[carried:]

    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(trip, init, xs, **how)
    return [*carry, *ys]


def _while(known: Known, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    condition, body = _inside(known, eqn)
    first = eqn.params["cond_nconsts"]
    last = first + eqn.params["body_nconsts"]
    return lax.while_loop(
        lambda carry: condition(*operands[:first], *carry)[0],
        lambda carry: body(*operands[first:last], *carry),
        list(operands[last:]),
    )


def _cond(known: Known, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    index, *operands = operands
    branches = _inside(known, eqn)
    if index.dtype == np.bool_:
        return lax.cond(index, branches[1], branches[0], *operands)
    return lax.switch(index, branches, *operands)


def _recomputation(known: Known, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The equation with the large consts among its operands; whether it is differentiated stays told."""
    ((inner, consts),) = _inner_of(eqn)
    held = _held_by(eqn)

    def run(outside: Sequence[Any], *args: Any) -> list[Any]:
        return _evaluate(
            {**known, **dict(zip(held, outside, strict=True))}, inner, consts, args, None
        )

    outside = [known[number] for number in held]
    closed, small = hoist_consts(jax.make_jaxpr(run)(outside, *operands))
    params = {**eqn.params, "jaxpr": closed.jaxpr}
    return eqn.primitive.bind(*small, *outside, *operands, **params)


_SPELLED_OUT: dict[str, Callable[[Known, JaxprEqn, Sequence[Any]], Sequence[Any]]] = {
    "jit": _call,
    "pjit": _call,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "remat2": _recomputation,
    "checkpoint": _recomputation,
}
"""How equations that hold large consts are traced anew. Functions with a derivative of their own keep theirs,
which could not be told of another operand."""


def _placed(eqn: JaxprEqn, call: JaxprEqn | None) -> JaxprEqn:
    """The equation where the call stands: in its name scope, and in its line if it has no line itself."""
    if call is None:
        return eqn
    info, outer = eqn.source_info, call.source_info
    traceback = info.traceback if str(Source(info)) else outer.traceback
    placed = info.replace(traceback=traceback, name_stack=outer.name_stack + info.name_stack)
    return eqn.replace(source_info=placed)
