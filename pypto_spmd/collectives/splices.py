"""Slices, pads and concatenations seen through to the arrays their rows come from.

`jnp.roll(x, 1)` is the concatenation of a slice of one row and a slice of all others. Neither can be split
over a mesh axis, though `x` and the outcome can, and what has to move is one row a device. So each tensor
that is made of rows of others is traced back along these primitives, and where that allows a finer split,
the equation that makes it becomes a `splice` of the original arrays. Slices that nothing else reads are then
pruned with the rest.

Invariant: the graph computes the same values, in equations of the same numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd
from typing import Any

from pypto_spmd.collectives.graph import Atom, Block, Constant, Equation, Graph
from pypto_spmd.collectives.pruning import pruned
from pypto_spmd.collectives.rules import Aval, rule_for
from pypto_spmd.collectives.rules.splice import ZEROS, splice_p

MOST_SEGMENTS = 8
"""A tensor of more segments is left as it is: each may be a collective."""

FEW = 4
"""A tensor of less than one part in so many of its source is left as it is: slices of few rows are read,
whatever the number of devices."""


@dataclass(frozen=True, slots=True)
class _Run:
    """`count` rows of a tensor from row `start` on, or zeros (no source)."""

    source: int | None
    start: int
    count: int

    def part(self, low: int, high: int) -> "_Run":
        return _Run(self.source, self.start + low if self.source is not None else 0, high - low)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What a tensor is made of along one dim.

    Args:
        dim: the dim.
        runs: its rows, in order.
        cut: into how many pieces the tensors between it and the sources could all be cut.
    """

    dim: int
    runs: tuple[_Run, ...]
    cut: int


def fuse_splices(graph: Graph) -> Graph:
    """The graph with splices in place of what they can do better."""
    return pruned(replace(graph, block=_fused(graph.block, graph.avals)))


