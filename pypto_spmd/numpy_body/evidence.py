"""Whether a function is NumPy code: what its code refers to, and what it does with its arguments.

Code that refers to JAX at all is JAX code. Code that refers to NumPy and not to JAX is read as NumPy
code; what code that refers to no library (`a @ b`) means depends on the arrays that it is given.
"""

import dis
import functools
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.sharding import PartitionSpec

_JAX_LIBRARIES = frozenset(
    {"jax", "jaxlib", "flax", "optax", "haiku", "equinox", "chex", "distrax", "jraph", "penzai"}
)
# SciPy is written in NumPy, and JAX has twins of many of its functions.
NUMPY_LIBRARIES = frozenset({"numpy", "scipy"})
_ONLY_JAX_ARRAYS_HAVE = frozenset(dir(jax.Array)) - frozenset(dir(np.ndarray))
_PYTHON = frozenset({*sys.stdlib_module_names, "pypto_spmd", ""})
_INSTALLED = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(__file__).parent.parent),
    }
)


def uses_numpy(fn: Callable) -> bool:
    """Whether a function refers to NumPy and not to JAX.

    Looked at are its code with nested functions, and the functions of the user's own modules that it
    names.

    Args:
        fn: a function, method, partial or callable object.
    """
    libraries = set(_libraries(fn, set()))
    return "numpy" in libraries and "jax" not in libraries


def uses_no_library(fn: Callable) -> bool:
    """Whether a function refers to nothing but Python itself and other such functions.

    What only JAX's arrays have (`x.at`) is a reference too.

    Args:
        fn: a function, method, partial or callable object.
    """
    return not set(_libraries(fn, set()))


def _libraries(value: Any, seen: set[int]) -> Iterator[str]:
    """What `library_of` tells, once for each reference found."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _libraries(part, seen)
    elif isinstance(value, MethodType):
        yield from _libraries(value.__func__, seen)
        yield from _libraries_of_type(type(value.__self__))
        for name in names_in(value.__func__):
            method = getattr(type(value.__self__), name, None)
            if is_users_function(method):
                yield from _libraries(method, seen)
    elif is_users_function(value):
        if names_in(value) & _ONLY_JAX_ARRAYS_HAVE:
            yield "jax"
        for _, referred in references(value):
            yield from _libraries(referred, seen)
    elif library := library_of(value):
        yield library
    elif (call := users_call_method(value)) is not None:
        yield from _libraries(call, seen)


def _libraries_of_type(kind: type) -> Iterator[str]:
    if any(_root(base.__module__) in _JAX_LIBRARIES for base in kind.__mro__):
        yield "jax"


def library_of(value: Any) -> str | None:
    """ "numpy", "jax" or "other" for what belongs to a library, None for anything else, data included.

    Args:
        value: what code refers to.
    """
    if isinstance(value, jax.Array | np.ndarray | np.generic | np.dtype):
        return None
    if value is PartitionSpec or isinstance(value, PartitionSpec):
        return None  # what constrain takes in NumPy code too
    if isinstance(value, ModuleType):
        roots = {_root(value.__name__)}
    elif isinstance(value, type):
        roots = {_root(base.__module__) for base in value.__mro__}
    else:
        roots = {_root(base.__module__) for base in type(value).__mro__}
        # What JAX makes of a user's function (jax.vmap(f)) passes for a function of the user's module.
        home = getattr(value, "__globals__", {}).get("__name__")
        roots |= {_root(getattr(value, "__module__", None)), _root(home)}
    if roots & _JAX_LIBRARIES:
        return "jax"
    if roots & NUMPY_LIBRARIES:
        return "numpy"
    return None if roots <= _PYTHON or not _is_code_of_library(value) else "other"


def _is_code_of_library(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return not is_users_module(value)
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return callable(value) and module is not None and not is_users_module(module)


def _root(module: Any) -> str:
    return module.split(".")[0] if isinstance(module, str) else ""


def is_users_function(value: Any) -> TypeGuard[FunctionType]:
    """Whether it is a Python function that no installed library defines.

    Args:
        value: anything.
    """
    return isinstance(value, FunctionType) and not _is_installed(value.__code__.co_filename)


def is_users_module(value: Any) -> bool:
    """Whether it is a module that no installed library brings.

    Args:
        value: anything.
    """
    if not isinstance(value, ModuleType):
        return False
    path = getattr(value, "__file__", None)
    return path is not None and not _is_installed(path)


def users_call_method(value: Any) -> MethodType | None:
    """The method that calling an object runs, if the user's class defines it.

    Args:
        value: anything.
    """
    method = inspect.getattr_static(type(value), "__call__", None)
    return MethodType(method, value) if is_users_function(method) else None


def _is_installed(path: str) -> bool:
    return path.startswith((*_INSTALLED, "<frozen"))


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """The code and all code nested in it.

    Args:
        code: the code of a function.
    """
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def names_in(fn: FunctionType) -> set[str]:
    """All names of globals and attributes in the code of a function.

    Args:
        fn: the function.
    """
    return {name for code in codes_of(fn.__code__) for name in code.co_names}


def global_names(fn: FunctionType) -> set[str]:
    """The names of the globals that the code of a function refers to.

    Args:
        fn: the function.
    """
    return {
        instruction.argval
        for code in codes_of(fn.__code__)
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def imported_modules(fn: FunctionType) -> set[str]:
    """The names of the modules that the code of a function imports.

    Args:
        fn: the function.
    """
    return {
        instruction.argval
        for code in codes_of(fn.__code__)
        for instruction in dis.get_instructions(code)
        if instruction.opname == "IMPORT_NAME"
    }


def references(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    """The names and values of all that the code of a function refers to from outside.

    Args:
        fn: the function.
    """
    for name in sorted(global_names(fn)):
        if name not in fn.__globals__:
            continue
        value = fn.__globals__[name]
        yield name, value
        if is_users_module(value):
            used = names_in(fn) & set(vars(value))
            yield from ((member, vars(value)[member]) for member in sorted(used))
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        if (contents := cell_contents(cell)) is not None:
            yield name, contents
    for default in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
        yield "default", default
    for name in sorted(imported_modules(fn)):
        if name in sys.modules:
            yield name, sys.modules[name]


def cell_contents(cell: Any) -> Any:
    """What a closure cell holds; None if it is still empty.

    Args:
        cell: the cell.
    """
    try:
        return cell.cell_contents
    except ValueError:
        return None
