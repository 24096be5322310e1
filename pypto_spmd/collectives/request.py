"""What inference is asked, and what one mesh axis answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pypto_spmd.collectives.graph import Graph
from pypto_spmd.collectives.objective import Objective, Option
from pypto_spmd.collectives.rules import Choice
from pypto_spmd.sharding.layout import Label, Layout


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What inference is asked.

    Args:
        graph: the traced function.
        axis_sizes: size of each mesh axis.
        axis_order: the axes, slowest link first.
        inputs: given layout of each argument, None if it is free.
        outputs: given layout of each result, None if it is free.
        is_state: for each argument whether it is parameters or train state.
        objective: the weights.
    """

    graph: Graph
    axis_sizes: Mapping[str, int]
    axis_order: tuple[str, ...]
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    is_state: tuple[bool, ...]
    objective: Objective


@dataclass(slots=True, eq=False)
class AxisLabels:
    """What one axis does everywhere.

    Args:
        choices: the labelling of each equation, by equation index.
        stored: the labels in which each tensor is stored, by tensor.
        inputs: the label of each argument as it comes in.
        outputs: the label of each result as it goes out.
        cost: cost under the objective.
        lower_bound: no labelling of the axis costs less (given the other axes).
    """

    choices: dict[int, Choice] = field(default_factory=dict)
    stored: list[Option] = field(default_factory=list)
    inputs: tuple[Label, ...] = ()
    outputs: tuple[Label, ...] = ()
    cost: float = 0.0
    lower_bound: float = 0.0

    def same_as(self, other: "AxisLabels") -> bool:
        """Whether both say the same of every equation and tensor."""
        return self.choices == other.choices and self.stored == other.stored


@dataclass(frozen=True, slots=True, eq=False)
class Labelling:
    """The labels of every axis of more than one device, in mesh order."""

    axes: Mapping[str, AxisLabels]

    @property
    def gap(self) -> float:
        """By how much (relatively) the cost may exceed the least one, axis by axis; 0 when exact."""
        gaps = [(a.cost - a.lower_bound) / a.cost for a in self.axes.values() if a.cost > 0]
        return max(gaps, default=0.0)
