"""`spmd_call`: a planned call as one primitive, so that JAX's transformations meet the serial function.

JAX would differentiate the lowered program otherwise, in which custom rules are gone and collectives
would be transposed unplanned. As a primitive, the call keeps the jaxpr of the serial function: each
transformation derives a new serial jaxpr (its linearization, its transpose, its batched form) and makes
that a planned call of its own.

Invariant: the jaxpr of a call has no consts; captured arrays are operands like all others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from pypto_spmd._jax_internal import checkify_inside
from pypto_spmd.collectives import lowering, planner
from pypto_spmd.collectives.effects import unordered
from pypto_spmd.collectives.flatten import build_graph
from pypto_spmd.collectives.fused_pads import with_fused_pads
from pypto_spmd.collectives.padding import Uneven, is_uneven, pad_inner, pad_uneven
from pypto_spmd.collectives.program import Program
from pypto_spmd.collectives.splices import fuse_splices
from pypto_spmd.collectives.trace import report
from pypto_spmd.collectives.uniform import without_needless
from pypto_spmd.collectives.wide_sums import with_wide_sums
from pypto_spmd.hoisting import hoist_consts
from pypto_spmd.mesh import DeviceMesh

CACHED_PROGRAMS = 256
"""How many planned programs, and how many derived jaxprs of each kind, are kept."""


@dataclass(frozen=True, slots=True)
class CallLayouts:
    """The layouts that are asked for, None where the planner chooses.

    Args:
        inputs: one for each operand.
        outputs: one for each result.
    """

    inputs: tuple[PartitionSpec | None, ...]
    outputs: tuple[PartitionSpec | None, ...]


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What planning needs beside the jaxpr and its layouts.

    Args:
        mesh: the mesh, with its topology.
        objective: "standard" or "bytes".
        lower_to: "shard_map", or "jit" for layouts as constraints to XLA.
        strict: whether a primitive without a rule is an error.
        function_name: the function's name, for the plan and for errors.
        argument_names: the operands' names, for the same.
        result_names: the results' names, for the same; none are named if there are none.
        x64: whether the function is traced with 64-bit types, whatever JAX's setting is.
        pads: whether dims that given layouts do not divide are padded.
        rule_changes: how often rules had been changed: programs made before are not those made after.
    """

    mesh: DeviceMesh
    objective: str
    lower_to: str
    strict: bool
    function_name: str
    argument_names: tuple[str, ...]
    result_names: tuple[str, ...] = ()
    x64: bool = False
    pads: bool = False
    rule_changes: int = 0

    def scope(self) -> AbstractContextManager[Any]:
        """In what the function, and all that is derived from it, is traced."""
        return jax.enable_x64(True) if self.x64 else nullcontext()

    @contextmanager
    def deriving(self) -> Iterator[None]:
        """In what others are derived from it, its custom rules of differentiation being traced then."""
        with self.scope(), inlining(self.mesh, self.pads):
            yield


@dataclass(frozen=True, slots=True)
class Call:
    """A serial jaxpr and all that planning it needs: the params of one `spmd_call`."""

    jaxpr: ClosedJaxpr
    layouts: CallLayouts
    is_state: tuple[bool, ...]
    options: CallOptions

    def __call__(self, *operands: Any) -> list[Any]:
        """Binds `spmd_call`."""
        hint = None if inlining_mesh() is not None else _mesh_hint(self.options.mesh)
        return spmd_call_p.bind(*operands, mesh_hint=hint, **_params(self))


spmd_call_p = Primitive("spmd_call")
spmd_call_p.multiple_results = True
# Newer JAX has primitives that stand for a function of others. Graphs look into these, JAX need not.
spmd_call_p.is_high = lambda *_, **__: False  # pyright: ignore[reportAttributeAccessIssue]

_inlining: ContextVar[tuple[DeviceMesh | None, bool]] = ContextVar(
    "pypto_spmd_inlining", default=(None, False)
)


@contextmanager
def inlining(mesh: DeviceMesh, pads: bool = False) -> Iterator[None]:
    """While an SPMD function is traced, calls inside are not planned by themselves: it inlines them."""
    token = _inlining.set((mesh, pads))
    try:
        yield
    finally:
        _inlining.reset(token)


def inlining_mesh() -> DeviceMesh | None:
    """The mesh of the SPMD function that the code which runs now is being traced for, if any."""
    return _inlining.get()[0]


