"""Sums of gradients in a wider type than they were computed in, where a person asks for it.

A gradient of a mixed-precision model ends in a cast from the narrow type, and what is cheapest to send is
the narrow array before it. Where the cast is marked (by its name scope), the graph is changed so that the
narrow array isn't there: the sum over the batch, a `dot_general` say, gives the wide type itself, and the
transposes, reshapes and additions up to the cast work on that. Then the gradient can only be reduced in
the wide type, and what each device adds up was never rounded to the narrow one.

What something else reads in the narrow type too stays narrow, and so does what reaches the cast in any other
way, such as through a loop of unknown length.

Invariant: only the marked values change, and only by not being rounded on the way.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax

from pypto_spmd.collectives.graph import Atom, Block, Constant, Equation, Graph
from pypto_spmd.collectives.rules import Aval, rule_for

SCOPE = "pypto_spmd.sum_in"
"""The name scope of a cast or copy up to which values are to be summed in the type of its result."""

_ALONG = frozenset(
    {
        "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "div",
        "expand_dims", "mul", "neg", "pad", "reshape", "rev", "slice", "squeeze", "sub", "transpose",
    }
)  # fmt: skip
"""Primitives that work on the wide type as on the narrow one; of `mul` and `div` with a constant."""

_TYPED = frozenset({"dot_general", "conv_general_dilated"})
"""Primitives that sum in the type that their params say."""

_CAST_FIRST = {"reduce_sum": (0,), "scatter-add": (0, 2)}
"""Primitives that sum in the type of their operands, and these operands."""

_WIDE, _FREE = "wide", "free"


def sum_in(value: jax.Array, dtype: Any) -> jax.Array:
    """Casts a value, and asks that in a plan it is summed, over devices too, in the type it is cast to.

    Args:
        value: what is to be summed, such as a gradient.
        dtype: the type.
    """
    with jax.named_scope(SCOPE):
        return jax.numpy.copy(value) if value.dtype == dtype else value.astype(dtype)


def with_wide_sums(graph: Graph) -> Graph:
    """The graph with its marked values summed in the type that they are cast to.

    Args:
        graph: the traced function.
    """
    marked = [e for e, _ in graph.equations() if SCOPE in e.scope]
    return _Walk(graph, marked).graph() if marked else graph


class _Walk:
    """The changes to a graph: types of tensors, equations in place of others, casts before them."""

    def __init__(self, graph: Graph, marked: Sequence[Equation]) -> None:
        self._graph = graph
        self._avals = list(graph.avals)
        self._next_index = 1 + max(e.index for e, _ in graph.equations())
        self._makers: dict[int, Equation] = {}
        self._readers = [0] * len(graph.avals)
        self._carried: set[int] = set()  # inputs of loops' bodies that a trip gives to the next one
        self._changed: dict[int, Equation] = {}
        self._casts: dict[int, list[Equation]] = {}
        for block in graph.blocks():
            self._count(block.outputs)
            for equation in block.equations:
                self._count(equation.inputs)
                self._makers.update(dict.fromkeys(equation.outputs, equation))
                if equation.name == "scan":
                    consts, carry, _ = equation.counts
                    held = equation.bodies[0].inputs[consts : consts + carry]
                    self._carried.update(held)
        self._blocked: set[int] = set()
        self._done: set[int] = set()
        tops = [
            (e, tensor, self._avals[e.outputs[0]].dtype)
            for e in marked
            for tensor in e.inputs
            if isinstance(tensor, int)
        ]
        while True:
            # What anything else reads as well stays narrow, and what is above it.
            self._reads: dict[int, set[tuple[int, int]]] = {}
            self._ways: dict[int, list[tuple[int, int]]] = {}
            wide = [top for top in tops if self._found(*top[1:], set()) == _WIDE]
            for equation, tensor, dtype in wide:
                self._visit(tensor, dtype, (equation.index, 0))
            shared = {t for t, reads in self._reads.items() if len(reads) < self._readers[t]}
            if not shared:
                break
            self._blocked |= shared
        for equation, tensor, dtype in wide:
            self._do(tensor, dtype)
            self._set(self._equation(equation))

    def _count(self, atoms: Sequence[Atom]) -> None:
        for atom in atoms:
            if isinstance(atom, int):
                self._readers[atom] += 1

    def _found(self, atom: Atom, dtype: Any, carried: set[int]) -> str | None:
        """What is above a value: a sum that can be wide, or what can be wide at no cost, or neither.

        Args:
            atom: the value.
            dtype: the wide type.
            carried: inputs of loops' bodies that the way up has come to are added.
        """
        if isinstance(atom, Constant):
            return _FREE
        if atom in self._blocked or not _is_inexact(self._avals[atom].dtype):
            return None
        if atom in self._carried:
            carried.add(atom)
            return _FREE
        equation = self._makers.get(atom)
        if equation is None:
            return None
        if equation.name in _TYPED or equation.name in _CAST_FIRST:
            # What is as wide already needs nothing, and must not be made narrower.
            return _WIDE if self._avals[atom].dtype.itemsize < dtype.itemsize else None
        if equation.name == "scan":
            return self._found_in_scan(equation, atom, dtype)
        if equation.name not in _ALONG:
            return None
        if equation.name in ("mul", "div") and not isinstance(equation.inputs[1], Constant):
            return None
        found = [self._found(operand, dtype, carried) for operand in equation.inputs]
        return _WIDE if _WIDE in found else _FREE if all(found) else None

    def _found_in_scan(self, equation: Equation, tensor: int, dtype: Any) -> str | None:
        consts, carry, _ = equation.counts
        place = equation.outputs.index(tensor)
        (body,) = equation.bodies
        carried: set[int] = set()
        found = self._found(body.outputs[place], dtype, carried)
        own = {body.inputs[consts + place]} if place < carry else set()
        return found if found == _WIDE and carried == own else None

    def _above(self, equation: Equation, tensor: int, dtype: Any) -> list[tuple[int, int]]:
        """What has to be wide for a result to be so, each with its place among what the equation reads."""
        if equation.name == "scan":
            place = equation.outputs.index(tensor)
            result = equation.bodies[0].outputs[place]
            assert isinstance(result, int)
            return [(place, result)]
        if equation.name in _TYPED:
            return []
        return [
            (place, operand)
            for place, operand in enumerate(equation.inputs)
            if isinstance(operand, int)
            and (equation.name in _ALONG or place in _CAST_FIRST[equation.name][:1])
            and self._found(operand, dtype, set()) is not None
        ]

    def _visit(self, tensor: int, dtype: Any, read: tuple[int, int]) -> None:
        """Notes who reads what would be wide."""
        self._reads.setdefault(tensor, set()).add(read)
        if tensor in self._carried or tensor in self._ways:
            return
        equation = self._makers[tensor]
        self._ways[tensor] = self._above(equation, tensor, dtype)
        for place, above in self._ways[tensor]:
            self._visit(above, dtype, (equation.index, place))

    def _do(self, tensor: int, dtype: Any) -> None:
        """Makes a tensor wide that was visited, and what has to be wide for it."""
        if tensor in self._done:
            return
        self._done.add(tensor)
        self._avals[tensor] = _cast(self._avals[tensor], dtype)
        if tensor in self._carried:
            return
        above = self._ways[tensor]
        for _, operand in above:
            self._do(operand, dtype)
        equation = self._equation(self._makers[tensor])
        params, inputs = dict(equation.params), list(equation.inputs)
        if equation.name == "scan":
            consts, carry, _ = equation.counts
            ((place, _),) = above
            casts: Sequence[int] = (consts + place,) if place < carry else ()
        elif equation.name in _TYPED:
            params["preferred_element_type"] = dtype
            casts = ()
        elif equation.name == "convert_element_type":
            params["new_dtype"] = dtype
            casts = ()
        else:
            casts = _CAST_FIRST.get(equation.name, range(len(inputs)))
        for place in casts:
            inputs[place] = self._as(inputs[place], dtype, equation)
        if equation.name == "scatter-add":
            params = _scatter_params(params, [self._aval(atom) for atom in inputs])
        self._set(replace(equation, params=params, inputs=tuple(inputs)))

    def _as(self, atom: Atom, dtype: Any, reader: Equation) -> Atom:
        """A value cast just before an equation that reads it."""
        aval = self._aval(atom)
        if aval.dtype == dtype:
            return atom
        wide = _cast(aval, dtype)
        if isinstance(atom, Constant):
            return Constant(np.asarray(atom.value).astype(dtype), wide)
        self._avals.append(wide)
        result = len(self._avals) - 1
        params = {"new_dtype": dtype, "weak_type": False, "sharding": None}
        rule = rule_for("convert_element_type", params, (aval,), (wide,))
        cast = Equation(
            self._next_index, lax.convert_element_type_p, params, (atom,), (result,), rule,
            reader.source, reader.scope,
        )  # fmt: skip
        self._next_index += 1
        self._casts.setdefault(reader.index, []).append(cast)
        return result

    def _aval(self, atom: Atom) -> Aval:
        return atom.aval if isinstance(atom, Constant) else self._avals[atom]

    def _equation(self, equation: Equation) -> Equation:
        return self._changed.get(equation.index, equation)

    def _set(self, equation: Equation) -> None:
        if equation.rule is not None:
            ins = tuple(self._aval(atom) for atom in equation.inputs)
            outs = tuple(self._avals[tensor] for tensor in equation.outputs)
            equation = replace(equation, rule=rule_for(equation.name, equation.params, ins, outs))
        self._changed[equation.index] = equation

    def graph(self) -> Graph:
        """The graph with all changes."""
        return replace(self._graph, avals=tuple(self._avals), block=self._block(self._graph.block))

    def _block(self, block: Block) -> Block:
        equations: list[Equation] = []
        for original in block.equations:
            equations += self._casts.get(original.index, ())
            equation = self._equation(original)
            if equation.bodies:
                bodies = tuple(self._block(body) for body in equation.bodies)
                equation = replace(equation, bodies=bodies)
            equations.append(equation)
        return replace(block, equations=tuple(equations))


def _is_inexact(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and jax.numpy.issubdtype(dtype, np.inexact)


def _cast(aval: Aval, dtype: Any) -> Aval:
    return replace(aval, dtype=dtype)


def _scatter_params(params: dict[str, Any], avals: Sequence[Aval]) -> dict[str, Any]:
    """The params with an addition of the operands' type."""
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    def scatter(operand: Any, indices: Any, updates: Any) -> Any:
        return lax.scatter_add(
            operand,
            indices,
            updates,
            params["dimension_numbers"],
            indices_are_sorted=params["indices_are_sorted"],
            unique_indices=params["unique_indices"],
            mode=params["mode"],
        )

    made = jax.make_jaxpr(scatter)(*shapes).jaxpr.eqns[-1].params
    return {**params, **{name: made[name] for name in ("update_jaxpr", "update_consts")}}
