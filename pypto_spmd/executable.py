"""One planned call as a compiled program that takes the function's own arguments.

The program is compiled ahead of time for its shapes. JAX runs such a program without Python on the way,
refuses tracers and arguments of another shape or layout, and never compiles it a second time because
an array comes from another place than before.
"""

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.stages import Compiled, Lowered

from pypto_spmd.call import Call, program_of, shardings
from pypto_spmd.collectives.plan import CommPlan
from pypto_spmd.simulated import one_at_a_time

_UNUSABLE = "Some donated buffers were not usable"


@dataclass(frozen=True, eq=False)
class Executable:
    """A planned call, compiled when it is first run.

    Args:
        call: the call; its leading operands are the captured arrays.
        captured: these arrays.
        arguments_tree: the structure of the tuple of arguments.
        result_tree: the structure of the result.
        donated: places of the arguments whose memory may be used for results.
    """

    call: Call
    captured: tuple[Any, ...]
    arguments_tree: Any
    result_tree: Any
    donated: tuple[int, ...]

    @property
    def plan(self) -> CommPlan:
        """What it communicates."""
        return program_of(self.call).plan

    @cached_property
    def promotes(self) -> bool:
        """Whether the function has numbers of one kind in several dtypes, so that weak types may matter."""
        kinds = Counter(
            "inexact" if jax.numpy.issubdtype(dtype, jax.numpy.inexact) else "integer"
            for dtype in _dtypes(self.call.jaxpr.jaxpr)
            if jax.numpy.issubdtype(dtype, jax.numpy.number)
        )
        return any(count > 1 for count in kinds.values())

    @cached_property
    def argument_shardings(self) -> tuple[Any, ...]:
        """The planned sharding of every array, in the structure of the arguments."""
        inputs, _ = shardings(self.call)
        return jax.tree.unflatten(self.arguments_tree, inputs[len(self.captured) :])

    @property
    def result_shardings(self) -> Any:
        """The planned sharding of every array of the result, in its structure."""
        return jax.tree.unflatten(self.result_tree, shardings(self.call)[1])

    @cached_property
    def lowered(self) -> Lowered:
        """The program before compilation; captured arrays are its leading arguments."""
        captured = len(self.captured)
        inputs, _ = shardings(self.call)

        @_named(self.call.options.function_name)
        def run(*values: Any) -> Any:
            return jax.tree.unflatten(self.result_tree, self.call(*jax.tree.leaves(values)))

        structs = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type)
            for a in self.call.jaxpr.in_avals
        ]
        jitted = jax.jit(
            run,
            in_shardings=(*inputs[:captured], *self.argument_shardings),
            out_shardings=self.result_shardings,
            donate_argnums=tuple(captured + place for place in self._donatable()),
        )
        with self.call.options.scope(), warnings.catch_warnings():
            # An argument may have leaves that no result can use beside others that one can.
            warnings.filterwarnings("ignore", _UNUSABLE)
            described = jax.tree.unflatten(self.arguments_tree, structs[captured:])
            return jitted.lower(*structs[:captured], *described)

    @cached_property
    def compiled(self) -> Compiled:
        """The compiled program; captured arrays are its leading arguments."""
        with self.call.options.scope(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", _UNUSABLE)
            return self.lowered.compile()

    @cached_property
    def run(self) -> Callable[..., Any]:
        """The compiled program as a function of the arguments that hold arrays."""
        run: Callable[..., Any] = self.compiled
        if self.captured:
            inputs, _ = shardings(self.call)
            placed = jax.device_put(self.captured, inputs[: len(self.captured)])
            run = functools.partial(run, *placed)
        if self.call.options.mesh.is_simulated:
            run = one_at_a_time(run, self.call.jaxpr.out_avals)
        if not self.call.options.x64:
            return run

        def run_with_x64(*values: Any) -> Any:
            with jax.enable_x64(True):
                return run(*values)

        return run_with_x64

    def place(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, moved to where the program wants them."""
        with self.call.options.scope():
            return jax.device_put(values, self.argument_shardings)

    def _donatable(self) -> list[int]:
        """The donated arguments of which at least one array can become a result as it lies."""
        inputs, outputs = shardings(self.call)
        jaxpr = self.call.jaxpr
        form = lambda aval, sharding: (aval.shape, aval.dtype, sharding.spec)  # noqa: E731
        free = Counter(map(form, jaxpr.out_avals, outputs))
        leaves = [form(a, s) for a, s in zip(jaxpr.in_avals, inputs, strict=True)]
        arguments = jax.tree.unflatten(self.arguments_tree, range(len(leaves) - len(self.captured)))
        usable = []
        for place in self.donated:
            found = False
            for leaf in jax.tree.leaves(arguments[place]):
                wanted = leaves[len(self.captured) + leaf]
                if free[wanted] > 0:
                    free[wanted] -= 1
                    found = True
            if found:
                usable.append(place)
        return usable


def _dtypes(jaxpr: Jaxpr) -> set[Any]:
    """The dtypes of all that a function computes, and of what it takes and gives."""
    atoms = [*jaxpr.invars, *jaxpr.outvars]
    inner = []
    for eqn in jaxpr.eqns:
        atoms += [*eqn.invars, *eqn.outvars]
        inner += [
            leaf
            for leaf in jax.tree.leaves(list(eqn.params.values()))
            if isinstance(leaf, Jaxpr | ClosedJaxpr)
        ]
    found = {atom.aval.dtype for atom in atoms if hasattr(atom.aval, "dtype")}
    bodies = (leaf.jaxpr if isinstance(leaf, ClosedJaxpr) else leaf for leaf in inner)
    return found.union(*map(_dtypes, bodies))


def _named(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a function the name that its program has in profiles and in the HLO."""

    def rename(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__name__ = name
        return function

    return rename
