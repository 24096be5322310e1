"""The traced function as one flat graph: inlined calls, loops with their bodies, sources.

`build_graph` turns a closed jaxpr into blocks of equations over numbered tensors. Calls that only group
equations (jit, remat, custom_jvp, custom_vjp) are inlined; `scan`, `while`, `cond` and `shard_map` keep
their bodies as blocks of the same graph, so that one inference sees them all. Dead equations are dropped
and equal ones merged, because XLA would do both and the plan must be what runs.

Invariant: tensors are numbered in program order, and every tensor is defined once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.extend.core import Var as JaxVar
from jax.sharding import NamedSharding, PartitionSpec

from pypto_spmd.collectives.by_hand import UNCHECKED, names_axes, unchecked
from pypto_spmd.collectives.graph import Atom, Block, Constant, Equation, Graph, aval_of
from pypto_spmd.collectives.pruning import prune
from pypto_spmd.collectives.region import Region
from pypto_spmd.collectives.rules import Aval, Rule, factor_rule, rule_for
from pypto_spmd.collectives.rules.user_rule import Misfit
from pypto_spmd.collectives.source import Source

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


def build_graph(
    closed: ClosedJaxpr, names: Sequence[str] = (), platform: str | None = None
) -> Graph:
    """Flattens a closed jaxpr whose consts have been hoisted to arguments.

    Args:
        closed: the traced function.
        names: names of its flat arguments, for the plan.
        platform: on what it will run, if that is known: of code for several platforms, XLA keeps only
            the branch of this one.
    """
    builder = _Builder(platform)
    jaxpr, consts = _open(closed)
    environment: dict[JaxVar, Atom] = {}
    inputs = []
    for var in jaxpr.invars:
        environment[var] = builder.new(aval_of(var))
        inputs.append(environment[var])
    builder.bind_consts(jaxpr, consts, environment)
    equations, outputs = builder.run(jaxpr, environment, _Place(Source.unknown(), "", {}))
    block, _ = prune(Block(tuple(inputs), tuple(equations), outputs), None)
    block = _weigh(block, 1.0, 1)
    named = dict(zip(inputs, names, strict=False))
    return Graph(tuple(builder.avals), named, block)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an equation stands: the enclosing equation's source, scope, and equal equations so far."""

    source: Source
    scope: str
    seen: dict[Any, tuple[int, ...]]


@dataclass(slots=True)
class _Builder:
    platform: str | None
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
                results = self.inline(eqn, _called(eqn), inputs, inner, equations)
            elif eqn.primitive.name == "while" and _has_batched_predicate(eqn):
                results = self.inline(eqn, _with_one_predicate(eqn), inputs, inner, equations)
            elif (branch := _branch_of(eqn, self.platform)) is not None:
                results = self.inline(eqn, branch, inputs[1:], inner, equations)
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
        self,
        eqn: JaxprEqn,
        called: Any,
        inputs: tuple[Atom, ...],
        place: _Place,
        equations: list[Equation],
    ) -> tuple[Atom, ...]:
        jaxpr, consts = _open(called)
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
        if (
            eqn.primitive.name == "sort"
            and aval_of(eqn.outvars[0]).shape[eqn.params["dimension"]] < 2
        ):
            return inputs  # XLA does not sort one row either
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
            counts = scan_counts(eqn)
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


def _has_batched_predicate(eqn: JaxprEqn) -> bool:
    """Whether a `while` has been batched, so that each element of the batch ends on its own."""
    jaxpr, _ = _open(eqn.params["cond_jaxpr"])
    return bool(aval_of(jaxpr.outvars[0]).shape)


def _with_one_predicate(eqn: JaxprEqn) -> ClosedJaxpr:
    """What a batched `while` means: it goes on while any element does, and the others stay as they are."""
    params = eqn.params
    goes_on, body = (jaxpr_as_fun(params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    first, second = params["cond_nconsts"], params["body_nconsts"]

    def run(*operands: Any) -> Any:
        cond_consts, body_consts = operands[:first], operands[first : first + second]

        def moves(carry: Sequence[Any]) -> Any:
            return goes_on(*cond_consts, *carry)[0]

        def step(state: Any) -> Any:
            moving, carry = state
            found = []
            for new, old in zip(body(*body_consts, *carry), carry, strict=True):
                mine = lax.broadcast_in_dim(moving, new.shape, range(moving.ndim))
                found.append(lax.select(mine, new, old))
            return moves(found), found

        carry = list(operands[first + second :])
        start = (moves(carry), carry)  # carried, so that nothing is asked twice
        return lax.while_loop(lambda state: state[0].any(), step, start)[1]

    described = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in map(aval_of, eqn.invars)]
    return jax.make_jaxpr(run)(*described)


def _branch_of(eqn: JaxprEqn, platform: str | None) -> Any:
    """The branch for the platform, if the equation chooses by it."""
    platforms = eqn.params.get("branches_platforms") if eqn.primitive.name == "cond" else None
    if platforms is None or platform is None:
        return None
    for names, branch in zip(platforms, eqn.params["branches"], strict=True):
        if names is None or platform in names:
            return branch
    return None


def _no_trips(eqn: JaxprEqn, inputs: tuple[Atom, ...]) -> tuple[Atom, ...]:
    """The results of a scan of length 0: what was carried in, and empty stacks."""
    consts, carry, _ = scan_counts(eqn)
    stacks = [aval_of(v) for v in eqn.outvars[carry:]]
    empty = [Constant(jnp.zeros(aval.shape, aval.dtype), aval) for aval in stacks]
    return (*inputs[consts : consts + carry], *empty)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int, int]:
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


def trace(function: Any, *args: Any) -> ClosedJaxpr:
    """`jax.make_jaxpr` of `function` at `args` (arrays or `ShapeDtypeStruct`s)."""
    return jax.make_jaxpr(function)(*args)
