"""Tracing the serial function, and what to tell a person whose Python code asks a tracer for its value."""

import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from pypto_spmd.arguments import Arguments, Signed, described, is_array
from pypto_spmd.call import inlining
from pypto_spmd.errors import Fault, raise_faults, refuse, spmd_function
from pypto_spmd.hoisting import hoist_consts, lift_consts
from pypto_spmd.mesh import DeviceMesh

_PYTHON_VALUE = (
    "What it does must be known while the function is traced, before any array has a value."
)
_ASKED_FOR_VALUE: Mapping[type[Exception], tuple[str, str]] = {
    jax.errors.TracerBoolConversionError: (
        "lets Python branch on the value of a traced array",
        "use jnp.where(condition, a, b) or jax.lax.cond for if, jax.lax.while_loop for while; or, if the "
        "value is known before the call, make its argument static: static_argnames.",
    ),
    jax.errors.TracerIntegerConversionError: (
        "uses a traced array as a Python integer",
        "use jax.lax.fori_loop or jax.lax.dynamic_slice; or make the argument that it comes from static: "
        "static_argnames.",
    ),
    jax.errors.NonConcreteBooleanIndexError: (
        "indexes with a traced boolean mask, so that the shape of its result depends on values",
        "use jnp.where(mask, x, other), or x.at[...] and a reduction with where=mask.",
    ),
    jax.errors.TracerArrayConversionError: (
        "turns a traced array into a NumPy array",
        "use the jax.numpy function of the same name.",
    ),
    jax.errors.ConcretizationTypeError: (
        "asks for the value of a traced array",
        "keep it an array (no float(), int() or bool()), or make the argument that it comes from static: "
        "static_argnames.",
    ),
}
"""What the code does, and what to use instead, by JAX's error; the subclasses come first."""

_TYPE_ERRORS = {
    "Shapes must be 1D sequences of concrete values": (
        "makes an array whose shape is a traced value",
        "take sizes from x.shape; or make the argument that it comes from static: static_argnames.",
    ),
    "Tracer.__format__": (
        "writes the value of a traced array as text",
        'use jax.debug.print("{}", x), which prints it when the program runs.',
    ),
}
"""What the messages of JAX's and Python's TypeErrors have in them, and what is told instead."""

_LIBRARIES = (
    "jax",
    "jaxlib",
    "numpy",
    "flax",
    "optax",
    "orbax",
    "chex",
    "pypto_spmd",
    "contextlib",
)


@dataclass(frozen=True, slots=True)
class Traced:
    """A serial function at the shapes of one call.

    Args:
        jaxpr: its jaxpr, without consts.
        captured: the arrays that it takes from outside: the jaxpr's leading operands.
        captured_names: their names.
        result: what it returns, arrays described.
    """

    jaxpr: ClosedJaxpr
    captured: tuple[Any, ...]
    captured_names: tuple[str, ...]
    result: Any


def trace(
    function: Callable[..., Any],
    arguments: Arguments,
    leaves: Sequence[Signed],
    name: str,
    mesh: DeviceMesh,
    *,
    pads: bool = False,
) -> Traced:
    """Traces a function at one call's arguments.

    Args:
        function: the function, as it is to be traced.
        arguments: the call.
        leaves: shape, dtype and weak type of its arrays.
        name: the function's name, for messages.
        mesh: the mesh it is to run on.
        pads: whether dims that layouts do not divide are padded.

    Raises:
        ShardingError: if Python code asks a traced array for its value.
    """
    tree = jax.tree.structure(arguments.values)
    result_tree: list[Any] = []

    def flat(*flat_values: Any) -> list[Any]:
        result = arguments.call(function, jax.tree.unflatten(tree, flat_values))
        values, structure = jax.tree.flatten(result)
        raise_faults(spmd_function(name), _result_faults(result))
        result_tree.append(structure)
        return values

    flat.__wrapped__ = function  # so that JAX's own errors name the function and its line

    structs = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in leaves]
    try:
        with inlining(mesh, pads):
            closed = jax.make_jaxpr(flat)(*structs)
    except tuple(_ASKED_FOR_VALUE) as error:
        does, instead = next(
            told for cls, told in _ASKED_FOR_VALUE.items() if isinstance(error, cls)
        )
        _explain(error, name, does, instead)
    except TypeError as error:
        told = next((told for part, told in _TYPE_ERRORS.items() if part in str(error)), None)
        if told is None:
            raise
        _explain(error, name, *told)
    jaxpr, captured = hoist_consts(lift_consts(closed))
    results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jaxpr.out_avals]
    names = _captured_names(function, captured)
    return Traced(jaxpr, captured, names, jax.tree.unflatten(result_tree[-1], results))


def _result_faults(result: Any) -> list[Fault]:
    """The results that are no arrays."""
    faults = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        if not is_array(leaf):
            what = f"result{jax.tree_util.keystr(path)} is {described(leaf)}."
            why = "An @spmd function returns arrays, numbers, and pytrees of them."
            fix = "leave it out of the result, and make it outside the @spmd function."
            faults.append(Fault(what, why, fix))
    return faults


def _explain(error: Exception, name: str, does: str, instead: str) -> NoReturn:
    place = _user_line(error.__traceback__)
    where = "the function" if place is None else f"{Path(place[0]).name}:{place[1]}"
    code = linecache.getline(*place).strip() if place else ""
    what = f"{where} {does}" + (f": {code}" if code else ".")
    try:
        refuse(spmd_function(name), what, _PYTHON_VALUE, instead)
    except ValueError as told:
        raise told from error


def _user_line(traceback: TracebackType | None) -> tuple[str, int] | None:
    """File and line of the innermost frame in the user's own code."""
    found = None
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _LIBRARIES:
            found = (traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def _captured_names(function: Callable[..., Any], captured: Sequence[Any]) -> tuple[str, ...]:
    """Names of captured arrays: of the variable that holds them, where it is one of the function's."""
    code = inspect.unwrap(function)
    try:
        variables = inspect.getclosurevars(code)
    except TypeError:  # not a plain function
        known: dict[int, str] = {}
    else:
        known = {id(v): n for n, v in {**variables.globals, **variables.nonlocals}.items()}
    # JAX takes a NumPy array from outside as a view of it.
    arrays = [c if isinstance(c, jax.Array) else np.asarray(c).base for c in captured]
    return tuple(known.get(id(a), f"captured array {i}") for i, a in enumerate(arrays))
