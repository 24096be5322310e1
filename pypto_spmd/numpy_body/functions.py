"""NumPy functions on stand-in arrays: NumPy's dtypes, `jax.numpy`'s computation.

Where all values are known, the real NumPy function runs. Otherwise the operands are cast to the dtypes
that NumPy would compute in, which JAX then keeps, and the function of that name in `jax.numpy` runs.
"""

import functools
import importlib
import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pypto_spmd.numpy_body.array import NumpyArray, as_jax_value, plain_value
from pypto_spmd.numpy_body.refusal import refuse


class NumpyApplied(BaseException):
    """A NumPy function was applied to a traced array, where somebody wanted to know."""


STOP_AT_NUMPY: ContextVar[bool] = ContextVar("STOP_AT_NUMPY", default=False)


def note_numpy_function() -> None:
    """Tell whoever wants to know that the code applies a NumPy function to traced arrays.

    Raises:
        NumpyApplied: if `STOP_AT_NUMPY` is set.
    """
    if STOP_AT_NUMPY.get():
        raise NumpyApplied


def _functions(module: ModuleType, names: str) -> frozenset[Callable]:
    return frozenset(getattr(module, name) for name in names.split() if hasattr(module, name))


# Integers and booleans are summed as 64-bit integers.
_SUMS = _functions(np, "sum prod cumsum cumprod nansum nanprod nancumsum nancumprod trace")

# Integers and booleans are computed with as float64.
_INEXACT = _functions(
    np,
    "mean var std median average percentile quantile nanmean nanvar nanstd nanmedian nanpercentile"
    " nanquantile gradient trapezoid sinc i0 unwrap roots histogram histogram2d histogramdd angle",
) | _functions(
    np.linalg,
    "cholesky cond det eig eigh eigvals eigvalsh inv lstsq matrix_norm matrix_rank norm pinv qr"
    " slogdet solve svd svdvals tensorinv tensorsolve vector_norm",
)

# Anything but complex numbers is computed with as float64.
_DOUBLE = _functions(np, "cov corrcoef interp polyfit")

# Results are 64-bit integers.
_COUNTS = _functions(
    np,
    "argmax argmin nanargmax nanargmin argsort argpartition lexsort searchsorted digitize bincount"
    " count_nonzero",
)

# So are the counts that are their first result, unless they are weighted.
_HISTOGRAMS = _functions(np, "histogram histogram2d histogramdd")

# Where the operands lie that are cast to one dtype; None stands for all.
_PROMOTED: dict[Callable, Sequence[int] | None] = {
    **dict.fromkeys(
        _functions(
            np,
            "dot vdot inner outer tensordot kron cross convolve correlate append polyval polyadd"
            " polysub polymul isclose allclose array_equal array_equiv searchsorted linspace"
            " logspace geomspace",
        )
        | _functions(np.linalg, "solve lstsq tensorsolve cross outer tensordot matmul vecdot"),
        (0, 1),
    ),
    **dict.fromkeys(
        _functions(
            np, "concatenate concat stack vstack hstack dstack column_stack block broadcast_arrays"
        )
        | _functions(np.linalg, "multi_dot"),
        (0,),
    ),
    np.where: (1, 2),
    np.select: (1, 2),
    np.choose: (1,),
    np.clip: (0, 1, 2),
    np.einsum: None,
}

# Lists among their arguments are arrays.
_LISTS = _functions(
    np,
    "take digitize interp isin percentile quantile nanpercentile nanquantile repeat polyfit"
    " trapezoid average compress extract histogram bincount cov corrcoef",
)

# Python numbers among these operands take the dtype of the others.
_WEAK = _functions(np, "where clip select linspace logspace geomspace")

# NumPy returns views of the first argument.
_VIEWS = _functions(
    np,
    "reshape ravel transpose permute_dims matrix_transpose swapaxes moveaxis rollaxis squeeze"
    " expand_dims real imag atleast_1d atleast_2d atleast_3d broadcast_to split array_split hsplit"
    " vsplit dsplit flip fliplr flipud rot90 diagonal asanyarray ascontiguousarray asfortranarray",
) | _functions(np.linalg, "diagonal matrix_transpose")

