"""Rules against the truth: every labelling that a rule calls legal is run on shards.

For each equation of a traced function, on one axis and on two, every combination of legal choices is
enumerated, the operands are cut (or made partial) by their labels, the rule's `bind` runs on the shards
under `shard_map`, and what comes out is put together by the results' labels and compared with the whole.
All combinations of an equation run in one program. The collectives in that program must be those that
the rule states. The other way round, `incomplete` finds labellings that the rule does not call legal but
that would have been right.
"""

import itertools
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive
from jax.sharding import PartitionSpec

from pypto_spmd.collectives.rules import Aval, Rule, choices, has_rule, rule_for
from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.user_rule import Misfit
from pypto_spmd.collectives.tagging import STEP_ATTRIBUTE
from pypto_spmd.errors import listed, shape_text
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.sharding.layout import Label, Layout, P, R, S

AXES = ("x", "y", "z")
MOST_LABELLINGS = 300
"""How many labellings of one equation the search for missing ones tries."""

_QUICKLY: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
"""Each program runs once, so that compiling it is most of the time."""

ROUNDINGS = 64
"""By how many roundings, relative to the largest element, a result may differ."""


@dataclass(frozen=True, slots=True)
class RuleReport:
    """What the truth test of a function's equations found.

    Args:
        checked: how many legal labellings were run.
        wrong: those that gave a wrong result, failed, or communicated otherwise than the rule states.
        incomplete: labellings that the rule does not allow although they are right, and primitives
            without a rule.
        advice: what to change in the rules.
    """

    checked: int
    wrong: tuple[str, ...]
    incomplete: tuple[str, ...]
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.checked} labellings checked, {len(self.wrong)} wrong."]
        lines += [f"  wrong: {text}" for text in self.wrong]
        lines += [f"  incomplete: {text}" for text in self.incomplete]
        lines += [f"  Fix: {text}" for text in self.advice]
        return "\n".join(lines)

    def check(self, *, complete: bool = False) -> None:
        """Raises an error that tells what was found, if there is anything.

        Args:
            complete: whether incomplete rules are an error too.

        Raises:
            AssertionError: if a rule is wrong.
        """
        if self.wrong or (complete and self.incomplete):
            raise AssertionError(str(self))


def check_rule(
    function: Callable[..., Any],
    *args: Any,
    mesh_shapes: Sequence[tuple[int, ...]] = ((2, 4),),
    primitives: Collection[str] = (),
    most_nested: int | None = None,
    incomplete: bool = False,
    seed: int = 0,
) -> RuleReport:
    """Checks the rules of all equations of a function against the truth.

    Every labelling of operands and results that a rule allows is run on shards and compared with the
    whole. So a rule of one's own, made by `register_rule`, is tested by one line:
    `check_rule(rms_norm, x, scale).check()`.

    Args:
        function: what to trace; calls inside it (jit, custom derivatives) are looked into.
        *args: arrays that show the primitive's behaviour, or `ShapeDtypeStruct`s to draw random ones.
            Equal sizes, sorted indices and the like let wrong rules pass; dims that no axis divides
            are not split at all.
        mesh_shapes: meshes of CPU devices to check on; devices are simulated if need be. A mesh of two
            axes checks each of them alone too.
        primitives: names of the primitives to check; by default all.
        most_nested: how many combinations in which several axes do something are run for each equation,
            drawn at random; all by default.
        incomplete: whether to look for missing labellings too (slow).
        seed: of the random data.

    Returns:
        What was found; `wrong` is empty if the rules are right.

    Raises:
        ShardingError: if a rule does not fit the arrays.
    """
    random = np.random.default_rng(seed)
    largest = max((prod(shape) for shape in mesh_shapes), default=1)
    _ = DeviceMesh.simulate((largest,), ("all",)).devices  # before any array starts the backend
    flat, tree = jax.tree.flatten(args)
    arrays = [
        _draw(random, a) if isinstance(a, jax.ShapeDtypeStruct) else jnp.asarray(a) for a in flat
    ]
    traced = jax.make_jaxpr(lambda *leaves: function(*jax.tree.unflatten(tree, leaves)))(*arrays)
    checked, wrong, missing, advice = 0, [], [], []
    for application in _applications(traced.jaxpr, traced.consts, arrays):
        if primitives and application.primitive.name not in primitives:
            continue
        if not has_rule(application.primitive.name):
            missing.append(f"{application.primitive.name} has no rule")
        wrong += application.misfits()
        for shape in mesh_shapes:
            count, found = _check_legal(application, shape, most_nested, random)
            checked += count
            for case, text, failed in found:
                wrong.append(text)
                advice += [] if case.is_nested else case.advice(application.rule, failed)
        if incomplete:
            missing += _find_missing(application, random)
    once = lambda texts: tuple(dict.fromkeys(texts))  # noqa: E731
    return RuleReport(checked, once(wrong), once(missing), once(advice))


