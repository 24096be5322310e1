"""Reductions over sliding windows, and the gradients of max pooling.

A window of one row passes its dim. A larger one slides like a convolution's kernel: windows that do not
overlap need no halo, and one window as large as the dim is a reduction over it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Linear, Rule, factor_rule
from pypto_spmd.collectives.rules.registry import Aval, rule
from pypto_spmd.collectives.rules.sliding import Sliding, blocked, returned, slide, with_halos


def _slidings(
    params: Mapping[str, Any], operand: Aval, out: Aval, *, cut_windows: bool
) -> dict[str, Sliding]:
    """The dims that can be cut, by factor name."""
    found = {}
    for dim, (rows, outputs) in enumerate(zip(operand.shape, out.shape, strict=True)):
        sliding = Sliding(
            rows=rows,
            taps=params["window_dimensions"][dim],
            outputs=outputs,
            stride=params["window_strides"][dim],
            row_step=params["base_dilation"][dim],
            tap_step=params["window_dilation"][dim],
            low=params["padding"][dim][0],
        )
        if sliding.blocks > 1 and (cut_windows or not sliding.cuts_taps):
            found[f"d{dim}"] = sliding
    return found


def _windowed(
    params: Mapping[str, Any],
    ins: tuple[Aval, ...],
    outs: tuple[Aval, ...],
    op: str,
    linear: Sequence[Linear],
    fills: Callable[[Sequence[Any]], Sequence[Any]],
) -> Rule:
    """A reduction of the windows of the first `len(outs)` operands by one op ("" if it is no known one)."""
    slidings = _slidings(params, ins[0], outs[0], cut_windows=bool(op))
    operand, out = ["_"] * len(ins[0].shape), ["_"] * len(outs[0].shape)
    sizes: dict[str, int] = {}
    rests: list[str] = []
    for name, sliding in slidings.items():
        dim = int(name[1:])
        operand[dim], rest = blocked(name, sliding.rows, sliding.blocks)
        if not sliding.cuts_taps:
            out[dim], more = blocked(name, sliding.outputs, sliding.blocks)
            rest |= more
        sizes |= {name: sliding.blocks, **rest}
        rests += rest
    count = len(outs)

    def bind(ctx: Context, *operands: Any) -> Any:
        moved, rest = list(operands[:count]), operands[count:]
        padding, window = list(params["padding"]), list(params["window_dimensions"])
        for name, sliding in slidings.items():
            shards, dim = ctx.shards(name), int(name[1:])
            if shards == 1:
                continue
            for position, fill in enumerate(fills(operands)):
                moved[position] = slide(
                    ctx, name, sliding, moved[position], dim, position=position, fill=fill
                )
            padding[dim] = sliding.padding(shards)
            if sliding.cuts_taps:
                window[dim] //= shards
        return ctx.bind(*moved, *rest, padding=tuple(padding), window_dimensions=tuple(window))

    left = [" ".join(operand)] * count + [""] * (len(ins) - count)
    made = factor_rule(
        f"{', '.join(left)} -> {', '.join([' '.join(out)] * count)}",
        [a.shape for a in ins],
        [a.shape for a in outs],
        sizes=sizes,
        reduce={name: op for name, s in slidings.items() if s.cuts_taps},
        linear=linear,
        whole=rests,
        bind=bind,
    )
    dims = {name: int(name[1:]) for name in slidings}
    return with_halos(made, ins[:count], slidings, dims, op or None)


@rule("reduce_window_sum")
def _sum(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    return _windowed(params, ins, outs, "sum", (Linear(frozenset({0})),), lambda _: (0,))


@rule("reduce_window_max")
def _max(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    linear = (Linear(frozenset({0}), ("max",)),)
    return _windowed(params, ins, outs, "max", linear, lambda _: (_least(ins[0].dtype),))


@rule("reduce_window_min")
def _min(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    linear = (Linear(frozenset({0}), ("min",)),)
    return _windowed(params, ins, outs, "min", linear, lambda _: (_greatest(ins[0].dtype),))


@rule("reduce_window")
def _any(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    return _windowed(params, ins, outs, "", (), lambda operands: operands[len(outs) :])


def _least(dtype: Any) -> Any:
    if dtype == np.dtype(bool):
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min


def _greatest(dtype: Any) -> Any:
    if dtype == np.dtype(bool):
        return True
    return jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


_POOLING: Mapping[str, tuple[str, tuple[Linear, ...]]] = {
    # name -> which operands and results have a row for each window, and which all rows
    "select_and_scatter_add": ("windows, rows -> rows", (Linear(frozenset({0})),)),
    "select_and_gather_add": ("rows, rows -> windows", (Linear(frozenset({0})),)),
    "select_and_scatter": ("rows, windows, init -> rows", ()),
}
"""Max pooling's derivatives (and their generic form), each linear in what is no selecting operand."""