def inlining_pads() -> bool:
    """Whether that function pads dims that layouts do not divide."""
    return _inlining.get()[1]


@lru_cache(maxsize=CACHED_PROGRAMS)
def program_of(call: Call) -> Program:
    """Plans a call; the program is made once."""
    options, layouts = call.options, call.layouts
    with options.scope():
        graph = build_graph(call.jaxpr, options.argument_names, options.mesh.known_platform)
    graph = with_fused_pads(graph)
    graph = without_needless(with_wide_sums(graph))
    ends = (layouts.inputs, layouts.outputs, options.mesh.shape)
    with options.scope():
        if options.pads:
            plain = pad_uneven(graph, *ends, options.result_names)
        else:
            plain = Uneven(graph, layouts.inputs, layouts.outputs)
        finer = pad_inner(graph, *ends, options.result_names)
    program = _planned_padded(call, plain)
    if finer is not None:
        other = _planned_padded(call, finer)
        if other.plan.wire_bytes < WORTH_PADDING * program.plan.wire_bytes:
            return other
    return program


WORTH_PADDING = 0.9
"""What lies between the ends of a program is padded where that sends less than this share."""


def _planned_padded(call: Call, uneven: Uneven) -> Program:
    options = call.options
    program = planner.make_program(
        fuse_splices(uneven.graph),
        mesh=options.mesh,
        inputs=uneven.inputs,
        outputs=uneven.outputs,
        is_state=call.is_state,
        objective=options.objective,
        strict=options.strict,
        function_name=options.function_name,
        result_names=options.result_names,
    )
    return replace(program, plan=replace(program.plan, notes=(*program.plan.notes, *uneven.notes)))


def shardings(call: Call) -> tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
    """The planned shardings of a call's operands and results."""
    program = program_of(call)
    mesh = call.options.mesh.jax_mesh
    inputs, outputs = program.inputs, program.outputs
    named = lambda layouts: tuple(NamedSharding(mesh, layout.spec) for layout in layouts)  # noqa: E731
    return named(inputs), named(outputs)


def _params(call: Call) -> dict[str, Any]:
    return {
        "jaxpr": call.jaxpr,
        "layouts": call.layouts,
        "is_state": call.is_state,
        "options": call.options,
    }


@cache
def _mesh_hint(mesh: DeviceMesh) -> ClosedJaxpr:
    """A jaxpr that names the mesh's devices: `jit` looks for its devices in the params' jaxprs."""
    whole = NamedSharding(mesh.jax_mesh, PartitionSpec())
    return jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, whole))(0.0)


@spmd_call_p.def_effectful_abstract_eval
def _abstract_eval(*_: Any, jaxpr: ClosedJaxpr, **__: Any) -> tuple[list[Any], Any]:
    return jaxpr.out_avals, unordered(jaxpr.effects)


@spmd_call_p.def_impl
def _run_at_once(*operands: Any, mesh_hint: Any, **params: Any) -> list[Any]:
    del mesh_hint
    call = Call(**params)
    in_shardings, _ = shardings(call)
    with call.options.scope():
        return _compiled(call)(*jax.device_put(operands, in_shardings))


@lru_cache(maxsize=CACHED_PROGRAMS)
def _compiled(call: Call) -> Callable[..., list[Any]]:
    in_shardings, out_shardings = shardings(call)
    return jax.jit(
        lambda *operands: call(*operands),
        in_shardings=in_shardings,
        out_shardings=list(out_shardings),
    )


def _lower(context: mlir.LoweringRuleContext, *operands: Any, mesh_hint: Any, **params: Any) -> Any:
    del mesh_hint
    call = Call(**params)
    program = program_of(call)
    report(program.plan)
    jax_mesh = program.mesh.jax_mesh
    if call.options.lower_to == "jit":
        function = lowering.lower_with_constraints(program, jax_mesh)
    else:
        function = lowering.shard_mapped(program, jax_mesh)
    with call.options.scope():
        return mlir.lower_fun(function, multiple_results=True)(context, *operands)


mlir.register_lowering(spmd_call_p, _lower)


# Derivatives: linearize the serial jaxpr once into a primal part, which also gives the residuals, and a
# part that is linear in the tangents. Both are planned calls, and so is the transpose of the second.


