"""The traced function as one flat graph: inlined calls, loops with their bodies, sources.

`build_graph` turns a closed jaxpr into blocks of equations over numbered tensors. Calls that only group
equations (jit, remat, custom_jvp, custom_vjp) are inlined; `scan`, `while`, `cond` and `shard_map` keep
their bodies as blocks of the same graph, so that one inference sees them all. Dead equations are dropped
and equal ones merged, because XLA would do both and the plan must be what runs.

Invariant: tensors are numbered in program order, and every tensor is defined once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive
from jax.extend.core import Var as JaxVar
from jax.sharding import NamedSharding, PartitionSpec

from pypto_spmd.collectives.by_hand import UNCHECKED, names_axes, unchecked
from pypto_spmd.collectives.effects import ACTIONS, has_effects, is_ordered
from pypto_spmd.collectives.region import Region
from pypto_spmd.collectives.rules import Aval, Rule, factor_rule, rule_for
from pypto_spmd.collectives.rules.user_rule import Misfit
from pypto_spmd.collectives.source import Source


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A value known while tracing: a literal or a small captured array."""

    value: Any
    aval: Aval


Atom = int | Constant
"""What an equation reads: a tensor by its number, or a constant."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Straight-line code.

    Args:
        inputs: tensors defined outside and bound on entry.
        equations: in program order.
        outputs: what the block gives back.
        weight: how often it runs in one call (of a loop without a known trip count: an assumption).
        repeat: how often it runs, None if that is not known before it runs.
    """

    inputs: tuple[int, ...]
    equations: "tuple[Equation, ...]"
    outputs: tuple[Atom, ...]
    weight: float = 1.0
    repeat: int | None = 1


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """One primitive application, or one with bodies: a loop, or a region.

    Args:
        index: number of the equation in the whole graph.
        primitive: the JAX primitive.
        params: its params.
        inputs: tensors and constants that it reads.
        outputs: tensors that it defines.
        rule: its rule; None if it has bodies.
        source: where in the user's code it stands.
        scope: its name scope ("jvp(Block_6)/Dense_0"); tells the layer, and the backward pass.
        bodies: of `scan` and `shard_map` (body,), of `while` (cond, body), of `cond` the branches.
        counts: of `scan` (consts, carry, xs), of `while` (cond consts, body consts, carry).
        constraint: the layout that `with_sharding_constraint` asks for here.
        region: of `shard_map`, what its specs fix.
    """

    index: int
    primitive: Primitive
    params: Mapping[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    rule: Rule | None
    source: Source
    scope: str
    bodies: tuple[Block, ...] = ()
    counts: tuple[int, ...] = ()
    constraint: PartitionSpec | None = None
    region: Region | None = None

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return self.primitive.name

    @property
    def ruled(self) -> Rule:
        """The rule of an equation that is no loop."""
        assert self.rule is not None
        return self.rule

    @property
    def entered(self) -> Region:
        """The region of an equation that is one."""
        assert self.region is not None
        return self.region

    @property
    def is_backward(self) -> bool:
        """Whether the equation was made by transposing, that is, belongs to a backward pass."""
        return "transpose(" in self.scope

    @property
    def acts_in_order(self) -> bool:
        """Whether it acts on the world and has to come after what acted before, itself or in a body."""
        if self.bodies:
            return any(e.acts_in_order for body in self.bodies for e in body.equations)
        return self.name in ACTIONS and is_ordered(self.params)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A whole traced function.

    Args:
        avals: the `Aval` of every tensor, by number.
        names: name of a tensor that has one (argument paths, outputs), by number.
        block: the function's body; its inputs are the function's flat arguments.
        padded: tensors that are an argument, padded and laid out as it was to be -> which argument.
    """

    avals: tuple[Aval, ...]
    names: Mapping[int, str]
    block: Block
    padded: Mapping[int, int] = field(default_factory=dict)

    def blocks(self) -> Iterator[Block]:
        """All blocks, outer before inner."""
        yield from blocks_of(self.block)

    def equations(self) -> Iterator[tuple[Equation, Block]]:
        """All equations with the block they stand in, in program order, loops before their bodies."""
        for block in self.blocks():
            for equation in block.equations:
                yield equation, block

    def aval(self, atom: Atom) -> Aval:
        """The `Aval` of a tensor or constant."""
        return atom.aval if isinstance(atom, Constant) else self.avals[atom]


def blocks_of(block: Block) -> Iterator[Block]:
    """A block and all blocks in it, outer before inner."""
    yield block
    for equation in block.equations:
        for body in equation.bodies:
            yield from blocks_of(body)


ASSUMED_TRIPS = 8.0
"""Trips that a `while` without a known count is taken to make when its communication is weighed."""

_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "composite": "jaxpr",
    "custom_partitioning": "call",
    "custom_vmap_call": "call",
    "linear_call": "callee",
    "call_hi_primitive": "_prim",
    "spmd_call": "jaxpr",
}
"""Primitives that only group equations -> the param with their jaxpr."""


def build_graph(closed: ClosedJaxpr, names: Sequence[str] = ()) -> Graph:
    """Flattens a closed jaxpr whose consts have been hoisted to arguments.

    Args:
        closed: the traced function.
        names: names of its flat arguments, for the plan.
    """
    builder = _Builder()
    jaxpr, consts = _open(closed)
    environment: dict[JaxVar, Atom] = {}
    inputs = []
    for var in jaxpr.invars:
        environment[var] = builder.new(aval_of(var))
        inputs.append(environment[var])
    builder.bind_consts(jaxpr, consts, environment)
    equations, outputs = builder.run(jaxpr, environment, _Place(Source.unknown(), "", {}))
    block, _ = _prune(Block(tuple(inputs), tuple(equations), outputs), None)
    block = _weigh(block, 1.0, 1)
    named = dict(zip(inputs, names, strict=False))
    return Graph(tuple(builder.avals), named, block)


def pruned(graph: Graph) -> Graph:
    """The graph without equations whose results nobody reads."""
    block, _ = _prune(graph.block, None)
    return replace(graph, block=block)


def aval_of(value: Any) -> Aval:
    """The `Aval` of a jaxpr variable or literal."""
    aval = value.aval
    shape = tuple(int(n) for n in getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", np.dtype(bool))
    if isinstance(value, Literal) and not shape and isinstance(dtype, np.dtype):
        return Aval(shape, dtype, np.asarray(value.val).item())
    return Aval(shape, dtype)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an equation stands: the enclosing equation's source, scope, and equal equations so far."""

    source: Source
    scope: str
    seen: dict[Any, tuple[int, ...]]


@dataclass(slots=True)
class _Builder:
    avals: list[Aval] = field(default_factory=list)
    reshaped: dict[int, int] = field(default_factory=dict)
    count: int = 0

    def new(self, aval: Aval) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def bind_consts(
        self, jaxpr: Jaxpr, consts: Sequence[Any], environment: dict[JaxVar, Atom]
    ) -> None:
        for var, value in zip(getattr(jaxpr, "constvars", ()), consts, strict=True):
            environment[var] = Constant(value, aval_of(var))

    def run(
        self, jaxpr: Jaxpr, environment: dict[JaxVar, Atom], place: _Place
    ) -> tuple[list[Equation], tuple[Atom, ...]]:
        equations: list[Equation] = []

        def read(var: Any) -> Atom:
            return Constant(var.val, aval_of(var)) if isinstance(var, Literal) else environment[var]

        for eqn in jaxpr.eqns:
            inputs = tuple(read(v) for v in eqn.invars)
            scope = _join(place.scope, str(eqn.source_info.name_stack))
            source = Source.of(eqn.source_info, place.source)
            inner = _Place(source, scope, place.seen)
            if eqn.primitive.name == "custom_linear_solve":
                results = self.linear_solve(eqn, inputs, inner, equations)
            elif eqn.primitive.name in _INLINED:
                results = self.inline(eqn, inputs, inner, equations)
            elif eqn.primitive.name == "scan" and eqn.params["length"] == 0:
                results = _no_trips(eqn, inputs)
            elif eqn.primitive.name in ("scan", "while", "cond", "shard_map"):
                equation = self.loop(eqn, inputs, inner)
                equations.append(equation)
                results = equation.outputs
            else:
                results = self.plain(eqn, inputs, inner, equations)
            environment.update(zip(eqn.outvars, results, strict=True))
        return equations, tuple(read(v) for v in jaxpr.outvars)

    def inline(
        self, eqn: JaxprEqn, inputs: tuple[Atom, ...], place: _Place, equations: list[Equation]
    ) -> tuple[Atom, ...]:
        jaxpr, consts = _open(_called(eqn))
        if eqn.primitive.name in ("remat", "remat2", "checkpoint") and eqn.params.get(
            "differentiated"
        ):
            # Without the barrier XLA would merge the recomputation with the first computation.
            inputs = self.barrier(inputs, place, equations)
        environment: dict[JaxVar, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
        self.bind_consts(jaxpr, consts, environment)
        specs = eqn.params.get("layouts") if eqn.primitive.name == "spmd_call" else None
        if specs is not None:
            for var, spec in zip(jaxpr.invars, specs.inputs, strict=True):
                environment[var] = self.constrain(environment[var], spec, place, equations)
        inner, outputs = self.run(jaxpr, environment, place)
        equations.extend(inner)
        if specs is not None:
            outputs = tuple(
                self.constrain(o, s, place, equations)
                for o, s in zip(outputs, specs.outputs, strict=True)
            )
        return outputs

    def linear_solve(
        self, eqn: JaxprEqn, inputs: tuple[Atom, ...], place: _Place, equations: list[Equation]
    ) -> tuple[Atom, ...]:
        """Only the solver runs: the matrix products beside it are there for derivatives."""
        lengths = eqn.params["const_lengths"]
        first = lengths.matvec + lengths.vecmat
        right = inputs[sum(lengths) :]
        jaxpr, consts = _open(eqn.params["jaxprs"].solve)
        operands = (*inputs[first : first + lengths.solve], *right)
        environment: dict[JaxVar, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
        self.bind_consts(jaxpr, consts, environment)
        inner, outputs = self.run(jaxpr, environment, place)
        equations.extend(inner)
        return outputs

    def barrier(
        self, inputs: tuple[Atom, ...], place: _Place, equations: list[Equation]
    ) -> tuple[Atom, ...]:
        results: list[Atom] = []
        for atom in inputs:
            if isinstance(atom, Constant):
                results.append(atom)
                continue
            aval = self.avals[atom]
            rule = rule_for("optimization_barrier", {}, (aval,), (aval,))
            output = self.new(aval)
            equations.append(
                Equation(
                    self.next(), lax.optimization_barrier_p, {}, (atom,), (output,), rule,
                    place.source, place.scope,
                )
            )  # fmt: skip
            results.append(output)
        return tuple(results)

    def constrain(
        self,
        atom: Atom,
        spec: PartitionSpec | None,
        place: _Place,
        equations: list[Equation],
        params: Mapping[str, Any] | None = None,
    ) -> Atom:
        """An identity that asks for a layout."""
        if spec is None or isinstance(atom, Constant):
            return atom
        aval = self.avals[atom]
        output = self.new(aval)
        equations.append(
            Equation(
                self.next(), lax.sharding_constraint_p, params or {}, (atom,), (output,), _identity(aval),
                place.source, place.scope, constraint=spec,
            )
        )  # fmt: skip
        return output

    def plain(
        self, eqn: JaxprEqn, inputs: tuple[Atom, ...], place: _Place, equations: list[Equation]
    ) -> tuple[Atom, ...]:
        if eqn.primitive.name == "sharding_constraint":
            sharding = eqn.params["sharding"]
            spec = sharding.spec if isinstance(sharding, NamedSharding) else None
            return (self.constrain(inputs[0], spec, place, equations, eqn.params),)
        if eqn.primitive.name == UNCHECKED:
            return inputs
        if eqn.primitive.name == "reshard":
            return inputs  # JAX's own, beside constraints; on Auto axes it asks for nothing
        if eqn.primitive.name == "optimization_barrier":
            return self.barrier(inputs, place, equations)
        if eqn.primitive.name == "split" and isinstance(inputs[0], int):
            return self.split(eqn, inputs[0], place, equations)
        if eqn.primitive.name == "convert_element_type":
            known = _cast_constant(inputs[0], aval_of(eqn.outvars[0]))
            if known is not None:
                return (known,)
        if eqn.primitive.name == "reshape" and isinstance(inputs[0], int):
            source = self.reshaped.get(inputs[0])
            if source is not None and self.avals[source].shape == aval_of(eqn.outvars[0]).shape:
                return (source,)  # there and back again
        primitive, params = unchecked(eqn.primitive, eqn.params)
        # A collective's only effect is that it names an axis.
        pure = not eqn.effects or names_axes(primitive.name)
        key = equation_key(primitive.name, params, inputs) if pure else None
        if key is not None and key in place.seen:
            return place.seen[key]
        ins = tuple(a.aval if isinstance(a, Constant) else self.avals[a] for a in inputs)
        outs = tuple(aval_of(v) for v in eqn.outvars)
        try:
            rule = rule_for(primitive.name, params, ins, outs)
        except Misfit as misfit:
            where = f" at {place.source}" if str(place.source) else ""
            misfit.refuse(f"{eqn.primitive.name!r}{where}")
        results = tuple(self.new(a) for a in outs)
        equations.append(
            Equation(
                self.next(),
                primitive,
                params,
                inputs,
                results,
                rule,
                place.source,
                place.scope,
            )
        )
        if key is not None:
            place.seen[key] = results
        if eqn.primitive.name == "reshape" and isinstance(inputs[0], int):
            self.reshaped[results[0]] = self.reshaped.get(inputs[0], inputs[0])
        return results

    def split(
        self, eqn: JaxprEqn, operand: int, place: _Place, equations: list[Equation]
    ) -> tuple[Atom, ...]:
        """A slice for each piece: what nobody reads is then pruned, and each lies as is best for it."""
        aval, axis = self.avals[operand], eqn.params["axis"]
        results: list[Atom] = []
        first = 0
        for variable, size in zip(eqn.outvars, eqn.params["sizes"], strict=True):
            starts, limits = [0] * len(aval.shape), list(aval.shape)
            starts[axis], limits[axis] = first, first + size
            first += size
            params = {
                "start_indices": tuple(starts),
                "limit_indices": tuple(limits),
                "strides": None,
            }
            output = self.new(aval_of(variable))
            rule = rule_for("slice", params, (aval,), (self.avals[output],))
            equations.append(
                Equation(
                    self.next(), lax.slice_p, params, (operand,), (output,), rule,
                    place.source, place.scope,
                )
            )  # fmt: skip
            results.append(output)
        return tuple(results)

    def loop(self, eqn: JaxprEqn, inputs: tuple[Atom, ...], place: _Place) -> Equation:
        index = self.next()
        region = None
        if eqn.primitive.name == "scan":
            body = self.body(eqn.params["jaxpr"], place)
            counts = _scan_counts(eqn)
            bodies: tuple[Block, ...] = (body,)
        elif eqn.primitive.name == "while":
            bodies = (
                self.body(eqn.params["cond_jaxpr"], place),
                self.body(eqn.params["body_jaxpr"], place),
            )
            cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            counts = (cond_consts, body_consts, len(inputs) - cond_consts - body_consts)
        elif eqn.primitive.name == "shard_map":
            bodies, counts = (self.body(eqn.params["jaxpr"], place),), ()
            ranks = [[len(aval_of(v).shape) for v in side] for side in (eqn.invars, eqn.outvars)]
            region = Region.of(eqn.params, *ranks)
        else:
            bodies = tuple(self.body(b, place) for b in eqn.params["branches"])
            counts = ()
        results = tuple(self.new(aval_of(v)) for v in eqn.outvars)
        return Equation(
            index,
            eqn.primitive,
            eqn.params,
            inputs,
            results,
            None,
            place.source,
            place.scope,
            bodies,
            counts,
            region=region,
        )

    def body(self, closed: Any, place: _Place) -> Block:
        jaxpr, consts = _open(closed)
        environment: dict[JaxVar, Atom] = {}
        inputs = []
        for var in jaxpr.invars:
            inputs.append(self.new(aval_of(var)))
            environment[var] = inputs[-1]
        self.bind_consts(jaxpr, consts, environment)
        equations, outputs = self.run(jaxpr, environment, replace(place, seen={}))
        return Block(tuple(inputs), tuple(equations), outputs)

    def next(self) -> int:
        self.count += 1
        return self.count - 1


def _open(closed: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Jaxpr and consts of what may be closed or open, or a callable's jaxpr, by JAX version."""
    if hasattr(closed, "jaxpr"):
        return closed.jaxpr, closed.consts
    return closed, getattr(closed, "consts", ())


def _called(eqn: JaxprEqn) -> Any:
    """The jaxpr that an inlined call runs."""
    name = _INLINED[eqn.primitive.name]
    called = eqn.params[name] if name in eqn.params else eqn.params["call_jaxpr"]
    if eqn.primitive.name != "call_hi_primitive":
        return called

    def expanded(*values: Any) -> list[Any]:
        return jax.tree.leaves(called.expand(*jax.tree.unflatten(called.in_tree, values)))

    return jax.make_jaxpr(expanded)(*(variable.aval for variable in eqn.invars))


def _cast_constant(atom: Atom, target: Aval) -> Constant | None:
    """A known scalar of another type, if it has the same value there: `jnp.pad` casts its zero."""
    if not isinstance(atom, Constant) or not isinstance(atom.aval.value, bool | int | float):
        return None
    if target.shape or not isinstance(target.dtype, np.dtype) or not np.isfinite(atom.aval.value):
        return None
    with np.errstate(over="ignore"):
        value = np.asarray(np.asarray(atom.aval.value).astype(target.dtype))
    if value.item() != atom.aval.value:
        return None
    return Constant(value, Aval((), target.dtype, value.item()))


def _identity(aval: Aval) -> Rule:
    letters = " ".join(f"d{d}" for d in range(len(aval.shape)))
    return factor_rule(f"{letters} -> {letters}", [aval.shape], [aval.shape])


def _join(outer: str, inner: str) -> str:
    return f"{outer}/{inner}" if outer and inner else outer or inner


def equation_key(name: str, params: Mapping[str, Any], inputs: tuple[Atom, ...]) -> Any:
    """Equal keys mean equal results of two equations; None where they cannot be compared."""
    atoms = []
    for atom in inputs:
        if isinstance(atom, Constant):
            if atom.aval.value is None:
                return None
            atoms.append((type(atom.value).__name__, repr(atom.aval.value), str(atom.aval.dtype)))
        else:
            atoms.append(atom)
    key = (name, tuple(sorted(params.items(), key=lambda p: p[0])), tuple(atoms))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _no_trips(eqn: JaxprEqn, inputs: tuple[Atom, ...]) -> tuple[Atom, ...]:
    """The results of a scan of length 0: what was carried in, and empty stacks."""
    consts, carry, _ = _scan_counts(eqn)
    stacks = [aval_of(v) for v in eqn.outvars[carry:]]
    empty = [Constant(jnp.zeros(aval.shape, aval.dtype), aval) for aval in stacks]
    return (*inputs[consts : consts + carry], *empty)


def _scan_counts(eqn: JaxprEqn) -> tuple[int, int, int]:
    """How many operands of a scan are consts, carry and xs, told by rank: only xs and ys gain a dim."""
    jaxpr, _ = _open(eqn.params["jaxpr"])
    rank = lambda v: len(getattr(v.aval, "shape", ()))  # noqa: E731
    xs = sum(
        rank(outer) > rank(inner) for outer, inner in zip(eqn.invars, jaxpr.invars, strict=True)
    )
    carry = sum(
        rank(outer) == rank(inner) for outer, inner in zip(eqn.outvars, jaxpr.outvars, strict=True)
    )
    return len(eqn.invars) - carry - xs, carry, xs


def _weigh(block: Block, weight: float, repeat: int | None) -> Block:
    """The block with its own and all inner weights and repeats set."""
    equations = []
    for equation in block.equations:
        if equation.bodies:
            if equation.name == "scan":
                trips, known = float(equation.params["length"]), int(equation.params["length"])
            elif equation.name == "while":
                trips, known = ASSUMED_TRIPS, None
            else:
                trips, known = 1.0, 1
            inner = None if repeat is None or known is None else repeat * known
            bodies = tuple(_weigh(b, weight * trips, inner) for b in equation.bodies)
            equation = replace(equation, bodies=bodies)
        equations.append(equation)
    return replace(block, equations=tuple(equations), weight=weight, repeat=repeat)


def _prune(block: Block, live_outputs: Sequence[bool] | None) -> tuple[Block, set[int]]:
    """The block without equations whose results nobody reads, and the tensors that it reads."""
    live: set[int] = set()
    for position, atom in enumerate(block.outputs):
        if isinstance(atom, int) and (live_outputs is None or live_outputs[position]):
            live.add(atom)
    kept = []
    for equation in reversed(block.equations):
        if not any(o in live for o in equation.outputs) and not _has_effects(equation):
            continue
        if equation.bodies:
            equation = _prune_loop(equation, live)
        kept.append(equation)
        live.update(a for a in equation.inputs if isinstance(a, int))
    return replace(block, equations=tuple(reversed(kept))), live


def _has_effects(equation: Equation) -> bool:
    if equation.bodies:
        return any(_has_effects(e) for b in equation.bodies for e in b.equations)
    return has_effects(equation.name)


def _prune_loop(equation: Equation, live: set[int]) -> Equation:
    if equation.name == "scan":
        return _prune_scan(equation, live)
    if equation.region is not None:
        return _prune_region(equation, equation.region, live)
    # A while's carries feed its predicate and each other, and a cond's outputs are few: kept whole.
    return replace(equation, bodies=tuple(_prune(b, None)[0] for b in equation.bodies))


def _prune_region(equation: Equation, region: Region, live: set[int]) -> Equation:
    (body,) = equation.bodies
    wanted = [o in live for o in equation.outputs]
    pruned, used = _prune(body, wanted)
    keep = [tensor in used for tensor in body.inputs]
    pruned = replace(
        pruned, inputs=_select(body.inputs, keep), outputs=_select(pruned.outputs, wanted)
    )
    return replace(
        equation,
        inputs=_select(equation.inputs, keep),
        outputs=_select(equation.outputs, wanted),
        bodies=(pruned,),
        region=replace(
            region, inputs=_select(region.inputs, keep), outputs=_select(region.outputs, wanted)
        ),
    )


def _prune_scan(equation: Equation, live: set[int]) -> Equation:
    consts, carry, xs = equation.counts
    (body,) = equation.bodies
    wanted = [o in live for o in equation.outputs]
    while True:
        pruned, used = _prune(body, wanted)
        more = [wanted[i] or body.inputs[consts + i] in used for i in range(carry)]
        if more == wanted[:carry]:
            break
        wanted[:carry] = more
    keep = [body.inputs[i] in used for i in range(consts)] + wanted[:carry]
    keep += [body.inputs[i] in used for i in range(consts + carry, consts + carry + xs)]
    pruned = replace(
        pruned, inputs=_select(body.inputs, keep), outputs=_select(pruned.outputs, wanted)
    )
    counts = (sum(keep[:consts]), sum(wanted[:carry]), sum(keep[consts + carry :]))
    return replace(
        equation,
        inputs=_select(equation.inputs, keep),
        outputs=_select(equation.outputs, wanted),
        bodies=(pruned,),
        counts=counts,
    )


def _select(values: Sequence[Any], mask: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(v for v, m in zip(values, mask, strict=True) if m)


def trace(function: Any, *args: Any) -> ClosedJaxpr:
    """`jax.make_jaxpr` of `function` at `args` (arrays or `ShapeDtypeStruct`s)."""
    return jax.make_jaxpr(function)(*args)
