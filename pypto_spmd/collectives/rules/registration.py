"""`register_rule`: users' primitives, kernels and functions get rules like JAX's own."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from pypto_spmd.collectives.rules import kernels
from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Bind, Rule
from pypto_spmd.collectives.rules.opaque import OpaqueFunction
from pypto_spmd.collectives.rules.registry import Aval, count_change, has_rule, replace_rule
from pypto_spmd.collectives.rules.user_rule import UserRule, user_rule
from pypto_spmd.collectives.rules.whole import WITHOUT_RULE, is_looked_into
from pypto_spmd.errors import refuse

_OVERRIDE = "pass override=True to replace it."


def register_rule(
    notation: str,
    *,
    primitive: Primitive | str | Callable[..., Any] | None = None,
    ffi_target: str | None = None,
    pallas_kernel: str | Callable[..., Any] | None = None,
    reduce: Mapping[str, str] | None = None,
    linear: Iterable[int | Sequence[int]] = (),
    whole: str | Iterable[str] = (),
    bind: Bind | None = None,
    local_params: Mapping[str, str] | None = None,
    override: bool = False,
) -> Any:
    """States how the dims of something that is not JAX's own correspond, so that it can run on shards.

    The notation is one group of dims for each operand and each result, `"i j, j k -> i k"`: a letter stands
    for a dim, `_` for one that must be whole, `...` for any number of dims, `(a b)` for a dim made of two,
    the first the slower, `()` for a scalar. Splitting a dim means running the same thing on the parts:
    every letter promises that this is right. A letter that a result lacks is kept whole, unless `reduce`
    says how the parts' results make the whole one.

    With no target it is a decorator of functions. A decorated function is one equation of the plan, which
    is not looked into, and on each device is called again with the local arrays: this is the way for
    functions that make Pallas or foreign calls, and for `jax.custom_vjp` and `jax.custom_jvp` functions.
    Its derivatives follow from the same string.

    Args:
        notation: the factor string.
        primitive: a `jax.extend.core.Primitive`, or its name; or a `jax.custom_vjp` or `jax.custom_jvp`
            function, all calls of which then are as if it had been decorated.
        ffi_target: the target name of a `jax.ffi.ffi_call`.
        pallas_kernel: the kernel function of a `pallas_call`, or its name. A dim is split between blocks
            of the grid; decorate the function that makes the call where the blocks are to be smaller.
        reduce: factor -> "sum", "max", "min", "prod", "or" or "and".
        linear: operands, counted from 0, in each of which it is linear (`[0, 1]` for a product), or tuples
            of operands in which it is linear together (`[(0, 1)]` for a sum). A sum that is still to be taken
            over devices may then be taken after it.
        whole: factors that must not be split: `"j k"`.
        bind: what to run on shards, instead of the primitive or function itself: `bind(context, *operands)`,
            where `context.index("i")` says which part of `i` this device has, and
            `context.local_size("i")` how large it is.
        local_params: for a primitive, params that hold sizes -> the factors that they are sizes of
            (`{"shape": "i k"}`).
        override: whether to replace a rule that is there.

    Returns:
        Without a target, a decorator.

    Raises:
        ShardingError: for a notation or options that can't be, and for what has a rule already. A rule that
            does not fit an equation is told when the equation is planned.

    Example:
        >>> @register_rule("... d, d -> ... d", whole="d")
        ... def rms_norm(x, scale):
        ...     return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale
        >>> mesh = DeviceMesh([0, 1], ["data"])
        >>> step = spmd(rms_norm, mesh=mesh, in_shardings=[PartitionSpec("data"), None])
        >>> x, scale = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4,), "float32")
        >>> step.plan(x, scale).wire_bytes
        0
    """
    targets = [t for t in (primitive, ffi_target, pallas_kernel) if t is not None]
    subject = f"register_rule({notation!r})"
    if len(targets) > 1:
        refuse(
            subject,
            f"it has {len(targets)} targets.",
            "A rule is of one primitive, function, foreign target or kernel.",
            "register each by a call of its own.",
        )
    stated = user_rule(
        subject,
        notation,
        reduce=reduce,
        linear=linear,
        whole=whole,
        bind=bind,
        local_params=local_params,
    )
    if ffi_target is not None:
        return _put(subject, kernels.FOREIGN, "ffi_call", ffi_target, stated, override)
    if pallas_kernel is not None:
        name = pallas_kernel if isinstance(pallas_kernel, str) else pallas_kernel.__name__
        return _put(subject, kernels.KERNELS, "pallas_call", name, stated, override)
    if isinstance(primitive, Primitive | str):
        return _of_primitive(subject, primitive, stated, override)
    if local_params:
        refuse(
            subject,
            "it has local_params, but is a function's rule.",
            "A function has no params: it is called with local arrays and takes sizes from these.",
            "leave local_params out, or pass bind=.",
        )
    if primitive is None:
        return lambda function: _opaque(subject, function, stated)
    return _in_place(subject, primitive, stated, override)


def _put(
    subject: str, table: dict[str, UserRule], what: str, name: str, stated: UserRule, override: bool
) -> None:
    if name in table and not override:
        refuse(
            subject,
            f"{what} {name!r} has a rule already, {table[name].notation!r}.",
            "Two rules of one thing would leave open which is meant.",
            _OVERRIDE,
        )
    table[name] = stated
    replace_rule(what, kernels.RULES[what])


def _of_primitive(
    subject: str, primitive: Primitive | str, stated: UserRule, override: bool
) -> None:
    name = primitive if isinstance(primitive, str) else primitive.name
    if is_looked_into(name):
        refuse(
            subject,
            f"{name!r} is {WITHOUT_RULE[name]}.",
            "No rule of it would ever be asked for.",
            "decorate the function that is called with @register_rule(...) instead.",
        )
    if name in kernels.RULES:
        option = "ffi_target" if name == "ffi_call" else "pallas_kernel"
        refuse(
            subject,
            f"{name!r} calls whatever it is given.",
            "Each of these has its own dims.",
            f'name it: register_rule({stated.notation!r}, {option}="...").',
        )
    if has_rule(name) and not override:
        refuse(
            subject,
            f"primitive {name!r} has a rule already.",
            "Two rules of one primitive would leave open which is meant.",
            _OVERRIDE,
        )

    def make(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
        missing = [p for p in stated.local_params or {} if p not in params]
        if missing:
            why = f"It has no param {missing[0]!r}, only {', '.join(sorted(params)) or 'none'}."
            raise stated.misfit(ins, outs, why, "name params of the primitive in local_params.")

        def bind(ctx: Context, *operands: jax.Array) -> Any:
            return ctx.bind(*operands, **stated.local_values(ctx))

        return stated.at(ins, outs, bind=bind)

    replace_rule(name, make)


def _opaque(subject: str, function: Callable[..., Any], stated: UserRule) -> OpaqueFunction:
    if not callable(function):
        refuse(
            subject,
            f"it decorates a value of type {type(function).__name__}.",
            "With no target it decorates functions.",
            "pass a function, or primitive=, ffi_target= or pallas_kernel=.",
        )
    return OpaqueFunction(function, stated)


def _in_place(subject: str, function: Callable[..., Any], stated: UserRule, override: bool) -> None:
    """Has a function with its own derivative rule call its opaque form, and differentiate that."""
    name = getattr(function, "__name__", type(function).__name__)
    if not isinstance(function, jax.custom_vjp | jax.custom_jvp):
        refuse(
            subject,
            f"primitive= is {name!r}, of type {type(function).__name__}.",
            "It takes a primitive, its name, or a jax.custom_vjp or jax.custom_jvp function.",
            "decorate other functions: @register_rule(...).",
        )
    is_defined = function.fwd if isinstance(function, jax.custom_vjp) else function.jvp
    if is_defined is None:
        refuse(
            subject,
            f"the derivative of {name!r} is not defined yet.",
            "Its rule is to be of the whole function.",
            "call its defvjp or defjvp first, or decorate it: @register_rule(...).",
        )
    inner = function.fun
    if isinstance(inner, OpaqueFunction):
        if not override:
            refuse(
                subject,
                f"function {name!r} has a rule already.",
                "Two rules of one function would leave open which is meant.",
                _OVERRIDE,
            )
        original = inner.__wrapped__
    else:
        original = object.__new__(type(function))
        vars(original).update(vars(function))
    count_change()
    opaque = OpaqueFunction(original, stated)
    held = tuple(function.nondiff_argnums)
    function.fun = opaque
    if isinstance(function, jax.custom_vjp):

        def forward(*args: Any) -> tuple[Any, Any]:
            return opaque(*args), [a for i, a in enumerate(args) if i not in held]

        def backward(*args: Any) -> Any:
            *fixed, moving, cotangent = args
            _, pull = jax.vjp(lambda *values: opaque(*_merged(held, fixed, values)), *moving)
            return pull(cotangent)

        function.defvjp(forward, backward)
    else:

        def along(*args: Any) -> tuple[Any, Any]:
            *fixed, moving, tangents = args
            return jax.jvp(lambda *values: opaque(*_merged(held, fixed, values)), moving, tangents)

        function.defjvp(along)


def _merged(held: Sequence[int], fixed: Sequence[Any], moving: Sequence[Any]) -> list[Any]:
    """All arguments: those at the places `held` among the others."""
    values = iter(moving)
    known = dict(zip(held, fixed, strict=True))
    return [known[i] if i in known else next(values) for i in range(len(fixed) + len(moving))]
