"""One small fact a primitive: how its dims correspond, and how it runs on shards."""

from pypto_spmd.collectives.rules import (  # noqa: F401  (importing a family registers its rules)
    annotations,
    communication,
    contraction,
    convolution,
    cumulative,
    dynamic,
    elementwise,
    fft,
    filling,
    indexing,
    inspection,
    kernels,
    linalg,
    ordering,
    ragged,
    random,
    reduction,
    shape,
    sorting,
    splice,
    window,
)
from pypto_spmd.collectives.rules.factor import (
    Choice,
    Exchange,
    Factor,
    Linear,
    Rule,
    choices,
    factor_rule,
    whole_rule,
)
from pypto_spmd.collectives.rules.registration import register_rule
from pypto_spmd.collectives.rules.registry import (
    Aval,
    changes,
    has_rule,
    registered,
    rule,
    rule_for,
)

__all__ = [
    "Aval",
    "Choice",
    "Exchange",
    "Factor",
    "Linear",
    "Rule",
    "changes",
    "choices",
    "factor_rule",
    "has_rule",
    "register_rule",
    "registered",
    "rule",
    "rule_for",
    "whole_rule",
]
