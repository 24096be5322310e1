"""From a Python call to named arguments: which are static, which arrays, and in what order.

A program takes its arguments by position: first the positional ones, then the keywords as the call has
them. Specs come in the order of the signature. `Arguments` knows both orders.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from pypto_spmd.errors import Fault, listed, quoted
from pypto_spmd.nnx_body import Modules, split_modules

Signed = tuple[tuple[int, ...], Any, bool]
"""What a program is made for: shape, dtype and weak type of an array."""


@dataclass(frozen=True, slots=True)
class Static:
    """The value of a static argument; objects without equality of their own are equal to themselves."""

    name: str
    value: Any

    def __hash__(self) -> int:
        return hash((self.name, _static_key(self.value)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return NotImplemented
        return self.name == other.name and _static_key(self.value) == _static_key(other.value)


def _static_key(value: Any) -> tuple[type, Any]:
    return (type(value), value if _is_hashable(value) else id(value))


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Arguments:
    """One call.

    Args:
        names: the arguments that hold arrays, as a program takes them.
        values: their values.
        positional: how many of them are positional.
        order: their places in the order of the signature.
        statics: the static arguments, with the place of each among the positional ones, -1 for keywords.
        omitted: parameters that the call leaves to their defaults.
        modules: the nnx modules among the arguments, of which `values` has the states.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]
    positional: int
    order: tuple[int, ...]
    statics: tuple[tuple[int, Static], ...]
    omitted: frozenset[str]
    modules: Modules | None = None

    @property
    def keywords(self) -> tuple[str, ...]:
        """The names of the arguments that are passed by keyword."""
        return self.names[self.positional :]

    def call(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Calls the function with other values for the arrays, the static ones in their places.

        Returns:
            What the function returns; if modules are among the arguments, after their new states.
        """
        if self.modules is not None:
            return self.modules.call(values, lambda whole: self._call(function, whole))
        return self._call(function, values)

    def _call(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        args = list(values[: self.positional])
        kwargs = dict(zip(self.keywords, values[self.positional :], strict=True))
        for place, static in self.statics:
            if place >= 0:
                args.insert(place, static.value)
            else:
                kwargs[static.name] = static.value
        return function(*args, **kwargs)

    def take(self, result: Any) -> Any:
        """The function's own result of what `call` gave; puts new states into the modules."""
        if self.modules is None:
            return result
        *states, own = result
        self.modules.update(states)
        return own

    def leaf_names(self) -> tuple[str, ...]:
        """The path of every array, as a person would write it: `params['w']`."""
        named = zip(self.names, self.values, strict=True)
        return tuple(path for name, value in named for path in _paths(name, value))

    def result_names(self, result: Any) -> tuple[str, ...]:
        """The path of every array of what `call` gave."""
        if self.modules is None:
            return _paths("result", result)
        *states, own = result
        modules = [f"new {self.names[place]}" for place in self.modules.places]
        named = [*zip(modules, states, strict=True), ("result", own)]
        return tuple(path for name, value in named for path in _paths(name, value))

    def faults(self) -> list[Fault]:
        """The arguments that are no arrays, and the static ones that can't be."""
        found = []
        for _, static in self.statics:
            if not _is_hashable(static.value) and static.name not in IMPLICIT_STATIC:
                what = f"static argument {quoted(static.name)} is of type {type(static.value).__name__}."
                why = "A program is made for each value of a static argument, so that it must be hashable."
                fix = "pass a tuple in place of a list, a frozen dataclass or a string in place of a dict."
                found.append(Fault(what, why, fix))
        for name, value in zip(self.names, self.values, strict=True):
            for path, leaf in jax.tree_util.tree_leaves_with_path(value):
                if not is_array(leaf):
                    what = f"argument {quoted(name + keystr(path))} is {described(leaf)}."
                    why = "An @spmd function takes arrays, numbers, and pytrees of them."
                    found.append(Fault(what, why, _non_array_fix(name, path, leaf)))
        return found


IMPLICIT_STATIC = ("self", "cls")
"""The first parameter of a method, which is static unless it is a pytree."""


def is_array(leaf: Any) -> bool:
    """Whether a pytree leaf is an array or a number, or describes one."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind in "biufc" or jnp.issubdtype(leaf.dtype, np.number)
    return isinstance(
        leaf, jax.Array | jax.ShapeDtypeStruct | bool | int | float | complex
    ) or hasattr(leaf, "__jax_array__")


def _paths(name: str, value: Any) -> tuple[str, ...]:
    """A path for every array; of an nnx variable without the step to its value."""
    pairs = jax.tree_util.tree_leaves_with_path(value)
    return tuple(name + keystr(path).removesuffix(".value") for path, _ in pairs)


def described(leaf: Any) -> str:
    """What a value that is no array is, for messages."""
    if isinstance(leaf, np.ndarray):
        return f"a NumPy array of dtype {leaf.dtype}"
    text = repr(leaf)
    if callable(leaf):
        text = getattr(leaf, "__name__", type(leaf).__name__)
    of_type = f"of type {type(leaf).__name__}"
    return of_type if len(text) > 40 or " at 0x" in text else f"{of_type}: {text}"


def _non_array_fix(name: str, path: Sequence[Any], leaf: Any) -> str:
    if isinstance(leaf, np.ndarray):
        return "encode it as numbers before the call."
    if path:
        return "keep it out of the tree, or register the class around it as a pytree with it as metadata."
    bare = name.partition("[")[0]
    return f"make it a static argument, @spmd(..., static_argnames={bare!r}), or close over it."


def signed(leaf: Any) -> Signed:
    """What of an array a program depends on."""
    if isinstance(leaf, bool | int | float | complex):
        leaf = jax.typeof(leaf)
    elif not hasattr(leaf, "dtype"):
        leaf = leaf.__jax_array__()
    dtype = leaf.dtype
    if isinstance(dtype, np.dtype):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return (tuple(leaf.shape), dtype, bool(getattr(leaf, "weak_type", False)))


def narrowed(leaf: Any) -> Any:
    """The array as JAX's rules have it: NumPy code may give back types that they don't allow.

    Args:
        leaf: an argument, or a part of one.
    """
    if isinstance(leaf, jax.Array) and isinstance(leaf.dtype, np.dtype):
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return leaf if dtype == leaf.dtype else jax.lax.convert_element_type(leaf, dtype)
    return leaf


class Signature:
    """A function's parameters, and which of them are static or donated.

    Args:
        function: the undecorated function.
        static_argnums: places of static parameters, negative ones from the end.
        static_argnames: names of static parameters.
        donate_argnums: places of donated parameters.
        donate_argnames: names of donated parameters.
        faults: what is wrong is added to this list.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        static_argnums: int | Iterable[int] = (),
        static_argnames: str | Iterable[str] = (),
        donate_argnums: int | Iterable[int] = (),
        donate_argnames: str | Iterable[str] = (),
        faults: list[Fault],
    ) -> None:
        self._signature = _signature_of(function)
        self._name = getattr(function, "__name__", "function")
        parameters = list(self._signature.parameters.values())
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._by_place = [p.name for p in parameters if p.kind in positional]
        self._rest = next(
            (p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None
        )
        self._takes_any_keyword = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self.names = tuple(
            p.name
            for p in parameters
            if p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        )
        self.static = self._chosen("static", static_argnums, static_argnames, faults)
        self.donated = self._chosen("donate", donate_argnums, donate_argnames, faults)
        for name in sorted(self.static & self.donated & set(self.names)):
            what = f"argument {quoted(name)} is both static and donated."
            fix = "take it out of one of them."
            faults.append(
                Fault(what, "A static argument has no memory that could be donated.", fix)
            )

    def _chosen(
        self,
        kind: str,
        argnums: int | Iterable[int],
        argnames: str | Iterable[str],
        faults: list[Fault],
    ) -> frozenset[str]:
        """The names of the parameters that are given by place or by name."""
        names = {argnames} if isinstance(argnames, str) else set(argnames)
        given = listed([repr(name) for name in self.names]) or "none"
        why = f"The parameters are {given}."
        for name in sorted(names - set(self.names)):
            if not self._takes_any_keyword:
                fix = f"use the names of the function's parameters in {kind}_argnames."
                faults.append(
                    Fault(f"{kind}_argnames has {name!r}, which is no parameter.", why, fix)
                )
        count = len(self._by_place)
        for place in (argnums,) if isinstance(argnums, int) else tuple(argnums):
            if self._rest is not None and place >= count:
                names.add(f"{self._rest}[{place - count}]")
            elif -count <= place < count:
                names.add(self._by_place[place])
            else:
                what = f"{kind}_argnums has {place}, but there are {count} positional parameters."
                fix = f"use places from 0 to {count - 1}, or {kind}_argnames."
                faults.append(Fault(what, why, fix))
        return frozenset(names)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Names the arguments of a call.

        Raises:
            TypeError: as the function itself would, when they don't fit its signature.
        """
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self._name}() {error}") from None
        rest = [f"{self._rest}[{i}]" for i in range(len(args) - len(self._by_place))]
        named = [*zip([*self._by_place, *rest], args, strict=False)]
        names, values, statics = [], [], []
        for place, (name, value) in enumerate(named):
            if self._is_static(name, place, value):
                statics.append((place, Static(name, value)))
            else:
                names.append(name)
                values.append(value)
        positional = len(names)
        for name, value in kwargs.items():
            if name in self.static:
                statics.append((-1, Static(name, value)))
            else:
                names.append(name)
                values.append(value)
        ranks = {name: rank for rank, name in enumerate(self.names)}
        keywords = range(positional, len(names))
        by_rank = sorted(keywords, key=lambda i: (ranks.get(names[i], len(ranks)), i))
        omitted = frozenset(self.names) - frozenset(given) - self.static
        split, modules = split_modules(values)
        order = (*range(positional), *by_rank)
        return Arguments(tuple(names), split, positional, order, tuple(statics), omitted, modules)

    def _is_static(self, name: str, place: int, value: Any) -> bool:
        if name in self.static:
            return True
        if place != 0 or name not in IMPLICIT_STATIC:
            return False
        return jax.tree_util.all_leaves([value]) and not is_array(value)


def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):  # some builtins have none
        args = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)
        return inspect.Signature([args, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)])
