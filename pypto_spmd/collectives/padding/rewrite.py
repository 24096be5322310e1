"""The graph on padded dims: every equation gets operands of the sizes that it bears.

A tensor is kept in its stored shape. Where an equation bears that, it runs on it as it is, padding that it
would read being filled first; where it does not, the operand is cut to its true size and the result
padded again. Slices and pads that undo each other are seen through later (`collectives.splices`).
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from pypto_spmd.collectives.flatten import build_graph
from pypto_spmd.collectives.graph import Atom, Block, Constant, Equation, Graph
from pypto_spmd.collectives.padding.ties import Padded, Tie, Ties, neutral
from pypto_spmd.collectives.rules import Aval, Rule, factor_rule, rule_for
from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.filling import fill_end_p
from pypto_spmd.collectives.rules.moving import moves
from pypto_spmd.collectives.source import Source

Shape = tuple[int, ...]

_KEEPS_ZEROS = (
    "convert_element_type", "copy", "name", "neg", "sharding_constraint", "stop_gradient",
)  # fmt: skip
"""Primitives that give zero where they read zero, at the same place."""


class Rewriter:
    """A graph's copy, in which tensors have their stored shapes.

    Args:
        graph: the graph.
        shapes: the stored shape of each of its tensors.
        ties_of: what padding an equation bears.
        garbage: has every padded result filled with values that would show; for tests.
    """

    def __init__(
        self,
        graph: Graph,
        shapes: Sequence[Shape],
        ties_of: Callable[[Equation], Ties],
        *,
        garbage: bool = False,
    ) -> None:
        self.graph = graph
        self.shapes = list(shapes)
        self.ties_of = ties_of
        self.garbage = garbage
        self.avals: list[Aval] = []
        self.zeros: dict[int, frozenset[int]] = {}  # dims whose padding holds zeros
        self.count = 0

    def new(self, aval: Aval) -> int:
        """The number of a new tensor."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def stored(self, tensor: int) -> Aval:
        """How a tensor of the graph is stored."""
        return replace(self.graph.avals[tensor], shape=self.shapes[tensor])

    def body(self, block: Block, out_shapes: Sequence[Shape]) -> Block:
        """The copy of a body that gives its outputs in these shapes."""
        inputs = tuple(self.new(self.stored(t)) for t in block.inputs)
        inside = Code(self, dict(zip(block.inputs, inputs, strict=True)))
        inside.run(block)
        outputs = tuple(
            inside.read(atom, shape) for atom, shape in zip(block.outputs, out_shapes, strict=True)
        )
        return replace(block, inputs=inputs, equations=tuple(inside.equations), outputs=outputs)

    def untouched(self, block: Block) -> Block:
        """The copy of a block that is inside a region."""
        environment = {t: self.new(self.graph.avals[t]) for t in block.inputs}
        equations = tuple(self.renumbered(e, environment) for e in block.equations)
        return replace(
            block,
            inputs=tuple(environment[t] for t in block.inputs),
            equations=equations,
            outputs=tuple(_renumbered(block.outputs, environment)),
        )

    def renumbered(self, equation: Equation, environment: dict[int, Any]) -> Equation:
        """The copy of an equation that stays what it is; its results are added to the environment."""
        index = self.next()
        bodies = tuple(self.untouched(b) for b in equation.bodies)
        environment |= {t: self.new(self.graph.avals[t]) for t in equation.outputs}
        return replace(
            equation,
            index=index,
            inputs=tuple(_renumbered(equation.inputs, environment)),
            outputs=tuple(environment[t] for t in equation.outputs),
            bodies=bodies,
        )

    def next(self) -> int:
        """The index of a new equation."""
        self.count += 1
        return self.count - 1


def _renumbered(atoms: Iterable[Atom], environment: Mapping[int, Atom]) -> Iterable[Atom]:
    return (a if isinstance(a, Constant) else environment[a] for a in atoms)