@dataclass(frozen=True, slots=True)
class _Derived:
    """A call made from another one.

    Args:
        call: the call.
        consts: its leading operands, which the derivation itself brought in.
    """

    call: Call
    consts: tuple[Any, ...]

    def __call__(self, *operands: Any) -> list[Any]:
        return self.call(*self.consts, *operands)


@dataclass(frozen=True, slots=True)
class _Linearized:
    """A call as its primal part and its linear part.

    Args:
        primal: operands -> results, and the residuals that are neither operands nor results.
        tangent: residuals and active tangents -> tangents of the inexact results.
        residuals: for each residual, its place among the operands, results and further residuals.
    """

    primal: _Derived
    tangent: _Derived
    residuals: tuple[int, ...]


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, mesh_hint: Any, **params: Any
) -> tuple[list[Any], list[Any]]:
    del mesh_hint
    call = Call(**params)
    active = tuple(_is_active(t) for t in tangents)
    inexact = tuple(_is_inexact(aval) for aval in call.jaxpr.out_avals)
    if any(active) and any(inexact):
        split = _linearized(call, active, inlining_mesh() is not None)
        values = split.primal(*primals)
        results = values[: len(inexact)]
        known = [*primals, *values]
        moving = [t for t, is_active in zip(tangents, active, strict=True) if is_active]
        moved = iter(split.tangent(*(known[i] for i in split.residuals), *moving))
    else:
        results, moved, inexact = call(*primals), iter(()), (False,) * len(inexact)
    out_tangents = [
        next(moved) if has_tangent else ad.Zero(aval.to_tangent_aval())
        for aval, has_tangent in zip(call.jaxpr.out_avals, inexact, strict=True)
    ]
    return results, out_tangents


ad.primitive_jvps[spmd_call_p] = _jvp


@lru_cache(maxsize=CACHED_PROGRAMS)
def _linearized(call: Call, active: tuple[bool, ...], inlined: bool) -> _Linearized:
    serial = jaxpr_as_fun(call.jaxpr)
    avals = call.jaxpr.in_avals
    inexact = [_is_inexact(aval) for aval in call.jaxpr.out_avals]
    linear_parts: list[ClosedJaxpr] = []

    def primal_and_residuals(*primals: Any) -> list[Any]:
        def moving_only(*moving: Any) -> tuple[list[Any], list[Any]]:
            results = serial(*_merge(active, moving, _where(active, primals, False)))
            return _where(inexact, results, True), _where(inexact, results, False)

        moving = _where(active, primals, True)
        tracked, tangent, rest = jax.linearize(moving_only, *moving, has_aux=True)
        linear_parts.append(jax.make_jaxpr(tangent)(*moving))
        return [*_merge(inexact, tracked, rest), *linear_parts[-1].consts]

    with call.options.deriving():
        primal, primal_consts = hoist_consts(jax.make_jaxpr(primal_and_residuals)(*avals))
    tangent, _ = hoist_consts(linear_parts[-1])
    jaxpr, count = primal.jaxpr, len(inexact)
    operands = jaxpr.invars[len(primal_consts) :]
    places = {
        var: place for place, var in enumerate([*operands, *jaxpr.outvars[:count]]) if _is_var(var)
    }
    further: list[Any] = []
    residuals: list[int] = []
    for var in jaxpr.outvars[count:]:
        place = places.get(var) if _is_var(var) else None
        if place is None:
            place = len(operands) + count + len(further)
            further.append(var)
            if _is_var(var):
                places[var] = place
        residuals.append(place)
    primal = ClosedJaxpr(jaxpr.replace(outvars=[*jaxpr.outvars[:count], *further]), [])

    names = call.options.argument_names
    forward = Call(
        primal,
        CallLayouts(
            (None,) * len(primal_consts) + call.layouts.inputs,
            call.layouts.outputs + (None,) * len(further),
        ),
        (False,) * len(primal_consts) + call.is_state,
        replace(
            call.options, argument_names=("constant",) * len(primal_consts) + names, result_names=()
        ),
    )
    # Inside another SPMD function the layouts are chosen together with it; else they are the forward's.
    chosen = forward.layouts if inlined else _planned(forward)
    operand_layouts = chosen.inputs[len(primal_consts) :]
    known = [*operand_layouts, *chosen.outputs]
    place_names = [*names, *("result",) * count, *(f"residual {i}" for i in range(len(further)))]
    place_is_state = [
        *call.is_state,
        *(False,) * count,
        *_state_only(primal, forward.is_state)[count:],
    ]
    moving_names = [f"tangent of {name}" for name in _where(active, names, True)]
    linear = Call(
        tangent,
        CallLayouts(
            tuple([known[i] for i in residuals] + _where(active, operand_layouts, True)),
            tuple(_where(inexact, chosen.outputs[:count], True)),
        ),
        tuple([place_is_state[i] for i in residuals] + _where(active, call.is_state, True)),
        _renamed(call.options, "tangents", [*(place_names[i] for i in residuals), *moving_names]),
    )
    return _Linearized(_Derived(forward, primal_consts), _Derived(linear, ()), tuple(residuals))