@dataclass(frozen=True, slots=True, eq=False)
class _Application:
    """One equation with the arrays it was applied to."""

    primitive: Primitive
    params: Mapping[str, Any]
    operands: tuple[jax.Array, ...]
    results: tuple[jax.Array, ...]
    ins: tuple[Aval, ...]
    outs: tuple[Aval, ...]
    rule: Rule

    def __str__(self) -> str:
        left, right = (
            ", ".join(shape_text(a.shape, a.dtype) for a in s) for s in (self.ins, self.outs)
        )
        return f"{self.primitive.name}({left}) -> {right} by the rule '{self.rule}'"

    def misfits(self) -> list[str]:
        """Where the rule does not fit the equation's shapes."""
        found = []
        for what, tensors, avals in (
            ("operand", self.rule.operands, self.ins),
            ("result", self.rule.results, self.outs),
        ):
            if len(tensors) != len(avals):
                return [f"{self}: the rule has {len(tensors)} {what}s"]
            for position, (dims, aval) in enumerate(zip(tensors, avals, strict=True)):
                sizes = [prod(self.rule.factors[f].size for f in dim) for dim in dims]
                fits = len(sizes) == len(aval.shape) and all(
                    not dim or size == n
                    for dim, size, n in zip(dims, sizes, aval.shape, strict=True)
                )
                if not fits:
                    found.append(f"{self}: {what} {position} has sizes {sizes} by the rule")
        return found


def _applications(
    jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]
) -> Generator[_Application, None, list[Any]]:
    """Evaluates a jaxpr and gives every equation with its operands; calls are looked into."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def read(variable: Any) -> Any:
        if isinstance(variable, Literal):
            return jnp.asarray(variable.val, getattr(variable.aval, "dtype", None))
        return values[variable]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        inner = _called(eqn)
        if inner is not None:
            results = yield from _applications(*inner, operands)
        else:
            results = eqn.primitive.bind(*operands, **eqn.params)
            results = results if isinstance(results, list | tuple) else [results]
            ins = tuple(_aval(v) for v in eqn.invars)
            outs = tuple(_aval(v) for v in eqn.outvars)
            try:
                rule = rule_for(eqn.primitive.name, eqn.params, ins, outs)
            except Misfit as misfit:
                misfit.refuse(repr(eqn.primitive.name))
            yield _Application(
                eqn.primitive, eqn.params, tuple(operands), tuple(results), ins, outs, rule
            )
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _called(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """The jaxpr that a call such as `jit` runs on its operands."""
    if has_rule(eqn.primitive.name) or eqn.primitive.name in ("scan", "while", "cond"):
        return None
    for value in eqn.params.values():
        jaxpr, consts = (value.jaxpr, value.consts) if hasattr(value, "jaxpr") else (value, ())
        if hasattr(jaxpr, "eqns") and len(jaxpr.invars) == len(eqn.invars):
            return jaxpr, consts
    return None


def _aval(variable: Any) -> Aval:
    aval = variable.aval
    if isinstance(variable, Literal) and not aval.shape and isinstance(aval.dtype, np.dtype):
        return Aval((), aval.dtype, np.asarray(variable.val).item())
    return Aval(tuple(aval.shape), aval.dtype)


@dataclass(frozen=True, slots=True)
class _Case:
    """One combination of choices: which axes split each factor, and how all tensors then lie."""

    splits: tuple[tuple[int, tuple[str, ...]], ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]

    @property
    def is_nested(self) -> bool:
        """Whether several axes do something."""
        return len(frozenset().union(*(t.axes for t in (*self.operands, *self.results)))) > 1

    def in_words(self, rule: Rule) -> str:
        """What is split and what is partial over which axes."""
        done = [
            f"factor {rule.factors[f].name!r} split over {listed([repr(a) for a in axes])}"
            for f, axes in self.splits
        ]
        for position, layout in enumerate(self.operands):
            for axis, op in layout.partial:
                done.append(f"operand {position} partial ({op}) over {axis!r}")
        return f"with {listed(done)}" if done else "with all whole"

    def advice(self, rule: Rule, failed: bool) -> list[str]:
        """What to change in a user's rule if this case is wrong by itself, or did not run at all."""
        found = []
        for f, _ in self.splits:
            name = rule.factors[f].name
            how = "how the parts combine" if not rule.factors[f].reduce else "another reduction"
            way = f"say {how}, reduce={{{name!r}: ...}}"
            if failed:
                way = "have it run at local shapes, local_params= or bind="
            found.append(f"keep {name!r} whole, whole={name!r}, or {way}.")
        if not self.splits:
            linear = [i for i, layout in enumerate(self.operands) if layout.partial]
            if linear:
                operands = listed([str(i) for i in linear])
                found.append(f"leave operand {operands} out of linear=.")
        return found


