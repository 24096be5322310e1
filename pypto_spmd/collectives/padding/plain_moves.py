"""Slices, pads and updates at known places, written so that each changes the rows of one dim only.

`x.at[1:-1, 1:-1].set(y)` is one scatter, whose windows nothing splits. It is also rows of `x`, then rows of
columns of `x` and `y`, then rows of `x` again: slices and concatenations, of which `collectives.splices`
sees what has to move.

Invariant: the graph computes the same values, and all slices, pads and static updates along dims in which
nothing changes are left as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax

from pypto_spmd.collectives.flatten import build_graph
from pypto_spmd.collectives.graph import Atom, Block, Constant, Equation, Graph
from pypto_spmd.collectives.rules import rule_for

Function = Callable[..., Any]


def with_plain_moves(graph: Graph) -> Graph:
    """The graph with slices, pads and static updates of one dim at a time.

    Args:
        graph: the traced function.
    """
    writer = _Writer(graph)
    block = writer.block(graph.block)
    return replace(graph, block=block, avals=tuple(writer.avals))


class _Writer:
    """The walk over a graph; `known` are the small integer arrays whose values are known."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.avals = list(graph.avals)
        self.known: dict[int, np.ndarray] = {}
        self.next_index = 1 + max((e.index for e, _ in graph.equations()), default=-1)

    def block(self, block: Block) -> Block:
        equations: list[Equation] = []
        for equation in block.equations:
            if equation.region is not None:
                equations.append(equation)
            elif equation.bodies:
                bodies = tuple(self.block(body) for body in equation.bodies)
                equations.append(replace(equation, bodies=bodies))
            else:
                self._learn(equation)
                find = _FORMS.get(equation.name)
                function = find(equation, self) if find is not None else None
                equations += [equation] if function is None else self._written(equation, function)
        return replace(block, equations=tuple(equations))

    def value(self, atom: Atom) -> np.ndarray | None:
        """The value of an operand, if it is known."""
        return np.asarray(atom.value) if isinstance(atom, Constant) else self.known.get(atom)

    def shape(self, atom: Atom) -> tuple[int, ...]:
        """The shape of an operand."""
        return atom.aval.shape if isinstance(atom, Constant) else self.avals[atom].shape

    def _learn(self, equation: Equation) -> None:
        make = _FOLDED.get(equation.name)
        if make is None or np.prod(self.avals[equation.outputs[0]].shape) > _MOST_FOLDED:
            return
        values = [self.value(atom) for atom in equation.inputs]
        if all(v is not None and v.dtype.kind in "iu" for v in values):
            self.known[equation.outputs[0]] = make(values, equation.params)

    def _written(self, equation: Equation, function: Function) -> list[Equation]:
        """The equations of a function of the equation's operands, in its place."""
        avals = [a.aval if isinstance(a, Constant) else self.avals[a] for a in equation.inputs]
        described = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        part = build_graph(jax.make_jaxpr(function)(*described))
        named: dict[int, Atom] = dict(zip(part.block.inputs, equation.inputs, strict=True))
        (result,) = part.block.outputs
        if isinstance(result, Constant) or result in part.block.inputs:
            return [equation]
        found = []
        for made in part.block.equations:
            for tensor in made.outputs:
                self.avals.append(part.avals[tensor])
                named[tensor] = len(self.avals) - 1
            if result in made.outputs:
                named[made.outputs[0]] = equation.outputs[0]
            inputs = tuple(a if isinstance(a, Constant) else named[a] for a in made.inputs)
            outputs = tuple(_tensor(named[tensor]) for tensor in made.outputs)
            ins = tuple(a.aval if isinstance(a, Constant) else self.avals[a] for a in inputs)
            outs = tuple(self.avals[tensor] for tensor in outputs)
            found.append(
                replace(
                    made, index=self.next_index, inputs=inputs, outputs=outputs,
                    rule=rule_for(made.name, made.params, ins, outs),
                    source=equation.source, scope=equation.scope,
                )
            )  # fmt: skip
            self.next_index += 1
        return found


def _tensor(atom: Atom) -> int:
    assert isinstance(atom, int)
    return atom


_MOST_FOLDED = 16
"""Arrays of more numbers are no places of windows."""

_FOLDED: Mapping[str, Callable[[Sequence[Any], Mapping[str, Any]], np.ndarray]] = {
    "broadcast_in_dim": lambda values, params: np.broadcast_to(
        values[0].reshape(
            [
                values[0].shape[params["broadcast_dimensions"].index(d)]
                if d in params["broadcast_dimensions"]
                else 1
                for d in range(len(params["shape"]))
            ]
        ),
        params["shape"],
    ),
    "concatenate": lambda values, params: np.concatenate(values, params["dimension"]),
    "convert_element_type": lambda values, params: values[0].astype(params["new_dtype"]),
}


