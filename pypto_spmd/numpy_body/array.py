"""An array that behaves like `numpy.ndarray` while it is traced by JAX.

It holds a real NumPy array as long as no traced value entered it, else a JAX value. Writing into it
replaces what it holds. A view made by indexing remembers its base: reading it reads the base, writing
it writes the base, as in NumPy. A view made otherwise (`reshape`, `T`) may be written while nothing
else shares its elements, and read until they change; after that there is an error, never a wrong value.
"""

import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pypto_spmd.errors import shape_text
from pypto_spmd.numpy_body.refusal import refuse

_COPY = "copy it first: x = x.copy()."


class _Memory:
    """What arrays that NumPy would let share memory have in common: who they are, and a version."""

    __slots__ = ("_arrays", "version")

    def __init__(self) -> None:
        self.version = 0
        self._arrays: list[weakref.ref[NumpyArray]] = []

    def add(self, array: "NumpyArray") -> None:
        self._arrays.append(weakref.ref(array))

    def is_only_of(self, array: "NumpyArray") -> bool:
        """Whether all other arrays that shared this memory are gone."""
        return all(other is None or other is array for other in (each() for each in self._arrays))


class NumpyArray:
    """A stand-in for `numpy.ndarray` in code that is being traced.

    Args:
        held: a NumPy array, or a JAX array or tracer.
        memory: the memory of the array that this one is a view of by other means than an index.
        is_argument: whether it is an argument of the traced function, or captured by it; nothing
            can be written into it.
    """

    __slots__ = (
        "__weakref__",
        "_base",
        "_held",
        "_index",
        "_is_argument",
        "_is_view",
        "_memory",
        "_seen",
    )

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(
        self, held: Any, *, memory: _Memory | None = None, is_argument: bool = False
    ) -> None:
        self._held = held
        self._is_argument = is_argument
        self._is_view = memory is not None
        self._base: NumpyArray | None = None
        self._index: Any = None
        self._memory = memory or _Memory()
        self._memory.add(self)
        self._seen = self._memory.version

    def indexed(self, part: Any, index: Any) -> "NumpyArray":
        """The view of a part that is read and written through this array.

        Args:
            part: the part that the index takes.
            index: where it lies.
        """
        view = NumpyArray(part)
        view._base = self
        view._index = index
        view._seen = self._root()._memory.version
        return view

    def derived(self, held: Any) -> "NumpyArray":
        """The view of the same elements that a function such as `reshape` makes.

        Args:
            held: what the view holds.
        """
        root = self._root()
        return NumpyArray(held, memory=root._memory, is_argument=root._is_argument)

    # Values

    @property
    def value(self) -> Any:
        """The NumPy array or JAX value that it holds at this moment."""
        version = self._root()._memory.version
        if version != self._seen:
            if self._base is None:
                refuse(
                    "an array is read that is a view of another one, which was written to since,",
                    "copy the view when it is made (y = x.reshape(...).copy()), or make it after"
                    " the write.",
                    "A view that isn't made by indexing can't follow later writes.",
                )
            self._held = _take(self._base.value, self._index)
            self._seen = version
        return self._held

    def shareable_value(self) -> Any:
        """The value, which a view may share: writing to the one writes to the other."""
        value = self.value
        root = self._root()
        if isinstance(value, np.ndarray) and not value.flags.writeable and not root._is_argument:
            root._held = np.array(root._held)
            root._memory.version += 1
            root._seen = root._memory.version
        return self.value

    @property
    def is_known(self) -> bool:
        """Whether its values are known while tracing."""
        return isinstance(self.value, np.ndarray | np.generic)

    def known(self, what: str, fix: str) -> Any:
        """The NumPy array that it holds.

        Args:
            what: what needs the values, for the error if they are not known.
            fix: what to do instead.
        """
        if not self.is_known:
            refuse(f"{what} needs the values of a traced array {self._text()}", fix)
        return self.value

    def _root(self) -> "NumpyArray":
        return self if self._base is None else self._base._root()

    def _text(self) -> str:
        return shape_text(self.shape, self.dtype)

    # Shape and type

    @property
    def dtype(self) -> np.dtype:
        """The NumPy dtype."""
        return np.dtype(self.value.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return tuple(self.value.shape)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

    @property
    def T(self) -> Any:
        """The array with its dims reversed."""
        return _apply(np.transpose, self)

    @property
    def mT(self) -> Any:
        """The array with its last two dims exchanged."""
        return _apply(np.matrix_transpose, self)

    @property
    def real(self) -> Any:
        """The real part."""
        return _apply(np.real, self)

    @property
    def imag(self) -> Any:
        """The imaginary part."""
        return _apply(np.imag, self)

    @property
    def flat(self) -> Any:
        """The elements in one dim; can be read, not written."""
        return _apply(np.ravel, self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self.shape:
            raise TypeError("iteration over a 0-d array")
        return iter([self[i] for i in range(len(self))])

    def __repr__(self) -> str:
        return repr(self.value) if self.is_known else f"array(traced {self._text()})"

    def __format__(self, spec: str) -> str:
        if spec:
            return format(self.known("formatting", "return the array and print it outside."), spec)
        return repr(self)

    # Leaving tracing

    def __bool__(self) -> bool:
        return bool(
            self.known(
                "a branch ('if', 'while', 'and', 'or', 'not', 'assert' or bool())",
                "use np.where(condition, a, b), np.logical_and, np.logical_or or np.logical_not.",
            )
        )

    def __float__(self) -> float:
        return float(self.known("float()", "leave it an array: x, or x.astype(np.float64)."))

    def __int__(self) -> int:
        return int(self.known("int()", "leave it an array: x.astype(np.int64)."))

    def __complex__(self) -> complex:
        return complex(self.known("complex()", "leave it an array: x.astype(np.complex128)."))

    def __index__(self) -> int:
        return operator.index(
            self.known(
                "using an array as a size or count",
                "pass the number as a static argument (static_argnums).",
            )
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        known = self.known(
            "turning an array into a real NumPy array",
            "call a function of NumPy itself (np.dot, np.exp, ...), or make the array that is"
            " written to inside this function.",
        )
        return np.array(known, dtype=dtype, copy=copy)

    def __jax_array__(self) -> jax.Array:
        return as_jax_value(self.value)

    def item(self, *index: int) -> Any:
        """One element as a Python number."""
        return self.known("item()", "leave it an array: x.reshape(()).").item(*index)

    def tolist(self) -> Any:
        """The elements as nested lists of Python numbers."""
        return self.known("tolist()", "leave it an array; it can be iterated over.").tolist()

    # NumPy's protocols

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        from pypto_spmd.numpy_body import functions

        operands = [isinstance(each, np.ndarray | np.generic) for each in inputs]
        if method != "__call__" or not any(operands):
            functions.note_numpy_function()
        return functions.call_ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(
        self, function: Callable, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        from pypto_spmd.numpy_body import functions

        functions.note_numpy_function()
        return functions.call_function(function, args, kwargs)

    # Reading and writing

    def __getitem__(self, index: Any) -> Any:
        value = self.value
        plain = plain_index(index)
        taken = _take(value, plain)
        if isinstance(taken, np.generic):
            return taken
        if taken.ndim == 0 and not _has_ellipsis(plain):
            return NumpyArray(taken)
        if _is_basic(plain):
            return self.indexed(taken, plain)
        return NumpyArray(taken)

    def __setitem__(self, index: Any, new: Any) -> None:
        plain = plain_index(index)
        # x[i] += v wrote through the view x[i] already when Python assigns it to x[i].
        if isinstance(new, NumpyArray) and new._base is self and new._index is plain:
            return
        self._write(plain, plain_value(new))

    def _write(self, index: Any, new: Any) -> None:
        if self._is_argument:
            refuse(
                "an argument, or an array from outside the function, is written to",
                _COPY,
                "The function runs on shards of its arguments, so its caller would not see it.",
            )
        value = self.value
        is_known = isinstance(value, np.ndarray | np.generic)
        if self._base is not None:
            copied = np.array(value) if is_known else value
            self._base._write(self._index, _put(copied, index, new))
            return
        changed = _put(value, index, new)
        if changed is value:
            return
        if self._is_view and not self._memory.is_only_of(self):
            refuse(
                "an array is written to that is a view of another one",
                f"write to the array itself, by an index, or {_COPY}",
                "A write through a view that isn't made by indexing doesn't reach its base.",
            )
        self._held = changed
        self._memory.version += 1
        self._seen = self._memory.version

    def write_all(self, new: Any) -> "NumpyArray":
        """Replace all elements, keeping shape and dtype, as `x[...] = new` does.

        Args:
            new: a value that may be broadcast to the shape.

        Returns:
            The array itself.
        """
        self._write(..., plain_value(new))
        return self

    def update_in_place(self, ufunc: np.ufunc, other: Any) -> Any:
        """Carry out `x += other` and its like.

        Args:
            ufunc: the operation.
            other: the right operand.

        Returns:
            The array itself; a new one for a scalar, which Python binds to the name.
        """
        result = _operate(ufunc, self, other)
        if self.ndim == 0:
            return result
        if not np.can_cast(result.dtype, self.dtype, "same_kind"):
            raise TypeError(
                f"Cannot cast ufunc '{ufunc.__name__}' output from {result.dtype!r} to"
                f" {self.dtype!r} with casting rule 'same_kind'"
            )
        if result.shape != self.shape:
            raise ValueError(
                f"non-broadcastable output operand with shape {self.shape} doesn't match the"
                f" broadcast shape {result.shape}"
            )
        return self.write_all(result)

    # Methods that are more than a NumPy function of the same name

    def astype(self, dtype: Any, **_: Any) -> "NumpyArray":
        """A copy of another dtype."""
        target = np.dtype(dtype)
        if self.is_known:
            return NumpyArray(self.value.astype(target))
        if self.dtype.kind == "c" and target.kind not in "cb":
            return NumpyArray(jnp.real(self.value).astype(target))
        return NumpyArray(self.value.astype(target))

    def copy(self, *_: Any, **__: Any) -> "NumpyArray":
        """A copy that is no view of anything."""
        return NumpyArray(np.array(self.value) if self.is_known else self.value)

    __copy__ = copy
    __deepcopy__ = copy

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> Any:
        """The same elements in another shape."""
        target = shape[0] if len(shape) == 1 else shape
        reshaped = _apply(np.reshape, self, target, order=order)
        return reshaped.copy() if copy else reshaped

    def transpose(self, *axes: Any) -> Any:
        """The array with its dims in another order."""
        order = axes[0] if len(axes) == 1 else axes or None
        return _apply(np.transpose, self, order)

    def flatten(self, order: str = "C") -> Any:
        """A copy in one dim."""
        return _apply(np.ravel, self, order=order).copy()

    def fill(self, new: Any) -> None:
        """Write one number everywhere."""
        self.write_all(new)

    def sort(self, axis: int = -1, **kwargs: Any) -> None:
        """Sort the array in place."""
        self.write_all(_apply(np.sort, self, axis=axis, **kwargs))

    def partition(self, kth: int, axis: int = -1) -> None:
        """Partition the array in place."""
        self.write_all(_apply(np.partition, self, kth, axis=axis))

    def dot(self, other: Any) -> Any:
        """The product `np.dot(self, other)`."""
        return _apply(np.dot, self, other)

    def conjugate(self) -> Any:
        """The complex conjugate."""
        return _operate(np.conjugate, self)

    conj = conjugate

    def __divmod__(self, other: Any) -> Any:
        return _operate(np.divmod, self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return _operate(np.divmod, other, self)

    def __contains__(self, element: Any) -> bool:
        return bool(_apply(np.any, self == element))

    def __getattr__(self, name: str) -> Any:
        if name in _NAMESAKES.split():
            function = getattr(np, name)
            return lambda *args, **kwargs: _apply(function, self, *args, **kwargs)
        if hasattr(np.ndarray, name):
            refuse(
                f"the attribute '{name}' of an array is used",
                "use a function of NumPy that makes a new array.",
                "It is about the memory of an array, and a traced array has none.",
            )
        raise AttributeError(f"'numpy.ndarray' object has no attribute '{name}'")


# Methods of ndarray that are the NumPy function of that name with the array as first argument.
_NAMESAKES = (
    "all any argmax argmin argpartition argsort choose clip compress cumprod cumsum diagonal max"
    " mean min nonzero prod put ravel repeat round searchsorted squeeze std sum swapaxes take trace"
    " var"
)

_BINARY_OPERATORS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "pow": np.power,
    "matmul": np.matmul,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
}
_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNARY_OPERATORS = {
    "neg": np.negative,
    "pos": np.positive,
    "abs": np.absolute,
    "invert": np.invert,
}


def _operate(ufunc: np.ufunc, *operands: Any) -> Any:
    from pypto_spmd.numpy_body import functions

    return functions.call_ufunc(ufunc, "__call__", operands, {})


def _apply(function: Callable, *args: Any, **kwargs: Any) -> Any:
    from pypto_spmd.numpy_body import functions

    return functions.call_function(function, args, kwargs)


def _install_operators() -> None:
    def define(name: str, method: Callable) -> None:
        setattr(NumpyArray, f"__{name}__", method)

    for name, ufunc in (_BINARY_OPERATORS | _COMPARISONS).items():
        define(name, lambda self, other, ufunc=ufunc: _operate(ufunc, self, other))
    for name, ufunc in _BINARY_OPERATORS.items():
        define(f"r{name}", lambda self, other, ufunc=ufunc: _operate(ufunc, other, self))
        define(f"i{name}", lambda self, other, ufunc=ufunc: self.update_in_place(ufunc, other))
    for name, ufunc in _UNARY_OPERATORS.items():
        define(name, lambda self, ufunc=ufunc: _operate(ufunc, self))


_install_operators()


def plain_value(value: Any) -> Any:
    """The NumPy or JAX value of an array; lists become arrays; anything else as it is."""
    if isinstance(value, NumpyArray):
        return value.value
    if isinstance(value, list | tuple):
        return plain_value(np.array(value) if not _holds_traced(value) else _apply(np.array, value))
    return value


def _holds_traced(value: Any) -> bool:
    return any(isinstance(leaf, NumpyArray | jax.Array) for leaf in jax.tree.leaves(value))


def as_jax_value(value: Any) -> Any:
    """A JAX value of the same dtype; an array of equal elements becomes a broadcast."""
    if isinstance(value, np.ndarray) and value.size > 1 and not any(value.strides):
        return jnp.full(value.shape, value[(0,) * value.ndim], value.dtype)
    if isinstance(value, np.ndarray | np.generic):
        return jnp.asarray(value, dtype=value.dtype)
    return value


def plain_index(index: Any) -> Any:
    """An index without stand-ins in it."""
    if isinstance(index, tuple):
        parts = tuple(plain_index(part) for part in index)
        same = all(new is old for new, old in zip(parts, index, strict=True))
        return index if same else parts
    if isinstance(index, slice):
        bounds = (index.start, index.stop, index.step)
        if any(isinstance(bound, NumpyArray) for bound in bounds):
            return slice(*(None if bound is None else operator.index(bound) for bound in bounds))
        return index
    if isinstance(index, list):
        return plain_value(index) if index else np.zeros(0, np.int64)
    return plain_value(index)


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def is_known_index(index: Any) -> bool:
    """Whether all of an index is known while tracing."""
    return not any(isinstance(part, jax.Array) for part in _parts(index))


def _is_basic(index: Any) -> bool:
    """Whether NumPy makes a view for this index."""
    return all(
        part is None
        or part is Ellipsis
        or isinstance(part, slice)
        or (isinstance(part, int | np.integer) and not isinstance(part, bool))
        or (isinstance(part, jax.Array) and part.ndim == 0 and part.dtype.kind in "iu")
        for part in _parts(index)
    )


def _has_ellipsis(index: Any) -> bool:
    return any(part is Ellipsis for part in _parts(index))


def _is_traced_mask(part: Any) -> bool:
    return isinstance(part, jax.Array) and part.dtype == np.bool_


def _check_bounds(shape: tuple[int, ...], index: Any) -> None:
    """Raise NumPy's IndexError where JAX would clamp or drop."""
    known = tuple(0 if isinstance(part, jax.Array) else part for part in _parts(index))
    if 0 in shape and known != _parts(index):
        return
    np.broadcast_to(np.zeros((), np.bool_), shape)[known]


def _take(value: Any, index: Any) -> Any:
    if any(_is_traced_mask(part) for part in _parts(index)):
        refuse(
            "an array is indexed by a traced boolean mask",
            "keep the shape: np.where(mask, x, 0), or np.sum(x, where=mask); assigning"
            " x[mask] = number works.",
            "How many elements the mask selects, so the shape of the result, is not known while"
            " the function is traced.",
        )
    if isinstance(value, np.ndarray) and is_known_index(index):
        return value[index]
    _check_bounds(value.shape, index)
    return as_jax_value(value)[index]


def _fits(index: Any, new: Any) -> bool:
    """Whether a write can be done in the memory of a NumPy array."""
    return is_known_index(index) and not isinstance(new, jax.Array)


def _put(value: Any, index: Any, new: Any) -> Any:
    """The value with an element or part replaced; the same object if that could be done in place."""
    if isinstance(value, np.ndarray) and _fits(index, new):
        changed = value if value.flags.writeable else np.array(value)
        changed[index] = new
        return changed
    old = as_jax_value(value)
    masks = [part for part in _parts(index) if _is_traced_mask(part)]
    if masks:
        return _put_where(old, index, new)
    _check_bounds(old.shape, index)
    fitting = jnp.asarray(new)
    if fitting.dtype.kind == "c" and old.dtype.kind != "c":
        fitting = jnp.real(fitting)
    return old.at[index].set(fitting.astype(old.dtype))


def _put_where(old: Any, mask: Any, new: Any) -> Any:
    if isinstance(mask, tuple) or jnp.ndim(new) > old.ndim - mask.ndim:
        refuse(
            "values are assigned to the elements that a traced boolean mask selects",
            "give values for all elements: x = np.where(mask, values, x).",
            "How many elements the mask selects is not known while the function is traced.",
        )
    whole = mask.reshape(mask.shape + (1,) * (old.ndim - mask.ndim))
    return jnp.where(whole, jnp.asarray(new).astype(old.dtype), old)
