"""Looking at how an array lies, which is no reason to lay it out otherwise."""

from collections.abc import Mapping
from typing import Any

from pypto_spmd.collectives.rules.factor import Factor, Rule
from pypto_spmd.collectives.rules.registry import Aval, rule


@rule("inspect_sharding")
def _inspect(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    (operand,) = ins
    factors = tuple(Factor(f"d{dim}", size) for dim, size in enumerate(operand.shape))
    return Rule((tuple((dim,) for dim in range(len(factors))),), (), factors)