def _changed(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]


def _slice(equation: Equation, writer: _Writer) -> Function | None:
    """One dim after another; a stride before the rows are cut to those that are wanted."""
    before, after = writer.shape(equation.inputs[0]), writer.avals[equation.outputs[0]].shape
    starts = equation.params["start_indices"]
    strides = equation.params["strides"] or (1,) * len(before)

    def is_plain(d: int) -> bool:
        return strides[d] == 1 or (starts[d] < strides[d] and after[d] * strides[d] == before[d])

    changed = _changed(before, after)
    if isinstance(equation.inputs[0], Constant) or (
        len(changed) <= 1 and all(map(is_plain, range(len(before))))
    ):
        return None

    def sliced(x: Any) -> Any:
        for d in changed:
            start, stride = starts[d], strides[d]
            if stride > 1 and before[d] % stride == 0:
                x = lax.slice_in_dim(x, start % stride, before[d], stride, axis=d)
                start, stride = start // stride, 1
            limit = start + (after[d] - 1) * stride + 1 if after[d] else start
            if (start, limit, stride) != (0, x.shape[d], 1):
                x = lax.slice_in_dim(x, start, limit, stride, axis=d)
        return x

    return sliced


def _pad(equation: Equation, writer: _Writer) -> Function | None:
    config = equation.params["padding_config"]
    changed = [d for d, way in enumerate(config) if any(way)]
    if len(changed) <= 1 or isinstance(equation.inputs[0], Constant):
        return None

    def padded(x: Any, value: Any) -> Any:
        for d in changed:
            x = lax.pad(x, value, [w if e == d else (0, 0, 0) for e, w in enumerate(config)])
        return x

    return padded


def _dynamic_update_slice(equation: Equation, writer: _Writer) -> Function | None:
    found = [writer.value(atom) for atom in equation.inputs[2:]]
    if any(v is None for v in found) or isinstance(equation.inputs[0], Constant):
        return None
    before, part = writer.shape(equation.inputs[0]), writer.shape(equation.inputs[1])
    starts = [
        min(max(int(v), 0), n - k)
        for v, n, k in zip(found, before, part, strict=True)
        if v is not None
    ]
    if not all(part) or part == before:
        return None
    return lambda x, update, *_: _put(x, update, starts)


def _put(x: Any, update: Any, starts: Sequence[int]) -> Any:
    """`x` with the update at these places."""
    changed = _changed(x.shape, update.shape)
    if not changed:
        return update
    d, size = changed[0], x.shape[changed[0]]
    start, limit = starts[d], starts[d] + update.shape[d]
    inside = lax.slice_in_dim(x, start, limit, axis=d)
    inside = _put(inside, update, [0 if e == d else s for e, s in enumerate(starts)])
    ends = [lax.slice_in_dim(x, low, high, axis=d) for low, high in ((0, start), (limit, size))]
    return lax.concatenate([p for p in (ends[0], inside, ends[1]) if p.shape[d]], d)


def _scatter(equation: Equation, writer: _Writer) -> Function | None:
    """One window at a known place, inside of the operand."""
    numbers = equation.params["dimension_numbers"]
    places = writer.value(equation.inputs[1])
    if (
        places is None
        or places.ndim != 1
        or isinstance(equation.inputs[0], Constant)
        or (equation.name == "scatter" and equation.params["update_jaxpr"] is not None)
    ):
        return None
    before = writer.shape(equation.inputs[0])
    inserted = numbers.inserted_window_dims
    part = list(writer.shape(equation.inputs[2]))
    for d in sorted(inserted):
        part.insert(d, 1)
    starts = [0] * len(before)
    for d, place in zip(numbers.scatter_dims_to_operand_dims, places, strict=True):
        starts[d] = int(place)
    inside = all(0 <= s <= n - k for s, n, k in zip(starts, before, part, strict=True))
    if not inside or not all(part) or tuple(part) == before:
        return None

    def put(x: Any, _: Any, update: Any) -> Any:
        return _put(x, lax.expand_dims(update, inserted), starts)

    def add(x: Any, _: Any, update: Any) -> Any:
        update = lax.expand_dims(update, inserted)
        zero = np.zeros((), x.dtype)
        for d in _changed(x.shape, update.shape):
            ends = (starts[d], x.shape[d] - starts[d] - update.shape[d], 0)
            update = lax.pad(update, zero, [ends if e == d else (0, 0, 0) for e in range(x.ndim)])
        return lax.add(x, update)

    return put if equation.name == "scatter" else add


_FORMS: Mapping[str, Callable[[Equation, _Writer], Function | None]] = {
    "slice": _slice,
    "pad": _pad,
    "dynamic_update_slice": _dynamic_update_slice,
    "scatter": _scatter,
    "scatter-add": _scatter,
}
