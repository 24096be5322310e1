"""Consts of calls inside a jaxpr made consts of its own.

JAX hands an array that a loop or branch takes from outside to the function around it, but leaves that of a
`jax.jit` inside where it is, and so it would become part of the program. Calls that hold a large one are
spelled out: their equations stand in their place.
"""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from pypto_spmd.collectives.source import Source

_CALLS = ("jit", "pjit")

LARGE_BYTES = 1024
"""From this size on a const of an inner call is moved out; a smaller one does no harm in a program."""


def lift_consts(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with the large consts of calls in it among its own, the new ones last.

    Args:
        closed: a traced function.
    """
    jaxpr = closed.jaxpr
    if not any(map(_holds_large_const, jaxpr.eqns)):
        return closed
    lifted: dict[int, tuple[Var, Any]] = {}
    names: dict[Var, Any] = {}
    equations = list(_spelled_out(jaxpr, names, None, lifted))
    constvars = [*jaxpr.constvars, *(var for var, _ in lifted.values())]
    outvars = _renamed(jaxpr.outvars, names)
    consts = [*closed.consts, *(const for _, const in lifted.values())]
    return ClosedJaxpr(jaxpr.replace(constvars=constvars, eqns=equations, outvars=outvars), consts)


def _called(eqn: JaxprEqn) -> tuple[Jaxpr, tuple[Any, ...]]:
    called = eqn.params["jaxpr"]  # closed, or by JAX version open with consts
    return getattr(called, "jaxpr", called), tuple(called.consts)


def _holds_large_const(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in _CALLS:
        return False
    jaxpr, consts = _called(eqn)
    is_large = any(getattr(const, "nbytes", 0) >= LARGE_BYTES for const in consts)
    return is_large or any(map(_holds_large_const, jaxpr.eqns))


def _spelled_out(
    jaxpr: Jaxpr, names: dict[Var, Any], call: JaxprEqn | None, lifted: dict[int, tuple[Var, Any]]
) -> Iterator[JaxprEqn]:
    """The equations, and those of a call that holds a large const in its place.

    Args:
        jaxpr: the equations; one jaxpr may be called twice, so that all that they make is renamed.
        names: what is read for a variable; those that are made are added.
        call: the call that the equations are of.
        lifted: consts by identity, each with its variable; new ones are added.
    """
    for eqn in jaxpr.eqns:
        reads = _renamed(eqn.invars, names)
        if _holds_large_const(eqn):
            inner, consts = _called(eqn)
            scope = dict(zip(inner.invars, reads, strict=True))
            for var, const in zip(inner.constvars, consts, strict=True):
                scope[var] = lifted.setdefault(id(const), (_like(var), const))[0]
            yield from _spelled_out(inner, scope, _placed(eqn, call), lifted)
            names.update(zip(eqn.outvars, _renamed(inner.outvars, scope), strict=True))
        else:
            writes = [_like(var) for var in eqn.outvars]
            names.update(zip(eqn.outvars, writes, strict=True))
            yield _placed(eqn.replace(invars=reads, outvars=writes), call)


def _renamed(atoms: Any, names: dict[Var, Any]) -> list[Any]:
    return [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in atoms]


def _like(var: Var) -> Var:
    return type(var)(var.aval)


def _placed(eqn: JaxprEqn, call: JaxprEqn | None) -> JaxprEqn:
    """The equation where the call stands: in its name scope, and in its line if it has no line itself."""
    if call is None:
        return eqn
    info, outer = eqn.source_info, call.source_info
    traceback = info.traceback if str(Source(info)) else outer.traceback
    placed = info.replace(traceback=traceback, name_stack=outer.name_stack + info.name_stack)
    return eqn.replace(source_info=placed)
