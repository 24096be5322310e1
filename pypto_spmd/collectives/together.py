"""Partial sums over several axes are reduced together.

Axes are labelled one at a time. Where one axis scatters a partial sum as it is made and another as it is
read, each pays the same, but the first then nests outside the second, whatever nesting the readers
want. So what all readers want scattered anyway is scattered as it is made, in one collective.
"""

from collections import defaultdict
from dataclasses import replace

from pypto_spmd.collectives.graph import Block
from pypto_spmd.collectives.objective import Option
from pypto_spmd.collectives.request import AxisLabels, Labelling, Request
from pypto_spmd.sharding.layout import Label


def scattered_together(request: Request, labelling: Labelling) -> Labelling:
    """The labelling with partial sums scattered over all axes as they are made, at no further cost.

    Args:
        request: what was asked.
        labelling: its solution.
    """
    if len(labelling.axes) < 2:
        return labelling
    stored = {axis: list(labels.stored) for axis, labels in labelling.axes.items()}
    for block in request.graph.blocks():
        is_outermost = block is request.graph.block
        _scatter_in(block, is_outermost, labelling, stored)
    return Labelling({a: replace(v, stored=stored[a]) for a, v in labelling.axes.items()})


def _scatter_in(
    block: Block, is_outermost: bool, labelling: Labelling, stored: dict[str, list[Option]]
) -> None:
    wanted = {axis: _wanted(block, is_outermost, v) for axis, v in labelling.axes.items()}
    for equation in block.equations:
        if equation.rule is None:
            continue
        for position, tensor in enumerate(equation.outputs):
            made = {
                a: v.choices[equation.index].results[position] for a, v in labelling.axes.items()
            }
            partial = [axis for axis, label in made.items() if label.kind == "P"]
            if not any([m.kind for m in stored[axis][tensor]] == ["S"] for axis in partial):
                continue
            for axis in partial:
                readers = wanted[axis][tensor]
                waits = stored[axis][tensor] == (made[axis],)
                if waits and len(readers) == 1 and all(label.kind == "S" for label in readers):
                    stored[axis][tensor] = tuple(readers)


def _wanted(block: Block, is_outermost: bool, labels: AxisLabels) -> dict[int, set[Label]]:
    """The labels in which each tensor is read in a block; loops and their results read it as it is stored."""
    found: dict[int, set[Label]] = defaultdict(set)
    for equation in block.equations:
        for position, atom in enumerate(equation.inputs):
            if not isinstance(atom, int):
                continue
            if equation.rule is None:
                found[atom] |= set(labels.stored[atom])
            else:
                found[atom].add(labels.choices[equation.index].operands[position])
    for position, atom in enumerate(block.outputs):
        if isinstance(atom, int):
            found[atom] |= {labels.outputs[position]} if is_outermost else set(labels.stored[atom])
    return found
