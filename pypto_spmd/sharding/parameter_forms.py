"""The ways to say how a model's parameters lie: each gives a spec for each leaf of its state.

All but the one spec that is fitted are exact: what doesn't fit its leaf is a fault, not a wish.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.sharding import PartitionSpec

from pypto_spmd.errors import Fault, count_of, listed, quoted, shape_text
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.sharding.leaves import Leaf, is_box, one_level
from pypto_spmd.sharding.mirror import Specs
from pypto_spmd.sharding.resolve import KINDS, is_spec, short_repr, spec_of
from pypto_spmd.sharding.spec import AUTO, entries, shape_faults, spec_text

MOST_PATHS_SHOWN = 8
OPTION = "parameter_shardings"


class ParameterLayout(ABC):
    """A layout that says by itself how parameters, optimizer state and batches lie."""

    @property
    @abstractmethod
    def batch(self) -> PartitionSpec:
        """The spec of what has the batch as its first dim."""

    @abstractmethod
    def parameter_specs(
        self, leaves: Sequence[Leaf], mesh: DeviceMesh, faults: list[Fault]
    ) -> Sequence[Specs]:
        """One spec for each parameter.

        Args:
            leaves: the parameters, of all arguments together.
            mesh: the mesh.
            faults: what is wrong is added to this list.
        """

    @abstractmethod
    def optimizer_spec(self, leaf: Leaf, mirrored: PartitionSpec, mesh: DeviceMesh) -> Specs:
        """The spec of a leaf of the optimizer's state.

        Args:
            leaf: the leaf.
            mirrored: how it would lie as the parameter that it mirrors does.
            mesh: the mesh.
        """


@dataclass(frozen=True, slots=True)
class Follows:
    """In place of a spec: the leaf lies as its parameter does, or as a layout makes of that."""

    spec: Callable[[Leaf, PartitionSpec, DeviceMesh], Specs]


_AS_PARAMETER = Follows(lambda leaf, mirrored, mesh: mirrored)
Own = list[Any]
"""For each parameter a spec or None, then for each leaf of the optimizer's state one or `Follows`."""


@dataclass(frozen=True, slots=True)
class State:
    """The leaves of all arguments that are models or train states.

    Args:
        parameters: the parameters that are to be laid out.
        followers: the optimizer's leaves that are.
        known: leaves that are laid out already.
    """

    parameters: Sequence[Leaf]
    followers: Sequence[Leaf]
    known: Sequence[Leaf]


class Form(ABC):
    """One way to say how parameters lie. What it says of scalars does not matter: they are whole."""

    @abstractmethod
    def own(self, state: State, faults: list[Fault]) -> Own:
        """A spec for each parameter, and then for each leaf of the optimizer's state.

        Args:
            state: the leaves.
            faults: what is wrong is added to this list.
        """


def form_of(shardings: Any, mesh: DeviceMesh, faults: list[Fault], uneven: str) -> Form:
    if isinstance(shardings, ParameterLayout):
        return _OfLayout(shardings, mesh)
    if is_spec(shardings):
        return _Fitted(spec_of(shardings, mesh, OPTION, faults), mesh)
    if is_rules(shardings):
        return _Rules(tuple(shardings), mesh, uneven)
    if callable(shardings) and not is_box(shardings) and one_level(shardings) is None:
        return _Function(shardings, mesh, uneven)
    return _Tree(shardings, mesh, uneven)


def is_rules(value: Any) -> bool:
    """Whether a value is a list of rules: pairs of which the first is a pattern."""
    return isinstance(value, list | tuple) and any(
        isinstance(part, list | tuple) and part and isinstance(part[0], str | re.Pattern)
        for part in value
    )


@dataclass(frozen=True, slots=True)
class _OfLayout(Form):
    layout: ParameterLayout
    mesh: DeviceMesh

    def own(self, state: State, faults: list[Fault]) -> Own:
        arrays = [leaf for leaf in state.parameters if leaf.shape]
        found = iter(self.layout.parameter_specs(arrays, self.mesh, faults) if arrays else ())
        specs = [next(found) if leaf.shape else PartitionSpec() for leaf in state.parameters]
        return [*specs, *[Follows(self.layout.optimizer_spec)] * len(state.followers)]


