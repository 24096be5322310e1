"""Convolutions: contractions over features, with groups, that slide over spatial dims.

The gradients of a convolution are convolutions too, whose features are the batch, or whose kernel is as
large as the image: a split batch then is a contracted dim, and a split image a contracted dim with a
halo. Groups are the major factor of the dims that hold them: `(g c), (g o) c -> (g o)` for feature
groups, `(b n), (b o) -> n (b o)` for batch groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Exchange, Linear, Rule, factor_rule
from pypto_spmd.collectives.rules.halo import Part, parts, window
from pypto_spmd.collectives.rules.registry import Aval, rule
from pypto_spmd.collectives.rules.sliding import Sliding


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
    slidings: dict[str, Sliding] = {}
    for at in range(rank - 2):
        sliding = _sliding(params, ins, outs, at)
        blocks = sliding.blocks
        if blocks == 1:
            continue
        name = f"s{at}"
        slidings[name] = sliding
        sizes[name] = blocks

        def dim(size: int, side: str, name: str = name, blocks: int = blocks) -> str:
            if size == blocks:
                return name
            rests.append(name + side)
            sizes[name + side] = size // blocks
            return f"({name} {name}{side})"

        lhs[lhs_dims[2 + at]] = dim(sliding.rows, "l")
        if sliding.cuts_taps:
            rhs[rhs_dims[2 + at]] = dim(sliding.taps, "r")
            reduce[name] = "sum"
        else:
            out[out_dims[2 + at]] = dim(sliding.outputs, "o")

    def bind(ctx: Context, left: Any, right: Any) -> Any:
        padding = list(params["padding"])
        for name, sliding in slidings.items():
            shards = ctx.shards(name)
            if shards > 1:
                at = int(name[1:])
                left = window(
                    ctx,
                    name,
                    0,
                    left,
                    lhs_dims[2 + at],
                    sliding.starts(shards),
                    sliding.length(shards),
                )
                padding[at] = sliding.padding(shards)
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
    dims = {name: lhs_dims[2 + int(name[1:])] for name in slidings}
    return with_halos(made, ins[0], slidings, dims)


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


def with_halos(
    made: Rule,
    operand: Aval,
    slidings: Mapping[str, Sliding],
    dims: Mapping[str, int],
    *,
    operands: int = 1,
) -> Rule:
    """The rule with the exchanges of its spatial factors.

    Args:
        made: the rule without them; its `bind` calls `halo.window` for the factors in the same order.
        operand: the operand that slides.
        slidings: by factor.
        dims: the operand's dim of each factor.
        operands: how many such operands there are, one after the other.
    """
    factors = list(made.factors)
    for position, name in enumerate(slidings):
        before = list(slidings)[:position]
        index = made.factor(name)

        def exchanges(
            shards: int, name: str = name, before: Sequence[str] = tuple(before)
        ) -> tuple[Exchange, ...]:
            sliding = slidings[name]
            found = parts(sliding.rows // shards, sliding.starts(shards), sliding.length(shards))

            def exchange(part: Part, which: int) -> Exchange:
                def count(local_sizes: Sequence[int]) -> float:
                    rows = 1
                    for dim, factors_of_dim in enumerate(made.operands[which]):
                        if dim == dims[name]:
                            continue
                        size = operand.shape[dim]
                        if factors_of_dim:
                            size = prod(local_sizes[f] for f in factors_of_dim)
                        for other in before:  # whose halo is there already
                            if dims[other] == dim and size < operand.shape[dim]:
                                size = slidings[other].length(operand.shape[dim] // size)
                        rows *= size
                    return float(part.size * rows)

                rows = "row" if part.size == 1 else "rows"
                return Exchange(
                    "collective_permute", (), 0.0, operand.itemsize, count=count,
                    what=f"a halo of {part.size} {rows}",
                )  # fmt: skip

            return tuple(
                exchange(part, which) for which in range(operands) for part in found if part.shift
            )

        factors[index] = replace(factors[index], exchanges=exchanges)
    return replace(made, factors=tuple(factors))
