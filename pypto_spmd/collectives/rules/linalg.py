"""Matrix factorisations and solvers: batch dims pass, the matrices themselves are whole.

The columns of a right-hand side are independent of each other, so they pass too, and a solution is linear
in its right-hand side.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pypto_spmd.collectives.rules.factor import Linear, Rule, factor_rule
from pypto_spmd.collectives.rules.registry import Aval, rule

_FACTORISATIONS: dict[str, tuple[int, ...]] = {
    # name -> how many dims of each operand are a matrix's or a vector's; the others are batch dims
    "cholesky": (2,),
    "cholesky_update": (2, 1),
    "eig": (2,),
    "eigh": (2,),
    "geqp3": (2, 1),
    "geqrf": (2,),
    "hessenberg": (2,),
    "householder_product": (2, 1),
    "lu": (2,),
    "lu_pivots_to_permutation": (1,),
    "ormqr": (2, 1, 2),
    "qr": (2,),
    "schur": (2,),
    "svd": (2,),
    "tridiagonal": (2,),
    "triangular_solve": (2, 2),
    "tridiagonal_solve": (1, 1, 1, 2),
}

_LINEAR = {
    "triangular_solve": (Linear(frozenset({1})),),
    "tridiagonal_solve": (Linear(frozenset({3})),),
    "ormqr": (Linear(frozenset({2})),),  # Q c, for Q in factored form
}


def _columns(name: str, params: Mapping[str, Any]) -> tuple[int, int]:
    """The operand whose rows or columns are independent, and the dim of its matrix; (-1, -1) if none."""
    if name == "triangular_solve":
        return 1, 1 if params["left_side"] else 0
    if name == "ormqr":
        return 2, 1 if params["left"] else 0
    return (3, 1) if name == "tridiagonal_solve" else (-1, -1)


def _batched(name: str, core: tuple[int, ...]):
    def make(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
        free_operand, free_dim = _columns(name, params)
        batch = [f"b{d}" for d in range(len(ins[0].shape) - core[0])]

        def dims(aval: Aval, free: bool) -> str:
            matrix = ["_"] * (len(aval.shape) - len(batch))
            if free:
                matrix[free_dim] = "c"
            return " ".join([*batch, *matrix])

        left = ", ".join(dims(a, n == free_operand) for n, a in enumerate(ins))
        right = ", ".join(dims(a, free_operand >= 0) for a in outs)
        made = factor_rule(
            f"{left} -> {right}",
            [a.shape for a in ins],
            [a.shape for a in outs],
            linear=_LINEAR.get(name, ()),
        )
        return replace(made, reason="each step of an elimination needs what those before it gave")

    return make


for _name, _core in _FACTORISATIONS.items():
    rule(_name)(_batched(_name, _core))


@rule("symmetric_product")
def _symmetric_product(
    params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]
) -> Rule:
    # alpha x x^T + beta c: the columns of x are contracted, and c counts once.
    batch = " ".join(f"b{d}" for d in range(len(ins[0].shape) - 2))
    return factor_rule(
        f"{batch} _ k, {batch} _ _ -> {batch} _ _",
        [a.shape for a in ins],
        [a.shape for a in outs],
        reduce={"k": "sum"},
        partial_operands={"k": (1,)},
        works=True,
    )