@dataclass(frozen=True, slots=True)
class _Fitted(Form):
    """One spec for all, each leaf taking what it has dims for."""

    spec: Specs
    mesh: DeviceMesh

    def own(self, state: State, faults: list[Fault]) -> Own:
        if self.spec is None:
            return [None] * (len(state.parameters) + len(state.followers))
        specs = [fitted(self.spec, leaf, self.mesh) for leaf in state.parameters]
        arrays = [leaf for leaf in state.parameters if not leaf.is_counted]
        splits = any(entries(self.spec)) and bool(arrays)
        if splits and not state.known and not any(any(entries(spec)) for spec in specs):
            what = f"{OPTION} is {spec_text(self.spec)}, which splits no parameter."
            shown = paths_text(arrays, with_shapes=True)
            why = f"None has a dim there that can be split so. The parameters are: {shown}."
            fix = f"name a dim that they have, or lay them out by rules: {OPTION}=[(pattern, spec), ...]."
            faults.append(Fault(what, why, fix))
        return [*specs, *[_AS_PARAMETER] * len(state.followers)]


def fitted(spec: PartitionSpec, leaf: Leaf, mesh: DeviceMesh) -> PartitionSpec:
    """What of a spec a leaf can take: entries for dims that it has and that they divide."""
    if leaf.is_counted:
        return PartitionSpec()
    kept = [
        entry if size % prod(mesh.shape[axis] for axis in axes) == 0 else None
        for entry, axes, size in zip(spec.partitions, entries(spec), leaf.shape, strict=False)
    ]
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


@dataclass(frozen=True, slots=True)
class _Rules(Form):
    """Patterns and specs, the first that matches."""

    rules: tuple[Any, ...]
    mesh: DeviceMesh
    uneven: str

    def own(self, state: State, faults: list[Fault]) -> Own:
        rules = compiled_rules(self.rules, self.mesh, OPTION, faults)
        if rules is None:
            return [None] * (len(state.parameters) + len(state.followers))
        specs = by_rules(rules, state, self.mesh, faults, self.uneven)
        unmatched = [
            leaf
            for leaf, spec in zip(state.parameters, specs, strict=False)
            if spec is UNMATCHED and not leaf.is_counted
        ]
        if unmatched:
            count = count_of(len(unmatched), "parameter")
            what = f"no rule in {OPTION} matches {count}: {paths_text(unmatched)}."
            why = "Every array of a model or train state needs a rule; the first that matches is taken."
            fix = "add rules for them, or a last one for all the rest: ('.*', PartitionSpec())."
            faults.append(Fault(what, why, fix))
        whole = [
            PartitionSpec() if spec is UNMATCHED else spec
            for spec in specs[: len(state.parameters)]
        ]
        return [
            *whole,
            *(_AS_PARAMETER if s is UNMATCHED else s for s in specs[len(state.parameters) :]),
        ]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Args:
        pattern: a regular expression, searched in the paths.
        spec: the spec of what matches.
        label: how the rule is called in messages.
    """

    pattern: re.Pattern[str]
    spec: Specs
    label: str

    def matches(self, leaf: Leaf) -> bool:
        """Whether the pattern is found in the leaf's path."""
        return self.pattern.search(leaf.text) is not None


UNMATCHED: Any = object()
"""In place of a spec: no rule matches."""


