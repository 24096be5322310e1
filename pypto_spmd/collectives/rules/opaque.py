"""Functions that are one equation: their calls are planned by a user's rule and run on shards as they are.

A call of such a function binds a primitive named after it, which graphs do not look into. On each device
the function itself is called with local arrays, and so traced anew at local shapes: a kernel's grid is
made for them.

Such calls are closed under JAX's transformations, and the rule is carried along. If a function may be run
on the parts of a dim one by one, then so may its derivative: the tangents are split like the operands
they belong to, and where a cotangent lacks a factor, the parts' cotangents add up. `vmap` adds a factor.
Backward passes call the function again and do not keep what it computed; within one program XLA merges
the two.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Linear, Rule
from pypto_spmd.collectives.rules.registry import Aval, has_rule, rule
from pypto_spmd.collectives.rules.user_rule import UserRule, names_in
from pypto_spmd.errors import refuse

Arrays = Sequence[Any]

_ARRAYS = (jax.Array, np.ndarray, np.generic)


@dataclass(frozen=True, slots=True, repr=False)
class OpaqueCall(ABC):
    """What one opaque equation calls.

    Args:
        rule: its rule.
        ins: the operands' types.
        outs: the results' types.
    """

    rule: UserRule
    ins: tuple[ShapedArray, ...]
    outs: tuple[ShapedArray, ...]

    @abstractmethod
    def function(self, ctx: Context | None) -> Callable[..., list[Any]]:
        """What runs on flat arrays: whole ones, or with a context one device's."""

    def __repr__(self) -> str:
        return repr(self.rule.notation)


@dataclass(frozen=True, slots=True, repr=False)
class _Function(OpaqueCall):
    """A Python function at given places of arrays among its arguments.

    Args:
        python: the function.
        tree: the structure of `(args, kwargs)`.
        statics: the leaves that are no arrays, by place.
    """

    python: Callable[..., Any]
    tree: Any
    statics: tuple[tuple[int, Any], ...]

    def function(self, ctx: Context | None) -> Callable[..., list[Any]]:
        run = self.python
        if ctx is not None and self.rule.bind is not None:
            run = functools.partial(self.rule.bind, ctx)
        return lambda *arrays: jax.tree.leaves(_call(run, self.tree, self.statics, arrays))


@dataclass(frozen=True, slots=True, repr=False)
class _Tangents(OpaqueCall):
    """The derivative of a call along tangents: `operands, tangents -> tangents`.

    Args:
        call: the call.
        moving: for each of its operands, whether there is a tangent.
        inexact: for each of its results, whether it has one.
    """

    call: OpaqueCall
    moving: tuple[bool, ...]
    inexact: tuple[bool, ...]

    def function(self, ctx: Context | None) -> Callable[..., list[Any]]:
        inner = self.call.function(_inner(ctx, self.call))
        count = len(self.moving)

        def run(*arrays: Any) -> list[Any]:
            held, tangents = arrays[:count], list(arrays[count:])
            moving = _of_moving(inner, held, self.moving, self.inexact)
            return jax.jvp(moving, tuple(_where(self.moving, held)), tuple(tangents))[1]

        return run


@dataclass(frozen=True, slots=True, repr=False)
class _Cotangents(OpaqueCall):
    """The transpose of `_Tangents`: `operands, cotangents -> cotangents` of the moving operands."""

    call: OpaqueCall
    moving: tuple[bool, ...]
    inexact: tuple[bool, ...]

    def function(self, ctx: Context | None) -> Callable[..., list[Any]]:
        inner = self.call.function(_inner(ctx, self.call))
        count = len(self.moving)

        def run(*arrays: Any) -> list[Any]:
            held, cotangents = arrays[:count], list(arrays[count:])
            moving = _of_moving(inner, held, self.moving, self.inexact)
            _, pull = jax.vjp(moving, *_where(self.moving, held))
            return list(pull(cotangents))

        return run


