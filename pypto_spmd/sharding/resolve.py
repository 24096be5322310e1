"""From the specs that a person gave to one spec for each array.

Specs come as a pytree prefix, as in ``jax.jit``: a spec stands for all arrays below its place. What
is wrong is collected, not raised, so that a call hears of all its faults at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr

from pypto_spmd.errors import Fault, count_of, listed, quoted, shape_text
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.sharding.spec import (
    AUTO,
    ShardingSpec,
    mesh_faults,
    rank_faults,
    shape_faults,
    spec_text,
)

Role = Literal["argument", "result", "value"]
_PREFIX_NAME = {"argument": "in_shardings", "result": "out_shardings", "value": "spec"}
_ROOT = {"result": "result", "value": "x"}
KINDS = "A ShardingSpec, PartitionSpec, NamedSharding, AUTO or None is wanted"


def resolve(
    prefix: Any,
    tree: Any,
    mesh: DeviceMesh,
    *,
    role: Role,
    names: Sequence[str] | None = None,
    label: str | None = None,
    are_parts: bool = False,
    uneven: str = "",
    faults: list[Fault],
) -> list[PartitionSpec | None]:
    """Turns a pytree prefix of specs into one spec for each leaf.

    Lists and tuples stand for each other everywhere. For one argument, its spec needs no list around
    it. One spec for a whole result passes over scalars, such as the loss beside the outputs.

    Args:
        prefix: The specs: ShardingSpec, PartitionSpec, NamedSharding, AUTO or None at its leaves.
        tree: What they are for; its leaves have ``shape`` and ``dtype``. Of ``role="argument"``, the
            tuple of the arguments.
        mesh: The mesh that all specs must be of.
        role: What the leaves are to the function; of a "value", specs may leave dims unconstrained.
        names: The arguments' names, for messages.
        label: What the specs are called in messages, ``in_shardings`` and its like by default.
        are_parts: Whether the leaves are one device's parts of the arrays that the specs are for.
        uneven: What is done about dims that their axes do not divide, see `shape_faults`.
        faults: What is wrong is added to this list.

    Returns:
        For each leaf of the tree, in the order of ``jax.tree.flatten``, its spec, or None where the
        planner is to choose (and where there is a fault).
    """
    walk = _Walk(mesh, role, are_parts, uneven, faults)
    label = label or _PREFIX_NAME[role]
    if role == "result" and is_spec(prefix):
        return list(walk.spread(prefix, tree, _ROOT[role], label, to_scalars=are_parts))
    if role in _ROOT:
        return list(walk.match(prefix, tree, _ROOT[role], label))
    names = tuple(names) if names is not None else tuple(f"args[{i}]" for i in range(len(tree)))
    if is_spec(prefix):
        prefixes, labels = [prefix] * len(tree), [label] * len(tree)
    elif isinstance(prefix, list | tuple) and not hasattr(prefix, "_fields"):
        prefixes, labels = list(prefix), [f"{label}[{i}]" for i in range(len(prefix))]
    else:
        prefixes, labels = [prefix], [label]
    if len(prefixes) != len(tree):
        faults.append(_argument_count_fault(prefix, prefixes, tree, names, label))
        return [None] * len(jax.tree.leaves(tree))
    specs: list[PartitionSpec | None] = []
    for part, argument, name, where in zip(prefixes, tree, names, labels, strict=True):
        specs += walk.match(part, argument, name, where)
    return specs


def _argument_count_fault(
    prefix: Any, prefixes: list[Any], tree: Sequence[Any], names: Sequence[str], label: str
) -> Fault:
    count = count_of(len(prefixes), "entry", "entries")
    calls = f"the function was called with {count_of(len(tree), 'argument')}"
    if isinstance(prefix, list | tuple):
        what = f"{label} has {count} but {calls}."
    else:
        what = f"{label} is a {type(prefix).__name__} but {calls}."
    given = listed([quoted(name) for name in names]) or "none"
    why = f"{label} has one entry for each argument, and the arguments are: {given}."
    wanted = f"{label}=[{', '.join(['...'] * len(tree))}]"
    fix = f"give {count_of(len(tree), 'entry', 'entries')}"
    if label == _PREFIX_NAME["argument"]:
        fix += ", AUTO where the planner is to choose"
    return Fault(what, why, f"{fix}: {wanted}.")


def is_spec(value: Any) -> bool:
    """Whether a value is one spec, in any of the forms that a person may write."""
    return value is None or isinstance(
        value, ShardingSpec | PartitionSpec | NamedSharding | type(AUTO)
    )


def spec_of(
    entry: Any, mesh: DeviceMesh, label: str, faults: list[Fault], *, may_be_open: bool = False
) -> PartitionSpec | None:
    """The PartitionSpec of one spec that a person wrote, if it is right on this mesh.

    Args:
        entry: the spec, of a kind that `is_spec` knows.
        mesh: the mesh.
        label: where it stands, for messages.
        faults: what is wrong is added to this list.
        may_be_open: whether it may leave dims unconstrained.

    Returns:
        The spec; None where the planner is to choose, and where there is a fault.
    """
    if entry is None or entry is AUTO:
        return None
    spec = entry
    if isinstance(entry, ShardingSpec):
        spec, same = entry.partition_spec, entry.mesh.same_places(mesh)
    elif isinstance(entry, NamedSharding):
        spec, same = entry.spec, is_of(entry.mesh, mesh)
    else:
        same = True
    what = f"{label} is {spec_text(spec)}."
    if not same:
        other = " × ".join(f"{axis}={size}" for axis, size in entry.mesh.shape.items())
        why = f"It is of another mesh ({other}) than the function's ({mesh})."
        fix = "make the spec of the function's mesh, or pass a bare PartitionSpec."
        faults.append(Fault(what, why, fix))
        return None
    found = mesh_faults(spec, mesh, what, may_be_open=may_be_open)
    faults.extend(found)
    return None if found else spec


@dataclass(frozen=True, slots=True)
class _Walk:
    """The recursion over prefix and tree at once, and where it puts what it finds."""

    mesh: DeviceMesh
    role: Role
    are_parts: bool
    uneven: str
    faults: list[Fault]

    def match(
        self, prefix: Any, node: Any, path: str, label: str
    ) -> Iterator[PartitionSpec | None]:
        """One spec for each leaf of the node.

        Args:
            prefix: The specs for this node.
            node: An array, or a tree of arrays.
            path: Where the node is, as the person would write it: ``params['dense']``.
            label: Where the prefix is: ``in_shardings[0]['dense']``.
        """
        if is_spec(prefix):
            yield from self.spread(prefix, node, path, label)
            return
        pairs = self._children(prefix, node, path, label)
        if pairs is None:
            yield from [None] * len(jax.tree.leaves(node))
            return
        for part, child, step in pairs:
            yield from self.match(part, child, path + step, label + step)

    def spread(
        self, entry: Any, node: Any, path: str, label: str, *, to_scalars: bool = True
    ) -> Iterator[PartitionSpec | None]:
        """One spec for every leaf of the node, or for all but scalars, which are whole."""
        is_value = self.role == "value"
        spec = spec_of(entry, self.mesh, label, self.faults, may_be_open=is_value)
        for below, leaf in jax.tree_util.tree_leaves_with_path(node):
            if spec is None:
                yield None
                continue
            if not leaf.shape and not to_scalars:
                yield PartitionSpec()
                continue
            what = f"{self._subject(path + keystr(below))} has shape {_shape_of(leaf)}."
            found = rank_faults(spec, leaf.shape, what)
            if not self.are_parts:
                found = found or shape_faults(spec, self.mesh, leaf.shape, what, uneven=self.uneven)
            self.faults.extend(found)
            yield None if found else spec

    def _subject(self, path: str) -> str:
        return f"argument {quoted(path)}" if self.role == "argument" else path

    def _children(
        self, prefix: Any, node: Any, path: str, label: str
    ) -> list[tuple[Any, Any, str]] | None:
        """Prefix, node and path step of each child, or None after a fault."""
        if not _has_children(prefix):
            what = f"{label} is {short_repr(prefix)}."
            fix = "write PartitionSpec('axis', ...) with one entry a dim, or AUTO."
            if isinstance(prefix, str):
                fix = f"write PartitionSpec({prefix!r})."
            self.faults.append(Fault(what, f"{KINDS} there.", fix))
            return None
        if not _has_children(node):
            found = f"is the array {_shape_of(node)}" if hasattr(node, "shape") else "has no parts"
            what = f"{label} is a {type(prefix).__name__}, but {self._subject(path)} {found}."
            why = "Specs are given for the whole of a tree or for its parts, as the tree has them."
            self.faults.append(Fault(what, why, f"give one spec in place of {label}."))
            return None
        parts, children = _one_level(prefix), _one_level(node)
        if not _alike(prefix, node):
            self._differ(
                f"{label} is a {type(prefix).__name__}, but {self._subject(path)} is a "
                f"{type(node).__name__}."
            )
            return None
        if isinstance(prefix, list | tuple):
            if len(parts) != len(children):
                count = count_of(len(parts), "entry", "entries")
                self._differ(f"{label} has {count}, but {self._subject(path)} has {len(children)}.")
                return None
            parts = dict(zip(children, parts.values(), strict=True))
        missing = [s for s, child in children.items() if s not in parts and jax.tree.leaves(child)]
        extra = [step for step in parts if step not in children]
        if missing:
            self._differ(f"{label} has nothing for {self._subject(path + missing[0])}.")
            return None
        if extra:
            self._differ(f"{label + extra[0]} is for nothing: there is no {path + extra[0]}.")
            return None
        return [(parts.get(step), child, step) for step, child in children.items()]

    def _differ(self, what: str) -> None:
        why = "The specs must be a prefix of the tree that they are for; this is where they differ."
        fix = "mirror the tree, with AUTO where the planner is to choose, or give one spec for all of it."
        self.faults.append(Fault(what, why, fix))


def _has_children(value: Any) -> bool:
    return not jax.tree_util.all_leaves([value])


def _one_level(value: Any) -> dict[str, Any]:
    """The children of a tree's root, None among them, by their path step in the root's order."""
    pairs = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda below: below is not value)[0]
    return {keystr(path): child for path, child in pairs}


def _alike(prefix: Any, node: Any) -> bool:
    """Whether a prefix of this type may describe a node of that type."""
    if isinstance(prefix, list | tuple) and isinstance(node, list | tuple):
        named = hasattr(prefix, "_fields") and hasattr(node, "_fields")
        return not named or type(prefix) is type(node)
    if isinstance(prefix, Mapping) and isinstance(node, Mapping):
        return True
    return type(prefix) is type(node)


def is_of(mesh: Mesh | AbstractMesh, ours: DeviceMesh) -> bool:
    """Whether a mesh of JAX's is ours: the same axes, and the same devices if it has any."""
    if tuple(mesh.shape.items()) != tuple(ours.shape.items()):
        return False
    return isinstance(mesh, AbstractMesh) or DeviceMesh.from_jax(mesh).same_places(ours)


def _shape_of(leaf: Any) -> str:
    return shape_text(leaf.shape, leaf.dtype)


def short_repr(value: Any) -> str:
    """A value for messages: what it is if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
