"""What is run: the graph with a layout for every operand and every collective in its place.

A schedule is a list of items. `Convert` makes a tensor available in one more layout, `Run` applies a
primitive on shards, `RunLoop` runs a loop whose bodies have schedules of their own. Nothing else moves
data, so the collectives of a program are those of its items, numbered as the steps of its plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pypto_spmd.collectives.graph import Equation, Graph
from pypto_spmd.collectives.plan import CommPlan
from pypto_spmd.collectives.sub_axes import Parts
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.sharding.layout import Layout
from pypto_spmd.sharding.redistribute import Leg


@dataclass(frozen=True, slots=True, eq=False)
class Convert:
    """Makes `tensor` available in the layout that `leg` leads to (it is available in `leg.source`).

    Args:
        tensor: number of the tensor.
        leg: one collective, slice or mask.
        step: index of the plan's step, -1 if the leg is local.
    """

    tensor: int
    leg: Leg
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Applies one equation's primitive on shards.

    Args:
        equation: the equation.
        operands: the layout in which each input is read. Tensors are available in it by then; constants
            are whole and are sliced or masked to it on the spot.
        results: the layout in which each output is made.
        splits: factor index -> mesh axes that split it, outermost first.
        steps: (factor index, exchange index) -> index of the plan's step.
        by_hand: index of the plan's step of a collective that a person wrote, -1 if it is none.
    """

    equation: Equation
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    splits: Mapping[int, tuple[str, ...]]
    steps: Mapping[tuple[int, int], int]
    by_hand: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class BlockSchedule:
    """The schedule of a block.

    Args:
        inputs: the layout in which each block input is bound.
        items: in order of execution.
        outputs: the layout in which each block output is given back; tensors are available in it at the
            end, constants are sliced or masked to it.
    """

    inputs: tuple[Layout, ...]
    items: "tuple[Convert | Run | RunLoop, ...]"
    outputs: tuple[Layout, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RunLoop:
    """Runs a `scan`, `while` or `cond`, or a region (`shard_map`).

    For `scan` and `while`, operand i is read in `operands[i]` and bound in the body in the body's input
    layout, which is the same one, but that the xs and ys of a scan lack their leading dim inside. Where the
    leading dim of an xs is split over some axes, each device holds only its block of slices: inside, the
    slice of one trip is partial ("sum") over these axes, being zero on the devices that do not hold it.

    Of a region the layouts inside lack its axes: what is split over them outside is local inside.

    Args:
        equation: the loop or region.
        operands: the layout in which each input is read.
        results: the layout in which each output is made: the carry's, the branch outputs', or the ys' with
            a whole leading dim.
        bodies: schedules of the equation's bodies.
    """

    equation: Equation
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    bodies: tuple[BlockSchedule, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A planned function.

    Args:
        graph: the traced function.
        plan: its communication.
        schedule: its body; `schedule.inputs` and `schedule.outputs` are the layouts of the arguments and
            results on `mesh`, none of them partial.
        inputs: layout of each argument on the mesh that was given.
        outputs: layout of each result on the mesh that was given.
        mesh: the mesh on which the schedule runs: the given one, some of its axes perhaps cut (`parts`).
        parts: the axes that are cut -> the sizes of their sub-axes.
    """

    graph: Graph
    plan: CommPlan
    schedule: BlockSchedule
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    mesh: DeviceMesh
    parts: Parts

    @property
    def axis_sizes(self) -> Mapping[str, int]:
        """Size of each mesh axis of the schedule, in mesh order."""
        return self.mesh.shape
