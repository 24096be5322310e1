"""The collectives that a program has, held against those that a rule states."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from pypto_spmd.collectives.tagging import STEP_ATTRIBUTE
from pypto_spmd.testing.applications import Application, Case, shards_of, steps_of

_KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "collective_permute",
}


@dataclass(frozen=True, slots=True)
class _Emitted:
    """One collective found in the program."""

    step: int
    kind: str
    axes: tuple[str, ...]
    eqn: Any

    def elements(self, group: int) -> int:
        """Elements of the tensor that is whole over the group, see `Exchange`."""
        if self.kind == "all_gather":
            return prod(self.eqn.outvars[0].aval.shape)
        count = sum(prod(v.aval.shape) for v in self.eqn.invars)
        return count * group if self.kind == "all_to_all" else count


def collectives_of(jaxpr: Any, scope: str) -> dict[int, list[_Emitted]]:
    """All collectives in a program by the case they belong to."""
    found: dict[int, list[_Emitted]] = {}
    for eqn in jaxpr.eqns:
        path = f"{scope}/{eqn.source_info.name_stack}"
        if eqn.primitive.name in _KINDS:
            case = re.findall(r"case(\d+)_", path)
            step = re.findall(STEP_ATTRIBUTE + r"(\d+)", path)
            axes = eqn.params.get("axis_name", eqn.params.get("axes"))
            axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
            emitted = _Emitted(int(step[-1]) if step else -1, _KINDS[eqn.primitive.name], axes, eqn)
            found.setdefault(int(case[-1]) if case else -1, []).append(emitted)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    for case, more in collectives_of(inner, path).items():
                        found.setdefault(case, []).extend(more)
    return found


def misstated(
    application: Application,
    case: Case,
    axis_sizes: Mapping[str, int],
    emitted: Sequence[_Emitted],
) -> list[str]:
    """Where the collectives of a case are not those that its rule states."""
    rule, splits = application.rule, dict(case.splits)
    shards = shards_of(case.splits, axis_sizes)
    sizes = [factor.size // shards.get(f, 1) for f, factor in enumerate(rule.factors)]
    stated = {}
    for (f, index), step in steps_of(rule, shards).items():
        exchange = rule.factors[f].exchanges_for(shards[f])[index]
        elements = exchange.full_elements(sizes, shards[f])
        stated[step] = (exchange.kind, tuple(a for a in axis_sizes if a in splits[f]), elements)
    problems = []
    for collective in emitted:
        group = prod(axis_sizes[a] for a in collective.axes)
        axes = tuple(a for a in axis_sizes if a in collective.axes)  # nesting shows in the values
        fact = (collective.kind, axes, collective.elements(group))
        expected = stated.pop(collective.step, None)
        if expected is None:
            problems.append(f"{fact} is no exchange of the rule")
        elif expected != fact:
            problems.append(f"{fact} is stated as {expected}")
    return problems + [f"{fact} is stated and never runs" for fact in stated.values()]