# They change their first argument; their twins return it changed.
_IN_PLACE = _functions(np, "fill_diagonal put put_along_axis")

# Names of operands that may be given by keyword.
_OPERAND_NAMES = frozenset({"a", "b", "x", "y", "m", "p", "v", "arr", "ary", "array", "x1", "x2"})

# Keywords about memory, of which traced arrays have none.
_MEMORY_KEYWORDS = frozenset({"subok", "like", "casting", "device"})

_REDUCTIONS = {
    np.add: np.sum,
    np.multiply: np.prod,
    np.maximum: np.max,
    np.minimum: np.min,
    np.logical_and: np.all,
    np.logical_or: np.any,
}
_ACCUMULATIONS = {np.add: np.cumsum, np.multiply: np.cumprod}


@functools.cache
def _twins() -> dict[Callable, Callable]:
    """The function of JAX for each in NumPy, and in what is imported of SciPy."""
    pairs = [(np, jnp), (np.linalg, jnp.linalg), (np.fft, jnp.fft)]
    for name in ("special", "linalg", "fft", "signal", "ndimage"):
        if real := sys.modules.get(f"scipy.{name}"):
            pairs.append((real, importlib.import_module(f"jax.scipy.{name}")))
    twins = {
        getattr(real, name): getattr(traced, name)
        for real, traced in pairs
        for name in dir(real)
        if not name.startswith("_")
        and callable(getattr(real, name))
        and not isinstance(getattr(real, name), type)
        and hasattr(traced, name)
    }
    return twins | {np.ascontiguousarray: jnp.asarray, np.asfortranarray: jnp.asarray}


def _name(function: Callable) -> str:
    return getattr(function, "__name__", repr(function))


def _twin(function: Callable) -> Callable:
    twin = _twins().get(function)
    if twin is None:
        refuse(
            f"NumPy's '{_name(function)}' is used",
            "write it with other functions of NumPy, or call it outside of the function.",
            f"There is no '{_name(function)}' in JAX, which this code is traced with.",
        )
    return twin


def is_traced(tree: Any) -> bool:
    """Whether some value in nested arguments is not known while tracing."""
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))


def plain_arguments(tree: Any) -> Any:
    """Nested arguments with their NumPy or JAX values instead of stand-ins."""
    return jax.tree.map(_plain_leaf, tree)


def _plain_leaf(leaf: Any) -> Any:
    if isinstance(leaf, NumpyArray):
        return leaf.value
    return leaf.numpy_type if isinstance(leaf, NumpyType) else leaf


def stand_in(result: Any, base: NumpyArray | None = None) -> Any:
    """Results of a function as stand-ins, views of the base if it is given."""

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray | jax.Array):
            return leaf
        return NumpyArray(leaf) if base is None else base.derived(leaf)

    return jax.tree.map(wrap, result)


class NumpyType:
    """A scalar type of NumPy, `np.float32` for one, that also converts stand-ins.

    Args:
        numpy_type: the type.
    """

    def __init__(self, numpy_type: type) -> None:
        self.numpy_type = numpy_type
        self.dtype = np.dtype(numpy_type)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], NumpyArray | list | tuple):
            converted = call_function(np.array, args, {"dtype": self.dtype})
            if not converted.is_known or converted.ndim:
                return converted
            return converted.value[()]
        return self.numpy_type(*args, **kwargs)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self.numpy_type)

    def __eq__(self, other: object) -> bool:
        return other is self.numpy_type or (
            isinstance(other, NumpyType) and other.numpy_type is self.numpy_type
        )

    def __hash__(self) -> int:
        return hash(self.numpy_type)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.numpy_type, name)


# Universal functions


