"""Convolutions: contractions over features, with groups, that slide over spatial dims.

The gradients of a convolution are convolutions too, whose features are the batch, or whose kernel is as
large as the image: a split batch then is a contracted dim, and a split image a contracted dim with a
halo. Groups are the major factor of the dims that hold them: `(g c), (g o) c -> (g o)` for feature
groups, `(b n), (b o) -> n (b o)` for batch groups.
"""

from collections.abc import Mapping
from typing import Any

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Linear, Rule, factor_rule
from pypto_spmd.collectives.rules.registry import Aval, rule
from pypto_spmd.collectives.rules.sliding import Sliding, blocked, slide, with_halos


@rule("conv_general_dilated")
def _conv(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    numbers = params["dimension_numbers"]
    lhs_dims, rhs_dims, out_dims = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    feature_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    rank = len(lhs_dims)
    lhs, rhs, out = ["_"] * rank, ["_"] * rank, ["_"] * rank
    sizes = {
        "g": feature_groups,
        "b": batch_groups,
        "n": ins[0].shape[lhs_dims[0]] // batch_groups,
        "c": ins[1].shape[rhs_dims[1]],
        "o": ins[1].shape[rhs_dims[0]] // (feature_groups * batch_groups),
    }
    lhs[lhs_dims[0]] = "n" if batch_groups == 1 else "(b n)"
    lhs[lhs_dims[1]] = "c" if feature_groups == 1 else "(g c)"
    rhs[rhs_dims[1]] = "c"
    out[out_dims[0]] = "n"
    rhs[rhs_dims[0]] = out[out_dims[1]] = (
        "(g o)" if feature_groups > 1 else "(b o)" if batch_groups > 1 else "o"
    )
    reduce, rests = {"c": "sum"}, []
    slidings = {f"s{at}": _sliding(params, ins, outs, at) for at in range(rank - 2)}
    slidings = {name: s for name, s in slidings.items() if s.blocks > 1}
    dims = {name: lhs_dims[2 + int(name[1:])] for name in slidings}
    for name, sliding in slidings.items():
        at = 2 + int(name[1:])
        cuts = [(lhs, lhs_dims, sliding.rows)]
        if sliding.cuts_taps:
            cuts.append((rhs, rhs_dims, sliding.taps))
            reduce[name] = "sum"
        else:
            cuts.append((out, out_dims, sliding.outputs))
        for side, dims_of_side, size in cuts:
            side[dims_of_side[at]], rest = blocked(name, size, sliding.blocks)
            sizes |= {name: sliding.blocks, **rest}
            rests += rest

    def bind(ctx: Context, left: Any, right: Any) -> Any:
        padding = list(params["padding"])
        for name, sliding in slidings.items():
            if ctx.axes(name):
                left = slide(ctx, name, sliding, left, dims[name])
                padding[int(name[1:])] = sliding.padding(ctx.shards(name))
        groups = {}
        if feature_groups > 1:
            groups["feature_group_count"] = ctx.local_size("g")
        if batch_groups > 1:
            groups["batch_group_count"] = ctx.local_size("b")
        return ctx.bind(left, right, padding=tuple(padding), out_sharding=None, **groups)

    made = factor_rule(
        f"{' '.join(lhs)}, {' '.join(rhs)} -> {' '.join(out)}",
        [a.shape for a in ins],
        [a.shape for a in outs],
        sizes=sizes,
        reduce=reduce,
        linear=(Linear(frozenset({0})), Linear(frozenset({1}))),
        whole=rests,
        bind=bind,
        works=True,
    )
    return with_halos(made, ins[:1], slidings, dims)


def _sliding(
    params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...], at: int
) -> Sliding:
    numbers = params["dimension_numbers"]
    return Sliding(
        rows=ins[0].shape[numbers.lhs_spec[2 + at]],
        taps=ins[1].shape[numbers.rhs_spec[2 + at]],
        outputs=outs[0].shape[numbers.out_spec[2 + at]],
        stride=params["window_strides"][at],
        row_step=params["lhs_dilation"][at],
        tap_step=params["rhs_dilation"][at],
        low=params["padding"][at][0],
    )
