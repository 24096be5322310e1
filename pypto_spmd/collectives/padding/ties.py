"""Which dims of an equation may be padded, and how it is run when they are.

A dim is stored padded when it holds more rows than the program's own: the true ones first, then rows of
which nothing is known. What an equation says of it is a *tie*: the dims of operands and results that are
padded alike, or not at all. A dim without a tie must have its true size.

Invariant: whatever stands in the padding of the operands, the results' true rows are the serial ones.
Where a primitive would read the padding, it is filled first with what changes nothing (0 for a sum, -inf
for a maximum); filled, not multiplied, for there may be NaNs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pypto_spmd.collectives.graph import Equation
from pypto_spmd.collectives.rules import Aval, Rule
from pypto_spmd.collectives.rules.elementwise import ELEMENTWISE

Shape = tuple[int, ...]


class Place(NamedTuple):
    """One dim of one operand or result of an equation."""

    is_result: bool
    position: int
    dim: int


@dataclass(frozen=True, slots=True)
class Tie:
    """Places that are padded alike.

    Args:
        places: the places.
        unit: what their sizes are all multiples of; so must the padded ones be, by the same factor.
    """

    places: tuple[Place, ...]
    unit: int


@dataclass(frozen=True, slots=True)
class Padded:
    """An equation with some of its dims padded.

    Args:
        equation: the equation.
        ins: the operands, of their true sizes.
        outs: the results, of their true sizes.
        in_shapes: the operands' shapes as they come.
        out_shapes: the results' shapes as they are to be made.
    """

    equation: Equation
    ins: tuple[Aval, ...]
    outs: tuple[Aval, ...]
    in_shapes: tuple[Shape, ...]
    out_shapes: tuple[Shape, ...]

    def is_padded(self, place: Place) -> bool:
        """Whether a dim holds more than its true rows."""
        avals, shapes = (
            (self.outs, self.out_shapes) if place.is_result else (self.ins, self.in_shapes)
        )
        true = avals[place.position].shape[place.dim]
        return shapes[place.position][place.dim] != true


Params = Callable[[Padded], Mapping[str, Any]]
Run = Callable[[Padded], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Ties:
    """What padding an equation bears.

    Args:
        ties: what may be padded.
        fills: (operand, dim) -> the reduction whose neutral element the padding is filled with first.
        params: the equation's params that change with the sizes.
        run: where other primitives are needed, a function of the operands.
    """

    ties: tuple[Tie, ...] = ()
    fills: Mapping[tuple[int, int], str] = field(default_factory=dict)
    params: Params | None = None
    run: Run | None = None


NOTHING = Ties()


def ties_of(equation: Equation, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Ties:
    """What padding an equation bears.

    Args:
        equation: an equation that has a rule.
        ins: its operands, of their true sizes.
        outs: its results, likewise.
    """
    make = _SPECIAL.get(equation.name)
    if make is not None:
        return make(equation, ins, outs)
    if equation.name in _BY_FACTORS:
        return _of_factors(equation)
    return NOTHING


def neutral(op: str, dtype: Any) -> Any:
    """The neutral element of a reduction of `dtype`; None if there is none.

    Args:
        op: "sum", "prod", "max", "min", "or" or "and".
        dtype: the elements' dtype.
    """
    if not isinstance(dtype, np.dtype):
        return None
    if dtype.kind == "b":
        return op in ("and", "min")
    if op in ("sum", "prod"):
        return 0 if op == "sum" else 1
    if op in ("or", "and"):
        return 0 if op == "or" else int(np.bitwise_not(np.zeros((), dtype)))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return None
    if not jnp.issubdtype(dtype, jnp.inexact):
        return int(jnp.iinfo(dtype).min if op == "max" else jnp.iinfo(dtype).max)
    end = -np.inf if op == "max" else np.inf
    if np.isinf(np.asarray(end).astype(dtype).astype(np.float32)):
        return end
    return float(jnp.finfo(dtype).min if op == "max" else jnp.finfo(dtype).max)


# By the factors of the rule ----------------------------------------------------------------------

_REDUCTIONS = (
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_or", "reduce_and",
)  # fmt: skip

_BY_FACTORS = ELEMENTWISE | {
    *_REDUCTIONS,
    *("dot_general", "transpose", "squeeze", "rev", "concatenate", "stack", "unstack"),
    *("sort", "argsort", "approx_top_k", "fft", "bitcast_convert_type", "reduce"),
    *("device_put", "sharding_constraint", "select_and_scatter_add"),
    *("select_and_gather_add", "select_and_scatter"),
    *("cholesky", "cholesky_update", "eig", "eigh", "geqp3", "geqrf", "hessenberg"),
    *("householder_product", "lu", "lu_pivots_to_permutation", "ormqr", "qr", "schur", "svd"),
    *("triangular_solve", "tridiagonal", "tridiagonal_solve"),
}
"""Primitives whose params hold no size: dims that are one plain factor pass, reduced ones are filled."""


def _of_factors(
    equation: Equation, params: Params | None = None, *, without: Sequence[int] = ()
) -> Ties:
    """The ties of the factors that are whole dims, wherever they stand."""
    rule = equation.rule
    assert rule is not None
    reduces = equation.name in _REDUCTIONS or equation.name in ("dot_general",)
    ties, fills = [], {}
    for index, factor in enumerate(rule.factors):
        places = factor_places(rule, index)
        if index in without or places is None or factor.partial_operands:
            continue
        if factor.exchanges or not (factor.splittable or reduces) or factor.min_local > 1:
            continue
        if factor.reduce and not reduces:
            continue
        ties.append(Tie(places, factor.size))
        if factor.reduce:
            fills |= {(p.position, p.dim): factor.reduce for p in places if not p.is_result}
    return Ties(tuple(ties), fills, params)


def factor_places(rule: Rule, index: int) -> tuple[Place, ...] | None:
    """The dims that a factor is; None if it is only a part of one, or twice in a tensor."""
    found = []
    for is_result, tensors in ((False, rule.operands), (True, rule.results)):
        for position, dims in enumerate(tensors):
            at = [d for d, dim in enumerate(dims) if index in dim]
            if len(at) > 1 or (at and len(dims[at[0]]) > 1):
                return None
            found += [Place(is_result, position, d) for d in at]
    return tuple(found)


# Moving ------------------------------------------------------------------------------------------


def _free(equation: Equation, ins: Any, outs: tuple[Aval, ...]) -> Ties:
    """The result's dims are made of any size."""
    return _of_factors(equation, lambda padded: {"shape": padded.out_shapes[0]})