def _cases(application: _Application, axis_sizes: Mapping[str, int]) -> tuple[_Case, ...]:
    """Every legal combination of choices; axes that split one factor are nested in every order."""
    rule = application.rule
    found: dict[_Case, None] = {}
    for order in itertools.permutations(axis_sizes):
        sizes = tuple(f.size for f in rule.factors)
        partial = [()] * (len(rule.operands) + len(rule.results))
        for splits, labels in _combinations(rule, order, axis_sizes, sizes, {}, partial):
            tensors = (*rule.operands, *rule.results)
            layouts = [
                Layout(tuple(tuple(a for f in dim for a in splits.get(f, ())) for dim in dims), p)
                for dims, p in zip(tensors, labels, strict=True)
            ]
            count = len(rule.operands)
            case = _Case(
                tuple(sorted(splits.items())), tuple(layouts[:count]), tuple(layouts[count:])
            )
            if all(map(_reducible, layouts, (*application.ins, *application.outs))):
                found[case] = None
    return tuple(found)


def _combinations(
    rule: Rule,
    order: Sequence[str],
    axis_sizes: Mapping[str, int],
    local_sizes: tuple[int, ...],
    splits: dict[int, tuple[str, ...]],
    partial: list[tuple[tuple[str, str], ...]],
) -> Iterator[tuple[dict[int, tuple[str, ...]], list[tuple[tuple[str, str], ...]]]]:
    if not order:
        yield splits, partial
        return
    axis, *rest = order
    for choice in choices(rule, local_sizes, axis_sizes[axis]):
        labels = (*choice.operands, *choice.results)
        more = [
            tuple(sorted((*p, (axis, label.op)))) if label.kind == "P" else p
            for p, label in zip(partial, labels, strict=True)
        ]
        sizes, inner = local_sizes, splits
        if choice.factor >= 0:
            at = choice.factor
            sizes = (*sizes[:at], sizes[at] // axis_sizes[axis], *sizes[at + 1 :])
            inner = splits | {at: (*splits.get(at, ()), axis)}
        yield from _combinations(rule, rest, axis_sizes, sizes, inner, more)


def _reducible(layout: Layout, aval: Aval) -> bool:
    """Whether a tensor can be partial so: no sums of bools, no max over one axis and sum over another."""
    ops = {op for _, op in layout.partial}
    if not ops:
        return True
    if len(ops) > 1 or not isinstance(aval.dtype, np.dtype):
        return False
    (op,) = ops
    if aval.dtype == np.dtype(bool):
        return op in ("or", "and")
    if np.issubdtype(aval.dtype, np.complexfloating):
        return op in ("sum", "prod")
    return op not in ("or", "and") or np.issubdtype(aval.dtype, np.integer)


def _check_legal(
    application: _Application,
    mesh_shape: tuple[int, ...],
    most_nested: int | None,
    random: np.random.Generator,
) -> tuple[int, list[tuple[_Case, str, bool]]]:
    axis_sizes: dict[str, int] = dict(zip(AXES, mesh_shape, strict=False))
    mesh = DeviceMesh.simulate(mesh_shape, tuple(axis_sizes)).jax_mesh
    cases = _cases(application, axis_sizes)
    if most_nested is not None:
        nested = [case for case in cases if case.is_nested]
        kept = {nested[i] for i in random.permutation(len(nested))[:most_nested]}
        cases = tuple(case for case in cases if case in kept or not case.is_nested)
    feeds: dict[Any, jax.Array] = {}  # one argument of the program per operand and kind of partial
    for case in cases:
        for position, layout in enumerate(case.operands):
            key = (position, layout.partial)
            if key not in feeds:
                feeds[key] = _parts(random, application.operands[position], layout, axis_sizes)
    failures: dict[_Case, str] = {}

    def device(given: dict[Any, jax.Array]) -> list[list[jax.Array]]:
        made = []
        for number, case in enumerate(cases):
            failures.pop(case, None)
            with jax.named_scope(f"case{number}_"):
                try:
                    made.append(_run_case(application, case, axis_sizes, given))
                except Exception as error:  # whatever a rule's bind raises is what we report
                    failures[case] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                    made.append([])
        return [[_as_data(r)[None] for r in results] for results in made]

    program = jax.jit(
        jax.shard_map(
            device,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(tuple(axis_sizes)),
            check_vma=False,
        )
    )
    traced = program.trace(feeds)
    stacked = jax.device_get(traced.lower().compile(_QUICKLY)(feeds))
    emitted = _collectives(traced.jaxpr.jaxpr, "")
    whole = [np.asarray(_as_data(r)) for r in application.results]
    where = "×".join(map(str, mesh_shape))
    wrong = []
    for number, case in enumerate(cases):
        problems = [failures[case]] if case in failures else []
        for result, (parts, truth) in enumerate(zip(stacked[number], whole, strict=False)):
            problem = _compare(np.asarray(parts), truth, case.results[result], axis_sizes)
            if problem:
                problems.append(f"result {result} {problem}")
        problems += _misstated(application, case, axis_sizes, emitted.get(number, []))
        doing = case.in_words(application.rule)
        failed = case in failures
        wrong += [
            (case, f"{application}, {doing} on {where} devices: {p}", failed) for p in problems
        ]
    return len(cases), wrong


def _run_case(
    application: _Application,
    case: _Case,
    axis_sizes: Mapping[str, int],
    given: Mapping[Any, jax.Array],
) -> list[jax.Array]:
    """On one device: cuts the operands, runs the rule, checks the results' local shapes."""
    operands = []
    for position, layout in enumerate(case.operands):
        value = given[position, layout.partial]
        if layout.partial:
            value = lax.dynamic_index_in_dim(value, _index(layout.partial), keepdims=False)
        for dim, axes in enumerate(layout.dims):
            if axes:
                size = value.shape[dim] // layout.shards(dim, axis_sizes)
                value = lax.dynamic_slice_in_dim(value, lax.axis_index(axes) * size, size, dim)
        operands.append(value)
    context = Context(
        application.primitive, application.params, application.ins, application.outs,
        application.rule, dict(case.splits), axis_sizes,
        _steps(application.rule, _shards(case.splits, axis_sizes)),
    )  # fmt: skip
    run = application.rule.bind or (lambda ctx, *local: ctx.bind(*local))
    results = run(context, *operands)
    results = list(results) if isinstance(results, list | tuple) else [results]
    if len(results) != len(application.outs):
        raise ValueError(f"bind gave {len(results)} results, not {len(application.outs)}")
    for position, (result, aval) in enumerate(zip(results, application.outs, strict=True)):
        if tuple(result.shape) != context.out_shape(position) or result.dtype != aval.dtype:
            expected = f"{aval.dtype}{list(context.out_shape(position))}"
            raise ValueError(
                f"bind gave {result.dtype}{list(result.shape)} for result {position}, not {expected}"
            )
    return results


def _index(partial: Sequence[tuple[str, str]]) -> jax.Array:
    return lax.axis_index(tuple(axis for axis, _ in partial))


def _shards(
    splits: Iterable[tuple[int, tuple[str, ...]]], axis_sizes: Mapping[str, int]
) -> dict[int, int]:
    """Into how many pieces each split factor is cut."""
    return {f: prod(axis_sizes[a] for a in axes) for f, axes in splits}


def _steps(rule: Rule, shards: Mapping[int, int]) -> dict[tuple[int, int], int]:
    """A number for each exchange of the split factors of a rule."""
    pairs = [
        (f, e) for f, n in shards.items() for e in range(len(rule.factors[f].exchanges_for(n)))
    ]
    return {pair: number for number, pair in enumerate(pairs)}


def _as_data(value: jax.Array) -> jax.Array:
    return jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value


_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def _draw(random: np.random.Generator, like: jax.ShapeDtypeStruct) -> jax.Array:
    dtype = like.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        words = _draw(random, jax.eval_shape(jax.random.key_data, like))
        return jax.random.wrap_key_data(words, impl=_KEYS[str(dtype)])
    if dtype == np.dtype(bool):
        return jnp.asarray(random.random(like.shape) < 0.5)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(random.integers(0, 8, like.shape), dtype)
    value = random.standard_normal(like.shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        value = value + 1j * random.standard_normal(like.shape)
    return jnp.asarray(value, dtype)


def _parts(
    random: np.random.Generator, value: jax.Array, layout: Layout, axis_sizes: Mapping[str, int]
) -> jax.Array:
    """Random values, one per device of the partial axes, that reduce to `value`."""
    if not layout.partial:
        return value
    count = prod(axis_sizes[axis] for axis, _ in layout.partial)
    op = layout.partial[0][1]
    whole = np.asarray(value)
    shape = (count, *whole.shape)
    owner = random.integers(0, count, whole.shape)
    owns = np.arange(count).reshape((count,) + (1,) * whole.ndim) == owner
    if op == "sum":
        parts = np.asarray(_draw(random, jax.ShapeDtypeStruct(shape, whole.dtype))).copy()
        parts[0] = whole - parts[1:].sum(0, dtype=whole.dtype)
    elif op == "prod":
        parts = np.where(owns, whole, np.ones((), whole.dtype))
    elif op in ("max", "min"):
        by = random.integers(1, 5, shape).astype(whole.dtype)
        with np.errstate(over="ignore"):
            other = whole - by if op == "max" else whole + by
        kept = other <= whole if op == "max" else other >= whole  # unsigned integers may wrap
        parts = np.where(owns | ~kept, whole, other)
    else:
        mask = np.asarray(_draw(random, jax.ShapeDtypeStruct(shape, whole.dtype)))
        parts = np.where(owns, whole, whole & mask if op == "or" else whole | mask)
    return jnp.asarray(parts, value.dtype)


_REDUCE = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "or": np.bitwise_or,
    "and": np.bitwise_and,
}


def _compare(
    parts: np.ndarray, whole: np.ndarray, layout: Layout, axis_sizes: Mapping[str, int]
) -> str:
    """What is wrong with the devices' parts of a result, "" if nothing."""
    names = list(axis_sizes)
    grid = parts.reshape(*axis_sizes.values(), *parts.shape[1:])
    for axis, op in layout.partial:
        at = names.index(axis)
        shape = grid.shape
        reduced = _REDUCE[op].reduce(grid, axis=at, dtype=grid.dtype, keepdims=True)
        grid = np.broadcast_to(reduced, shape)
    for place in np.ndindex(*axis_sizes.values()):
        coordinates = dict(zip(names, place, strict=True))
        expected = whole
        for dim, axes in enumerate(layout.dims):
            block = 0
            for axis in axes:
                block = block * axis_sizes[axis] + coordinates[axis]
            size = whole.shape[dim] // layout.shards(dim, axis_sizes)
            expected = expected.take(range(block * size, (block + 1) * size), axis=dim)
        if not _close(grid[place], expected, whole):
            return f"is wrong on device {place}: {_largest_error(grid[place], expected)}"
    return ""


def _close(found: np.ndarray, expected: np.ndarray, whole: np.ndarray) -> bool:
    if found.shape != expected.shape:
        return False
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return bool(np.array_equal(found, expected))
    tolerance = min(ROUNDINGS * float(jnp.finfo(expected.dtype).eps), 0.05)
    wide = np.complex128 if jnp.issubdtype(expected.dtype, jnp.complexfloating) else np.float64
    found, expected, whole = (a.astype(wide) for a in (found, expected, whole))
    finite = np.abs(whole[np.isfinite(whole)])
    scale = max(1.0, float(finite.max())) if finite.size else 1.0
    return bool(np.allclose(found, expected, tolerance, tolerance * scale, equal_nan=True))


def _largest_error(found: np.ndarray, expected: np.ndarray) -> str:
    differs = np.asarray(found != expected)
    at = tuple(int(i) for i in np.argwhere(differs)[0]) if differs.any() else ()
    count = int(differs.sum())
    return (
        f"{count} of {differs.size} elements differ, at {at} {found[at]} instead of {expected[at]}"
    )


_KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "collective_permute",
}


