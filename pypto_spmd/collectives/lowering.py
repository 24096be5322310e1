"""A program, run: its schedule walked item by item under JAX's tracing.

`shard_mapped` is the program as it is planned: every device works on its own blocks inside `shard_map`,
and each leg is the collective that the plan says. `lower_with_constraints` walks the same schedule over
whole arrays and tells XLA's partitioner the layouts instead.

Invariant: a tensor is looked up by its number and the layout in which it is read. What is never read
again is dropped, so that tracing holds no more than the program does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.sharding import Mesh, NamedSharding

from pypto_spmd.collectives.by_hand import communicate, names_axes
from pypto_spmd.collectives.effects import (
    ACTIONS,
    INSPECTION,
    act,
    first_token,
    is_ordered,
    sent_to_all,
)
from pypto_spmd.collectives.graph import Atom, Block, Constant, Equation, Graph
from pypto_spmd.collectives.legs import place, run_leg
from pypto_spmd.collectives.program import BlockSchedule, Convert, Program, Run, RunLoop
from pypto_spmd.collectives.rules.context import Context
from pypto_spmd.collectives.tagging import step_scope
from pypto_spmd.sharding.layout import Layout

Value = tuple[int, Layout]
"""A tensor in one layout."""


@dataclass(frozen=True, slots=True, eq=False)
class _Barrier:
    """Barriers that hold back all their operands together."""

    runs: tuple[Run, ...]

    def makes(self, tensor: int) -> bool:
        """Whether a tensor comes out of it."""
        return any(tensor in run.equation.outputs for run in self.runs)


_Item = Convert | Run | RunLoop | _Barrier


def lower(program: Program) -> Callable[..., tuple[Any, ...]]:
    """The program as a function of one device's blocks, to be traced inside `shard_map`.

    Args:
        program: a planned function.

    Returns:
        A function from the flat arguments' local blocks to the results', every mesh axis being manual.
    """
    return _OnShards(program).run


def shard_mapped(program: Program, jax_mesh: Mesh) -> Callable[..., tuple[Any, ...]]:
    """The program as a function of whole arrays, each device of the mesh working on its blocks.

    Args:
        program: a planned function.
        jax_mesh: a mesh with the program's axes.

    Returns:
        A function from the flat arguments to the flat results, to be run under `jax.jit`.
    """
    return jax.shard_map(
        lower(program),
        mesh=jax_mesh,
        in_specs=tuple(layout.spec for layout in program.schedule.inputs),
        out_specs=tuple(layout.spec for layout in program.schedule.outputs),
        check_vma=False,
    )


def lower_with_constraints(program: Program, jax_mesh: Mesh) -> Callable[..., tuple[Any, ...]]:
    """The serial function with the program's layouts as constraints, for XLA's partitioner.

    Args:
        program: a planned function.
        jax_mesh: a mesh with the program's axes.

    Returns:
        A function from the flat arguments to the flat results, to be run under `jax.jit`.
    """
    return _OnWholes(program, jax_mesh).run


class _Walk(ABC):
    """The walk over a schedule; subclasses say what a layout means for the arrays."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph: Graph = program.graph
        self.axis_sizes: Mapping[str, int] = program.axis_sizes
        self.exchanged: dict[
            int, Any
        ] = {}  # what rules' own collectives gave in this block, by step
        self.token: Any = None  # of the last ordered action, None before the first

    @abstractmethod
    def place(self, value: Any, layout: Layout) -> Any:
        """A whole value in a layout."""

    @abstractmethod
    def convert(self, item: Convert, x: Any) -> Any:
        """One change of layout."""

    @abstractmethod
    def apply(self, item: Run, operands: list[Any]) -> Sequence[Any]:
        """One equation that is no loop."""

    @abstractmethod
    def region(self, item: RunLoop, operands: list[Any]) -> Sequence[Any]:
        """A region: its body on the values of one device."""

    @abstractmethod
    def owners(self, layout: Layout) -> tuple[str, ...]:
        """The axes over which the slices of a scanned stack are dealt out."""

    @abstractmethod
    def owned_slice(self, stack: Any, index: Any, owners: tuple[str, ...]) -> Any:
        """The slice of a dealt out stack at a global index: zero where another device has it."""

    def run(self, *arguments: Any) -> tuple[Any, ...]:
        """The whole program on its flat arguments."""
        return self.block(self.program.schedule, self.graph.block, arguments, "")

    def block(
        self, schedule: BlockSchedule, block: Block, arguments: Sequence[Any], scope: str
    ) -> tuple[Any, ...]:
        """Runs a block; `scope` is the name scope of the loop it stands in."""
        environment: dict[Value, Any] = {}
        outer, self.exchanged = self.exchanged, {}
        for tensor, layout, x in zip(block.inputs, schedule.inputs, arguments, strict=True):
            environment[tensor, layout] = x
        items = _joined(schedule.items)
        for item, dead in zip(items, _deaths(items, schedule, block), strict=True):
            operands = [self._read(environment, *value) for value in _read_by(item)]
            if isinstance(item, Convert):
                results: Sequence[Any] = [self.convert(item, operands[0])]
            elif isinstance(item, _Barrier):
                with _context(item.runs[0].equation, scope):
                    results = lax.optimization_barrier(operands)
            else:
                with _context(item.equation, scope):
                    if isinstance(item, Run):
                        results = self.apply(item, operands)
                    else:
                        results = self._loop(item, operands)
            environment.update(zip(_made_by(item), results, strict=True))
            for value in dead:
                environment.pop(value, None)
        self.exchanged = outer
        return tuple(
            self._read(environment, atom, layout)
            for atom, layout in zip(block.outputs, schedule.outputs, strict=True)
        )

    def _read(self, environment: Mapping[Value, Any], atom: Atom, layout: Layout) -> Any:
        if isinstance(atom, Constant):
            return self.place(_typed(atom), layout)
        return environment[atom, layout]

    def _loop(self, item: RunLoop, operands: list[Any]) -> Sequence[Any]:
        run = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "shard_map": self.region,
        }
        return run[item.equation.name](item, operands)

    def _scan(self, item: RunLoop, operands: list[Any]) -> Sequence[Any]:
        equation = item.equation
        consts, carry, _ = equation.counts
        first_xs = consts + carry
        held, stacks = operands[:consts], operands[first_xs:]
        owners = [self.owners(layout) for layout in item.operands[first_xs:]]
        length = equation.params["length"]
        body, schedule = equation.bodies[0], item.bodies[0]

        def trip(values: tuple[Any, Any], scanned: tuple[Any, list[Any]]) -> tuple[Any, Any]:
            self.token, carried = values
            index, slices = scanned[0], iter(scanned[1])
            xs = [
                self.owned_slice(stack, index, axes) if axes else next(slices)
                for stack, axes in zip(stacks, owners, strict=True)
            ]
            results = self.block(schedule, body, (*held, *carried, *xs), equation.scope)
            return (self.token, results[:carry]), results[carry:]

        # A stack that is dealt out cannot be scanned along: its slices are found by their index.
        index = jnp.arange(length, dtype=np.int32) if any(owners) else None
        scanned = [stack for stack, axes in zip(stacks, owners, strict=True) if not axes]
        (self.token, last), piles = lax.scan(
            trip,
            (self._token_for(equation), tuple(operands[consts:first_xs])),
            (index, scanned),
            length=length,
            reverse=equation.params["reverse"],
            unroll=equation.params.get("unroll", 1),
        )
        return (*last, *piles)

    def _while(self, item: RunLoop, operands: list[Any]) -> Sequence[Any]:
        equation = item.equation
        cond_consts, body_consts, _ = equation.counts
        cond_held = operands[:cond_consts]
        body_held = operands[cond_consts : cond_consts + body_consts]

        def goes_on(values: tuple[Any, Any]) -> Any:
            # A predicate hands no token on: its actions come after those before them, and that is all.
            self.token, carried = values
            arguments = (*cond_held, *carried)
            return self.block(item.bodies[0], equation.bodies[0], arguments, equation.scope)[0]

        def trip(values: tuple[Any, Any]) -> tuple[Any, Any]:
            self.token, carried = values
            arguments = (*body_held, *carried)
            results = self.block(item.bodies[1], equation.bodies[1], arguments, equation.scope)
            return self.token, results

        start = self._token_for(equation), tuple(operands[cond_consts + body_consts :])
        self.token, last = lax.while_loop(goes_on, trip, start)
        return last

    def _cond(self, item: RunLoop, operands: list[Any]) -> Sequence[Any]:
        equation = item.equation

        def branch(schedule: BlockSchedule, body: Block) -> Callable[..., tuple[Any, Any]]:
            def run(token: Any, *values: Any) -> tuple[Any, Any]:
                self.token = token
                results = self.block(schedule, body, values, equation.scope)
                return self.token, results

            return run

        branches = [branch(s, b) for s, b in zip(item.bodies, equation.bodies, strict=True)]
        index, *values = operands
        index = lax.convert_element_type(index, np.int32)
        # Of two branches the false one comes first; an index out of range means the nearest branch.
        self.token, results = lax.switch(index, branches, self._token_for(equation), *values)
        return results

    def _token_for(self, equation: Equation) -> Any:
        """The token that goes into a loop: there is one if its bodies act in order."""
        if self.token is None and equation.acts_in_order:
            self.token = first_token()
        return self.token

    def inspect(self, item: Run) -> Sequence[Any]:
        """Tells how an array lies."""
        mesh = self.program.mesh.jax_mesh
        item.equation.params["callback"](NamedSharding(mesh, item.operands[0].spec))
        return ()

    def act(self, item: Run, operands: list[Any], axes: tuple[str, ...] = ()) -> Sequence[Any]:
        """Runs an equation that acts on the world, on the first device along the axes."""
        primitive, params = item.equation.primitive, item.equation.params
        if not is_ordered(params):
            return act(primitive, params, operands, None, axes)[0]
        token = first_token() if self.token is None else self.token
        results, self.token = act(primitive, params, operands, token, axes)
        return results