def _reshape(equation: Equation, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Ties:
    # Rows of a dim that leads a group of dims stay rows of the dim that leads the other group: what
    # they are made of is padded with them.
    rule = equation.rule
    assert rule is not None
    ties = []
    for index, factor in enumerate(rule.factors):
        places = _led_by(rule, index)
        if places and factor.size > 1:
            ties.append(Tie(places, factor.size))
    return Ties(tuple(ties), params=lambda padded: {"new_sizes": padded.out_shapes[0]})


def _led_by(rule: Rule, index: int) -> tuple[Place, ...]:
    """The dims in which a factor stands first; none if it also stands behind others."""
    found = []
    for is_result, tensors in ((False, rule.operands), (True, rule.results)):
        for position, dims in enumerate(tensors):
            for d, dim in enumerate(dims):
                if index in dim:
                    if any(rule.factors[f].size > 1 for f in dim[: dim.index(index)]):
                        return ()
                    found.append(Place(is_result, position, d))
    return tuple(found) if len(found) == 2 else ()


def _slice(equation: Equation, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Ties:
    # Rows at a static place are found there, whatever comes after the true ones.
    strides = equation.params["strides"] or (1,) * len(ins[0].shape)
    whole = [
        n == m and step == 1
        for n, m, step in zip(ins[0].shape, outs[0].shape, strides, strict=True)
    ]
    ties = [
        Tie((Place(False, 0, d), *([Place(True, 0, d)] if is_whole else [])), ins[0].shape[d])
        for d, is_whole in enumerate(whole)
    ]

    def params(padded: Padded) -> Mapping[str, Any]:
        limits = zip(whole, equation.params["limit_indices"], padded.in_shapes[0], strict=True)
        return {
            "limit_indices": tuple(size if is_whole else limit for is_whole, limit, size in limits)
        }

    return Ties(tuple(ties), params=params)


def _pad(equation: Equation, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Ties:
    # Where rows are set apart, both ends may have more of them: no splice of rows says so. What stands
    # in the operand's padding becomes what is padded with.
    made = _of_factors(equation)
    config, value = equation.params["padding_config"], ins[1].value
    spread = [d for d, (_, _, interior) in enumerate(config) if interior]
    fills = dict(made.fills)
    ties = list(made.ties)
    for d in spread:
        ties.append(Tie((Place(True, 0, d),), outs[0].shape[d]))
        if value is not None and value == 0 and neutral("sum", ins[0].dtype) is not None:
            ties.append(Tie((Place(False, 0, d),), ins[0].shape[d]))
            fills[0, d] = "sum"

    def params(padded: Padded) -> Mapping[str, Any]:
        ends = list(config)
        for d in spread:
            low, _, interior = config[d]
            reach = (padded.in_shapes[0][d] - 1) * (interior + 1) + 1
            ends[d] = (low, padded.out_shapes[0][d] - low - reach, interior)
        return {"padding_config": tuple(ends)}

    return Ties(tuple(ties), fills, params)


def _dynamic_slice(equation: Equation, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Ties:
    ties = [
        Tie((Place(False, 0, d), *([Place(True, 0, d)] if before == after else [])), before)
        for d, (before, after) in enumerate(zip(ins[0].shape, outs[0].shape, strict=True))
    ]

    def run(padded: Padded) -> Callable[..., Any]:
        sizes = padded.out_shapes[0]
        lasts = [n - k for n, k in zip(ins[0].shape, outs[0].shape, strict=True)]

        def sliced(x: Any, *starts: Any) -> Any:
            starts = tuple(_clamped(s, last) for s, last in zip(starts, lasts, strict=True))
            return equation.primitive.bind(x, *starts, **{**equation.params, "slice_sizes": sizes})

        return sliced

    return Ties(tuple(ties), run=run)


def _dynamic_update_slice(
    equation: Equation, ins: tuple[Aval, ...], outs: tuple[Aval, ...]
) -> Ties:
    ties = []
    for d, (before, part) in enumerate(zip(ins[0].shape, ins[1].shape, strict=True)):
        places = [Place(False, 0, d), Place(True, 0, d)]
        ties.append(Tie((*places, *([Place(False, 1, d)] if before == part else [])), before))

    def run(padded: Padded) -> Callable[..., Any]:
        lasts = [n - k for n, k in zip(ins[0].shape, ins[1].shape, strict=True)]

        def updated(x: Any, update: Any, *starts: Any) -> Any:
            starts = tuple(_clamped(s, last) for s, last in zip(starts, lasts, strict=True))
            return equation.primitive.bind(x, update, *starts, **equation.params)

        return updated

    return Ties(tuple(ties), run=run)


def _clamped(start: Any, last: int) -> Any:
    """A start index as the primitive moves it into an array of the true size."""
    start = jnp.asarray(start)
    last = min(last, jnp.iinfo(start.dtype).max)
    return lax.clamp(start.dtype.type(0), start, start.dtype.type(last))


# Comparing and accumulating ----------------------------------------------------------------------


def _along(op_of: Callable[[Equation], str], dim_of: Callable[[Equation, int], int]):
    """A primitive that reads a dim in the order of its rows, and others row by row."""

    def make(equation: Equation, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Ties:
        made = _of_factors(equation)
        op, along = op_of(equation), dim_of(equation, len(ins[0].shape))
        if neutral(op, ins[0].dtype) is None:
            return made
        place = Place(False, 0, along)
        ties = [tie for tie in made.ties if place not in tie.places]
        ties.append(Tie((place,), ins[0].shape[along]))
        return Ties(tuple(ties), {**made.fills, (0, along): op})

    return make


_best = _along(
    lambda e: "min" if e.name == "argmin" else "max",
    lambda e, rank: (e.params["axes"][0] if "axes" in e.params else e.params["axis"]) % rank,
)


def _reduce_xor(equation: Equation, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Ties:
    made = _of_factors(equation)
    axes = equation.params["axes"]
    ties = tuple(Tie((Place(False, 0, d),), ins[0].shape[d]) for d in axes)
    return Ties((*made.ties, *ties), {(0, d): "sum" for d in axes})


_CUMULATIVE = {
    "cumsum": "sum", "cumprod": "prod", "cummax": "max", "cummin": "min", "cumlogsumexp": "max",
}  # fmt: skip


def _cumulative(equation: Equation, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Ties:
    made = _of_factors(equation)
    axis, op = equation.params["axis"], _CUMULATIVE[equation.name]
    if equation.params["reverse"] and neutral(op, ins[0].dtype) is None:
        return made
    places = (Place(False, 0, axis), Place(True, 0, axis))
    ties = [tie for tie in made.ties if places[0] not in tie.places]
    # What comes after the true rows is read by none of them, unless it comes first.
    fills = {(0, axis): op} if equation.params["reverse"] else {}
    return Ties((*ties, Tie(places, ins[0].shape[axis])), fills)


# Looking up --------------------------------------------------------------------------------------

_FILL_OR_DROP = lax.GatherScatterMode.FILL_OR_DROP
_CLIP = lax.GatherScatterMode.CLIP


def _gather(equation: Equation, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Ties:
    rule, numbers = equation.rule, equation.params["dimension_numbers"]
    assert rule is not None
    index_map = numbers.start_index_map
    sizes = equation.params["slice_sizes"]
    one_row = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    full = [d for d, k in enumerate(sizes) if k == ins[0].shape[d] and d not in one_row]
    ties = []
    for index, factor in enumerate(rule.factors):
        places = factor_places(rule, index)
        if places is not None:
            ties.append(Tie(places, factor.size))

    def run(padded: Padded) -> Callable[..., Any]:
        x_shape = padded.in_shapes[0]
        window = tuple(x_shape[d] if d in full else k for d, k in enumerate(sizes))
        params = {**padded.equation.params, "slice_sizes": window}
        moving = [d for d in index_map if d not in full]
        if any(padded.is_padded(Place(False, 0, d)) for d in moving):
            params["indices_are_sorted"] = False

        def gathered(x: Any, indices: Any) -> Any:
            # What is promised to be in bounds is clamped if it is not.
            mode = _FILL_OR_DROP if params["mode"] == _FILL_OR_DROP else _CLIP
            indices = _within(indices, index_map, moving, padded, sizes, mode)
            return lax.gather_p.bind(x, indices, **params)

        return gathered

    return Ties(tuple(ties), run=run)


def _within(
    indices: Any,
    index_map: Sequence[int],
    dims: Sequence[int],
    padded: Padded,
    window: Sequence[int],
    mode: Any,
) -> Any:
    """Indices that the mode treats in the padded operand as it would in the true one.

    Args:
        indices: the indices, their components in the last dim.
        index_map: the operand's dim of each component.
        dims: the dims along which windows move.
        padded: the gather or scatter.
        window: how many rows of each dim one index takes.
        mode: what is done about indices out of bounds.
    """
    true, stored = padded.ins[0].shape, padded.in_shapes[0]
    moved = [d in dims and stored[d] != true[d] for d in index_map]
    if not any(moved) or mode not in (_CLIP, _FILL_OR_DROP):
        return indices
    indices = _wide(indices)
    last = np.array([true[d] - window[d] for d in index_map], indices.dtype)
    if mode == _CLIP:
        return jnp.where(np.array(moved), jnp.clip(indices, 0, last), indices)
    outside = np.array([stored[d] for d in index_map], indices.dtype)
    return jnp.where(np.array(moved) & (indices > last), outside, indices)


def _wide(indices: Any) -> Any:
    """Indices of a type that holds those of any array, and -1."""
    if indices.dtype in (jnp.int32, jnp.int64):
        return indices
    if indices.dtype in (jnp.uint32, jnp.uint64):
        indices = jnp.minimum(indices, jnp.iinfo(jnp.int32).max)
    return indices.astype(jnp.int32)


def _scatter(equation: Equation, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Ties:
    rule, numbers = equation.rule, equation.params["dimension_numbers"]
    assert rule is not None
    index_map = numbers.scatter_dims_to_operand_dims
    window = _scatter_window(equation, ins)
    point_dims = []
    ties = []
    for index, factor in enumerate(rule.factors):
        places = factor_places(rule, index)
        if places is None:
            continue
        if not any(p.is_result for p in places):  # a dim of the indices
            if not index_map:
                continue
            point_dims += [p.dim for p in places if p.position == 1]
        ties.append(Tie(places, factor.size))

    def run(padded: Padded) -> Callable[..., Any]:
        moving = [d for d in index_map if window[d] != ins[0].shape[d] or window[d] == 1]
        hidden = [d for d in point_dims if padded.is_padded(Place(False, 1, d))]
        params = {**padded.equation.params}
        if hidden or any(padded.is_padded(Place(False, 0, d)) for d in moving):
            params |= {"indices_are_sorted": False, "unique_indices": False}

        def scattered(x: Any, indices: Any, updates: Any) -> Any:
            mode = params["mode"]
            indices = _within(indices, index_map, moving, padded, window, mode)
            if not hidden:
                return padded.equation.primitive.bind(x, indices, updates, **params)
            # Updates that stand in the padding go nowhere.
            indices = _wide(indices)
            if mode == _CLIP:
                last = np.array([ins[0].shape[d] - window[d] for d in index_map], indices.dtype)
                indices = jnp.clip(indices, 0, last)
            for dim in hidden:
                row = lax.broadcasted_iota(jnp.int32, indices.shape, dim)
                indices = jnp.where(row < ins[1].shape[dim], indices, -1)
            return padded.equation.primitive.bind(
                x, indices, updates, **{**params, "mode": _FILL_OR_DROP}
            )

        return scattered

    return Ties(tuple(ties), run=run)


def _scatter_window(equation: Equation, ins: tuple[Aval, ...]) -> tuple[int, ...]:
    numbers = equation.params["dimension_numbers"]
    dropped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    sizes = iter(numbers.update_window_dims)
    return tuple(1 if d in dropped else ins[2].shape[next(sizes)] for d in range(len(ins[0].shape)))


# Sliding -----------------------------------------------------------------------------------------


def _conv(equation: Equation, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Ties:
    params, rule = equation.params, equation.rule
    assert rule is not None
    numbers = params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    left = lambda d: Place(False, 0, lhs[d])  # noqa: E731
    kernel = lambda d: Place(False, 1, rhs[d])  # noqa: E731
    made = lambda d: Place(True, 0, out[d])  # noqa: E731
    ties: list[Tie] = []
    fills: dict[tuple[int, int], str] = {}
    if batch_groups == 1:
        ties.append(Tie((left(0), made(0)), ins[0].shape[lhs[0]]))
    else:
        ties.append(Tie((left(0), kernel(0), made(1)), batch_groups))
    if groups == 1:
        ties.append(Tie((left(1), kernel(1)), ins[0].shape[lhs[1]]))
        fills |= {(0, lhs[1]): "sum", (1, rhs[1]): "sum"}
    else:
        ties.append(Tie((left(1), kernel(0), made(1)), groups))
    if groups == batch_groups == 1:
        ties.append(Tie((kernel(0), made(1)), outs[0].shape[out[1]]))
    for d in range(2, len(lhs)):
        rows, outputs = ins[0].shape[lhs[d]], outs[0].shape[out[d]]
        fills |= {(0, lhs[d]): "sum", (1, rhs[d]): "sum"}
        ties += _sliding(left(d), made(d), rows, outputs)
        ties.append(Tie((kernel(d),), ins[1].shape[rhs[d]]))

    def changed(padded: Padded) -> Mapping[str, Any]:
        x, w, y = *padded.in_shapes, padded.out_shapes[0]

        def is_true(d: int) -> bool:
            true = ins[0].shape[lhs[d]], ins[1].shape[rhs[d]], outs[0].shape[out[d]]
            return (x[lhs[d]], w[rhs[d]], y[out[d]]) == true

        padding = [
            _window_padding(
                x[lhs[d]], w[rhs[d]], y[out[d]], params["window_strides"][d - 2],
                params["lhs_dilation"][d - 2], params["rhs_dilation"][d - 2], low,
                high if is_true(d) else None,
            )
            for d, (low, high) in enumerate(params["padding"], 2)
        ]  # fmt: skip
        scale = lambda count, place, true: count * padded.in_shapes[0][place] // true  # noqa: E731
        return {
            "padding": tuple(padding),
            "feature_group_count": groups
            if groups == 1
            else scale(groups, lhs[1], ins[0].shape[lhs[1]]),
            "batch_group_count": batch_groups
            if batch_groups == 1
            else scale(batch_groups, lhs[0], ins[0].shape[lhs[0]]),
        }

    return Ties(tuple(ties), fills, params=changed)


def _sliding(rows_at: Place, outputs_at: Place, rows: int, outputs: int) -> list[Tie]:
    """Windows reach the end of the rows by their padding, which fills as the primitive's own does."""
    if rows == outputs:
        return [Tie((rows_at, outputs_at), rows)]
    return [Tie((rows_at,), rows), Tie((outputs_at,), outputs)]


def _window_padding(
    rows: int, taps: int, outputs: int, stride: int, row_step: int, tap_step: int, low: int,
    high: int | None,
) -> tuple[int, int]:  # fmt: skip
    """The padding with which windows over `rows` give `outputs`."""
    if high is not None:
        return low, high
    reach = (outputs - 1) * stride + (taps - 1) * tap_step + 1
    return low, reach - low - ((rows - 1) * row_step + 1)


_WINDOWS = {"reduce_window_sum": "sum", "reduce_window_max": "max", "reduce_window_min": "min"}


def _reduce_window(equation: Equation, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Ties:
    params = equation.params
    op = _WINDOWS.get(equation.name, "")
    can_fill = bool(op) and neutral(op, ins[0].dtype) is not None
    ties: list[Tie] = []
    fills: dict[tuple[int, int], str] = {}
    steps = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    for d, (rows, outputs) in enumerate(zip(ins[0].shape, outs[0].shape, strict=True)):
        if all(params[name][d] == 1 for name in steps) and tuple(params["padding"][d]) == (0, 0):
            moved = range(len(outs))
            places = [Place(is_result, i, d) for i in moved for is_result in (False, True)]
            ties.append(Tie(tuple(places), rows))
        elif can_fill:
            fills[0, d] = op
            ties += _sliding(Place(False, 0, d), Place(True, 0, d), rows, outputs)

    def changed(padded: Padded) -> Mapping[str, Any]:
        x, y = padded.in_shapes[0], padded.out_shapes[0]
        padding = [
            _window_padding(
                x[d], params["window_dimensions"][d], y[d], params["window_strides"][d],
                params["base_dilation"][d], params["window_dilation"][d], low,
                high if (0, d) not in fills or (x[d], y[d]) == (ins[0].shape[d], outs[0].shape[d]) else None,
            )
            for d, (low, high) in enumerate(params["padding"])
        ]  # fmt: skip
        return {"padding": tuple(padding)}

    return Ties(tuple(ties), fills, params=changed)


# Random numbers ----------------------------------------------------------------------------------


def _random_bits(equation: Equation, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Ties:
    # Counters are row-major indices, which more rows of the first dim leave as they are.
    keys, shape = len(ins[0].shape), equation.params["shape"]
    if not shape or "fry" not in str(ins[0].dtype) or not prod(shape):
        return NOTHING
    if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        return NOTHING
    tie = Tie((Place(True, 0, keys),), shape[0])
    return Ties((tie,), params=lambda padded: {"shape": padded.out_shapes[0][keys:]})


_SPECIAL: dict[str, Callable[[Equation, tuple[Aval, ...], tuple[Aval, ...]], Ties]] = {
    "iota": _free,
    "broadcast_in_dim": _free,
    "reshape": _reshape,
    "slice": _slice,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "argmax": _best,
    "argmin": _best,
    "top_k": _best,
    "reduce_xor": _reduce_xor,
    **dict.fromkeys(_CUMULATIVE, _cumulative),
    "gather": _gather,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
        _scatter,
    ),
    "conv_general_dilated": _conv,
    **dict.fromkeys((*_WINDOWS, "reduce_window"), _reduce_window),
    "random_bits": _random_bits,
}