def call_ufunc(ufunc: np.ufunc, method: str, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a universal function, or one of its methods.

    Args:
        ufunc: the function of NumPy.
        method: "__call__", "reduce", "accumulate", "reduceat", "outer" or "at".
        inputs: its operands, stand-ins among them.
        kwargs: its keywords, `out` included.

    Returns:
        A stand-in, or a number if it is known.
    """
    if method == "at":
        return _update_at(ufunc, *inputs)
    keywords = {name: each for name, each in kwargs.items() if name not in _MEMORY_KEYWORDS}
    targets = keywords.pop("out", None)
    values = [plain_value(each) for each in inputs]
    plain_keywords = plain_arguments(keywords)
    if not is_traced((values, plain_keywords)):
        result = getattr(ufunc, method)(*values, **plain_keywords)
    elif method == "__call__":
        result = _elementwise(ufunc, values, **plain_keywords)
    elif method == "reduce":
        result = _reduce(ufunc, *values, **plain_keywords)
    elif method == "accumulate":
        result = _accumulate(ufunc, *values, **plain_keywords)
    else:
        result = getattr(_twin(ufunc), method)(*_common(values, weak=False), **plain_keywords)
    return _into(targets, stand_in(result), keywords.get("where", True))


def _into(targets: Any, results: Any, where: Any) -> Any:
    """Write results to `out`, and return it; return the results if there is none."""
    if targets is None:
        return results
    outputs = targets if isinstance(targets, tuple) else (targets,)
    found = results if isinstance(results, tuple) else (results,)
    for output, result in zip(outputs, found, strict=True):
        if output is None:
            continue
        if not isinstance(output, NumpyArray):
            refuse(
                "'out' is an array made outside of the function",
                "make it in the function, or use what the function returns.",
                "The function is traced, so a real array can't take its results.",
            )
        kept = result if where is True else call_function(np.where, (where, result, output), {})
        output.write_all(kept)
    return targets[0] if isinstance(targets, tuple) and len(targets) == 1 else targets


def _kind(value: Any) -> Any:
    """What NumPy's promotion sees of an operand: a dtype, or a Python type for a weak number."""
    if isinstance(value, bool):
        return np.dtype(np.bool_)
    if isinstance(value, int | float | complex) and not isinstance(value, np.generic):
        return type(value)
    if isinstance(value, jax.Array) and getattr(value, "weak_type", False):
        return {"i": int, "f": float, "c": complex}.get(value.dtype.kind, value.dtype)
    return np.asarray(value).dtype if not hasattr(value, "dtype") else np.dtype(value.dtype)


def _cast(value: Any, dtype: np.dtype) -> Any:
    if isinstance(value, jax.Array):
        return value.astype(dtype)
    if isinstance(value, np.ndarray) and value.ndim:
        return as_jax_value(value.astype(dtype))
    return np.asarray(value).astype(dtype)[()]


def _elementwise(
    ufunc: np.ufunc, values: Sequence[Any], dtype: Any = None, where: Any = True
) -> Any:
    kinds = (*map(_kind, values), *[None] * ufunc.nout)
    outputs = [None if dtype is None else np.dtype(dtype)] * ufunc.nout
    dtypes = ufunc.resolve_dtypes(kinds, signature=(*[None] * ufunc.nin, *outputs))
    operands = [_cast(each, kind) for each, kind in zip(values, dtypes, strict=False)]
    if ufunc is np.power and isinstance(values[1], int):
        # A Python exponent lets JAX multiply instead of taking logarithms.
        operands[1] = values[1]
    result = _call_twin(ufunc, operands, {})
    results = result if isinstance(result, tuple | list) else (result,)
    typed = tuple(
        jnp.where(where, each.astype(kind), 0).astype(kind)
        if where is not True
        else each.astype(kind)
        for each, kind in zip(results, dtypes[ufunc.nin :], strict=True)
    )
    return typed if ufunc.nout > 1 else typed[0]


def _reduce(ufunc: np.ufunc, value: Any, axis: Any = 0, **keywords: Any) -> Any:
    function = _REDUCTIONS.get(ufunc)
    if function is None:
        return _twin(ufunc).reduce(as_jax_value(value), axis=axis, **keywords)
    return plain_value(call_function(function, (NumpyArray(value),), {"axis": axis, **keywords}))


def _accumulate(ufunc: np.ufunc, value: Any, axis: int = 0, **keywords: Any) -> Any:
    function = _ACCUMULATIONS.get(ufunc)
    if function is None:
        return _twin(ufunc).accumulate(as_jax_value(value), axis=axis, **keywords)
    return plain_value(call_function(function, (NumpyArray(value), axis), keywords))


def _update_at(ufunc: np.ufunc, array: Any, index: Any, *operands: Any) -> None:
    """Carry out `np.add.at(array, index, operand)`: repeated indices count repeatedly."""
    values = [plain_value(each) for each in operands]
    plain = plain_arguments(index)
    known = isinstance(array, NumpyArray) and array.is_known
    if not isinstance(array, NumpyArray):
        refuse(
            f"'np.{ufunc.__name__}.at' writes to an array made outside of the function",
            "make the array in the function.",
            "The function is traced, so a real array can't take its results.",
        )
    if known and not is_traced((plain, values)):
        changed = np.array(array.value)
        ufunc.at(changed, plain, *values)
    else:
        fitting = [_cast(each, array.dtype) for each in values]
        changed = _twin(ufunc).at(as_jax_value(array.value), plain, *fitting, inplace=False)
    array.write_all(changed)


# Other functions


def call_function(function: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of NumPy.

    Args:
        function: the real function.
        args: its arguments, stand-ins among them, also nested in lists.
        kwargs: its keywords.

    Returns:
        A stand-in, or what else the function returns; the very same array where NumPy does that.
    """
    if special := _SPECIAL.get(function):
        return special(*args, **kwargs)
    if isinstance(function, np.ufunc):
        return call_ufunc(function, "__call__", args, kwargs)
    return _call(function, args, kwargs)


def _call(function: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of NumPy that has no code of its own here."""
    keywords = {name: each for name, each in kwargs.items() if name not in _MEMORY_KEYWORDS}
    target = keywords.pop("out", None)
    args += _operands_by_keyword(function, args, keywords)
    base = args[0] if args and function in _VIEWS and isinstance(args[0], NumpyArray) else None
    if base is not None:
        base.shareable_value()
    values, plain_keywords = plain_arguments((args, keywords))
    if is_traced((values, plain_keywords)):
        result = _run_twin(function, values, plain_keywords)
    else:
        result = function(*values, **plain_keywords)
        if base is not None and not _shares_memory(result, base.value):
            base = None
    if function in _IN_PLACE:
        return args[0].write_all(result) if result is not None else None
    return _into(target, stand_in(result, base), True)


def _operands_by_keyword(
    function: Callable, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, ...]:
    """Take the operands out of the keywords, in the order of the function's signature."""
    if not _OPERAND_NAMES & keywords.keys():
        return ()
    names = list(inspect.signature(function).parameters)[len(args) :]
    found = itertools.takewhile(lambda name: name in keywords and name in _OPERAND_NAMES, names)
    return tuple(keywords.pop(name) for name in list(found))


def _shares_memory(result: Any, value: Any) -> bool:
    arrays = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, np.ndarray)]
    return any(np.may_share_memory(array, value) for array in arrays)