def _planned(call: Call) -> CallLayouts:
    program, given, jaxpr = program_of(call), call.layouts, call.jaxpr
    mesh = call.options.mesh.shape

    def chosen(avals: Any, specs: Any, layouts: Any) -> tuple[PartitionSpec, ...]:
        # What is split unevenly is whole at the boundary, and still to be split inside.
        return tuple(
            spec if is_uneven(spec, aval.shape, mesh) else layout.spec
            for aval, spec, layout in zip(avals, specs, layouts, strict=True)
        )

    return CallLayouts(
        chosen(jaxpr.in_avals, given.inputs, program.inputs),
        chosen(jaxpr.out_avals, given.outputs, program.outputs),
    )


def _state_only(closed: ClosedJaxpr, is_state: Sequence[bool]) -> list[bool]:
    """Which results depend on state, and on nothing else."""
    jaxpr = closed.jaxpr
    depends = {var: (state, not state) for var, state in zip(jaxpr.invars, is_state, strict=True)}
    nothing = (False, False)
    for eqn in jaxpr.eqns:
        read = [depends.get(v, nothing) for v in eqn.invars if _is_var(v)]
        found = (any(state for state, _ in read), any(other for _, other in read))
        depends.update(dict.fromkeys(eqn.outvars, found))
    return [_is_var(v) and depends.get(v, nothing) == (True, False) for v in jaxpr.outvars]


def _transpose(
    cotangents: Sequence[Any], *operands: Any, mesh_hint: Any, **params: Any
) -> list[Any]:
    del mesh_hint
    call = Call(**params)
    linear = tuple(ad.is_undefined_primal(operand) for operand in operands)
    live = tuple(_is_active(cotangent) for cotangent in cotangents)
    if not any(live):
        return [
            ad.Zero(o.aval.to_tangent_aval()) if ad.is_undefined_primal(o) else None
            for o in operands
        ]
    known = [o for o, is_linear in zip(operands, linear, strict=True) if not is_linear]
    given = [c for c, is_live in zip(cotangents, live, strict=True) if is_live]
    results = iter(_transposed(call, linear, live)(*known, *given))
    return [next(results) if is_linear else None for is_linear in linear]


ad.primitive_transposes[spmd_call_p] = _transpose


@lru_cache(maxsize=CACHED_PROGRAMS)
def _transposed(call: Call, linear: tuple[bool, ...], live: tuple[bool, ...]) -> _Derived:
    """The call that maps residuals and live cotangents to the cotangents of the linear operands."""
    serial = jaxpr_as_fun(call.jaxpr)
    in_avals, out_avals = call.jaxpr.in_avals, call.jaxpr.out_avals
    known_avals = _where(linear, in_avals, False)
    linear_avals = _where(linear, in_avals, True)

    def backward(*values: Any) -> list[Any]:
        known, cotangents = values[: len(known_avals)], values[len(known_avals) :]

        def forward(*tangents: Any) -> list[Any]:
            return _where(live, serial(*_merge(linear, tangents, known)), True)

        return list(jax.linear_transpose(forward, *linear_avals)(list(cotangents)))

    with call.options.deriving():
        closed = jax.make_jaxpr(backward)(*known_avals, *_where(live, out_avals, True))
    jaxpr, consts = hoist_consts(closed)
    layouts = CallLayouts(
        tuple(
            [None] * len(consts)
            + _where(linear, call.layouts.inputs, False)
            + _where(live, call.layouts.outputs, True)
        ),
        tuple(_where(linear, call.layouts.inputs, True)),
    )
    names = ["constant"] * len(consts) + _where(linear, call.options.argument_names, False)
    names += ["cotangent of the result"] * sum(live)
    is_state = [False] * len(consts) + _where(linear, call.is_state, False) + [False] * sum(live)
    options = _renamed(call.options, "backward", names)
    return _Derived(Call(jaxpr, layouts, tuple(is_state), options), consts)


