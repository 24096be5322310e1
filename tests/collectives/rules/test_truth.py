"""Every rule against the truth: one table of functions, whose equations are all checked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pypto_spmd.testing.rule_truth import check_rule


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def boolean(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


@dataclass(frozen=True, slots=True)
class Case:
    """A function and the arguments to trace it at."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    primitives: tuple[str, ...] = ()


def case(name: str, function: Callable[..., Any], *args: Any, primitives: str = "") -> Case:
    return Case(name, function, args, tuple(primitives.split()))


ELEMENTWISE = [
    case("elementwise chain", lambda a, b: -(a * 2.0 + b) / 3.0 - a * b, f32(8, 4), f32(8, 4)),
    case("nonlinear", lambda a: jnp.maximum(jnp.exp(a), lax.rsqrt(abs(a))), f32(8, 4)),
    case("select", lambda p, a, b: lax.select_n(p, a, b), boolean(8, 4), f32(8, 4), f32(8, 4)),
    case("scalar predicate", lambda p, a, b: lax.select_n(p, a, b), boolean(), f32(8), f32(8)),
    case("casts", lambda a: a.astype(jnp.bfloat16).astype(jnp.int32) > 0, f32(8, 4)),
    case("clamp", lambda a: lax.clamp(-1.0, a, 1.0), f32(8, 4)),
    case("complex", lambda a, b: lax.imag(lax.complex(a, b)) + a, f32(8), f32(8)),
]
CONTRACTION = [
    case("matmul", lambda a, b: a @ b, f32(8, 16), f32(16, 24)),
    case("matvec", lambda a, b: a @ b, f32(8, 16), f32(16)),
    case(
        "batched matmul",
        lambda a, b: jnp.einsum("bik,bkj->bij", a, b),
        f32(8, 4, 16),
        f32(8, 16, 12),
    ),
    case("two contracted dims", lambda a, b: jnp.tensordot(a, b, 2), f32(4, 8, 16), f32(8, 16, 12)),
    case(
        "attention scores",
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
        f32(2, 4, 8, 4),
        f32(2, 12, 8, 4),
    ),
]
REDUCTION = [
    case("sum", lambda a: a.sum((0, 2)), f32(8, 4, 16)),
    case("max and min", lambda a: a.max(1) + a.min(1), f32(8, 4)),
    case("product", lambda a: a.prod(0), f32(8, 4)),
    case("any and all", lambda a: a.any(0) & a.all(0), boolean(8, 4)),
    case("sum of integers", lambda a: a.sum(), i32(8, 4)),
]

CASES = [*ELEMENTWISE, *CONTRACTION, *REDUCTION]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_legal_labellings_are_right(case: Case):
    report = check_rule(case.function, *case.args, primitives=case.primitives)
    assert report.checked
    assert not report.wrong, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_right_labelling_is_missing(case: Case):
    report = check_rule(
        case.function, *case.args, primitives=case.primitives, mesh_shapes=(), incomplete=True
    )
    assert not report.incomplete, str(report)
