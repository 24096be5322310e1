"""Why each collective is there, in words, and what it moves.

A reason names the fact that made the data end up where it is not wanted: the equation whose split
contraction left a partial sum, or the split dim that an equation needs whole.
"""

from dataclasses import dataclass, field

from pypto_spmd.collectives.assemble import Layouts
from pypto_spmd.collectives.drafts import DraftConvert
from pypto_spmd.collectives.graph import Equation, Graph
from pypto_spmd.collectives.links import links_of
from pypto_spmd.collectives.sub_axes import Parts, join

_RENAMED = frozenset(
    {
        "convert_element_type",
        "copy",
        "transpose",
        "reshape",
        "optimization_barrier",
        "sharding_constraint",
        "squeeze",
        "expand_dims",
    }
)
"""Primitives through which a tensor is still called by the name of its argument."""


@dataclass(slots=True)
class Narrator:
    """Finds names and reasons in one program."""

    layouts: Layouts
    parts: Parts = field(default_factory=dict)
    producers: dict[int, Equation] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    slices: set[int] = field(default_factory=set)
    bound: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.layouts.request.graph
        for equation, _ in graph.equations():
            for tensor in equation.outputs:
                self.producers[tensor] = equation
        self.names |= graph.names
        for equation, _ in graph.equations():
            for link in links_of(equation, 1.0) if equation.bodies else ():
                if link.kind == "xs":
                    self.slices.add(link.target)
                elif isinstance(link.source, int):
                    self.bound.setdefault(link.target, []).append(link.source)
                # Inside a loop an operand keeps its name; of a stack it is one slice.
                if isinstance(link.source, int) and link.source in self.names:
                    slice_of = "[i]" if link.kind == "xs" else ""
                    self.names.setdefault(link.target, self.names[link.source] + slice_of)

    @property
    def graph(self) -> Graph:
        """The program's graph."""
        return self.layouts.request.graph

    def tensor(self, tensor: int) -> str:
        """What a tensor is called: an argument's path, or what made it and its shape."""
        name = self._argument(tensor)
        aval = self.graph.avals[tensor]
        shape = f"{_short(aval.dtype)}[{','.join(map(str, aval.shape))}]"
        if name:
            return f"{name} {shape}"
        producer = self.producers.get(tensor)
        if producer is None:
            return shape
        layer = _layer(producer.scope)
        kind = "gradient in " if producer.is_backward and layer else ""
        return f"{producer.name} {shape}" + (f" ({kind}{layer})" if layer else "")

    def _argument(self, tensor: int) -> str:
        seen = 0
        while tensor not in self.names and seen < 8:
            producer = self.producers.get(tensor)
            if producer is None or producer.name not in _RENAMED:
                return ""
            source = producer.inputs[0]
            if not isinstance(source, int):
                return ""
            tensor, seen = source, seen + 1
        return self.names.get(tensor, "")

    def op(self, draft: DraftConvert) -> str:
        """The primitive that a conversion is about."""
        if draft.leg.kind in ("all_reduce", "reduce_scatter"):
            origin = self._origin(draft.tensor, draft.leg.axes[0])
            if origin is not None:
                return origin[0].name
        if draft.reader is not None:
            return draft.reader.name
        producer = self.producers.get(draft.tensor)
        return producer.name if producer is not None else "output"

    def source(self, draft: DraftConvert) -> str:
        """The user's line that a conversion is about."""
        candidates = []
        if draft.leg.kind in ("all_reduce", "reduce_scatter"):
            origin = self._origin(draft.tensor, draft.leg.axes[0])
            candidates.append(origin[0] if origin else None)
        candidates += [draft.reader, self.producers.get(draft.tensor)]
        for equation in candidates:
            if equation is not None and str(equation.source):
                return str(equation.source)
        return ""

    def reason(self, draft: DraftConvert) -> str:
        """Why a conversion is needed."""
        leg = draft.leg
        axes = " and ".join(repr(a) for a in join(leg.axes, self.parts))
        if draft.reader is None:
            reader = "the result is asked for with"
        elif draft.reader.constraint is not None:
            reader = "the constraint asks for"
        else:
            reader = f"{draft.reader.name} needs"
        split = list(dict.fromkeys(leg.dims))
        dims = " and ".join(str(d) for d in split)
        if leg.kind in ("all_reduce", "reduce_scatter"):
            why = self._partial_reason(draft.tensor, leg.axes, leg.op)
            if leg.kind == "reduce_scatter":
                return f"{why}; each keeps its block of dim {dims}"
            return why
        if leg.kind == "all_gather":
            whole = (
                f"dim {dims} whole, which is"
                if len(split) == 1
                else f"dims {dims} whole, which are"
            )
            return f"{reader} {whole} split over {axes}"
        if leg.kind == "all_to_all":
            return f"{reader} dim {dims} split over {axes}, which splits dim {leg.from_dim}"
        return f"{reader} blocks laid out as {leg.target} where they lie as {leg.source}"

    def _partial_reason(self, tensor: int, axes: tuple[str, ...], op: str) -> str:
        names = " and ".join(repr(a) for a in join(axes, self.parts))
        origin = self._origin(tensor, axes[0])
        held = f"so each device holds a partial {op}"
        if origin is None and self._slice_origin(tensor, axes[0]):
            return f"each slice of the stack lies on one device of {names} alone, and all need it"
        if origin is None:
            return f"the {op} over {names} is still to be taken, {held}"
        equation, factor = origin
        rule = equation.ruled
        dims = [
            f"dim {d} of operand {i}"
            for i, dims in enumerate(rule.operands)
            for d, dim in enumerate(dims)
            if factor in dim
        ]
        what = "contracted" if rule.works else "reduced"
        if equation.name in ("gather", "dynamic_slice"):
            what = "indexed"
        elif "scatter" in equation.name:
            what = "scattered"
        return (
            f"{what} {dims[0] if dims else 'dim'} of {equation.name} is split over {names}, {held}"
        )

    def _origin(self, tensor: int, axis: str) -> tuple[Equation, int] | None:
        """The equation that left `tensor` partial over `axis`, and its split factor."""
        producer = self.producers.get(self._partial_root(tensor, axis))
        if producer is None or producer.rule is None:
            return None
        factor = self.layouts.choice(producer, axis).factor
        return (producer, factor) if factor >= 0 and producer.rule.factors[factor].reduce else None

    def _slice_origin(self, tensor: int, axis: str) -> bool:
        """Whether `tensor` is partial over `axis` because a stack's slices lie on one device each."""
        return self._partial_root(tensor, axis) in self.slices

    def _partial_root(self, tensor: int, axis: str) -> int:
        """The tensor that was first partial over `axis`, of those that `tensor` is linear in."""
        waiting, seen, root = [tensor], set(), tensor
        while waiting:
            current = waiting.pop()
            if current in seen:
                continue
            seen.add(current)
            outside = self.bound.get(current, ())
            waiting += outside
            if outside or current in self.slices:
                root = current if current in self.slices else root
                continue
            producer = self.producers.get(current)
            if producer is None or producer.rule is None:
                continue
            choice = self.layouts.choice(producer, axis)
            if choice.factor >= 0:
                return current
            # Of several partial operands, those that were made partial, not masked to be.
            waiting += [
                a
                for a, label in zip(producer.inputs, choice.operands, strict=True)
                if isinstance(a, int)
                and label.kind == "P"
                and self.layouts.stored(a).label(axis).kind == "P"
            ]
        return root


def _layer(scope: str) -> str:
    """The innermost named scopes without the transformations around them."""
    text = scope
    for word in ("transpose(", "jvp(", "vmap(", "checkpoint(", "rematted_computation"):
        text = text.replace(word, "")
    text = text.replace(")", "").strip("/")
    return "/".join(p for p in text.split("/") if p and not p.startswith("pypto_spmd."))[-60:]


def _short(dtype: object) -> str:
    text = str(dtype)
    for long, short in (
        ("bfloat", "bf"),
        ("float", "f"),
        ("uint", "u"),
        ("int", "i"),
        ("complex", "c"),
    ):
        if text.startswith(long):
            return short + text[len(long) :]
    return text