class Code:
    """The equations of one block, as they are rewritten.

    Args:
        rewriter: the rewriter.
        known: the copy of each tensor of the graph, in its stored shape.
    """

    def __init__(self, rewriter: Rewriter, known: dict[int, Atom]) -> None:
        self.rewriter = rewriter
        self.known = known
        self.equations: list[Equation] = []
        self.made: dict[Hashable, Atom] = {}
        self.source, self.scope = Source.unknown(), ""

    # What stands between equations ---------------------------------------------------------------

    def read(self, atom: Atom, shape: Shape) -> Atom:
        """A tensor or constant of the graph in a shape between its true one and any larger."""
        graph = self.rewriter.graph
        if isinstance(atom, Constant):
            return self.fitted(atom, atom.aval.shape, shape)
        return self.fitted(self.known[atom], graph.avals[atom].shape, shape)

    def fitted(self, atom: Atom, true: Shape, shape: Shape) -> Atom:
        """A value in another shape, of which the true one is a part."""
        if self.aval(atom).shape == shape:
            return atom
        key = ("fitted", _key(atom), shape)
        if key not in self.made:
            cut = tuple(map(min, self.aval(atom).shape, shape))
            made = self._cut(atom, cut)
            if cut != shape:
                made = self._pad(made, true, shape)
            self.made[key] = made
        return self.made[key]

    def _cut(self, atom: Atom, shape: Shape) -> Atom:
        if self.aval(atom).shape == shape:
            return atom
        params = {
            "start_indices": (0,) * len(shape),
            "limit_indices": shape,
            "strides": None,
        }
        rule = _cut_rule(self.aval(atom), shape)
        made = self.emit(lax.slice_p, params, (atom,), shape, rule=rule)
        if isinstance(atom, int):
            self.rewriter.zeros[made] = self.rewriter.zeros.get(atom, frozenset())
        return made

    def _pad(self, atom: Atom, true: Shape, shape: Shape) -> Atom:
        aval = self.aval(atom)
        config = tuple((0, new - old, 0) for old, new in zip(aval.shape, shape, strict=True))
        zero = np.zeros((), aval.dtype)
        params = {"padding_config": config}
        known = Constant(zero, Aval((), aval.dtype, zero.item()))
        made = self.emit(lax.pad_p, params, (atom, known), shape)
        grown = {d for d, n in enumerate(aval.shape) if n == true[d] != shape[d]}
        self.rewriter.zeros[made] = frozenset(grown)
        return made

    def filled(self, atom: Atom, sizes: Sequence[tuple[int, int]], value: Any) -> Atom:
        """A value with the padding of some dims filled."""
        if not isinstance(value, bool) and value == 0 and isinstance(atom, int):
            zeros = self.rewriter.zeros.get(atom, frozenset())
            sizes = [(d, n) for d, n in sizes if d not in zeros]
        if not sizes:
            return atom
        key = ("filled", _key(atom), tuple(sizes), repr(value))
        if key not in self.made:
            params = {"sizes": tuple(sizes), "value": value}
            made = self.emit(fill_end_p, params, (atom,), self.aval(atom).shape)
            if not isinstance(value, bool) and value == 0:
                before = self.rewriter.zeros.get(atom, ()) if isinstance(atom, int) else ()
                self.rewriter.zeros[made] = frozenset([*before, *(d for d, _ in sizes)])
            self.made[key] = made
        return self.made[key]

    def entered(self, value: Atom, true: Shape, stored: Shape) -> Atom:
        """What has been made of a tensor, as it is stored."""
        made = self.fitted(value, true, stored)
        return self._with_garbage(made, true, stored) if self.rewriter.garbage else made

    def constrained(self, atom: Atom, spec: PartitionSpec) -> Atom:
        """A value that lies as a spec says."""
        aval = self.aval(atom)
        return self.emit(
            lax.sharding_constraint_p, {}, (atom,), aval.shape, identity_rule(aval), spec
        )

    def aval(self, atom: Atom) -> Aval:
        """The `Aval` of a tensor of the copy, or of a constant."""
        return atom.aval if isinstance(atom, Constant) else self.rewriter.avals[atom]

    def emit(
        self,
        primitive: Primitive,
        params: dict[str, Any],
        inputs: tuple[Atom, ...],
        shape: Shape,
        rule: Rule | None = None,
        constraint: PartitionSpec | None = None,
    ) -> int:
        """One more equation, whose result has the dtype of its first operand."""
        ins = tuple(map(self.aval, inputs))
        out = Aval(shape, ins[0].dtype)
        if rule is None:
            rule = rule_for(primitive.name, params, ins, (out,))
        output = self.rewriter.new(out)
        self.equations.append(
            Equation(
                self.rewriter.next(), primitive, params, inputs, (output,), rule, self.source,
                self.scope, constraint=constraint,
            )
        )  # fmt: skip
        if primitive.name in _KEEPS_ZEROS and isinstance(inputs[0], int):
            self.rewriter.zeros[output] = self.rewriter.zeros.get(inputs[0], frozenset())
        return output

    # Equations -----------------------------------------------------------------------------------

    def run(self, block: Block) -> None:
        """Rewrites a block of the graph."""
        for equation in block.equations:
            self.source, self.scope = equation.source, equation.scope
            if equation.region is not None:
                results = self._region(equation)
            elif equation.bodies:
                results = self._loop(equation)
            else:
                results = self._plain(equation)
            for tensor, (atom, true) in zip(equation.outputs, results, strict=True):
                self.known[tensor] = self.entered(atom, true, self.rewriter.shapes[tensor])

    def _with_garbage(self, atom: Atom, true: Shape, stored: Shape) -> Atom:
        sizes = [(d, n) for d, (n, m) in enumerate(zip(true, stored, strict=True)) if n != m]
        if not sizes:
            return atom
        dtype = self.aval(atom).dtype
        if jnp.issubdtype(dtype, jnp.inexact):
            value: Any = np.nan
        else:
            value = dtype.kind == "b" or int(jnp.iinfo(dtype).max)
        return self.filled(atom, sizes, value)

    def _region(self, equation: Equation) -> list[tuple[Atom, Shape]]:
        avals = self.rewriter.graph.avals
        aval_of = self.rewriter.graph.aval
        environment: dict[int, Atom] = {
            atom: self.read(atom, aval_of(atom).shape)
            for atom in equation.inputs
            if isinstance(atom, int)
        }
        copy = self.rewriter.renumbered(equation, environment)
        self.equations.append(copy)
        return [
            (made, avals[tensor].shape)
            for made, tensor in zip(copy.outputs, equation.outputs, strict=True)
        ]

    def _loop(self, equation: Equation) -> list[tuple[Atom, Shape]]:
        """A loop over stored tensors: what is bound to a body's input is fitted to it."""
        rewriter, shapes = self.rewriter, self.rewriter.shapes
        index = rewriter.next()
        bound = _bound(equation, shapes)
        inputs = tuple(
            self.read(atom, shape)
            for atom, shape in zip(equation.inputs, bound.inputs, strict=True)
        )
        bodies = tuple(
            rewriter.body(body, of_body)
            for body, of_body in zip(equation.bodies, bound.inner, strict=True)
        )
        avals = [rewriter.graph.avals[tensor] for tensor in equation.outputs]
        outputs = tuple(
            rewriter.new(replace(aval, shape=shape))
            for aval, shape in zip(avals, bound.outputs, strict=True)
        )
        self.equations.append(
            replace(equation, index=index, inputs=inputs, outputs=outputs, bodies=bodies)
        )
        return [(made, aval.shape) for made, aval in zip(outputs, avals, strict=True)]

    def _plain(self, equation: Equation) -> list[tuple[Atom, Shape]]:
        graph, shapes = self.rewriter.graph, self.rewriter.shapes
        ins = tuple(map(graph.aval, equation.inputs))
        outs = tuple(graph.avals[t] for t in equation.outputs)
        stored = [shapes[a] if isinstance(a, int) else None for a in equation.inputs]
        is_plain = all(s is None or s == a.shape for s, a in zip(stored, ins, strict=True))
        if is_plain and all(
            shapes[t] == a.shape for t, a in zip(equation.outputs, outs, strict=True)
        ):
            return self._padded(equation, Ties(), ins, outs)
        return self._padded(equation, self.rewriter.ties_of(equation), ins, outs)

    def _padded(
        self, equation: Equation, ties: Ties, ins: tuple[Aval, ...], outs: tuple[Aval, ...]
    ) -> list[tuple[Atom, Shape]]:
        in_shapes, out_shapes = [list(a.shape) for a in ins], [list(a.shape) for a in outs]
        for tie in ties.ties:
            growth = self._growth(equation, ties, tie, ins)
            for is_result, position, dim in tie.places if growth != 1 else ():
                shape = (out_shapes if is_result else in_shapes)[position]
                shape[dim] = int(shape[dim] * growth)
        padded = Padded(
            equation, ins, outs, tuple(map(tuple, in_shapes)), tuple(map(tuple, out_shapes))
        )
        operands = []
        for position, (atom, shape) in enumerate(
            zip(equation.inputs, padded.in_shapes, strict=True)
        ):
            operand = self.read(atom, shape)
            for dim, op in _fills_of(ties, position):
                if shape[dim] != ins[position].shape[dim]:
                    value = neutral(op, ins[position].dtype)
                    operand = self.filled(operand, ((dim, ins[position].shape[dim]),), value)
            operands.append(operand)
        results = self._applied(padded, ties, tuple(operands))
        return [(made, aval.shape) for made, aval in zip(results, outs, strict=True)]

    def _growth(self, equation: Equation, ties: Ties, tie: Tie, ins: tuple[Aval, ...]) -> Fraction:
        """By what factor all places of a tie are padded; 1 if they do not agree."""
        graph, shapes = self.rewriter.graph, self.rewriter.shapes
        found = set()
        for is_result, position, dim in tie.places:
            op = "" if is_result else ties.fills.get((position, dim), "")
            if op and neutral(op, ins[position].dtype) is None:
                return Fraction(1)
            atom = (equation.outputs if is_result else equation.inputs)[position]
            if isinstance(atom, int):  # a constant is padded like the others
                true = graph.avals[atom].shape[dim]
                found.add(Fraction(shapes[atom][dim], true) if true else Fraction(1))
        if len(found) != 1:
            return Fraction(1)
        (growth,) = found
        return growth if (growth * tie.unit).denominator == 1 else Fraction(1)

    def _applied(self, padded: Padded, ties: Ties, operands: tuple[Atom, ...]) -> Sequence[Atom]:
        equation = padded.equation
        is_true = all(
            shape == aval.shape
            for shape, aval in zip(
                (*padded.in_shapes, *padded.out_shapes), (*padded.ins, *padded.outs), strict=True
            )
        )
        if not is_true and ties.run is not None:
            return self._inlined(ties.run(padded), operands)
        params, rule = equation.params, equation.rule
        if not is_true:
            if ties.params is not None:
                params = {**params, **ties.params(padded)}
            made = tuple(
                replace(a, shape=s) for a, s in zip(padded.outs, padded.out_shapes, strict=True)
            )
            if equation.constraint is not None:
                rule = identity_rule(made[0])
            else:
                rule = rule_for(equation.name, params, tuple(map(self.aval, operands)), made)
        outputs = tuple(
            self.rewriter.new(replace(a, shape=s))
            for a, s in zip(padded.outs, padded.out_shapes, strict=True)
        )
        self.equations.append(
            replace(
                equation, index=self.rewriter.next(), params=params, inputs=operands,
                outputs=outputs, rule=rule,
            )
        )  # fmt: skip
        if equation.name in _KEEPS_ZEROS and isinstance(operands[0], int):
            self.rewriter.zeros[outputs[0]] = self.rewriter.zeros.get(operands[0], frozenset())
        return outputs

    def _inlined(self, function: Callable[..., Any], operands: tuple[Atom, ...]) -> Sequence[Atom]:
        """The equations of a function of the operands."""
        avals = [self.aval(atom) for atom in operands]
        described = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        part = build_graph(jax.make_jaxpr(function)(*described))
        environment: dict[int, Atom] = dict(zip(part.block.inputs, operands, strict=True))
        for equation in part.block.equations:
            inputs = tuple(_renumbered(equation.inputs, environment))
            outs = tuple(part.avals[t] for t in equation.outputs)
            rule = rule_for(equation.name, equation.params, tuple(map(self.aval, inputs)), outs)
            outputs = tuple(map(self.rewriter.new, outs))
            environment |= zip(equation.outputs, outputs, strict=True)
            self.equations.append(
                replace(
                    equation, index=self.rewriter.next(), inputs=inputs, outputs=outputs, rule=rule,
                    source=self.source, scope=self.scope,
                )
            )  # fmt: skip
        return tuple(_renumbered(part.block.outputs, environment))