@dataclass(frozen=True, slots=True)
class _Emitted:
    """One collective found in the program."""

    step: int
    kind: str
    axes: tuple[str, ...]
    eqn: Any

    def elements(self, group: int) -> int:
        """Elements of the tensor that is whole over the group, see `Exchange`."""
        if self.kind == "all_gather":
            return prod(self.eqn.outvars[0].aval.shape)
        count = sum(prod(v.aval.shape) for v in self.eqn.invars)
        return count * group if self.kind == "all_to_all" else count


def _collectives(jaxpr: Any, scope: str) -> dict[int, list[_Emitted]]:
    """All collectives in a program by the case they belong to."""
    found: dict[int, list[_Emitted]] = {}
    for eqn in jaxpr.eqns:
        path = f"{scope}/{eqn.source_info.name_stack}"
        if eqn.primitive.name in _KINDS:
            case = re.findall(r"case(\d+)_", path)
            step = re.findall(STEP_ATTRIBUTE + r"(\d+)", path)
            axes = eqn.params.get("axis_name", eqn.params.get("axes"))
            axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
            emitted = _Emitted(int(step[-1]) if step else -1, _KINDS[eqn.primitive.name], axes, eqn)
            found.setdefault(int(case[-1]) if case else -1, []).append(emitted)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    for case, more in _collectives(inner, path).items():
                        found.setdefault(case, []).extend(more)
    return found


