"""Fourier transforms: linear; the transformed dims, which are the last ones, are whole."""

from collections.abc import Mapping
from typing import Any

from pypto_spmd.collectives.rules.factor import Linear, Rule, factor_rule
from pypto_spmd.collectives.rules.registry import Aval, rule


@rule("fft")
def _fft(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    transformed = len(params["fft_lengths"])
    batch = [f"b{d}" for d in range(len(ins[0].shape) - transformed)]
    dims = " ".join([*batch, *["_"] * transformed])
    return factor_rule(
        f"{dims} -> {dims}",
        [ins[0].shape],
        [outs[0].shape],
        linear=(Linear(frozenset({0})),),
    )