def _run_twin(function: Callable, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
    operands = list(args)
    positions = range(len(args))
    if function in _PROMOTED:
        wanted = _PROMOTED[function]
        chosen = [i for i in positions if wanted is None or i in wanted]
        chosen = [i for i in chosen if args[i] is not None and not isinstance(args[i], str)]
        groups = [_listed(args[i]) for i in chosen]
        common = _common(groups, weak=function in _WEAK)
        for i, group in zip(chosen, common, strict=True):
            operands[i] = group
    elif function is np.diff:
        ends = {name: keywords[name] for name in ("prepend", "append") if name in keywords}
        operands[0], ends = _common((args[0], ends), weak=False)
        keywords = {**keywords, **ends}
    elif function in _LISTS:
        operands = [plain_value(each) for each in args]
        keywords = {
            name: plain_value(each) if isinstance(each, list) else each
            for name, each in keywords.items()
        }
    elif args and isinstance(args[0], list | tuple) and is_traced(args[0]):
        operands[0] = plain_value(args[0])
    for i in positions:
        widens = function in _INEXACT or function in _DOUBLE or _is_scipys(function)
        if widens or (i == 0 and function in _SUMS):
            if function in _SUMS and keywords.get("dtype") is not None:
                continue
            operands[i] = jax.tree.map(functools.partial(_widened, function), operands[i])
    adapted = jax.tree.map(
        lambda each: _adapted(each) if _is_user_function(each) else each, operands
    )
    if function in _IN_PLACE:
        keywords = {**keywords, "inplace": False}
    result = _call_twin(function, adapted, keywords)
    if function in _HISTOGRAMS and not {"weights", "density"} & keywords.keys():
        result = (result[0].astype(np.int64), *result[1:])
    if function in _COUNTS:
        result = jax.tree.map(lambda count: count.astype(np.int64), result)
    return result


def _is_scipys(function: Callable) -> bool:
    return getattr(function, "__module__", "").startswith("scipy.")


def _listed(operand: Any) -> Any:
    """An operand, or a list of them, in which lists of numbers are arrays."""
    if not isinstance(operand, list | tuple):
        return operand
    if not is_traced(operand):
        has_arrays = any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(operand))
        return [np.asarray(each) for each in operand] if has_arrays else np.asarray(operand)
    return [_listed(each) for each in operand]


