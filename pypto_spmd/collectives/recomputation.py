"""Which tensors are computed a second time, as `jax.checkpoint` has the backward pass do.

A recomputation differs from what it repeats in nothing but the barriers on its inputs. A compiler that
takes these away, as XLA's does for CPUs, finds both to be the same and runs one of them.
"""

from collections.abc import Mapping

from pypto_spmd.collectives.graph import Block, Graph, equation_key


def originals(graph: Graph) -> Mapping[int, int]:
    """For every tensor that repeats an earlier one of its block, that one.

    Args:
        graph: the traced function.
    """
    found: dict[int, int] = {}
    for block in graph.blocks():
        _add(block, found)
    return found


def _add(block: Block, found: dict[int, int]) -> None:
    seen: dict[object, tuple[int, ...]] = {}
    for equation in block.equations:
        inputs = tuple(found.get(a, a) if isinstance(a, int) else a for a in equation.inputs)
        if equation.name == "optimization_barrier":
            results = inputs
        else:
            key = None if equation.bodies else equation_key(equation.name, equation.params, inputs)
            if key is None:
                continue
            results = seen.setdefault(key, equation.outputs)
        for tensor, original in zip(equation.outputs, results, strict=True):
            if isinstance(original, int) and original != tensor:
                found[tensor] = original
