"""Which tensors are computed a second time, as `jax.checkpoint` has the backward pass do.

A recomputation differs from what it repeats in nothing but the barriers on its inputs. A compiler that
takes these away, as XLA's does for CPUs, finds both to be the same and runs one of them.
"""

from collections.abc import Mapping, Sequence

from pypto_spmd.collectives.flatten import equation_key
from pypto_spmd.collectives.graph import Atom, Block, Equation, Graph
from pypto_spmd.collectives.region import Region


def originals(graph: Graph) -> Mapping[int, int]:
    """For every tensor that repeats an earlier one of its block, that one.

    Args:
        graph: the traced function.
    """
    found: dict[int, int] = {}
    _add(graph.block, found, {})
    return found


Seen = dict[object, tuple[Atom, ...]]
"""What was computed first, by what it was computed from."""


def _add(block: Block, found: dict[int, int], seen: Seen) -> None:
    for equation in block.equations:
        inputs = tuple(found.get(a, a) if isinstance(a, int) else a for a in equation.inputs)
        if equation.region is not None:
            _add_region(equation, equation.region, inputs, found, seen)
            continue
        for body in equation.bodies:
            _add(body, found, {})
        if equation.name == "optimization_barrier":
            results = inputs
        else:
            key = None if equation.bodies else equation_key(equation.name, equation.params, inputs)
            if key is None:
                continue
            results = seen.setdefault(key, equation.outputs)
        _note(equation.outputs, results, found)


def _add_region(
    equation: Equation, region: Region, inputs: Sequence[Atom], found: dict[int, int], seen: Seen
) -> None:
    """A region runs once where it stands: its body repeats what the body of an earlier one did."""
    (body,) = equation.bodies
    for atom, tensor, given in zip(inputs, body.inputs, region.inputs, strict=True):
        if isinstance(atom, int):
            _note((tensor,), seen.setdefault(("enter", atom, given, region.axes), (tensor,)), found)
    _add(body, found, seen)
    for atom, tensor, given in zip(body.outputs, equation.outputs, region.outputs, strict=True):
        if isinstance(atom, int):
            key = ("leave", found.get(atom, atom), given, region.axes)
            _note((tensor,), seen.setdefault(key, (tensor,)), found)


def _note(tensors: Sequence[int], originals: Sequence[Atom], found: dict[int, int]) -> None:
    for tensor, original in zip(tensors, originals, strict=True):
        if isinstance(original, int) and original != tensor:
            found[tensor] = original
