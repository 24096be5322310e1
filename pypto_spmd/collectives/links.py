"""How the tensors inside the bodies of a loop or region correspond to those outside.

A link says that a tensor is bound to another: an operand to a body input, a body output to the next
trip's carry, and so on. Inference and lowering both read loops and regions through their links.
"""

from dataclasses import dataclass

from pypto_spmd.collectives.graph import Atom, Block, Equation
from pypto_spmd.collectives.region import Region
from pypto_spmd.sharding.layout import Label, Layout


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One tensor bound to another.

    Args:
        kind: "const", "init", "carry", "result", "xs", "ys", "operand", "branch", "same", and of a region
            "enter" and "leave".
        source: what is bound.
        target: the tensor it is bound to.
        weight: how often that happens in one call.
        source_shift: dims by which the source's rank exceeds the target's: 1 for xs, -1 for ys.
        inside: whether the source is read inside a body (its conversions then run there).
        given: how the value outside lies on the axes of a region.
        axes: the axes of the region; the value inside is a local one there.
    """

    kind: str
    source: Atom
    target: int
    weight: float
    source_shift: int = 0
    inside: bool = False

    @property
    def tensor(self) -> int:
        """The source of a link that binds no constant."""
        assert isinstance(self.source, int)
        return self.source

    given: Layout | None = None
    axes: tuple[str, ...] = ()

    def given_label(self, axis: str) -> Label | None:
        """How the value outside a region lies on an axis; None if that is not given."""
        return self.given.label(axis) if self.given is not None and axis in self.axes else None


def links_of(equation: Equation, weight: float) -> tuple[Link, ...]:
    """All links of a loop or region that stands in a block of `weight`.

    "same" links bind a tensor to another in the very same layout: the branches' inputs among each other,
    and a while's carry as its predicate reads it.
    """
    if equation.name == "scan":
        return tuple(_scan(equation, weight))
    if equation.name == "while":
        return tuple(_while(equation, weight))
    if equation.region is not None:
        return tuple(_region(equation, equation.region, weight))
    return tuple(_cond(equation, weight))


def _scan(equation: Equation, weight: float):
    consts, carry, xs = equation.counts
    (body,) = equation.bodies
    for i in range(consts):
        yield Link("const", equation.inputs[i], body.inputs[i], weight)
    for i in range(consts, consts + carry):
        yield Link("init", equation.inputs[i], body.inputs[i], weight)
        yield Link("carry", body.outputs[i - consts], body.inputs[i], body.weight, inside=True)
        yield Link("result", body.inputs[i], equation.outputs[i - consts], weight)
    for i in range(consts + carry, consts + carry + xs):
        yield Link("xs", equation.inputs[i], body.inputs[i], weight, source_shift=1)
    for i in range(carry, len(body.outputs)):
        yield Link("ys", body.outputs[i], equation.outputs[i], body.weight, -1, inside=True)


def _while(equation: Equation, weight: float):
    cond_consts, body_consts, carry = equation.counts
    cond, body = equation.bodies
    first = cond_consts + body_consts
    for i in range(cond_consts):
        yield Link("const", equation.inputs[i], cond.inputs[i], weight)
    for i in range(body_consts):
        yield Link("const", equation.inputs[cond_consts + i], body.inputs[i], weight)
    for i in range(carry):
        inner = body.inputs[body_consts + i]
        yield Link("init", equation.inputs[first + i], inner, weight)
        yield Link("carry", body.outputs[i], inner, body.weight, inside=True)
        yield Link("same", inner, cond.inputs[cond_consts + i], body.weight)
        yield Link("result", inner, equation.outputs[i], weight)


def _cond(equation: Equation, weight: float):
    for i, source in enumerate(equation.inputs[1:]):
        first = equation.bodies[0].inputs[i]
        yield Link("operand", source, first, weight)
        for branch in equation.bodies[1:]:
            yield Link("same", first, branch.inputs[i], weight)
    for branch in equation.bodies:
        for i, output in enumerate(equation.outputs):
            yield Link("branch", branch.outputs[i], output, branch.weight, inside=True)


def _region(equation: Equation, region: Region, weight: float):
    (body,) = equation.bodies
    for source, target, given in zip(equation.inputs, body.inputs, region.inputs, strict=True):
        yield Link("enter", source, target, weight, given=given, axes=region.axes)
    for source, target, given in zip(body.outputs, equation.outputs, region.outputs, strict=True):
        yield Link("leave", source, target, weight, inside=True, given=given, axes=region.axes)


def predicates(equation: Equation) -> tuple[tuple[Atom, Block | None], ...]:
    """Scalars that every device must know whole: a while's predicate (in its block), a cond's index."""
    if equation.name == "while":
        cond = equation.bodies[0]
        return ((cond.outputs[0], cond),)
    if equation.name == "cond":
        return ((equation.inputs[0], None),)
    return ()