def compiled_rules(
    rules: Sequence[Any], mesh: DeviceMesh, option: str, faults: list[Fault]
) -> list[Rule] | None:
    """The rules that a person wrote, or None if one can't be.

    Args:
        rules: pairs of a pattern and a spec.
        mesh: the mesh.
        option: where they stand, for messages.
        faults: what is wrong is added to this list.
    """
    found: list[Rule] = []
    before = len(faults)
    for i, rule in enumerate(rules):
        label = f"{option}[{i}]"
        is_pair = isinstance(rule, list | tuple) and len(rule) == 2
        if not is_pair or not isinstance(rule[0], str | re.Pattern) or not is_spec(rule[1]):
            what, why = f"{label} is {short_repr(rule)}.", "A rule is a pair: a pattern and a spec."
            faults.append(Fault(what, why, "write ('kernel', PartitionSpec('axis', ...))."))
            continue
        try:
            pattern = re.compile(rule[0])
        except re.error as error:
            what, why = (
                f"{label} has the pattern {rule[0]!r}.",
                f"It is no regular expression: {error}.",
            )
            faults.append(Fault(what, why, "correct it, or escape it with re.escape."))
            continue
        spec = spec_of(rule[1], mesh, f"the spec of {label}", faults)
        found.append(Rule(pattern, spec, f"{label}, {pattern.pattern!r},"))
    return found if len(faults) == before else None


def by_rules(
    rules: Sequence[Rule],
    state: State,
    mesh: DeviceMesh,
    faults: list[Fault],
    uneven: str = "",
) -> list[Any]:
    """The spec of the first rule that matches each leaf, or UNMATCHED.

    Args:
        rules: the rules.
        state: the leaves. For those of the optimizer only rules count that match no parameter; what is laid
            out already only keeps a rule from matching nothing.
        mesh: the mesh.
        faults: gets one for each rule that matches nothing, and for each that doesn't fit what it matches.
        uneven: what is done about dims that their axes do not divide, see `shape_faults`.
    """
    leaves = [*state.parameters, *state.followers]
    known = [*state.parameters, *state.known]
    about_parameters = [any(rule.matches(leaf) for leaf in known) for rule in rules]
    about_followers = [rule for rule, own in zip(rules, about_parameters, strict=True) if not own]
    specs: list[Any] = []
    matched: dict[Rule, list[Leaf]] = {rule: [] for rule in rules}
    for i, leaf in enumerate(leaves):
        candidates = rules if i < len(state.parameters) else about_followers
        rule = next((rule for rule in candidates if rule.matches(leaf)), None)
        if rule is not None:
            matched[rule].append(leaf)
        specs.append(UNMATCHED if rule is None else rule.spec)
    for rule in about_followers:
        if not matched[rule]:
            what = f"{rule.label} matches no parameter."
            fix = "correct the pattern, or take the rule out."
            faults.append(Fault(what, f"The paths are: {paths_text(state.parameters)}.", fix))
    for rule, of_rule in matched.items():
        faults.extend(_misfits(rule, of_rule, mesh, uneven))
    return specs


def _misfits(rule: Rule, leaves: Sequence[Leaf], mesh: DeviceMesh, uneven: str) -> list[Fault]:
    """One fault for all leaves that a rule matches and can't lay out."""
    if rule.spec is None:
        return []
    arrays = [leaf for leaf in leaves if leaf.shape]
    wrong = [
        (leaf, shape_faults(rule.spec, mesh, leaf.shape, "", uneven=uneven)) for leaf in arrays
    ]
    wrong = [(leaf, found) for leaf, found in wrong if found]
    if not wrong:
        return []
    (first, (fault, *_)), misfits = wrong[0], [leaf for leaf, _ in wrong]
    count = f"{len(wrong)} of the {count_of(len(arrays), 'array')}"
    what = f"{rule.label} doesn't fit {count} that it matches: {paths_text(misfits, with_shapes=True)}."
    where = "" if len(wrong) == 1 else f"The first, {first.text}: "
    fix = f"put a rule for {'it' if len(wrong) == 1 else 'them'} before this one; or {fault.fix}"
    return [Fault(what, where + fault.why, fix)]