class _OnShards(_Walk):
    """Arrays are one device's blocks, inside `shard_map`."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.by_hand: Set[str] = frozenset()  # the axes of the regions that are being run

    def place(self, value: Any, layout: Layout) -> Any:
        return place(value, layout, self.axis_sizes) if layout.axes else value

    def convert(self, item: Convert, x: Any) -> Any:
        return run_leg(item.leg, x, self.axis_sizes, item.step)

    def region(self, item: RunLoop, operands: list[Any]) -> Sequence[Any]:
        equation = item.equation
        outer, self.by_hand = self.by_hand, self.by_hand | set(equation.entered.axes)
        results = self.block(item.bodies[0], equation.bodies[0], operands, equation.scope)
        self.by_hand = outer
        return results

    def owners(self, layout: Layout) -> tuple[str, ...]:
        return layout.dims[0]

    def owned_slice(self, stack: Any, index: Any, owners: tuple[str, ...]) -> Any:
        held = stack.shape[0]
        mine = lax.dynamic_index_in_dim(stack, index % held, keepdims=False)
        return lax.select(index // held == lax.axis_index(owners), mine, lax.full_like(mine, 0))

    def apply(self, item: Run, operands: list[Any]) -> Sequence[Any]:
        equation, rule = item.equation, item.equation.rule
        assert rule is not None, equation.name
        if equation.name == "sharding_constraint":
            return operands
        if equation.name in ACTIONS:
            return self._act_once(item, operands)
        if equation.name == INSPECTION:
            return self.inspect(item)
        if names_axes(equation.name):
            with step_scope(item.by_hand) if item.by_hand >= 0 else nullcontext():
                results = communicate(
                    equation.primitive, equation.params, operands, self.axis_sizes
                )
        elif rule.bind is None:
            results = _bind(equation, operands, _without_shardings(equation.params))
        else:
            context = Context(
                equation.primitive,
                equation.params,
                tuple(self.graph.aval(atom) for atom in equation.inputs),
                tuple(self.graph.avals[tensor] for tensor in equation.outputs),
                rule,
                item.splits,
                self.axis_sizes,
                item.steps,
                self.exchanged,
            )
            results = _several(rule.bind(context, *operands))
        for tensor, layout, x in zip(equation.outputs, item.results, results, strict=True):
            wanted = layout.local_shape(self.graph.avals[tensor].shape, self.axis_sizes)
            assert x.shape == wanted, f"{equation.name} made {x.shape} where {wanted} was planned"
        return results

    def _act_once(self, item: Run, operands: list[Any]) -> Sequence[Any]:
        """Acts on the first device of the mesh only; in a region on each, with its own values."""
        axes = tuple(a for a, n in self.axis_sizes.items() if n > 1 and a not in self.by_hand)
        results = self.act(item, operands, axes)
        if item.by_hand < 0:
            return results
        with step_scope(item.by_hand):
            return [sent_to_all(x, axes) for x in results]


class _OnWholes(_Walk):
    """Arrays are whole, and layouts are constraints; a partial one says nothing to XLA."""

    def __init__(self, program: Program, jax_mesh: Mesh) -> None:
        super().__init__(program)
        self.jax_mesh = jax_mesh

    @property
    def region_mesh(self) -> Mesh | None:
        """On which mesh a region runs, None for the current one."""
        return self.jax_mesh

    def place(self, value: Any, layout: Layout) -> Any:
        return value

    def convert(self, item: Convert, x: Any) -> Any:
        return self._constrained(x, item.leg.target)

    def region(self, item: RunLoop, operands: list[Any]) -> Sequence[Any]:
        equation, region = item.equation, item.equation.entered

        def body(*values: Any) -> tuple[Any, ...]:
            inside = _InRegion(self.program, self.jax_mesh)
            return inside.block(item.bodies[0], equation.bodies[0], values, equation.scope)

        return jax.shard_map(
            body,
            mesh=self.region_mesh,
            in_specs=tuple(layout.spec for layout in region.inputs),
            out_specs=tuple(layout.spec for layout in region.outputs),
            axis_names=set(region.axes),
            check_vma=False,
        )(*operands)

    def owners(self, layout: Layout) -> tuple[str, ...]:
        return ()

    def owned_slice(self, stack: Any, index: Any, owners: tuple[str, ...]) -> Any:
        raise AssertionError("whole stacks are scanned along")

    def apply(self, item: Run, operands: list[Any]) -> Sequence[Any]:
        equation = item.equation
        if equation.name == "sharding_constraint":
            results: Sequence[Any] = operands
        elif equation.name in ACTIONS:
            results = self.act(item, operands)
        elif equation.name == INSPECTION:
            results = self.inspect(item)
        elif names_axes(equation.name):
            results = communicate(equation.primitive, equation.params, operands, self.axis_sizes)
        else:
            results = _bind(equation, operands, equation.params)
        return [self._constrained(x, y) for x, y in zip(results, item.results, strict=True)]

    def _constrained(self, x: Any, layout: Layout) -> Any:
        if layout.partial:
            return x
        return lax.with_sharding_constraint(x, NamedSharding(self.jax_mesh, layout.spec))


class _InRegion(_OnWholes):
    """Arrays are one device's on the axes of a region, and whole on all others: XLA lays them out."""

    @property
    def region_mesh(self) -> None:
        """Regions in this one are on the mesh that is current by then."""
        return None

    def _constrained(self, x: Any, layout: Layout) -> Any:
        return x


