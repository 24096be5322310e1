"""Optimizer state lies as the parameters that it mirrors.

Optimizers keep trees that are shaped as the parameters' tree: moments, momentum, averages, accumulated
gradients, inside of whatever wraps them (masks, groups, schedules, accumulation). So a leaf whose path
ends with a parameter's path belongs to that parameter, and takes its spec if it has its shape. What
has another shape takes as much of the spec as it has dims of the parameter, and is whole otherwise.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from pypto_spmd.errors import Fault, shape_text
from pypto_spmd.sharding.leaves import Leaf

MIRRORS = frozenset(
    {"mu", "nu", "nu_max", "trace", "ema", "acc_grads", "sum_of_squares", "momentum", "velocity"}
)
"""Fields of optimizer states that hold an array of the parameter's own shape, or a scalar, for each."""

Specs = PartitionSpec | None


class Mirror:
    """Finds the parameter of each leaf of an optimizer's state.

    Args:
        parameters: the parameters.
        specs: how each lies, None where the planner chooses.
    """

    def __init__(self, parameters: Sequence[Leaf], specs: Sequence[Specs]) -> None:
        self._by_path: dict[tuple[str, ...], list[tuple[Leaf, Specs]]] = defaultdict(list)
        for leaf, spec in zip(parameters, specs, strict=True):
            self._by_path[leaf.path[leaf.root :]].append((leaf, spec))
        self._last_steps = {path[-1] for path in self._by_path if path}

    def spec(self, leaf: Leaf, faults: list[Fault]) -> Specs:
        """How a leaf of an optimizer's state lies.

        Args:
            leaf: the leaf.
            faults: gets one if the leaf should mirror a parameter and does not.
        """
        found = self._parameter(leaf)
        if found is None:
            faults.extend(self._without_parameter(leaf))
            return PartitionSpec()
        parameter, spec = found
        depth = len(parameter.path) - parameter.root
        field = leaf.path[-depth - 1] if len(leaf.path) > depth else ""
        if field in MIRRORS and leaf.shape not in ((), parameter.shape):
            faults.append(_differs(leaf, parameter))
            return None
        if spec is None:
            return None
        return spec_of_part(leaf, parameter, spec)

    def _parameter(self, leaf: Leaf) -> tuple[Leaf, Specs] | None:
        """The parameter whose path is the longest that the leaf's path ends with."""
        for start in range(len(leaf.path) + 1):
            candidates = self._by_path.get(leaf.path[start:], ())
            if start == len(leaf.path):  # parameters that are arguments of their own
                candidates = [pair for pair in candidates if pair[0].shape == leaf.shape]
            if candidates:
                return max(candidates, key=lambda pair: _likeness(leaf, pair[0]))
        return None

    def _without_parameter(self, leaf: Leaf) -> list[Fault]:
        if not leaf.shape or not leaf.path or leaf.path[-1] not in self._last_steps:
            return []
        above = leaf.path[:-1]
        is_part = any(above[start:] in self._by_path for start in range(len(above)))
        if is_part or not MIRRORS & set(above):
            return []
        what = f"{leaf.text} is {shape_text(leaf.shape, leaf.dtype)} and mirrors no parameter."
        why = "An optimizer's state mirrors the parameters: its paths end with theirs."
        fix = "make the state with the optimizer's init, of the parameters that are passed here."
        return [Fault(what, why, fix)]


def _likeness(leaf: Leaf, parameter: Leaf) -> tuple[bool, int, int]:
    """Of parameters with one path below their roots: same shape, and the rest of the path alike."""
    after = before = 0
    pairs = list(zip(reversed(leaf.path), reversed(parameter.path), strict=False))
    while after < len(pairs) and pairs[after][0] == pairs[after][1]:
        after += 1
    pairs = list(zip(leaf.path, parameter.path, strict=False))
    while before < len(pairs) and pairs[before][0] == pairs[before][1]:
        before += 1
    return parameter.shape == leaf.shape, after, before


def _differs(leaf: Leaf, parameter: Leaf) -> Fault:
    mine, wanted = (shape_text(x.shape, x.dtype) for x in (leaf, parameter))
    what = (
        f"{leaf.text} is {mine}, but the parameter that it mirrors, {parameter.text}, is {wanted}."
    )
    why = "An optimizer's state mirrors the parameters: it has their shapes."
    return Fault(what, why, "make the state with the optimizer's init, of these parameters.")


def spec_of_part(leaf: Leaf, parameter: Leaf, spec: PartitionSpec) -> PartitionSpec:
    """The spec of what an optimizer keeps for a parameter, whatever shape that has.

    Args:
        leaf: what it keeps.
        parameter: the parameter.
        spec: how the parameter lies.
    """
    if leaf.shape == parameter.shape:
        return spec
    rank = len(parameter.shape)
    entries = [*spec.partitions, *[None] * (rank - len(spec.partitions))]
    if rank and leaf.shape[-rank:] == parameter.shape:  # several of them, stacked
        return _trimmed([None] * (len(leaf.shape) - rank) + entries)
    kept = _kept_dims(leaf, parameter)
    return PartitionSpec() if kept is None else _trimmed([entries[dim] for dim in kept])


def _kept_dims(leaf: Leaf, parameter: Leaf) -> list[int] | None:
    """Which of the parameter's dims a factor of it has; None if it is no such factor."""
    if leaf.size <= 1 or len(leaf.shape) >= len(parameter.shape):
        return None
    dims = range(len(parameter.shape))
    by_size = sorted(dims, key=lambda dim: parameter.shape[dim])
    # Adafactor's rows lack the largest dim, its columns the second largest; of equal dims the last is
    # the largest (Shazeer and Stern 2018, as optax's scale_by_factored_rms has it).
    for field, gone in (("v_row", by_size[-1]), ("v_col", by_size[-2] if len(dims) > 1 else -1)):
        kept = [dim for dim in dims if dim != gone]
        if field in leaf.path and leaf.shape == tuple(parameter.shape[dim] for dim in kept):
            return kept
    kept, start = [], 0
    for size in leaf.shape:
        place = next((dim for dim in dims[start:] if parameter.shape[dim] == size), None)
        if place is None:
            return None
        kept.append(place)
        start = place + 1
    return kept


def _trimmed(entries: Sequence[Any]) -> PartitionSpec:
    end = len(entries)
    while end and entries[end - 1] is None:
        end -= 1
    return PartitionSpec(*entries[:end])
