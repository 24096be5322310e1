"""From what a person says about a model's parameters to one spec for each array of its state.

What is said is about parameters. Optimizer state follows them (`mirror`), scalars are whole, and so are
counters and random keys that nobody names. It is said as

- one spec, which is fitted: a leaf takes those of its entries for which it has a dim that they divide;
- rules, `[(pattern, spec), ...]`: the first whose regular expression is found in the leaf's path
  (`state/params/dense/kernel`, the argument's name first); one that matches no parameter may match
  leaves of the optimizer's state;
- a function of the path and the leaf's shape and dtype;
- a pytree of specs, or a prefix of one, of the argument or of the parameters inside it;
- a named layout (`pypto_spmd.training`), or AUTO.

All but the first are exact: what doesn't fit its leaf is a fault, not a wish.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from pypto_spmd.errors import Fault, raise_faults
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.sharding.leaves import Leaf, leaves_of
from pypto_spmd.sharding.mirror import Mirror, Specs
from pypto_spmd.sharding.parameter_forms import Follows, State, form_of
from pypto_spmd.sharding.spec import AUTO


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument, or a result, that is a model or train state.

    Args:
        name: its name, "" if it has none.
        value: its value, with arrays or their descriptions as leaves.
        given: the spec of each leaf that is known already, else None.
    """

    name: str
    value: Any
    given: tuple[Specs, ...] = ()


def parameter_specs(tree: Any, shardings: Any, mesh: DeviceMesh, *, name: str = "") -> Any:
    """How a model or train state lies, as a pytree of specs of its own structure.

    Args:
        tree: the state, with arrays or `jax.ShapeDtypeStruct`s as leaves.
        shardings: what `@spmd` takes as `parameter_shardings`.
        mesh: the mesh.
        name: the argument's name, with which paths start.

    Returns:
        A PartitionSpec for each array, AUTO where the planner is to choose.

    Raises:
        ShardingError: for what can't be, all faults at once.

    Example:
        >>> mesh = DeviceMesh.simulate((2, 4), ("data", "model"))
        >>> params = {"w": jax.ShapeDtypeStruct((8, 6), "float32")}
        >>> parameter_specs(params, [("w", PartitionSpec("model"))], mesh)
        {'w': P('model',)}
    """
    faults: list[Fault] = []
    (specs,) = resolve_parameters(shardings, [Argument(name, tree)], mesh, faults)
    raise_faults("parameter_specs", faults)
    found = [AUTO if spec is None else spec for spec in specs]
    return jax.tree.unflatten(jax.tree.structure(tree), found)


def resolve_parameters(
    shardings: Any,
    arguments: Sequence[Argument],
    mesh: DeviceMesh,
    faults: list[Fault],
    uneven: str = "",
) -> list[list[Specs]]:
    """One spec for each leaf of some arguments that are models or train states.

    Args:
        shardings: what is said about them.
        arguments: the arguments, all together: one may hold the optimizer's state of another.
        mesh: the mesh.
        faults: what is wrong is added to this list.
        uneven: what is done about dims that their axes do not divide, see `shape_faults`.

    Returns:
        For each argument the specs of its leaves, None where the planner chooses or where there is a
        fault.
    """
    leaves: list[Leaf] = []
    given: list[Specs] = []
    counts = []
    for argument in arguments:
        found = leaves_of(argument.value, argument.name)
        leaves += found
        given += argument.given or (None,) * len(found)
        counts.append(len(found))
    specs = _specs_of(shardings, leaves, given, mesh, faults, uneven)
    split, start = [], 0
    for count in counts:
        split.append(list(specs[start : start + count]))
        start += count
    return split


def _specs_of(
    shardings: Any,
    leaves: Sequence[Leaf],
    given: Sequence[Specs],
    mesh: DeviceMesh,
    faults: list[Fault],
    uneven: str,
) -> list[Specs]:
    if shardings is None or shardings is AUTO:
        return list(given)
    asked = [i for i, spec in enumerate(given) if spec is None]
    # An optimizer's state alone is laid out as parameters would be.
    alone = all(leaf.is_optimizer for leaf in leaves)
    parameters = [i for i in asked if alone or not leaves[i].is_optimizer]
    followers = [i for i in asked if not alone and leaves[i].is_optimizer]
    state = State(
        [leaves[i] for i in parameters],
        [leaves[i] for i in followers],
        [leaf for leaf, spec in zip(leaves, given, strict=True) if spec is not None],
    )
    own = form_of(shardings, mesh, faults, uneven).own(state, faults)
    specs = list(given)
    for i, spec in zip(parameters, own, strict=False):
        specs[i] = spec if leaves[i].shape else PartitionSpec()
    sources = [i for i, leaf in enumerate(leaves) if leaf.shape and not leaf.is_optimizer]
    mirror = Mirror([leaves[i] for i in sources], [specs[i] for i in sources])
    for i, spec in zip(followers, own[len(parameters) :], strict=True):
        if isinstance(spec, Follows):
            mirrored = mirror.spec(leaves[i], faults)
            spec = None if mirrored is None else spec.spec(leaves[i], mirrored, mesh)
        specs[i] = spec if leaves[i].shape else PartitionSpec()
    return specs
