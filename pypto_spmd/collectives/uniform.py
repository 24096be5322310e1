"""Collectives of one number everywhere: what they give is known, and nothing need be sent.

The cotangent of a sum is such an array of ones, and so hand-written collectives meet it in every
derivative of a sum. XLA sends nothing for it either.

Invariant: the graph computes the same values.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from jax import lax

from pypto_spmd.collectives.by_hand import COLLECTIVES, axes_of
from pypto_spmd.collectives.graph import Atom, Block, Constant, Equation, Graph
from pypto_spmd.collectives.region import Region
from pypto_spmd.collectives.rules import Aval, rule_for

_KEEPING = frozenset(
    {
        "broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reduce_max", "reduce_min",
        "reshape", "sharding_constraint", "slice", "squeeze", "transpose",
    }
)  # fmt: skip
"""Primitives that give the one number that they get."""

_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "div": np.true_divide,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "neg": np.negative,
    "sub": np.subtract,
}

_SUMS = ("psum", "reduce_scatter")
_SENT_ANYWAY = ("ppermute",)  # who is sent nothing gets zeros, so that it is not one number


def without_needless(graph: Graph) -> Graph:
    """The graph without collectives whose outcome is one number that is known.

    Args:
        graph: the traced function.
    """
    return replace(graph, block=_Walk(graph).block(graph.block, {}))


class _Walk:
    """The walk over a graph; `known` are the tensors that are one number, and this number."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[int, Any] = {}
        self.next_index = 1 + max((e.index for e, _ in graph.equations()), default=-1)

    def block(self, block: Block, axis_sizes: Mapping[str, int]) -> Block:
        """The block; in one of a region the sizes of the mesh axes are known."""
        equations: list[Equation] = []
        for equation in block.equations:
            if equation.region is not None:
                equations += self._region(equation, equation.region)
            else:
                equations.append(self._equation(equation, axis_sizes))
        return replace(block, equations=tuple(equations))

    def _number(self, atom: Atom) -> Any:
        if isinstance(atom, int):
            return self.known.get(atom)
        return None if atom.aval.value is None else np.asarray(atom.value, atom.aval.dtype)

    def _learn(self, tensor: int, number: Any) -> None:
        dtype = self.graph.avals[tensor].dtype
        if number is not None and isinstance(dtype, np.dtype):
            self.known[tensor] = np.asarray(number).astype(dtype)

    def _region(self, equation: Equation, region: Region) -> list[Equation]:
        """The region, its known results made outside of it."""
        (body,) = equation.bodies
        for atom, tensor in zip(equation.inputs, body.inputs, strict=True):
            self._learn(tensor, self._number(atom))
        body = self.block(body, region.mesh.shape)
        kept, fills = [], []
        for position, (atom, tensor) in enumerate(zip(body.outputs, equation.outputs, strict=True)):
            self._learn(tensor, self._number(atom))
            if tensor in self.known:
                fills.append(self._filled(equation, tensor, self.next_index))
                self.next_index += 1
            else:
                kept.append(position)
        select = lambda values: tuple(values[position] for position in kept)  # noqa: E731
        rest = replace(
            equation,
            outputs=select(equation.outputs),
            bodies=(replace(body, outputs=select(body.outputs)),),
            region=replace(region, outputs=select(region.outputs)),
        )
        return [rest, *fills]

    def _equation(self, equation: Equation, axis_sizes: Mapping[str, int]) -> Equation:
        if equation.bodies:
            bodies = tuple(self.block(body, axis_sizes) for body in equation.bodies)
            return replace(equation, bodies=bodies)
        if len(equation.outputs) != 1 or not equation.inputs:
            return equation
        numbers = [self._number(atom) for atom in equation.inputs]
        if any(number is None for number in numbers):
            return equation
        (output,) = equation.outputs
        with np.errstate(all="ignore"):
            if equation.name in _KEEPING:
                self._learn(output, numbers[0])
            elif equation.name == "reduce_sum":
                shape = self.graph.aval(equation.inputs[0]).shape
                self._learn(output, numbers[0] * prod(shape[d] for d in equation.params["axes"]))
            elif equation.name in _ARITHMETIC and self._is_inexact(output):
                self._learn(output, _ARITHMETIC[equation.name](*numbers))
            elif equation.name in COLLECTIVES and equation.name not in _SENT_ANYWAY:
                group = prod(axis_sizes[a] for a in axes_of(equation.params))
                self._learn(output, numbers[0] * (group if equation.name in _SUMS else 1))
                if output in self.known:
                    return self._filled(equation, output, equation.index)
        return equation

    def _is_inexact(self, tensor: int) -> bool:
        dtype = self.graph.avals[tensor].dtype
        return isinstance(dtype, np.dtype) and dtype.kind in "fVc"  # V: bfloat16 and its like

    def _filled(self, equation: Equation, output: int, index: int) -> Equation:
        """An array of the known number, where an equation makes it."""
        number, aval = self.known[output], self.graph.avals[output]
        scalar = Aval((), aval.dtype, number.item())
        params = {"shape": aval.shape, "broadcast_dimensions": (), "sharding": None}
        rule = rule_for("broadcast_in_dim", params, (scalar,), (aval,))
        inputs = (Constant(number, scalar),)
        return Equation(
            index,
            lax.broadcast_in_dim_p,
            params,
            inputs,
            (output,),
            rule,
            equation.source,
            equation.scope,
        )
