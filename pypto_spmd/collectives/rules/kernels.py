"""Calls of foreign functions and of Pallas kernels: rules by the target's or the kernel's name.

What a foreign function computes is only told by its user, and so is what a kernel's grid means. On shards
a foreign call is made with the local shapes of its results. A Pallas call keeps its kernel, which was
traced for blocks of one size, and its grid gets smaller: so a dim can be split between blocks, where
one grid axis walks along it, and where the kernel does not ask how far along it is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import Literal

from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.rules.factor import Factor, Rule, whole_rule
from pypto_spmd.collectives.rules.registry import NO_RULE, Aval, RuleFunction, rule
from pypto_spmd.collectives.rules.user_rule import UserRule

FOREIGN: dict[str, UserRule] = {}
"""Rules of foreign functions by their target's name."""

KERNELS: dict[str, UserRule] = {}
"""Rules of Pallas calls by their kernel's name."""

Params = Mapping[str, Any]


def _ffi_call(params: Params, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    stated = FOREIGN.get(params["target_name"])
    if stated is None:
        return _without(f"ffi_call {params['target_name']!r}", ins, outs)

    def bind(ctx: Context, *operands: jax.Array) -> Any:
        local = _local_avals(ctx, params["result_avals"])
        return ctx.bind(*operands, **{**stated.local_values(ctx), "result_avals": local})

    return stated.at(ins, outs, bind=bind, knows_results=True)


def _pallas_call(params: Params, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    name = kernel_name(params)
    stated = KERNELS.get(name)
    if stated is None:
        return _without(f"pallas_call {name!r}", ins, outs)
    made = stated.at(ins, outs, bind=_bind_pallas, knows_results=True)
    return made if stated.bind is not None else _between_blocks(made, params)


RULES: Mapping[str, RuleFunction] = {"ffi_call": _ffi_call, "pallas_call": _pallas_call}
"""The rule functions of the primitives that call by name."""

for _name, _function in RULES.items():
    rule(_name)(_function)


def kernel_name(params: Params) -> str:
    """The name given to a Pallas call, or else that of its kernel function."""
    return params.get("name") or params["jaxpr"].debug_info.func_src_info.partition(" at ")[0]


def _without(what: str, ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    return whole_rule([a.shape for a in ins], [a.shape for a in outs], NO_RULE + what)


def _local_avals(ctx: Context, avals: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(aval.update(shape=ctx.out_shape(i)) for i, aval in enumerate(avals))


def _between_blocks(made: Rule, params: Params) -> Rule:
    """The rule with every dim as its blocks, which may be dealt out, and what is inside of one."""
    grid = params["grid_mapping"]
    asked = set(_axes_asked_for(params["jaxpr"]))
    tensors = (*made.operands, *made.results)
    mappings = [None] * (len(tensors) - len(grid.block_mappings)) + list(grid.block_mappings)
    walked: dict[int, set[tuple[int, int]]] = {}  # factor -> (grid axis, block size) wherever it is
    walkers: dict[int, set[int]] = {}  # grid axis -> the factors that it walks along
    for dims, mapping in zip(tensors, mappings, strict=True):
        for d, dim in enumerate(dims):
            axis, block = (-1, 0) if mapping is None else _walk(mapping, d)
            for f in dim:
                walked.setdefault(f, set()).add((axis, block) if len(dim) == 1 else (-1, 0))
            for other in () if mapping is None else _axes_in(mapping, d):
                walkers.setdefault(other, set()).update(dim or (-1,))
    factors: list[Factor] = []
    parts: dict[int, tuple[int, ...]] = {}
    for f, factor in enumerate(made.factors):
        ((axis, block), *others) = walked[f]
        splits = (
            factor.splittable
            and not others
            and axis >= 0
            and grid.grid[axis] * block == factor.size
            and walkers[axis] == {f}
            and (axis not in asked or bool(factor.reduce))
        )
        if splits:
            inside = replace(factor, name=f"{factor.name}_inside", size=block, splittable=False)
            parts[f] = (len(factors), len(factors) + 1)
            factors += [replace(factor, size=grid.grid[axis]), inside]
        else:
            parts[f] = (len(factors),)
            factors.append(replace(factor, splittable=False))
    dims = lambda dim: tuple(p for f in dim for p in parts[f])  # noqa: E731
    return replace(
        made,
        operands=tuple(tuple(map(dims, t)) for t in made.operands),
        results=tuple(tuple(map(dims, t)) for t in made.results),
        factors=tuple(factors),
    )


def _bind_pallas(ctx: Context, *operands: jax.Array) -> Any:
    grid = ctx.params["grid_mapping"]
    tensors = (*ctx.rule.operands, *ctx.rule.results)
    shapes = [ctx.in_shape(i) for i in range(len(operands))]
    shapes += [ctx.out_shape(i) for i in range(len(ctx.outs))]
    first = len(tensors) - len(grid.block_mappings)
    sizes = list(grid.grid)
    mappings = []
    for mapping, dims, shape in zip(
        grid.block_mappings, tensors[first:], shapes[first:], strict=True
    ):
        for d, dim in enumerate(dims):
            axis, block = _walk(mapping, d)
            if any(f in ctx.splits for f in dim):
                sizes[axis] = shape[d] // block
        mappings.append(replace(mapping, array_aval=mapping.array_aval.update(shape=shape)))
    return ctx.bind(
        *operands,
        grid_mapping=replace(grid, grid=tuple(sizes), block_mappings=tuple(mappings)),
        out_avals=_local_avals(ctx, ctx.params["out_avals"]),
    )


def _walk(mapping: Any, dim: int) -> tuple[int, int]:
    """The grid axis that walks along a dim block by block, and a block's size; (-1, 0) if none does."""
    index_map = mapping.index_map_jaxpr.jaxpr
    block = getattr(mapping.block_shape[dim], "block_size", 1)  # 1 where the block lacks the dim
    index = index_map.outvars[dim]
    if isinstance(index, Literal) or index not in index_map.invars:
        return -1, 0
    return index_map.invars.index(index), int(block)


def _axes_in(mapping: Any, dim: int) -> Iterator[int]:
    """The grid axes that a dim's block depends on; all of them where it is computed."""
    index_map = mapping.index_map_jaxpr.jaxpr
    index = index_map.outvars[dim]
    if isinstance(index, Literal):
        return
    if index in index_map.invars:
        yield index_map.invars.index(index)
    else:
        yield from range(len(index_map.invars))


def _axes_asked_for(jaxpr: Any) -> Iterator[int]:
    """The grid axes along which a kernel asks where it is, or how far it goes."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("program_id", "num_programs"):
            yield eqn.params["axis"]
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _axes_asked_for(inner)
