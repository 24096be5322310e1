"""Contractions: dot_general and its ragged kin.

A contracted dim is a factor that the result lacks: split, it leaves a partial sum.
"""

from collections.abc import Mapping
from typing import Any

from pypto_spmd.collectives.rules.factor import Linear, Rule, factor_rule
from pypto_spmd.collectives.rules.registry import Aval, rule


@rule("dot_general")
def _dot_general(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    lhs = [f"m{d}" for d in range(len(ins[0].shape))]
    rhs = [f"n{d}" for d in range(len(ins[1].shape))]
    for left, right in zip((*lhs_batch, *lhs_contract), (*rhs_batch, *rhs_contract), strict=True):
        rhs[right] = lhs[left]
    contracted = {lhs[d] for d in lhs_contract}
    out = [lhs[d] for d in lhs_batch]
    out += [n for d, n in enumerate(lhs) if d not in (*lhs_batch, *lhs_contract)]
    out += [n for d, n in enumerate(rhs) if d not in (*rhs_batch, *rhs_contract)]
    return factor_rule(
        f"{' '.join(lhs)}, {' '.join(rhs)} -> {' '.join(out)}",
        [a.shape for a in ins],
        [a.shape for a in outs],
        reduce=dict.fromkeys(contracted, "sum"),
        linear=(Linear(frozenset({0})), Linear(frozenset({1}))),
        works=True,
        bind=lambda ctx, *operands: ctx.bind(*operands, out_sharding=None),
    )