def _joined(items: Sequence[Convert | Run | RunLoop]) -> list[_Item]:
    """The items with the barriers of one recomputation made one.

    Apart, each would hold back its own operand only: what is recomputed could then start long before
    the backward pass comes to it, and hold its memory until then.
    """
    joined: list[_Item] = []
    for item in items:
        last = joined[-1] if joined else None
        if isinstance(item, Run) and item.equation.name == "optimization_barrier":
            if isinstance(last, _Barrier) and last.runs[0].equation.source is item.equation.source:
                joined[-1] = _Barrier((*last.runs, item))
            else:
                joined.append(_Barrier((item,)))
        elif (
            isinstance(item, Convert) and isinstance(last, _Barrier) and not last.makes(item.tensor)
        ):
            joined.insert(-1, item)
        else:
            joined.append(item)
    return joined


def _read_by(item: _Item) -> list[tuple[Atom, Layout]]:
    if isinstance(item, Convert):
        return [(item.tensor, item.leg.source)]
    if isinstance(item, _Barrier):
        return [value for run in item.runs for value in _read_by(run)]
    return list(zip(item.equation.inputs, item.operands, strict=True))


def _made_by(item: _Item) -> list[Value]:
    if isinstance(item, Convert):
        return [(item.tensor, item.leg.target)]
    if isinstance(item, _Barrier):
        return [value for run in item.runs for value in _made_by(run)]
    return list(zip(item.equation.outputs, item.results, strict=True))


