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


@rule("scaled_dot")
def _scaled_dot(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    # Each operand has a scale for each of its blocks: its dims are blocks and what is in one.
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    names = [
        [f"{side}{d}" for d in range(len(a.shape))] for side, a in zip("mn", ins, strict=False)
    ]
    pairs = list(zip((*lhs_batch, *lhs_contract), (*rhs_batch, *rhs_contract), strict=True))
    for left, right in pairs:
        names[1][right] = names[0][left]
    blocks = [[max(s, 1) for s in scale.shape] for scale in ins[2:]]
    alike = {
        names[0][a] for a, b in pairs if blocks[0][a] != blocks[1][b]
    }  # blocks that don't match
    sizes: dict[str, int] = {}
    dims: list[list[str]] = [[], []]
    scales: list[list[str]] = [[], []]
    for side in (0, 1):
        for name, count, size in zip(names[side], blocks[side], ins[side].shape, strict=True):
            if name in alike or size % count:
                dims[side].append("_")
                scales[side].append("_")
            elif count in (1, size):
                dims[side].append(name)
                scales[side].append("_" if count != size else name)
            else:
                sizes |= {name: count, f"{name}_inside": size // count}
                dims[side].append(f"({name} {name}_inside)")
                scales[side].append(name)
    out = [dims[0][d] for d in lhs_batch]
    out += [n for d, n in enumerate(dims[0]) if d not in (*lhs_batch, *lhs_contract)]
    out += [n for d, n in enumerate(dims[1]) if d not in (*rhs_batch, *rhs_contract)]
    return factor_rule(
        f"{', '.join(' '.join(d) for d in (*dims, *scales))} -> {' '.join(out)}",
        [a.shape for a in ins],
        [a.shape for a in outs],
        sizes=sizes,
        reduce={names[0][d]: "sum" for d in lhs_contract},
        works=True,
    )