def _batch(
    operands: Sequence[Any], dims: Sequence[int | None], *, mesh_hint: Any, **params: Any
) -> tuple[list[Any], list[int]]:
    del mesh_hint
    call = Call(**params)
    sizes = {o.shape[d] for o, d in zip(operands, dims, strict=True) if d is not None}
    results = _batched(call, tuple(dims), sizes.pop())(*operands)
    return results, [0] * len(results)


batching.primitive_batchers[spmd_call_p] = _batch


@lru_cache(maxsize=CACHED_PROGRAMS)
def _batched(call: Call, dims: tuple[int | None, ...], size: int) -> _Derived:
    serial = jaxpr_as_fun(call.jaxpr)
    structs = [
        aval if dim is None else _with_dim(aval, dim, size)
        for aval, dim in zip(call.jaxpr.in_avals, dims, strict=True)
    ]
    with call.options.deriving():
        batched = jax.vmap(lambda *o: serial(*o), in_axes=dims, axis_size=size)
        jaxpr, consts = hoist_consts(jax.make_jaxpr(batched)(*structs))
    ranks = [len(aval.shape) for aval in call.jaxpr.in_avals]
    inputs = [
        spec if dim is None else _spec_with_dim(spec, dim, rank)
        for spec, dim, rank in zip(call.layouts.inputs, dims, ranks, strict=True)
    ]
    outputs = [_spec_with_dim(spec, 0, 0) for spec in call.layouts.outputs]
    layouts = CallLayouts((*(None for _ in consts), *inputs), tuple(outputs))
    names = (*("constant" for _ in consts), *call.options.argument_names)
    is_state = (*(False for _ in consts), *call.is_state)
    return _Derived(
        Call(jaxpr, layouts, is_state, _renamed(call.options, "batched", names)), consts
    )


def _checked(
    checked: ClosedJaxpr, errors: int, made: int, params: dict[str, Any]
) -> Callable[..., list[Any]]:
    """The call that also takes the errors found before it, and gives those found in it."""
    call = Call(**{name: value for name, value in params.items() if name != "mesh_hint"})
    return _checked_call(call, checked, errors, made)


@lru_cache(maxsize=CACHED_PROGRAMS)
def _checked_call(call: Call, checked: ClosedJaxpr, errors: int, made: int) -> _Derived:
    jaxpr, consts = hoist_consts(checked)
    leading = len(consts) + errors
    layouts = CallLayouts(
        (None,) * leading + call.layouts.inputs, (None,) * made + call.layouts.outputs
    )
    names = ["constant"] * len(consts) + ["error"] * errors + list(call.options.argument_names)
    options = _renamed(call.options, "checked", names)
    return _Derived(Call(jaxpr, layouts, (False,) * leading + call.is_state, options), consts)


checkify_inside(spmd_call_p, _checked)


def _with_dim(aval: Any, dim: int, size: int) -> jax.ShapeDtypeStruct:
    shape = list(aval.shape)
    shape.insert(dim, size)
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=aval.weak_type)


def _spec_with_dim(spec: PartitionSpec | None, dim: int, rank: int) -> PartitionSpec | None:
    """The spec of an array that has got a new, whole dim."""
    if spec is None:
        return None
    entries = [*spec, *[None] * (rank - len(spec))]
    entries.insert(dim, None)
    return PartitionSpec(*entries)


def _renamed(options: CallOptions, part: str, names: Sequence[str]) -> CallOptions:
    name = f"{options.function_name.removesuffix(' (tangents)')} ({part})"
    return replace(options, function_name=name, argument_names=tuple(names), result_names=())


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, Literal)


def _is_active(tangent: Any) -> bool:
    return not isinstance(tangent, ad.Zero) and _is_inexact(jax.typeof(tangent))


def _is_inexact(aval: Any) -> bool:
    return jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact)


def _where(mask: Sequence[bool], values: Sequence[Any], wanted: bool) -> list[Any]:
    return [value for value, flag in zip(values, mask, strict=True) if flag == wanted]


def _merge(mask: Sequence[bool], yes: Sequence[Any], no: Sequence[Any]) -> list[Any]:
    """The values of both, each in its place: the inverse of `_where` with True and with False."""
    yes_values, no_values = iter(yes), iter(no)
    return [next(yes_values) if flag else next(no_values) for flag in mask]