def _deaths(items: Sequence[_Item], schedule: BlockSchedule, block: Block) -> list[list[Any]]:
    """For each item of a schedule, the values that nothing after it reads."""
    alive: set[Any] = set(zip(block.outputs, schedule.outputs, strict=True))
    dead: list[list[Any]] = []
    for item in reversed(items):
        touched = (*_read_by(item), *_made_by(item))
        dead.append([value for value in touched if value not in alive])
        alive.update(touched)
    return dead[::-1]


def _bind(equation: Equation, operands: list[Any], params: Mapping[str, Any]) -> Sequence[Any]:
    bound = equation.primitive.get_bind_params(dict(params))
    return _several(equation.primitive.bind(*operands, **bound))


def _several(results: Any) -> Sequence[Any]:
    return results if isinstance(results, list | tuple) else (results,)


def _without_shardings(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Params without the shardings of whole arrays, which blocks do not have."""
    named = [k for k in ("sharding", "out_sharding") if params.get(k) is not None]
    return {**params, **dict.fromkeys(named)} if named else params


def _typed(constant: Constant) -> Any:
    """The constant's value with the dtype it was traced with: a Python number has none of its own."""
    dtype = constant.aval.dtype
    if isinstance(constant.value, jax.Array) or not isinstance(dtype, np.dtype):
        return constant.value
    return np.asarray(constant.value, dtype)


def _context(equation: Equation, outer: str) -> AbstractContextManager[Any]:
    """Has what is traced inside stand where the user wrote the equation, in their name scope."""
    info = equation.source.info
    inner = equation.scope
    if outer and (inner == outer or inner.startswith(outer + "/")):
        inner = inner[len(outer) + 1 :]
    names = source_info_util.current_name_stack()
    return source_info_util.user_context(
        None if info is None else info.traceback,
        name_stack=names + source_info_util.new_name_stack(inner) if inner else names,
    )
