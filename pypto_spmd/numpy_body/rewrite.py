"""NumPy code as a function that JAX can trace: a copy of it in which NumPy is replaced.

Every name in the code that stands for NumPy, or for a function of the user that may use it, stands for a
replacement in the copy; the original is left as it is. The copy is made anew for each tracing, so
globals that are defined or changed later are seen.
"""

import builtins
import functools
from collections.abc import Callable
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pypto_spmd.numpy_body import evidence
from pypto_spmd.numpy_body.array import NumpyArray
from pypto_spmd.numpy_body.functions import (
    QUERIES,
    NumpyType,
    call_function,
    call_ufunc,
    is_traced,
    note_numpy_function,
    plain_arguments,
    stand_in,
)
from pypto_spmd.numpy_body.refusal import BODY_NAME, refuse

_ABSTRACT_TYPES = frozenset(
    {
        np.generic,
        np.number,
        np.integer,
        np.signedinteger,
        np.unsignedinteger,
        np.inexact,
        np.floating,
        np.complexfloating,
        np.flexible,
        np.character,
    }
)
_RANDOM_SOURCES = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)


def as_jax(fn: Callable) -> Callable:
    """NumPy code as a function that JAX can trace, with NumPy's dtypes and semantics.

    It must be traced and run with 64-bit types: `with jax.enable_x64(True): jax.make_jaxpr(as_jax(fn))`.

    Args:
        fn: a function, method, partial or callable object in NumPy.

    Returns:
        A function of the same arguments that gives JAX values.

    Raises:
        ShardingError: when traced, if the code needs values that only a real run has, or writes
            where no one would see it; it names the line and what to use instead.
    """

    @functools.wraps(fn)
    def traced(*args: Any, **kwargs: Any) -> Any:
        name = BODY_NAME.set(getattr(fn, "__name__", type(fn).__name__))
        try:
            with jax.enable_x64(True):
                body = _Replacements().of(fn)
                stand_ins, keywords = jax.tree.map(_argument, (args, kwargs))
                return plain_arguments(body(*stand_ins, **keywords))
        finally:
            BODY_NAME.reset(name)

    return traced


def _argument(leaf: Any) -> Any:
    is_array = isinstance(leaf, np.ndarray | jax.Array)
    if not is_array or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    return NumpyArray(leaf, is_argument=True)


def _is_numpys(module: str) -> bool:
    return module.split(".")[0] in evidence.NUMPY_LIBRARIES


class _Replacements:
    """What stands in the copy of the code for what it refers to; each function is copied once."""

    def __init__(self) -> None:
        self._copies: dict[int, FunctionType] = {}

    def of(self, value: Any) -> Any:
        """What replaces a value; itself if nothing need."""
        if isinstance(value, ModuleType):
            if _is_numpys(value.__name__):
                return _NumpyModule(value, self)
            return _UsersModule(value, self) if evidence.is_users_module(value) else value
        if isinstance(value, np.ndarray | jax.Array):
            return _argument(value)
        if isinstance(value, functools.partial):
            keywords = {name: self.of(part) for name, part in value.keywords.items()}
            return functools.partial(self.of(value.func), *map(self.of, value.args), **keywords)
        if isinstance(value, MethodType) and evidence.is_users_function(value.__func__):
            return MethodType(self.of(value.__func__), value.__self__)
        if evidence.is_users_function(value):
            return self._function(value)
        if (call := evidence.users_call_method(value)) is not None:
            return self.of(call)
        if type(value).__module__.startswith("pypto_spmd.") and hasattr(value, "__wrapped__"):
            return lambda *args, **kwargs: stand_in(
                value(*plain_arguments(args), **plain_arguments(kwargs))
            )
        return self._of_numpy(value)

    def _of_numpy(self, value: Any) -> Any:
        """What replaces something of NumPy that is no module."""
        owner = value.__self__ if isinstance(value, BuiltinMethodType) else None
        if isinstance(value, _RANDOM_SOURCES) or isinstance(owner, _RANDOM_SOURCES):
            return _Random()
        if value is np.ndarray:
            return _Ndarray
        if value is np.vectorize:
            return _vectorize
        if isinstance(value, type):
            is_scalar = issubclass(value, np.generic) and value not in _ABSTRACT_TYPES
            return NumpyType(value) if is_scalar else value
        if value is np.r_ or value is np.c_:
            return _Joiner(value)
        if callable(value) and evidence.library_of(value) == "numpy":
            return _NumpyFunction(value)
        return value

    def _function(self, fn: FunctionType) -> FunctionType:
        if id(fn) in self._copies:
            return self._copies[id(fn)]
        names: dict[str, Any] = dict(fn.__globals__)
        closure = tuple(CellType() for _ in fn.__closure__ or ())
        copy = FunctionType(fn.__code__, names, fn.__name__, None, closure or None)
        self._copies[id(fn)] = copy
        functools.update_wrapper(copy, fn)
        copy.__defaults__ = tuple(map(self.of, fn.__defaults__)) if fn.__defaults__ else None
        keywords = fn.__kwdefaults__
        copy.__kwdefaults__ = {k: self.of(v) for k, v in keywords.items()} if keywords else None
        for name in evidence.global_names(fn) & names.keys():
            names[name] = self.of(names[name])
        for cell, original in zip(closure, fn.__closure__ or (), strict=True):
            contents = evidence.cell_contents(original)
            if contents is not None:
                cell.cell_contents = self.of(contents)
        if any(_is_numpys(name) for name in evidence.imported_modules(fn)):
            names["__builtins__"] = {**vars(builtins), "__import__": self._import}
        return copy

    def _import(self, *args: Any, **kwargs: Any) -> Any:
        return self.of(builtins.__import__(*args, **kwargs))