def _fills_of(ties: Ties, position: int) -> list[tuple[int, str]]:
    return [(dim, op) for (operand, dim), op in ties.fills.items() if operand == position]


def _key(atom: Atom) -> Hashable:
    return ("constant", id(atom)) if isinstance(atom, Constant) else atom


def _cut_rule(operand: Aval, after: Shape) -> Rule:
    """The rule of a cut to the true size: nearly all rows are kept, and are better gathered than added up."""
    before = operand.shape
    names = [f"d{d}" if n == m else "_" for d, (n, m) in enumerate(zip(before, after, strict=True))]

    def bind(ctx: Context, x: jax.Array) -> jax.Array:
        kept = tuple(k if n == "_" else m for n, k, m in zip(names, after, x.shape, strict=True))
        return lax.slice(x, (0,) * x.ndim, kept)

    notation = " ".join(names)
    return factor_rule(
        f"{notation} -> {notation}", [before], [after], linear=moves({0}, operand.dtype), bind=bind
    )


def identity_rule(aval: Aval) -> Rule:
    """The rule of what asks for a layout."""
    letters = " ".join(f"d{d}" for d in range(len(aval.shape)))
    return factor_rule(f"{letters} -> {letters}", [aval.shape], [aval.shape])


@dataclass(frozen=True, slots=True)
class _Bound:
    """The shapes of what a loop binds.

    Args:
        inputs: of its operands.
        inner: of the outputs of each of its bodies.
        outputs: of its results.
    """

    inputs: Sequence[Shape]
    inner: Sequence[Sequence[Shape]]
    outputs: Sequence[Shape]


