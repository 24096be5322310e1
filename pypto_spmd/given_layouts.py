"""What a person says about layouts: one spec for each array of a call, and of its result.

`in_shardings` is for arguments, `parameter_shardings` for those among them that are models or train
states, and for such states that a function makes. With `parameter_shardings`, `in_shardings` may leave
these arguments out: fewer entries than arguments are for the others, in order, and the last of those may
be left out too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pypto_spmd.arguments import IMPLICIT_STATIC, Arguments
from pypto_spmd.errors import Fault, listed, quoted
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.sharding.leaves import Leaf
from pypto_spmd.sharding.parameter_forms import ParameterLayout
from pypto_spmd.sharding.parameters import Argument, resolve_parameters
from pypto_spmd.sharding.resolve import is_spec, resolve
from pypto_spmd.sharding.spec import AUTO, ShardingSpec
from pypto_spmd.state import is_parameter

Specs = list[PartitionSpec | None]


@dataclass(frozen=True, slots=True)
class GivenLayouts:
    """The options of `spmd` that say where arrays lie; see there."""

    in_shardings: Any
    out_shardings: Any
    parameter_shardings: Any
    parameter_argnames: frozenset[str]
    uneven: str = "error"

    def mesh(self) -> DeviceMesh | Mesh | None:
        """The mesh of the first spec that has one."""
        return mesh_of((self.in_shardings, self.out_shardings, self.parameter_shardings))

    def of_arguments(
        self,
        arguments: Arguments,
        described: Sequence[Any],
        parameters: Sequence[str],
        mesh: DeviceMesh,
        faults: list[Fault],
    ) -> Specs:
        """A spec for each array of a call, None where the planner chooses.

        Args:
            arguments: the call.
            described: its values, arrays described.
            parameters: the names of the function's parameters, in order.
            mesh: the mesh.
            faults: what is wrong is added to this list.

        Returns:
            The specs, in the order of the program's arguments.
        """
        order = arguments.order
        names = [arguments.names[i] for i in order]
        in_order = tuple(described[i] for i in order)
        prefix = self._in_prefix(arguments, names, in_order, parameters, faults)
        found = resolve(
            prefix, in_order, mesh, role="argument", names=names, uneven=self.uneven, faults=faults
        )
        flat = iter(found)
        given = {
            name: tuple(next(flat) for _ in jax.tree.leaves(value))
            for name, value in zip(names, in_order, strict=True)
        }
        if self.parameter_shardings is not None:
            states = [
                Argument(name, value, given[name])
                for name, value in zip(names, in_order, strict=True)
                if self._is_parameter(name, value)
            ]
            resolved = resolve_parameters(
                self.parameter_shardings, states, mesh, faults, self.uneven
            )
            given |= {
                state.name: tuple(specs) for state, specs in zip(states, resolved, strict=True)
            }
        return [spec for name in arguments.names for spec in given[name]]

    def of_result(self, result: Any, mesh: DeviceMesh, faults: list[Fault]) -> Specs:
        """The spec of each array of a result that `out_shardings` gives, else None.

        Args:
            result: the result, arrays described.
            mesh: the mesh.
            faults: what is wrong is added to this list.
        """
        return resolve(
            self.out_shardings, result, mesh, role="result", uneven=self.uneven, faults=faults
        )

    def of_new_states(
        self,
        names: Sequence[str],
        described: Sequence[Any],
        in_specs: Specs,
        result: Any,
        out_specs: Specs,
        next_of: Mapping[int, int],
        mesh: DeviceMesh,
        faults: list[Fault],
    ) -> Specs:
        """The specs of a result, with those of models and train states that the function makes.

        Args:
            names: the arguments' names.
            described: the arguments, arrays described.
            in_specs: the spec of each of their arrays.
            result: the result, likewise.
            out_specs: the spec of each of its arrays as far as it is known.
            next_of: the arrays that are the next value of an argument's; they and those with a spec belong to
                no new state.
            mesh: the mesh.
            faults: what is wrong is added to this list.
        """
        if self.parameter_shardings is None:
            return out_specs
        of_argument = iter(in_specs)
        known = []
        for name, value in zip(names, described, strict=True):
            specs = tuple(next(of_argument) for _ in jax.tree.leaves(value))
            if self._is_parameter(name, value):
                known.append(Argument(name, value, specs))
        found: list[tuple[Argument, int]] = []
        start = 0
        for name, part in _parts(result):
            count = len(jax.tree.leaves(part))
            places = range(start, start + count)
            is_free = all(out_specs[i] is None and i not in next_of for i in places)
            if count and is_free and _is_new_state(part, typed_only=bool(known)):
                found.append((Argument(name, part), start))
            start += count
        if not found:
            return out_specs
        states = [*known, *(argument for argument, _ in found)]
        resolved = resolve_parameters(self.parameter_shardings, states, mesh, faults, self.uneven)
        specs = list(out_specs)
        for (_, start), of_part in zip(found, resolved[len(known) :], strict=True):
            specs[start : start + len(of_part)] = of_part
        return specs

    def _is_parameter(self, name: str, value: Any) -> bool:
        return name in self.parameter_argnames or is_parameter(name, value)

    def _in_prefix(
        self,
        arguments: Arguments,
        names: Sequence[str],
        values: Sequence[Any],
        parameters: Sequence[str],
        faults: list[Fault],
    ) -> Any:
        """in_shardings as the specs of the given arguments, in the order of the signature."""
        prefix = self.in_shardings
        static = {static.name for _, static in arguments.statics}
        if isinstance(prefix, Mapping):
            return self._prefix_by_name(prefix, names, values, parameters, static, faults)
        if self.parameter_shardings is not None:
            others = [n for n, v in zip(names, values, strict=True) if not self._is_parameter(n, v)]
            entries = prefix if _is_list(prefix) else [] if prefix is None else None
            if entries is None and is_spec(prefix):
                entries = [prefix] * len(others)
            if entries is not None and len(entries) <= len(others) and len(entries) < len(names):
                by_name = dict(zip(others, entries, strict=False))
                return [self._entry(by_name, n, v) for n, v in zip(names, values, strict=True)]
        if not _is_list(prefix) or not arguments.omitted:
            return prefix
        every = [n for n in parameters if n in names or n in arguments.omitted]
        if len(prefix) != len(every) or len(every) != len(names) + len(arguments.omitted):
            return prefix
        return [part for name, part in zip(every, prefix, strict=True) if name in names]

    def _entry(self, by_name: Mapping[str, Any], name: str, value: Any) -> Any:
        """What is said about an argument; a named layout splits batches about which nothing is said."""
        layout = self.parameter_shardings
        says_nothing = name not in by_name and not self._is_parameter(name, value)
        if not says_nothing or not isinstance(layout, ParameterLayout):
            return by_name.get(name, AUTO)
        of_leaf = lambda leaf: PartitionSpec() if _is_whole(leaf) else layout.batch  # noqa: E731
        return jax.tree.map(of_leaf, value)

    def _prefix_by_name(
        self,
        prefix: Mapping[str, Any],
        names: Sequence[str],
        values: Sequence[Any],
        known: Sequence[str],
        static: set[str],
        faults: list[Fault],
    ) -> Any:
        """A dict of specs by argument; or, of a single argument that is a dict, for its entries."""
        parameters = {*known, *names}
        if len(values) == 1 and isinstance(values[0], Mapping) and set(prefix) <= set(values[0]):
            return [prefix]
        if len(values) == 1 and not set(prefix) & parameters:
            return [prefix]
        for name in prefix:
            if name not in parameters or name in static or name in IMPLICIT_STATIC:
                kind = "a static argument" if name in static else "no argument"
                given = listed([quoted(n) for n in names]) or "none"
                what, why = (
                    f"in_shardings has {name!r}, which is {kind}.",
                    f"The arguments are: {given}.",
                )
                faults.append(Fault(what, why, "name arguments of the function, or give a list."))
        return [self._entry(prefix, n, v) for n, v in zip(names, values, strict=True)]


def mesh_of(shardings: Any) -> DeviceMesh | Mesh | None:
    """The mesh of the first spec in a pytree of specs that has one."""
    for leaf in jax.tree.leaves(shardings, is_leaf=lambda x: isinstance(x, PartitionSpec)):
        mesh = leaf.mesh if isinstance(leaf, ShardingSpec | NamedSharding) else None
        if isinstance(mesh, DeviceMesh | Mesh):
            return mesh
    return None


def _is_list(prefix: Any) -> TypeGuard[Sequence[Any]]:
    """Whether in_shardings has one entry an argument."""
    return (
        isinstance(prefix, list | tuple)
        and not hasattr(prefix, "_fields")
        and not isinstance(prefix, PartitionSpec)
    )


def _is_whole(leaf: Any) -> bool:
    """Whether no batch is its first dim: a scalar, or a random key."""
    return not leaf.shape or Leaf((), "", 0, tuple(leaf.shape), leaf.dtype, False).is_random_key


def _parts(result: Any) -> list[tuple[str, Any]]:
    """The results in which a state may come: the elements of a returned tuple, or all of it."""
    if type(result) is tuple:
        return [(f"result[{i}]", part) for i, part in enumerate(result)]
    return [("result", result)]


def _is_new_state(part: Any, typed_only: bool) -> bool:
    """Whether a result is a state by its type; or any tree, of a function to which no state is passed."""
    if is_parameter("", part) or (isinstance(part, Mapping) and "params" in part):
        return True
    return not typed_only and not jax.tree_util.all_leaves([part])