class _NumpyModule:
    """`numpy`, `numpy.linalg` and so on, for copied code."""

    def __init__(self, module: ModuleType, replacements: _Replacements) -> None:
        self._module = module
        self._replacements = replacements

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._module, name)
        return _Random() if member is np.random else self._replacements.of(member)


class _UsersModule:
    """A module of the user, for copied code: its functions are copied too."""

    def __init__(self, module: ModuleType, replacements: _Replacements) -> None:
        self._module = module
        self._replacements = replacements

    def __getattr__(self, name: str) -> Any:
        return self._replacements.of(getattr(self._module, name))


class _NumpyFunction:
    """A function of NumPy that takes stand-ins."""

    def __init__(self, function: Callable) -> None:
        self._function = function
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note(args, kwargs)
        return call_function(self._function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._function, name)
        ufunc = self._function
        if not isinstance(ufunc, np.ufunc) or name not in (
            "reduce",
            "accumulate",
            "reduceat",
            "outer",
            "at",
        ):
            return member

        def method(*inputs: Any, **kwargs: Any) -> Any:
            self._note(inputs, kwargs)
            return call_ufunc(ufunc, name, inputs, kwargs)

        return method

    def _note(self, args: Any, kwargs: Any) -> None:
        if self._function not in QUERIES and is_traced(plain_arguments((args, kwargs))):
            note_numpy_function()


class _Joiner:
    """`np.r_` and `np.c_`."""

    def __init__(self, joiner: Any) -> None:
        self._joiner = joiner

    def __getitem__(self, items: Any) -> Any:
        plain = plain_arguments(items)
        if not is_traced(plain):
            return stand_in(self._joiner[plain])
        return stand_in((jnp.r_ if self._joiner is np.r_ else jnp.c_)[plain])


class _InstanceOfNdarray(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, np.ndarray | NumpyArray)


class _Ndarray(metaclass=_InstanceOfNdarray):
    """`np.ndarray`, of which stand-ins are instances."""


class _Random:
    """`np.random` and its generators: whatever is asked of them is refused."""

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse()

    def _refuse(self) -> Any:
        refuse(
            "np.random is used",
            "pass the random array as an argument, or write the function in jax.numpy and use"
            " jax.random with a key.",
            "The function is traced once and run many times, so its random numbers would never"
            " change.",
        )


def _vectorize(function: Callable, otypes: Any = None, **options: Any) -> Callable:
    """`np.vectorize`, on stand-ins."""

    def on_values(*args: Any) -> Any:
        return plain_arguments(function(*stand_in(args)))

    def vectorized(*args: Any) -> Any:
        values = plain_arguments(args)
        if is_traced(values):
            return stand_in(jnp.vectorize(on_values, **options)(*values))
        return stand_in(np.vectorize(on_values, otypes, **options)(*values))

    return vectorized
