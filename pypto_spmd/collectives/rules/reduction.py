"""Reductions over whole dims: a reduced factor that is split leaves a partial result."""

from collections.abc import Mapping
from typing import Any

from pypto_spmd.collectives.rules.factor import Linear, Rule, factor_rule
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
        return factor_rule(
            f"{' '.join(letters)} -> {' '.join(kept)}",
            [a.shape for a in ins],
            [a.shape for a in outs],
            reduce=dict.fromkeys(reduced, op),
            linear=(Linear(frozenset({0}), (op,)),),
        )

    return make


for _name, _op in _REDUCTIONS.items():
    rule(_name)(_reduction(_op))
