"""Equations whose results nobody reads are dropped, in loops too, as XLA would drop them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pypto_spmd.collectives.effects import has_effects
from pypto_spmd.collectives.graph import Block, Equation, Graph
from pypto_spmd.collectives.region import Region


def pruned(graph: Graph) -> Graph:
    """The graph without equations whose results nobody reads."""
    block, _ = prune(graph.block, None)
    return replace(graph, block=block)


def prune(block: Block, live_outputs: Sequence[bool] | None) -> tuple[Block, set[int]]:
    """The block without equations whose results nobody reads, and the tensors that it reads."""
    live: set[int] = set()
    for position, atom in enumerate(block.outputs):
        if isinstance(atom, int) and (live_outputs is None or live_outputs[position]):
            live.add(atom)
    kept = []
    for equation in reversed(block.equations):
        if not any(o in live for o in equation.outputs) and not _has_effects(equation):
            continue
        if equation.bodies:
            equation = _prune_loop(equation, live)
        kept.append(equation)
        live.update(a for a in equation.inputs if isinstance(a, int))
    return replace(block, equations=tuple(reversed(kept))), live


def _has_effects(equation: Equation) -> bool:
    if equation.bodies:
        return any(_has_effects(e) for b in equation.bodies for e in b.equations)
    return has_effects(equation.name)


def _prune_loop(equation: Equation, live: set[int]) -> Equation:
    if equation.name == "scan":
        return _prune_scan(equation, live)
    if equation.region is not None:
        return _prune_region(equation, equation.region, live)
    # A while's carries feed its predicate and each other, and a cond's outputs are few: kept whole.
    return replace(equation, bodies=tuple(prune(b, None)[0] for b in equation.bodies))


def _prune_region(equation: Equation, region: Region, live: set[int]) -> Equation:
    (body,) = equation.bodies
    wanted = [o in live for o in equation.outputs]
    pruned, used = prune(body, wanted)
    keep = [tensor in used for tensor in body.inputs]
    pruned = replace(
        pruned, inputs=_select(body.inputs, keep), outputs=_select(pruned.outputs, wanted)
    )
    return replace(
        equation,
        inputs=_select(equation.inputs, keep),
        outputs=_select(equation.outputs, wanted),
        bodies=(pruned,),
        region=replace(
            region, inputs=_select(region.inputs, keep), outputs=_select(region.outputs, wanted)
        ),
    )


def _prune_scan(equation: Equation, live: set[int]) -> Equation:
    consts, carry, xs = equation.counts
    (body,) = equation.bodies
    wanted = [o in live for o in equation.outputs]
    while True:
        pruned, used = prune(body, wanted)
        more = [wanted[i] or body.inputs[consts + i] in used for i in range(carry)]
        if more == wanted[:carry]:
            break
        wanted[:carry] = more
    keep = [body.inputs[i] in used for i in range(consts)] + wanted[:carry]
    keep += [body.inputs[i] in used for i in range(consts + carry, consts + carry + xs)]
    pruned = replace(
        pruned, inputs=_select(body.inputs, keep), outputs=_select(pruned.outputs, wanted)
    )
    counts = (sum(keep[:consts]), sum(wanted[:carry]), sum(keep[consts + carry :]))
    return replace(
        equation,
        inputs=_select(equation.inputs, keep),
        outputs=_select(equation.outputs, wanted),
        bodies=(pruned,),
        counts=counts,
    )


def _select(values: Sequence[Any], mask: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(v for v, m in zip(values, mask, strict=True) if m)
