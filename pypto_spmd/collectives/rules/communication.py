"""Collectives of hand-written regions, on the mesh axes that their region leaves to the planner.

There a collective is like any other primitive: the dims along which it works stay whole, all others pass
through, and a sum over one axis is linear on another.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pypto_spmd.collectives.rules.factor import Linear, Rule, factor_rule, whole_rule
from pypto_spmd.collectives.rules.registry import Aval, rule


def _passing(
    ins: Sequence[Aval],
    outs: Sequence[Aval],
    whole: Mapping[int, tuple[int, ...]],
    ops: tuple[str, ...],
) -> Rule:
    """Each operand becomes its result; its dims pass through but those in `whole` (0 operands, 1 results)."""

    def dims(position: int, aval: Aval, side: int) -> str:
        names = iter(f"t{position}d{n}" for n in range(len(aval.shape)))
        return " ".join(
            "_" if d in whole.get(side, ()) else next(names) for d in range(len(aval.shape))
        )

    sides = [
        ", ".join(dims(i, a, side) for i, a in enumerate(avals))
        for side, avals in enumerate((ins, outs))
    ]
    linear = (Linear(frozenset(range(len(ins))), ops),) if ops else ()
    return factor_rule(
        " -> ".join(sides), [a.shape for a in ins], [a.shape for a in outs], linear=linear
    )


@rule("psum")
def _sum(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    return _passing(ins, outs, {}, ("sum",))


@rule("pmax")
def _max(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    return _passing(ins, outs, {}, ("max",))


@rule("pmin")
def _min(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    return _passing(ins, outs, {}, ("min",))


@rule("ppermute", "pbroadcast")
def _moved(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    # Zero, which who is sent nothing gets, is the partial value of a zero sum and of no other reduction.
    return _passing(ins, outs, {}, ("sum",))


@rule("all_gather")
def _gather(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    dim = (params["all_gather_dimension"],)
    return _passing(ins, outs, {0: dim, 1: dim} if params["tiled"] else {1: dim}, ("sum",))


@rule("reduce_scatter")
def _scatter(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    dim = (params["scatter_dimension"],)
    return _passing(ins, outs, {0: dim, 1: dim} if params["tiled"] else {0: dim}, ("sum",))


@rule("all_to_all")
def _transposed(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    dims = (params["split_axis"], params["concat_axis"])
    return _passing(ins, outs, {0: dims, 1: dims}, ("sum",))


@rule("axis_index")
def _index(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    return whole_rule([a.shape for a in ins], [a.shape for a in outs], "a number of each device")