def _common(tree: Any, *, weak: bool) -> Any:
    """Cast all operands to NumPy's common dtype."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return tree
    kinds = [_kind(leaf) if weak else _strong_kind(leaf) for leaf in leaves]
    dtype = np.result_type(*(kind(0) if isinstance(kind, type) else kind for kind in kinds))
    return jax.tree.map(lambda leaf: _cast(leaf, dtype), tree)


def _strong_kind(value: Any) -> np.dtype:
    kind = _kind(value)
    return np.dtype(kind)


def _widened(function: Callable, value: Any) -> Any:
    """Cast an operand as NumPy does before it computes."""
    if not isinstance(value, np.ndarray | jax.Array):
        return value
    kind = value.dtype.kind
    if function in _SUMS:
        if kind == "u":
            return _cast(value, np.dtype(np.uint64))
        return _cast(value, np.dtype(np.int64)) if kind in "bi" else value
    if kind in "biu" or (function in _DOUBLE and kind == "f"):
        return _cast(value, np.dtype(np.float64))
    return value


def _is_user_function(argument: Any) -> bool:
    return callable(argument) and not isinstance(argument, type | np.dtype)


def _adapted(function: Callable) -> Callable:
    """A function of NumPy code, as a function on JAX values."""

    def on_values(*args: Any) -> Any:
        return plain_arguments(function(*stand_in(args)))

    return on_values


def _call_twin(function: Callable, operands: Sequence[Any], keywords: dict[str, Any]) -> Any:
    twin = _twin(function)
    name = _name(function)
    values = jax.tree.map(as_jax_value, operands)
    try:
        return twin(*values, **keywords)
    except jax.errors.JAXTypeError:
        refuse(
            f"NumPy's '{name}' needs the values of a traced array",
            "use a form whose shape does not depend on values: np.where(condition, a, b), or pass"
            " what it needs as a static argument (static_argnums).",
        )
    except NotImplementedError as error:
        refuse(
            f"NumPy's '{name}' is used in a way that JAX has no code for",
            "write it with other functions of NumPy, or call it outside of the function.",
            f"JAX says: {error}",
        )


# Functions that make arrays, or only look at shapes and dtypes


def _shape_of(sizes: Any) -> tuple[int, ...]:
    listed: Iterable[Any] = sizes if isinstance(sizes, tuple | list) else (sizes,)
    if isinstance(sizes, NumpyArray) and sizes.ndim:
        listed = sizes
    elif isinstance(sizes, np.ndarray) and sizes.ndim:
        listed = sizes.tolist()
    return tuple(operator.index(size) for size in listed)


def _filled(shape: tuple[int, ...], number: Any, dtype: Any) -> NumpyArray:
    value = plain_value(number)
    if is_traced(value):
        target = value.dtype if dtype is None else np.dtype(dtype)
        return NumpyArray(jnp.broadcast_to(value.astype(target), shape))
    typed = np.asarray(value, dtype=None if dtype is None else np.dtype(dtype))
    # All elements share one place in memory until one is written to.
    return NumpyArray(np.broadcast_to(typed, shape))


def _like(array: Any, number: Any, dtype: Any, shape: Any) -> NumpyArray:
    value = plain_value(array)
    value = value if hasattr(value, "dtype") else np.asarray(value)
    sizes = value.shape if shape is None else _shape_of(shape)
    return _filled(tuple(sizes), number, value.dtype if dtype is None else dtype)


def _array(
    items: Any, dtype: Any = None, *, copy: bool | None = True, ndmin: int = 0, **_: Any
) -> NumpyArray:
    target = None if dtype is None else np.dtype(dtype)
    plain = plain_arguments(items)
    if is_traced(plain):
        leaves = jax.tree.leaves(plain)
        found = np.result_type(*map(_strong_kind, leaves)) if target is None else target
        made = NumpyArray(jnp.array(jax.tree.map(lambda leaf: _cast(leaf, found), plain)))
    else:
        made = NumpyArray(np.array(plain, dtype=target))
    missing = ndmin - made.ndim
    return made if missing <= 0 else NumpyArray(made.value[(None,) * missing])


def _asarray(items: Any, dtype: Any = None, *, copy: bool | None = None, **_: Any) -> NumpyArray:
    same = not copy and (dtype is None or np.dtype(dtype) == getattr(items, "dtype", None))
    if isinstance(items, NumpyArray) and same:
        return items
    if isinstance(items, np.ndarray) and same:
        return NumpyArray(items, is_argument=True)
    return _array(items, dtype)


def _copyto(target: NumpyArray, source: Any, casting: str = "same_kind", where: Any = True) -> None:
    if where is not True:
        source = call_function(np.where, (where, source, target), {})
    target.write_all(source)


def _putmask(array: NumpyArray, mask: Any, values: Any) -> None:
    array[mask] = values


def _result_type(*operands: Any) -> np.dtype:
    plain = [plain_arguments(each) for each in operands]
    return np.result_type(*(each.dtype if hasattr(each, "shape") else each for each in plain))


def _only_looks(look: Callable) -> Callable:
    return lambda array: look(array if hasattr(array, "dtype") else np.asarray(array))


def _size(array: Any, axis: int | None = None) -> int:
    shape = array.shape if hasattr(array, "shape") else np.shape(array)
    return int(np.prod(shape, dtype=np.int64)) if axis is None else shape[axis]


def _clip(
    array: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None, **kw: Any
) -> Any:
    low, high = (a_min if min is None else min), (a_max if max is None else max)
    return _call(np.clip, (array, low, high), kw)


_SPECIAL: dict[Callable, Callable] = {
    np.clip: _clip,
    np.zeros: lambda shape, dtype=float, **_: _filled(_shape_of(shape), 0, dtype),
    np.empty: lambda shape, dtype=float, **_: _filled(_shape_of(shape), 0, dtype),
    np.ones: lambda shape, dtype=None, **_: _filled(_shape_of(shape), 1, dtype or float),
    np.full: lambda shape, fill_value, dtype=None, **_: _filled(
        _shape_of(shape), fill_value, dtype
    ),
    np.zeros_like: lambda a, dtype=None, shape=None, **_: _like(a, 0, dtype, shape),
    np.empty_like: lambda a, dtype=None, shape=None, **_: _like(a, 0, dtype, shape),
    np.ones_like: lambda a, dtype=None, shape=None, **_: _like(a, 1, dtype, shape),
    np.full_like: lambda a, fill_value, dtype=None, shape=None, **_: _like(
        a, fill_value, dtype, shape
    ),
    np.array: _array,
    np.asarray: _asarray,
    np.asanyarray: _asarray,
    np.copy: lambda a, **_: _array(a),
    np.astype: lambda x, dtype, **_: x.astype(dtype),
    np.copyto: _copyto,
    np.putmask: _putmask,
    np.result_type: _result_type,
    np.size: _size,
    np.shape: _only_looks(lambda array: tuple(array.shape)),
    np.ndim: _only_looks(lambda array: array.ndim),
    np.iscomplexobj: _only_looks(lambda array: array.dtype.kind == "c"),
    np.isrealobj: _only_looks(lambda array: array.dtype.kind != "c"),
}

# What these say of an array needs no values, so applying them makes no NumPy code.
QUERIES = frozenset({np.result_type, np.size, np.shape, np.ndim, np.iscomplexobj, np.isrealobj})
