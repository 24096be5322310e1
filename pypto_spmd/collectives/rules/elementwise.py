"""Elementwise primitives: every dim passes through; an operand's dim of size 1 is repeated.

What differs between them is in which operands they are linear, so that a partial value may flow
through and be reduced later, and for which reductions they are monotone.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pypto_spmd.collectives.rules.factor import Linear, Rule, factor_rule, whole_rule
from pypto_spmd.collectives.rules.moving import dim_names, is_inexact, moves, moving_ops
from pypto_spmd.collectives.rules.registry import Aval, rule

_NONLINEAR = [
    "abs", "sign", "floor", "ceil", "round", "exp2", "log", "log1p", "log2", "expm1", "tanh", "sin",
    "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "logistic",
    "sqrt", "rsqrt", "cbrt", "erf", "erfc", "erf_inv", "lgamma", "digamma", "is_finite",
    "integer_pow", "not", "population_count", "clz", "square", "one_minus_square", "pow", "atan2",
    "rem", "mulhi", "nextafter", "xor", "shift_right_arithmetic",
    "shift_right_logical", "eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "igamma",
    "igammac", "igamma_grad_a", "bessel_i0e", "bessel_i1e", "regularized_incomplete_beta",
    "polygamma", "polynomial", "zeta",
]  # fmt: skip

_ONE = (Linear(frozenset({0})),)
_BOTH = (Linear(frozenset({0, 1})),)
_EITHER = (Linear(frozenset({0})), Linear(frozenset({1})))

_LINEAR: dict[str, tuple[Linear, ...]] = {
    "neg": _ONE,  # -(a + b) = -a + -b
    "real": _ONE,
    "imag": _ONE,
    "conj": _ONE,
    "complex": _BOTH,
    "add": _BOTH,
    "add_any": _BOTH,
    "sub": _BOTH,
    "shift_left": _ONE,  # multiplies by a power of two
    "mul": _EITHER,  # (a + b) c = ac + bc, but not when c is partial too
    "optimization_barrier": (),
}

_MONOTONE = {
    "max": (Linear(frozenset({0, 1}), ("max",)),),  # max is its own reduction
    "min": (Linear(frozenset({0, 1}), ("min",)),),
    "or": (Linear(frozenset({0, 1}), ("or",)),),
    "and": (Linear(frozenset({0, 1}), ("and",)),),
    # Increasing: exp(max(a, b)) = max(exp a, exp b). So are log and sqrt, but only where they are
    # defined: a device whose own maximum is negative would bring a NaN into the reduction.
    "exp": (Linear(frozenset({0}), ("max", "min")),),
    "clamp": (Linear(frozenset({1}), ("max", "min")),),
}


def elementwise(ins: tuple[Aval, ...], outs: tuple[Aval, ...], linear: tuple[Linear, ...]) -> Rule:
    """The rule of a primitive whose operands have the result's shape, or 1 for a dim, or no dims."""
    shape = outs[0].shape
    names = dim_names(len(shape))

    def dims(operand: Aval) -> str:
        if not operand.shape:
            return ""
        return " ".join(
            name if n == size else "_"
            for name, n, size in zip(names, operand.shape, shape, strict=True)
        )

    return factor_rule(
        f"{', '.join(map(dims, ins))} -> {', '.join([' '.join(names)] * len(outs))}",
        [a.shape for a in ins],
        [a.shape for a in outs],
        linear=linear,
    )


@rule(*_NONLINEAR)
def _nonlinear(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    return elementwise(ins, outs, ())


def _with(linear: tuple[Linear, ...]):
    def make(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
        return elementwise(ins, outs, linear)

    return make


for _name, _groups in (_LINEAR | _MONOTONE).items():
    rule(_name)(_with(_groups))


@rule("copy", "stop_gradient", "name")
def _identity(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    return elementwise(ins, outs, moves({0}, ins[0].dtype))


@rule("device_put")
def _device_put(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    # Inside one program all is on the mesh already.
    if len(ins) != 1:
        return whole_rule([a.shape for a in ins], [a.shape for a in outs], "several arrays at once")
    made = elementwise(ins, outs, moves({0}, outs[0].dtype))
    return replace(made, bind=lambda ctx, x: [x])


@rule("div")
def _div(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    # The division of integers rounds, and so is not linear.
    return elementwise(ins, outs, _ONE if is_inexact(outs[0].dtype) else ())


@rule("select_n")
def _select_n(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    # Choosing among partial values by a whole predicate gives a partial value, for any reduction.
    return elementwise(ins, outs, moves(range(1, len(ins)), outs[0].dtype))


@rule("convert_element_type")
def _convert(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    # A cast between inexact types is linear, and increasing, up to rounding. Casts of integers are
    # not: they wrap at another size than the sum did.
    source, target = ins[0].dtype, outs[0].dtype
    if not is_inexact(source) or not is_inexact(target):
        return elementwise(ins, outs, ())
    ops = tuple(op for op in moving_ops(source) if op in moving_ops(target))
    return elementwise(ins, outs, (Linear(frozenset({0}), ops),))


@rule("reduce_precision")
def _reduce_precision(
    params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]
) -> Rule:
    return elementwise(ins, outs, (Linear(frozenset({0}), ("sum", "max", "min")),))


@rule("bitcast_convert_type")
def _bitcast(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    # Between widths the wide side's element is the narrow side's last dim.
    longer = max(ins[0].shape, outs[0].shape, key=len)
    narrow = len(ins[0].shape) != len(outs[0].shape)
    names = dim_names(len(longer) - narrow)
    dims = [" ".join([*names, "_"] if len(a.shape) > len(names) else names) for a in (*ins, *outs)]
    return factor_rule(f"{dims[0]} -> {dims[1]}", [ins[0].shape], [outs[0].shape])


ELEMENTWISE = frozenset(
    [
        *_NONLINEAR,
        *_LINEAR,
        *_MONOTONE,
        *("copy", "div", "name", "convert_element_type", "reduce_precision", "select_n"),
        "stop_gradient",
    ]
)
"""The primitives of this family whose results' elements each depend on the operands' at the same place."""