@dataclass(frozen=True, slots=True, repr=False)
class _Batched(OpaqueCall):
    """A call under `vmap`: results get a first dim.

    Args:
        call: the call.
        dims: the dim of each operand that is mapped over, None where there is none.
    """

    call: OpaqueCall
    dims: tuple[int | None, ...]

    def function(self, ctx: Context | None) -> Callable[..., list[Any]]:
        return jax.vmap(self.call.function(_inner(ctx, self.call)), in_axes=self.dims)


def _of_moving(
    inner: Callable[..., list[Any]], held: Arrays, moving: Sequence[bool], inexact: Sequence[bool]
) -> Callable[..., list[Any]]:
    """`inner` as a function of its moving operands, with only the inexact results."""

    def run(*values: Any) -> list[Any]:
        given = iter(values)
        results = inner(*(next(given) if m else x for m, x in zip(moving, held, strict=True)))
        return _where(inexact, results)

    return run


def _where(mask: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [value for value, flag in zip(values, mask, strict=True) if flag]


def _inner(ctx: Context | None, call: OpaqueCall) -> Context | None:
    """The context as the equation of `call` would have it: factors keep their names."""
    if ctx is None:
        return None
    ins, outs = _avals(call.ins), _avals(call.outs)
    rule = _rule_of(call, ins, outs)
    names = [factor.name for factor in rule.factors]
    splits = {
        names.index(ctx.rule.factors[f].name): axes
        for f, axes in ctx.splits.items()
        if ctx.rule.factors[f].name in names
    }
    return replace(ctx, ins=ins, outs=outs, rule=rule, splits=splits)


def _avals(types: Sequence[ShapedArray]) -> tuple[Aval, ...]:
    return tuple(Aval(tuple(t.shape), t.dtype) for t in types)


def _rule_of(call: OpaqueCall, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    def bind(ctx: Context, *operands: Any) -> list[Any]:
        return call.function(ctx if ctx.splits else None)(*operands)

    # The user's own `bind` is part of the call's function: a derivative differentiates it.
    made = call.rule.at(ins, outs, bind=bind)
    return replace(made, bind=bind)


def _rule(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    return _rule_of(params["call"], ins, outs)


# The primitives: one for each name, all alike, since what they do is in their params.


@cache
def primitive_named(name: str) -> Primitive:
    """The primitive of calls of functions with this name."""
    while has_rule(name):
        name += "_"  # the user's `sort` is not JAX's
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, call: list(call.outs))
    primitive.def_impl(lambda *operands, call: call.function(None)(*operands))
    lowered = mlir.lower_fun(
        lambda *operands, call: call.function(None)(*operands), multiple_results=True
    )
    mlir.register_lowering(primitive, lowered)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, name)
    ad.primitive_transposes[primitive] = functools.partial(_transpose, name)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    rule(name)(_rule)  # nothing can have been planned with it yet
    return primitive


def _jvp(
    name: str, primals: Arrays, tangents: Arrays, *, call: OpaqueCall
) -> tuple[list[Any], list[Any]]:
    moving = tuple(
        not isinstance(t, ad.Zero) and jnp.issubdtype(aval.dtype, jnp.inexact)
        for t, aval in zip(tangents, call.ins, strict=True)
    )
    inexact = tuple(bool(jnp.issubdtype(aval.dtype, jnp.inexact)) for aval in call.outs)
    results = primitive_named(name).bind(*primals, call=call)
    moved: list[Any] = []
    if any(moving) and any(inexact):
        made = _Tangents(
            _rule_of_tangents(call.rule, _ranks(call), moving, inexact),
            (*call.ins, *_where(moving, call.ins)),
            tuple(_where(inexact, call.outs)),
            call,
            moving,
            inexact,
        )
        along = primitive_named(f"{name.removesuffix(_TANGENTS)}{_TANGENTS}")
        moved = along.bind(*primals, *_where(moving, tangents), call=made)
    given = iter(moved)
    return results, [
        next(given) if moved and flag else ad.Zero(aval.to_tangent_aval())
        for flag, aval in zip(inexact, call.outs, strict=True)
    ]


_TANGENTS, _BACKWARD = " (tangents)", " (backward)"


def _transpose(name: str, cotangents: Arrays, *operands: Any, call: OpaqueCall) -> list[Any]:
    assert isinstance(call, _Tangents), "only derivatives are linear"
    count = len(call.moving)
    primals = operands[:count]
    given = [ad.instantiate_zeros(c) if isinstance(c, ad.Zero) else c for c in cotangents]
    made = _Cotangents(
        _rule_of_cotangents(call.call.rule, _ranks(call.call), call.moving, call.inexact),
        (*call.call.ins, *call.outs),
        call.ins[count:],
        call.call,
        call.moving,
        call.inexact,
    )
    back = primitive_named(f"{name.removesuffix(_TANGENTS)}{_BACKWARD}")
    results = back.bind(*primals, *given, call=made)
    return [None] * count + [
        r if ad.is_undefined_primal(o) else None
        for r, o in zip(results, operands[count:], strict=True)
    ]


def _batch(
    primitive: Primitive, operands: Arrays, dims: Sequence[Any], *, call: OpaqueCall
) -> tuple[list[Any], list[int]]:
    places = tuple(None if d is None else int(d) for d in dims)
    (size,) = {o.shape[d] for o, d in zip(operands, places, strict=True) if d is not None}
    made = _Batched(
        _rule_of_batched(call.rule, _ranks(call), places),
        tuple(
            aval if d is None else _with_dim(aval, d, size)
            for aval, d in zip(call.ins, places, strict=True)
        ),
        tuple(_with_dim(aval, 0, size) for aval in call.outs),
        call,
        places,
    )
    results = primitive.bind(*operands, call=made)
    return results, [0] * len(results)


def _with_dim(aval: ShapedArray, dim: int, size: int) -> ShapedArray:
    shape = list(aval.shape)
    shape.insert(dim, size)
    return ShapedArray(tuple(shape), aval.dtype, weak_type=aval.weak_type)


# The rules of derived calls: one object each, since equal equations are planned as one.


@cache
def _written_out(rule: UserRule, ranks: tuple[int, ...]) -> UserRule:
    return rule.expanded(ranks)


def _ranks(call: OpaqueCall) -> tuple[int, ...]:
    return tuple(len(aval.shape) for aval in call.ins)


def _additive(rule: UserRule) -> frozenset[str]:
    """The factors that a derivative may not be split along.

    A result that lacks a factor must be the sum of what the parts give, for its derivative to be so too.
    """
    held = set(rule.whole)
    for name in names_in((*rule.operands, *rule.results)):
        lacking = any(name not in names_in([dims]) for dims in rule.results)
        if rule.reduce.get(name, "sum") != "sum" or (lacking and name not in rule.reduce):
            held.add(name)
    return frozenset(held)


@cache
def _rule_of_tangents(
    rule: UserRule, ranks: tuple[int, ...], moving: tuple[bool, ...], inexact: tuple[bool, ...]
) -> UserRule:
    rule = _written_out(rule, ranks)
    tangents = range(len(moving), len(moving) + sum(moving))
    return replace(
        rule,
        operands=(*rule.operands, *_where(moving, rule.operands)),
        results=tuple(_where(inexact, rule.results)),
        whole=_additive(rule),
        linear=(Linear(frozenset(tangents)),),
    )


@cache
def _rule_of_cotangents(
    rule: UserRule, ranks: tuple[int, ...], moving: tuple[bool, ...], inexact: tuple[bool, ...]
) -> UserRule:
    rule = _written_out(rule, ranks)
    results = tuple(_where(inexact, rule.results))
    cotangents = range(len(moving), len(moving) + len(results))
    return replace(
        rule,
        operands=(*rule.operands, *results),
        results=tuple(_where(moving, rule.operands)),
        reduce=dict.fromkeys(names_in((*rule.operands, *rule.results)), "sum"),
        whole=_additive(rule),
        linear=(Linear(frozenset(cotangents)),),
    )


@cache
def _rule_of_batched(
    rule: UserRule, ranks: tuple[int, ...], dims: tuple[int | None, ...]
) -> UserRule:
    rule = _written_out(rule, ranks)
    taken = names_in((*rule.operands, *rule.results))
    name = next(f"v{i}" for i in range(len(taken) + 1) if f"v{i}" not in taken)
    operands = tuple(
        d if at is None else (*d[:at], (name,), *d[at:])
        for d, at in zip(rule.operands, dims, strict=True)
    )
    return replace(rule, operands=operands, results=tuple(((name,), *d) for d in rule.results))


# Functions.


class OpaqueFunction:
    """A function whose calls are one equation each, with a rule; `register_rule` makes it.

    It takes and returns what the function does. Attributes are the function's, such as `defvjp` of a
    `jax.custom_vjp`.
    """

    def __init__(self, function: Callable[..., Any], rule: UserRule) -> None:
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self._rule = rule
        self._name = getattr(function, "__name__", type(function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Binds one equation."""
        function = self.__wrapped__
        # Of functions with their own derivative JAX makes arrays of all arguments but these.
        has_derivative = isinstance(function, jax.custom_vjp | jax.custom_jvp)
        fixed = function.nondiff_argnums if has_derivative else ()
        wrapped = [_Static(a) if i in fixed else a for i, a in enumerate(args)]
        leaves, tree = jax.tree.flatten((tuple(wrapped), kwargs))
        kinds = (*_ARRAYS, bool, int, float, complex) if has_derivative else _ARRAYS
        arrays = [jnp.asarray(x) for x in leaves if isinstance(x, kinds)]
        statics = tuple((i, x) for i, x in enumerate(leaves) if not isinstance(x, kinds))
        result_tree: list[Any] = []

        def flat(*values: Any) -> list[Any]:
            results, structure = jax.tree.flatten(_call(function, tree, statics, values))
            result_tree.append(structure)
            return results

        traced = jax.make_jaxpr(flat)(*arrays)
        if any(isinstance(c, Tracer) for c in traced.consts):
            refuse(
                f"register_rule: function '{self._name}'",
                "it uses an array of the function around it, which is being traced.",
                "It is called again on each device's shards, where that array is not known.",
                "pass the array as an argument, and name its dims in the rule.",
            )
        avals = [jax.typeof(x) for x in arrays]
        ins = tuple(ShapedArray(a.shape, a.dtype, weak_type=a.weak_type) for a in avals)
        outs = tuple(ShapedArray(a.shape, a.dtype, weak_type=a.weak_type) for a in traced.out_avals)
        call = _Function(self._rule, ins, outs, function, tree, statics)
        results = primitive_named(self._name).bind(*arrays, call=call)
        return jax.tree.unflatten(result_tree[-1], results)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method."""
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __repr__(self) -> str:
        return f"<function {self._name!r} with the rule {self._rule.notation!r}>"


@dataclass(frozen=True, slots=True)
class _Static:
    """An argument that is no operand whatever it is."""

    value: Any


def _call(
    function: Callable[..., Any], tree: Any, statics: Sequence[tuple[int, Any]], arrays: Arrays
) -> Any:
    """Calls a function with arrays and other values at their places."""
    values, given, held = [], iter(arrays), dict(statics)
    for place in range(tree.num_leaves):
        values.append(held[place] if place in held else next(given))
    args, kwargs = jax.tree.unflatten(tree, values)
    args = [a.value if isinstance(a, _Static) else a for a in args]
    return function(*args, **kwargs)
