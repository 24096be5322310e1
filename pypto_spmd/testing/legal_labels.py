"""The labellings that a rule allows, run on shards and compared with the whole."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.testing.applications import AXES, Application, Case, cases_of, shards_of, steps_of
from pypto_spmd.testing.comparison import compare
from pypto_spmd.testing.emitted import collectives_of, misstated
from pypto_spmd.testing.random_data import as_data, parts_of

_QUICKLY: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
"""Each program runs once, so that compiling it is most of the time."""


def check_legal(
    application: Application,
    mesh_shape: tuple[int, ...],
    most_nested: int | None,
    random: np.random.Generator,
) -> tuple[int, list[tuple[Case, str, bool]]]:
    """How many labellings were run; and of each that was not right what is wrong, and whether it failed."""
    axis_sizes: dict[str, int] = dict(zip(AXES, mesh_shape, strict=False))
    mesh = DeviceMesh.simulate(mesh_shape, tuple(axis_sizes)).jax_mesh
    cases = cases_of(application, axis_sizes)
    if most_nested is not None:
        nested = [case for case in cases if case.is_nested]
        kept = {nested[i] for i in random.permutation(len(nested))[:most_nested]}
        cases = tuple(case for case in cases if case in kept or not case.is_nested)
    feeds: dict[Any, jax.Array] = {}  # one argument of the program per operand and kind of partial
    for case in cases:
        for position, layout in enumerate(case.operands):
            key = (position, layout.partial)
            if key not in feeds:
                feeds[key] = parts_of(random, application.operands[position], layout, axis_sizes)
    failures: dict[Case, str] = {}

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
        return [[as_data(r)[None] for r in results] for results in made]

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
    emitted = collectives_of(traced.jaxpr.jaxpr, "")
    whole = [np.asarray(as_data(r)) for r in application.results]
    where = "×".join(map(str, mesh_shape))
    wrong = []
    for number, case in enumerate(cases):
        problems = [failures[case]] if case in failures else []
        for result, (parts, truth) in enumerate(zip(stacked[number], whole, strict=False)):
            problem = compare(np.asarray(parts), truth, case.results[result], axis_sizes)
            if problem:
                problems.append(f"result {result} {problem}")
        problems += misstated(application, case, axis_sizes, emitted.get(number, []))
        doing = case.in_words(application.rule)
        failed = case in failures
        wrong += [
            (case, f"{application}, {doing} on {where} devices: {p}", failed) for p in problems
        ]
    return len(cases), wrong


def _run_case(
    application: Application,
    case: Case,
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
        steps_of(application.rule, shards_of(case.splits, axis_sizes)),
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