def _fused(block: Block, avals: Sequence[Aval]) -> Block:
    known: dict[int, _Rows | None] = {}
    zeros: set[int] = set()
    sources: set[int] = set()
    equations = []
    for equation in block.equations:
        if equation.bodies:
            bodies = tuple(_fused(b, avals) for b in equation.bodies)
            equations.append(replace(equation, bodies=bodies))
            continue
        if _makes_zeros(equation):
            zeros.add(equation.outputs[0])
        tracer = _TRACERS.get(equation.name)
        if tracer is not None:
            made = tracer(equation, _Known(known, zeros, sources, avals))
            known.update(zip(equation.outputs, made, strict=True))
            if len(made) == 1 and made[0] is not None:
                equation = _spliced(equation, made[0], avals)
                if equation.primitive is splice_p and _is_fine(equation, avals):
                    sources.add(equation.outputs[0])
        equations.append(equation)
    return replace(block, equations=tuple(equations))


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of the tensors so far.

    Args:
        rows: what they are made of.
        zeros: those that are all zeros.
        sources: those that are splices, and can be split as they are.
        avals: their `Aval`s.
    """

    rows: dict[int, _Rows | None]
    zeros: set[int]
    sources: set[int]
    avals: Sequence[Aval]

    def of(self, atom: Atom, dim: int) -> _Rows | None:
        """The rows of a tensor along `dim`: its own, if it is not made of others'."""
        if isinstance(atom, Constant):
            return None
        size = self.avals[atom].shape[dim]
        if atom in self.zeros:
            return _Rows(dim, (_Run(None, 0, size),), size)
        found = self.rows.get(atom)
        if found is not None and found.dim == dim and atom not in self.sources:
            return replace(found, cut=gcd(found.cut, size))
        return _Rows(dim, (_Run(atom, 0, size),), size)

    def changed_dim(self, equation: Equation) -> int | None:
        """The only dim in which operand and result differ in size."""
        before, after = (
            self.avals[_tensor(equation, 0)].shape,
            self.avals[equation.outputs[0]].shape,
        )
        dims = [d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        return dims[0] if len(dims) == 1 else None


def _is_fine(splice: Equation, avals: Sequence[Aval]) -> bool:
    """Whether a splice can be split as finely as any of its operands."""
    dim, whole = splice.params["dim"], splice.params.get("whole", ())
    split = [splice.outputs[0], *(a for i, a in enumerate(splice.inputs) if i not in whole)]
    sizes = [avals[t].shape[dim] for t in split if isinstance(t, int)]
    return gcd(*sizes) == min(sizes)


def _tensor(equation: Equation, position: int) -> int:
    atom = equation.inputs[position]
    assert isinstance(atom, int)
    return atom


def _makes_zeros(equation: Equation) -> bool:
    return equation.name == "broadcast_in_dim" and _is_zero(equation.inputs[0])


def _is_zero(atom: Atom) -> bool:
    return isinstance(atom, Constant) and atom.aval.shape == () and atom.aval.value == 0


def _window(rows: _Rows, low: int, high: int) -> tuple[_Run, ...]:
    """Rows `low` to `high`, zeros where there are none."""
    size = sum(run.count for run in rows.runs)
    runs = [_Run(None, 0, min(high, 0) - low)] if low < 0 else []
    at = 0
    for run in rows.runs:
        first, last = max(low - at, 0), min(high - at, run.count)
        if first < last:
            runs.append(run.part(first, last))
        at += run.count
    if high > size:
        runs.append(_Run(None, 0, high - max(low, size)))
    return _merged(runs)


def _merged(runs: Sequence[_Run]) -> tuple[_Run, ...]:
    """The runs, those that continue one another as one."""
    found: list[_Run] = []
    for run in runs:
        if found and found[-1].source == run.source:
            last = found[-1]
            if run.source is None or last.start + last.count == run.start:
                found[-1] = replace(last, count=last.count + run.count)
                continue
        found.append(run)
    return tuple(found)


def _trace_slice(equation: Equation, known: _Known) -> list[_Rows | None]:
    strides = equation.params["strides"]
    if isinstance(equation.inputs[0], Constant) or (strides and any(s != 1 for s in strides)):
        return [None]
    dim = known.changed_dim(equation)
    rows = None if dim is None else known.of(equation.inputs[0], dim)
    if dim is None or rows is None:
        return [None]
    low, high = equation.params["start_indices"][dim], equation.params["limit_indices"][dim]
    return [_Rows(dim, _window(rows, low, high), rows.cut)]


def _trace_pad(equation: Equation, known: _Known) -> list[_Rows | None]:
    config = equation.params["padding_config"]
    changed = [d for d, (low, high, _) in enumerate(config) if low or high]
    if (
        len(changed) != 1
        or any(interior for _, _, interior in config)
        or isinstance(equation.inputs[0], Constant)
        or not _is_zero(equation.inputs[1])
    ):
        return [None]
    (dim,) = changed
    rows = known.of(equation.inputs[0], dim)
    if rows is None:
        return [None]
    low, high, _ = config[dim]
    size = known.avals[_tensor(equation, 0)].shape[dim]
    return [_Rows(dim, _window(rows, -low, size + high), rows.cut)]


def _trace_concatenate(equation: Equation, known: _Known) -> list[_Rows | None]:
    dim = equation.params["dimension"]
    filled = [a for a in equation.inputs if isinstance(a, Constant) or known.avals[a].shape[dim]]
    if len(filled) == 1 < len(equation.inputs):  # what it was, with nothing beside it
        (atom,) = filled
        if isinstance(atom, Constant) or atom in known.sources:
            return [None]
        return [known.rows.get(atom)]
    parts = [known.of(atom, dim) for atom in equation.inputs]
    if any(p is None for p in parts):
        return [None]
    runs = [run for p in parts if p is not None for run in p.runs]
    cut = gcd(*(p.cut for p in parts if p is not None))
    return [_Rows(dim, _merged(runs), cut)]


def _trace_add(equation: Equation, known: _Known) -> list[_Rows | None]:
    """The sum of two tensors of which, in each row, one is zero: the gradient of a concatenation."""
    found = [known.rows.get(a) if isinstance(a, int) else None for a in equation.inputs]
    left, right = found
    if left is None or right is None or left.dim != right.dim:
        return [None]
    runs: list[_Run] = []
    ends = {_ends(left), _ends(right)}
    bounds = sorted({0, *(end for side in ends for end in side)})
    for low, high in pairwise(bounds):
        both = (*_window(left, low, high), *_window(right, low, high))
        real = [run for run in both if run.source is not None]
        if len(real) > 1:
            return [None]
        runs += real or [_Run(None, 0, high - low)]
    return [_Rows(left.dim, _merged(runs), gcd(left.cut, right.cut))]


def _ends(rows: _Rows) -> tuple[int, ...]:
    ends, at = [], 0
    for run in rows.runs:
        at += run.count
        ends.append(at)
    return tuple(ends)


_SUMS = ("add", "add_any")

_TRACERS: dict[str, Callable[[Equation, _Known], list[_Rows | None]]] = {
    "slice": _trace_slice,
    "pad": _trace_pad,
    "concatenate": _trace_concatenate,
    "add": _trace_add,
    "add_any": _trace_add,
}


def _spliced(equation: Equation, rows: _Rows, avals: Sequence[Aval]) -> Equation:
    """The equation as a splice, if that can be cut into more pieces than the way it is made."""
    output = avals[equation.outputs[0]]
    sources = tuple(dict.fromkeys(run.source for run in rows.runs if run.source is not None))
    if not sources or len(rows.runs) > MOST_SEGMENTS:
        return equation
    size = output.shape[rows.dim]
    all_sizes = [avals[s].shape[rows.dim] for s in sources]
    # Rows that are few beside the outcome's come whole, wherever they go.
    whole = tuple(i for i, n in enumerate(all_sizes) if n * FEW <= size)
    sizes = [n for i, n in enumerate(all_sizes) if i not in whole]
    if not sizes:
        return equation
    cut, before = gcd(size, *sizes), gcd(rows.cut, size)
    # A sum of rows and zeros is always better put together: its terms would be moved one by one.
    better = cut >= before if equation.name in _SUMS else cut > before
    if not better or size * FEW < max(sizes):
        return equation
    ins = tuple(avals[s] for s in sources)
    if any(aval.dtype != output.dtype for aval in ins):
        return equation
    segments = tuple(
        (ZEROS if run.source is None else sources.index(run.source), run.start, run.count)
        for run in rows.runs
    )
    params: dict[str, Any] = {"dim": rows.dim, "segments": segments}
    if whole:
        params["whole"] = whole
    rule = rule_for(splice_p.name, params, ins, (output,))
    return replace(equation, primitive=splice_p, params=params, inputs=sources, rule=rule)