def _misstated(
    application: _Application,
    case: _Case,
    axis_sizes: Mapping[str, int],
    emitted: Sequence[_Emitted],
) -> list[str]:
    """Where the collectives of a case are not those that its rule states."""
    rule, splits = application.rule, dict(case.splits)
    shards = _shards(case.splits, axis_sizes)
    sizes = [factor.size // shards.get(f, 1) for f, factor in enumerate(rule.factors)]
    stated = {}
    for (f, index), step in _steps(rule, shards).items():
        exchange = rule.factors[f].exchanges_for(shards[f])[index]
        elements = exchange.full_elements(sizes, shards[f])
        stated[step] = (exchange.kind, tuple(a for a in axis_sizes if a in splits[f]), elements)
    problems = []
    for collective in emitted:
        group = prod(axis_sizes[a] for a in collective.axes)
        axes = tuple(a for a in axis_sizes if a in collective.axes)  # nesting shows in the values
        fact = (collective.kind, axes, collective.elements(group))
        expected = stated.pop(collective.step, None)
        if expected is None:
            problems.append(f"{fact} is no exchange of the rule")
        elif expected != fact:
            problems.append(f"{fact} is stated as {expected}")
    return problems + [f"{fact} is stated and never runs" for fact in stated.values()]


def _find_missing(application: _Application, random: np.random.Generator) -> list[str]:
    """Labellings on one axis of 2 that no choice of the rule has, and that are right all the same."""
    rule = application.rule
    legal = {c.operands for c in choices(rule, tuple(f.size for f in rule.factors), 2)}
    takes: dict[Any, bool] = {}
    labellings = [
        labels
        for labels in itertools.product(*(_labels(a) for a in application.ins))
        if labels not in legal and _takes(application, labels, takes)
    ][:MOST_LABELLINGS]

    @jax.jit
    def run(whole: Sequence[jax.Array], given: Sequence[Sequence[jax.Array]]) -> Any:
        shards = [
            [_bind(application, _cut(values, labels, device)) for device in range(2)]
            for labels, values in zip(labellings, given, strict=True)
        ]
        return _bind(application, whole), shards

    others = tuple(_redrawn(random, a) for a in application.operands)
    verdicts = None
    for operands in (application.operands, others):
        given = [
            [_parts(random, value, _on_x(value, label), {"x": 2}) for value, label in pairs]
            for pairs in (zip(operands, labels, strict=True) for labels in labellings)
        ]
        whole, shards = jax.device_get(run(operands, given))
        right = [_right_labels(whole, parts) for parts in shards]
        verdicts = (
            right if verdicts is None else [a & b for a, b in zip(verdicts, right, strict=True)]
        )
    return [
        f"{application}: {_in_words('operand', labels)} would give {_in_words('result', results)}"
        for labels, found in zip(labellings, verdicts or (), strict=True)
        for results in sorted(found)
    ]


def _in_words(what: str, labels: Sequence[Label]) -> str:
    """Operands or results, and how each lies."""
    told = {"R": "whole", "P": "as a partial sum"}
    return listed(
        [
            f"{what} {i} " + told.get(label.kind, f"split along dim {label.dim}")
            for i, label in enumerate(labels)
        ]
    )


def _labels(aval: Aval) -> list[Label]:
    if aval.value is not None or not isinstance(aval.dtype, np.dtype):
        return [R]
    splits = [S(d) for d, n in enumerate(aval.shape) if n and n % 2 == 0]
    return [R, *splits, *([P("sum")] if aval.dtype != np.dtype(bool) else [])]


def _redrawn(random: np.random.Generator, value: jax.Array) -> jax.Array:
    """Other data of the same kind: floats anew, integers in another order."""
    if not isinstance(value.dtype, np.dtype):
        return value
    if value.dtype == np.dtype(bool):
        return ~value
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return _draw(random, jax.ShapeDtypeStruct(value.shape, value.dtype))
    return jnp.asarray(random.permuted(np.asarray(value).ravel()).reshape(value.shape))


def _on_x(value: jax.Array, label: Label) -> Layout:
    return Layout.replicated(value.ndim).with_label("x", label)


def _takes(
    application: _Application, labels: Sequence[Label], known: dict[tuple[Any, ...], bool]
) -> bool:
    """Whether the primitive takes operands of these local shapes together."""
    local = tuple(
        Layout.replicated(len(aval.shape)).with_label("x", label).local_shape(aval.shape, {"x": 2})
        for aval, label in zip(application.ins, labels, strict=True)
    )
    if local not in known:
        arguments = [
            jax.ShapeDtypeStruct(shape, a.dtype)
            for shape, a in zip(local, application.ins, strict=True)
        ]
        try:
            lowered = jax.jit(lambda *operands: _bind(application, operands)).lower(*arguments)
            known[local] = len(jax.tree.leaves(lowered.out_info)) == len(application.outs)
        except Exception:  # a primitive may refuse shapes by any error, some while it is lowered
            known[local] = False
    return known[local]


def _right_labels(
    whole: Sequence[np.ndarray], parts: Sequence[Sequence[np.ndarray]]
) -> set[tuple[Label, ...]]:
    """The labellings of the results under which the two devices' parts are right."""
    options = []
    for result, truth in enumerate(map(np.asarray, whole)):
        pieces = [np.asarray(device[result]) for device in parts]
        tells = truth.size and not np.all(truth == truth.ravel()[0])
        candidates = [R, *(S(d) for d in range(truth.ndim)), P("sum")]
        options.append([c for c in candidates if tells and _assembles(pieces, truth, c)])
    return set(itertools.product(*options))


def _bind(application: _Application, operands: Sequence[jax.Array]) -> list[jax.Array]:
    results = application.primitive.bind(*operands, **application.params)
    return list(map(_as_data, results if isinstance(results, list | tuple) else [results]))


def _cut(values: Sequence[jax.Array], labels: Sequence[Label], device: int) -> list[jax.Array]:
    local = []
    for value, label in zip(values, labels, strict=True):
        if label.kind == "P":
            value = value[device]
        elif label.kind == "S":
            size = value.shape[label.dim] // 2
            value = lax.slice_in_dim(value, device * size, (device + 1) * size, axis=label.dim)
        local.append(value)
    return local


def _assembles(parts: Sequence[np.ndarray], whole: np.ndarray, label: Label) -> bool:
    if label.kind == "R":
        return all(_close(p, whole, whole) for p in parts)
    if label.kind == "S":
        return _close(np.concatenate(parts, axis=label.dim), whole, whole)
    return whole.dtype != np.dtype(bool) and _close(parts[0] + parts[1], whole, whole)