def _pooling(name: str, form: str, linear: tuple[Linear, ...]):
    """Windows choose one of their rows. What they add to rows of others is given back to these.

    How the generic form adds is not known, so that its windows must not overlap.
    """
    left, right = form.split(" -> ")
    sides = left.split(", ")
    sliding_at = [i for i, side in enumerate(sides) if side == "rows"]
    scatters = right == "rows"

    def make(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
        shapes = dict(zip((*sides, right), (a.shape for a in (*ins, *outs)), strict=True))
        rank = len(shapes["rows"])
        ones = (1,) * rank
        dilated = {"base_dilation": ones, "window_dilation": ones, **params}
        rows_like, windows_like = (Aval(shapes[s], ins[0].dtype) for s in ("rows", "windows"))
        slidings = _slidings(dilated, rows_like, windows_like, cut_windows=False)
        if name == "select_and_scatter":
            slidings = {n: s for n, s in slidings.items() if s.is_apart}
        dims = {"rows": ["_"] * rank, "windows": ["_"] * rank, "init": []}
        sizes: dict[str, int] = {}
        rests: list[str] = []
        for factor, sliding in slidings.items():
            dim = int(factor[1:])
            dims["rows"][dim], rest = blocked(factor, sliding.rows, sliding.blocks)
            dims["windows"][dim], more = blocked(factor, sliding.outputs, sliding.blocks)
            sizes |= {factor: sliding.blocks, **rest, **more}
            rests += {**rest, **more}
        moving = {factor: s for factor, s in slidings.items() if not s.is_apart}

        def bind(ctx: Context, *operands: Any) -> Any:
            moved, padding = list(operands), list(params["padding"])
            split = [factor for factor in moving if ctx.axes(factor)]
            for factor in split:
                dim, sliding = int(factor[1:]), moving[factor]
                for n, at in enumerate(sliding_at):
                    # The last is the one by which rows are chosen: none outside the dim ever is.
                    fill = _never_chosen(params, ins[at].dtype) if at == sliding_at[-1] else 0
                    moved[at] = slide(ctx, factor, sliding, moved[at], dim, position=n, fill=fill)
                padding[dim] = sliding.padding(ctx.shards(factor))
            made = ctx.bind(*moved, padding=tuple(padding))
            for factor in reversed(split if scatters else ()):
                made = returned(ctx, factor, moving[factor], made, int(factor[1:]))
            return made

        made = factor_rule(
            f"{', '.join(' '.join(dims[s]) for s in sides)} -> {' '.join(dims[right])}",
            [a.shape for a in ins],
            [a.shape for a in outs],
            sizes=sizes,
            linear=linear,
            whole=rests,
            bind=bind if moving else None,
        )
        return with_halos(
            made,
            [ins[at] for at in sliding_at],
            moving,
            {factor: int(factor[1:]) for factor in moving},
            "max" if "select_prim" not in params or params["select_prim"].name == "ge" else "min",
            first=sliding_at[0],
            returns=scatters,
        )

    return make


def _never_chosen(params: Mapping[str, Any], dtype: Any) -> Any:
    return _least(dtype) if params["select_prim"].name == "ge" else _greatest(dtype)


for _name, _facts in _POOLING.items():
    rule(_name)(_pooling(_name, *_facts))
