"""Padding and cropping that a window or a convolution does itself.

The gradient of average pooling pads 8 rows to 17, which no axis divides, and sums windows of these; and so
does an image that is padded by hand before a convolution. Windows have a padding and a dilation of their
own: taken as these, the rows in between are never made, and only a halo has to move. Its gradient's ends
that are cut off again need not be made either.

Invariant: the graph computes the same values.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from pypto_spmd.collectives.graph import Atom, Block, Constant, Equation, Graph
from pypto_spmd.collectives.pruning import pruned
from pypto_spmd.collectives.rules import rule_for

_FILLED_WITH = {
    # primitive -> what stands in its own padding
    "conv_general_dilated": 0.0,
    "reduce_window_max": -np.inf,
    "reduce_window_min": np.inf,
    "reduce_window_sum": 0.0,
}


def with_fused_pads(graph: Graph) -> Graph:
    """The graph with pads taken into the windows that read them, and cuts into those that they read.

    Args:
        graph: the traced function.
    """
    return pruned(replace(graph, block=_fused(graph.block, graph)))


def _fused(block: Block, graph: Graph) -> Block:
    uses = Counter(a for e in block.equations for a in e.inputs if isinstance(a, int))
    uses.update(a for a in block.outputs if isinstance(a, int))
    makers: dict[int, Equation] = {}
    casts: dict[int, Atom] = {}
    equations = []
    for equation in block.equations:
        maker = makers.get(_first(equation))
        if equation.bodies and equation.region is None:
            equation = replace(equation, bodies=tuple(_fused(b, graph) for b in equation.bodies))
        elif maker is None:
            pass
        elif maker.name == "pad" and equation.name in _FILLED_WITH:
            equation = _taken_in(maker, equation, graph)
        elif maker.name in _FILLED_WITH and uses[maker.outputs[0]] == 1:
            equation = _cut_off(maker, equation, graph)
        if equation.name == "convert_element_type" and not graph.avals[equation.outputs[0]].shape:
            casts[equation.outputs[0]] = equation.inputs[0]
        elif equation.name == "pad":
            operand, value = equation.inputs
            value = casts.get(value, value) if isinstance(value, int) else value
            makers[equation.outputs[0]] = replace(equation, inputs=(operand, value))
        elif equation.name in _FILLED_WITH:
            makers[equation.outputs[0]] = equation
        equations.append(equation)
    return replace(block, equations=tuple(equations))


def _first(equation: Equation) -> int:
    """The tensor that an equation reads first, -1 if that is none."""
    first = equation.inputs[0] if equation.inputs else -1
    return first if isinstance(first, int) else -1


def _taken_in(pad: Equation, equation: Equation, graph: Graph) -> Equation:
    """The equation as one that pads by itself, if it can."""
    operand, value = pad.inputs
    config = [tuple(map(int, way)) for way in pad.params["padding_config"]]
    dtype = graph.aval(operand).dtype
    if any(low < 0 or high < 0 for low, high, _ in config):
        return equation
    if not jnp.issubdtype(dtype, jnp.inexact) or not _is(value, _FILLED_WITH[equation.name]):
        return equation
    params = dict(equation.params)
    if equation.name == "conv_general_dilated":
        spec = params["dimension_numbers"].lhs_spec
        if any(any(config[d]) for d in spec[:2]):
            return equation
        params |= _padded(params, "lhs_dilation", [config[d] for d in spec[2:]])
    else:
        params |= _padded(params, "base_dilation", config)
    return _with(equation, params, (operand, *equation.inputs[1:]), graph)


def _with(
    equation: Equation, params: Mapping[str, Any], inputs: tuple[Atom, ...], graph: Graph
) -> Equation:
    outs = tuple(graph.avals[t] for t in equation.outputs)
    rule = rule_for(equation.name, params, tuple(map(graph.aval, inputs)), outs)
    return replace(equation, params=params, inputs=inputs, rule=rule)


def _cut_off(windows: Equation, cut: Equation, graph: Graph) -> Equation:
    """An equation that cuts off ends of what windows give as these windows, if it is one."""
    shape = graph.avals[windows.outputs[0]].shape
    ends = _ends_cut(cut, shape)
    if ends is None or not any(map(any, ends)):
        return cut
    params = dict(windows.params)
    strides = params["window_strides"]
    if windows.name == "conv_general_dilated":
        spec = params["dimension_numbers"].out_spec
        if any(any(ends[d]) for d in spec[:2]):
            return cut
        ends = [ends[d] for d in spec[2:]]
    params["padding"] = tuple(
        (low - before * stride, high - after * stride)
        for (low, high), (before, after), stride in zip(
            params["padding"], ends, strides, strict=True
        )
    )
    if windows.name != "conv_general_dilated" and any(min(way) < 0 for way in params["padding"]):
        return cut
    made = replace(windows, index=cut.index, outputs=cut.outputs)
    return _with(made, params, windows.inputs, graph)


def _ends_cut(equation: Equation, shape: Sequence[int]) -> list[tuple[int, int]] | None:
    """How many rows of each dim an equation cuts off at both ends, if that is all it does."""
    params = equation.params
    if equation.name == "pad":
        config = params["padding_config"]
        if any(low > 0 or high > 0 or interior for low, high, interior in config):
            return None
        return [(-int(low), -int(high)) for low, high, _ in config]
    if equation.name == "slice" and all(s == 1 for s in params["strides"] or ()):
        ends = zip(params["start_indices"], params["limit_indices"], shape, strict=True)
        return [(int(low), int(n - high)) for low, high, n in ends]
    return None


def _is(value: Atom, wanted: float) -> bool:
    return isinstance(value, Constant) and value.aval.shape == () and value.aval.value == wanted


def _padded(
    params: Mapping[str, Any], dilation: str, config: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """The params that pad and dilate rows which were padded, and set apart, by `config` before."""
    steps = params[dilation]
    return {
        "padding": tuple(
            (low + before * step, high + after * step)
            for (low, high), (before, after, _), step in zip(
                params["padding"], config, steps, strict=True
            )
        ),
        dilation: tuple(
            step * (interior + 1) for step, (_, _, interior) in zip(steps, config, strict=True)
        ),
    }