@dataclass(frozen=True, slots=True)
class _Function(Form):
    """A function of path and array."""

    function: Callable[[str, Any], Any]
    mesh: DeviceMesh
    uneven: str

    def own(self, state: State, faults: list[Fault]) -> Own:
        specs: Own = []
        for leaf in state.parameters:
            if not leaf.shape:
                specs.append(None)
                continue
            said = self.function(leaf.text, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
            where = f"{OPTION}({leaf.text!r}, {shape_text(leaf.shape, leaf.dtype)})"
            specs.append(_exact(said, leaf, where, self.mesh, faults, self.uneven))
        return [*specs, *[_AS_PARAMETER] * len(state.followers)]


def _exact(
    said: Any, leaf: Leaf, where: str, mesh: DeviceMesh, faults: list[Fault], uneven: str
) -> Specs:
    """A spec for one leaf, if it is one and fits."""
    if not is_spec(said):
        fix = "give PartitionSpec('axis', ...) with one entry a dim, or AUTO."
        if isinstance(said, str):
            fix = f"give PartitionSpec({said!r})."
        faults.append(Fault(f"{where} is {short_repr(said)}.", f"{KINDS} there.", fix))
        return None
    spec = spec_of(said, mesh, where, faults)
    if spec is None:
        return None
    shape = shape_text(leaf.shape, leaf.dtype)
    found = shape_faults(
        spec,
        mesh,
        leaf.shape,
        f"parameter {quoted(leaf.name)} has shape {shape}.",
        uneven=uneven,
    )
    faults.extend(found)
    return None if found else spec


@dataclass(frozen=True, slots=True)
class _Tree(Form):
    """A pytree of specs, or a prefix of one, of each argument or of the parameters in it."""

    tree: Any
    mesh: DeviceMesh
    uneven: str

    def own(self, state: State, faults: list[Fault]) -> Own:
        said = dict(_flat_specs(self.tree, (), OPTION))
        used = {_place_of(leaf, said) for leaf in state.known}
        missing = False
        specs: Own = []
        for i, leaf in enumerate((*state.parameters, *state.followers)):
            follows = i >= len(state.parameters)
            place = _place_of(leaf, said)
            if place is None:
                specs.append(_AS_PARAMETER if follows else PartitionSpec())
                if not follows and not leaf.is_counted:
                    missing = True
                    self._differ(f"{OPTION} has nothing for argument {quoted(leaf.name)}.", faults)
                continue
            used.add(place)
            label, entry = said[place]
            spec = None
            if leaf.shape:
                spec = _exact(entry, leaf, label, self.mesh, faults, self.uneven)
            specs.append(spec)
        for place, (label, entry) in said.items():
            if not missing and place not in used and entry is not None and entry is not AUTO:
                self._differ(f"{label} is for nothing: there is no {'/'.join(place)}.", faults)
        return specs

    def _differ(self, what: str, faults: list[Fault]) -> None:
        why = "The specs must be a prefix of the tree that they are for; this is where they differ."
        fix = "mirror the tree, with AUTO where the planner is to choose, or give one spec for all of it."
        faults.append(Fault(what, why, fix))


def _flat_specs(
    node: Any, path: tuple[str, ...], label: str
) -> list[tuple[tuple[str, ...], tuple[str, Any]]]:
    """Path, label and spec of each spec in a pytree."""
    if is_box(node):
        (node,) = jax.tree.leaves(node, is_leaf=is_spec)
    children = None if is_spec(node) else one_level(node)
    if children is None:
        return [(path, (label, node))]
    return [
        found
        for step, text, child in children
        for found in _flat_specs(child, (*path, step), label + text)
    ]


def _place_of(leaf: Leaf, said: Mapping[tuple[str, ...], Any]) -> tuple[str, ...] | None:
    """The path in the pytree of the spec for a leaf: seen from the argument, or from the parameters."""
    for start in dict.fromkeys((1, leaf.root)):
        below = leaf.path[start:]
        for end in range(len(below) + 1):
            if below[:end] in said:
                return below[:end]
    return None


def paths_text(leaves: Sequence[Leaf], *, with_shapes: bool = False) -> str:
    """Paths as a sentence lists them, the first few of many."""
    words = [
        f"{leaf.text} {shape_text(leaf.shape, leaf.dtype)}" if with_shapes else leaf.text
        for leaf in leaves[:MOST_PATHS_SHOWN]
    ]
    if len(leaves) > MOST_PATHS_SHOWN:
        words.append(f"{len(leaves) - MOST_PATHS_SHOWN} more")
    return listed(words) or "none"