def _bound(equation: Equation, shapes: list[Shape]) -> _Bound:
    """The shapes of what a loop binds; tensors of its bodies that must be stored alike, are."""
    outer = [shapes[t] for t in equation.outputs]
    if equation.name == "scan":
        consts, carry, _ = equation.counts
        (body,) = equation.bodies
        inner = [shapes[t] for t in body.inputs]
        length = equation.params["length"]
        kept, stacks = inner[: consts + carry], inner[consts + carry :]
        carried, piled = inner[consts : consts + carry], [shape[1:] for shape in outer[carry:]]
        return _Bound(
            [*kept, *((length, *shape) for shape in stacks)],
            [[*carried, *piled]],
            [*carried, *((length, *shape) for shape in piled)],
        )
    if equation.name == "while":
        cond_consts, body_consts, _ = equation.counts
        cond, body = equation.bodies
        for seen, carried in zip(cond.inputs[cond_consts:], body.inputs[body_consts:], strict=True):
            shapes[seen] = shapes[carried]
        carried = [shapes[t] for t in body.inputs[body_consts:]]
        held = [*cond.inputs[:cond_consts], *body.inputs[:body_consts]]
        return _Bound([*(shapes[t] for t in held), *carried], [[()], carried], carried)
    first, *others = equation.bodies
    for other in others:
        for one, same in zip(first.inputs, other.inputs, strict=True):
            shapes[same] = shapes[one]
    operands = [shapes[t] for t in first.inputs]
    return _Bound([(), *operands], [outer] * len(equation.bodies), outer)
