"""Which rule a primitive has: one table from primitive name to rule function.

A rule function takes `(params, ins, outs)`, the equation's params and the `Aval`s of its operands and
results, all global, and returns a `Rule`. Rules are cached by equation signature, since a model repeats
a few hundred signatures thousands of times.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pypto_spmd.collectives.rules.factor import Rule, whole_rule
from pypto_spmd.collectives.rules.whole import WITHOUT_RULE


@dataclass(frozen=True, slots=True)
class Aval:
    """Shape, dtype and, for a literal or a known constant scalar, the value of an operand."""

    shape: tuple[int, ...]
    dtype: Any
    value: Any = None

    @property
    def itemsize(self) -> int:
        """Bytes of one element (of a PRNG key: of its base array's elements together)."""
        return itemsize(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def itemsize(dtype: Any) -> int:
    """Bytes of one element of `dtype`; a threefry key counts as its two words."""
    return int(np.dtype(dtype).itemsize) if isinstance(dtype, np.dtype) else 8


NO_RULE = "no rule for "
"""How the reason of a rule begins, where there is none for a primitive: then its name follows."""

RuleFunction = Callable[[Mapping[str, Any], tuple[Aval, ...], tuple[Aval, ...]], Rule]

_RULES: dict[str, RuleFunction] = {}
_CACHE: dict[Any, Rule] = {}
_changes = 0


def rule(*names: str) -> Callable[[RuleFunction], RuleFunction]:
    """Decorator: registers a rule function for the primitives called `names`."""

    def register(function: RuleFunction) -> RuleFunction:
        for name in names:
            if name in _RULES:
                raise ValueError(f"primitive {name!r} has a rule already")
            _RULES[name] = function
        return function

    return register


def replace_rule(name: str, function: RuleFunction) -> None:
    """Gives a primitive a rule function, whether it has one or not."""
    count_change()
    _RULES[name] = function
    for key in [key for key in _CACHE if key[0] == name]:
        del _CACHE[key]


def count_change() -> None:
    """Notes that some rule is another one from now on: what was planned before must be planned anew."""
    global _changes
    _changes += 1


def changes() -> int:
    """How often rules were changed since they were first registered."""
    return _changes


def registered() -> tuple[str, ...]:
    """Names of all primitives that have a rule, sorted."""
    return tuple(sorted(_RULES))


def has_rule(name: str) -> bool:
    """Whether the primitive called `name` has a rule."""
    return name in _RULES


def rule_for(
    name: str, params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]
) -> Rule:
    """The rule of an equation; one that runs whole if the primitive has none."""
    key = (name, _freeze(params), ins, outs)
    try:
        found = _CACHE.get(key)
    except TypeError:  # an unhashable value among the params
        return _make(name, params, ins, outs)
    if found is None:
        found = _CACHE[key] = _make(name, params, ins, outs)
    return found


def _make(
    name: str, params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]
) -> Rule:
    function = _RULES.get(name)
    if function is None:
        shapes = tuple(a.shape for a in ins), tuple(a.shape for a in outs)
        return whole_rule(*shapes, reason=WITHOUT_RULE.get(name) or NO_RULE + name)
    return function(params, ins, outs)


def _freeze(params: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(params.items(), key=lambda item: item[0]))
