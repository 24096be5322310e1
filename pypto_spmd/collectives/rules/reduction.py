"""Reductions over whole dims: a reduced factor that is split leaves a partial result.

Exclusive or is no reduction that a layout can wait for, so its partial results are exchanged at once.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Exchange, Linear, Rule, factor_rule
from pypto_spmd.collectives.rules.moving import dim_names
from pypto_spmd.collectives.rules.registry import Aval, rule

_REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_or": "or",
    "reduce_and": "and",
}


def _reduction(op: str):
    def make(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
        letters = [f"d{d}" for d in range(len(ins[0].shape))]
        reduced = [letters[d] for d in params["axes"]]
        kept = [n for n in letters if n not in reduced]
        # Of integers "or" and "and" are bitwise, which no collective computes.
        bitwise = op in ("or", "and") and ins[0].dtype != bool
        return factor_rule(
            f"{' '.join(letters)} -> {' '.join(kept)}",
            [a.shape for a in ins],
            [a.shape for a in outs],
            reduce=dict.fromkeys(reduced, op),
            linear=() if bitwise else (Linear(frozenset({0}), (op,)),),
            whole=reduced if bitwise else (),
        )

    return make


for _name, _op in _REDUCTIONS.items():
    rule(_name)(_reduction(_op))


@rule("reduce_xor")
def _reduce_xor(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    names = dim_names(len(ins[0].shape))
    reduced = [names[d] for d in params["axes"]]
    kept = [d for d, n in enumerate(names) if n not in reduced]
    partial = Exchange(
        "all_gather", tuple(kept), 1.0, ins[0].itemsize, per_shard=True, what="partial results"
    )

    def bind(ctx: Context, x: jax.Array) -> jax.Array:
        x = ctx.bind(x)
        for name in reduced:
            if ctx.axes(name):
                parts = ctx.exchange(name, 0, lambda axes, x=x: lax.all_gather(x, axes, axis=0))
                x = ctx.bind(parts, axes=(0,))
        return x

    return factor_rule(
        f"{' '.join(names)} -> {' '.join(names[d] for d in kept)}",
        [ins[0].shape],
        [outs[0].shape],
        exchanges=dict.fromkeys(reduced, (partial,)),
        bind=bind,
    )


@rule("reduce")
def _reduce(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    names = dim_names(len(ins[0].shape))
    left = " ".join("_" if d in params["dimensions"] else n for d, n in enumerate(names))
    right = " ".join(n for d, n in enumerate(names) if d not in params["dimensions"])
    count = len(outs)
    made = factor_rule(
        f"{', '.join([left] * count)}{', ' * count} -> {', '.join([right] * count)}",
        [a.shape for a in ins],
        [a.shape for a in outs],
    )
    return replace(
        made, reason="its initial value would count once for every piece of a reduced dim"
    )
