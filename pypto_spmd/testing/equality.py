"""SPMD equals serial: the promise of every ``@spmd`` function, checked for one call."""

from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from pypto_spmd.errors import count_of, shape_text, spmd_function

# What reductions in another order may differ by, relative to the largest element: some dozens of
# roundings. Other dtypes must be equal.
_ROUNDING = {
    "float64": 1e-11,
    "complex128": 1e-11,
    "float32": 2e-5,
    "complex64": 2e-5,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}


class Decorated(Protocol):
    """What is needed of an ``@spmd`` function."""

    __name__: str
    __wrapped__: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on the mesh."""
        ...

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """The plan, for its layouts."""
        ...


def assert_spmd_equal(
    fn: Decorated, *args: Any, rtol: float | None = None, atol: float | None = None, **kwargs: Any
) -> None:
    """Runs an ``@spmd`` function and the serial one below it and compares what they return.

    Structure, shapes and dtypes must be the same; floating values equal to rounding, others exactly.

    Args:
        fn: The decorated function.
        *args: What to call both with. NumPy arrays are copied for the serial call, which may write.
        rtol: Relative tolerance; by default some dozens of roundings of the dtype.
        atol: Absolute tolerance; by default ``rtol`` times the array's largest element, since a sum
            that cancels keeps the rounding of what it was made of.
        **kwargs: What to call both with.

    Raises:
        AssertionError: Naming each array that differs, how many of its elements, the largest error
            and its place, and the layouts.
    """
    copied_args, copied_kwargs = jax.tree.map(
        lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, (args, kwargs)
    )
    serial = fn.__wrapped__(*copied_args, **copied_kwargs)
    described_args, described_kwargs = jax.tree.map(_described, (args, kwargs))
    spmd = fn(*args, **kwargs)
    problems = list(_structure_problems(serial, spmd)) or list(
        _value_problems(serial, spmd, rtol, atol)
    )
    if problems:
        plan = fn.plan(*described_args, **described_kwargs)
        lines = [f"{spmd_function(fn.__name__)} differs from the serial function.", *problems]
        for role, layouts in (("argument ", plan.in_layouts), ("", plan.out_layouts)):
            lines += [f"{role}{path} was laid out as {text}." for path, text in layouts.items()]
        raise AssertionError("\n  ".join(lines))


def _described(leaf: Any) -> Any:
    """A device array as planning needs it, since donated ones are gone after the call."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _structure_problems(serial: Any, spmd: Any) -> Iterator[str]:
    if jax.tree.structure(serial) == jax.tree.structure(spmd):
        return
    paths, others = ([keystr(p) for p, _ in _leaves(tree)] for tree in (serial, spmd))
    for path in paths:
        if path not in others:
            yield f"result{path} is missing."
            return
    for path in others:
        if path not in paths:
            yield f"result{path} is there, which the serial function doesn't return."
            return
    yield f"it returns {jax.tree.structure(spmd)}, not {jax.tree.structure(serial)}."


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _value_problems(
    serial: Any, spmd: Any, rtol: float | None, atol: float | None
) -> Iterator[str]:
    for (path, want), (_, got) in zip(_leaves(serial), _leaves(spmd), strict=True):
        found, wanted = _host(got), _host(want)
        if isinstance(want, bool | int | float | complex) and wanted.dtype.kind == found.dtype.kind:
            wanted = wanted.astype(found.dtype)  # a Python number has no width of its own
        problem = _array_problem(wanted, found, rtol, atol)
        if problem:
            yield f"result{keystr(path)} {problem}"


def _host(leaf: Any) -> np.ndarray:
    """The leaf as NumPy has it, random keys by their data."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _array_problem(
    want: np.ndarray, got: np.ndarray, rtol: float | None, atol: float | None
) -> str | None:
    """What is different between two arrays, in words."""
    if want.shape != got.shape or want.dtype != got.dtype:
        now, then = (shape_text(array.shape, array.dtype) for array in (got, want))
        return f"is {now}, the serial one {then}."
    inexact = want.dtype.name in _ROUNDING or want.dtype.kind in "fc" or "float" in want.dtype.name
    rtol = _ROUNDING.get(want.dtype.name, 0.0) if rtol is None else rtol
    wide = want.dtype if want.dtype.name in ("complex64", "complex128") else np.dtype(np.float64)
    if not inexact:
        error, allowed = (want != got).astype(np.float64), np.zeros(want.shape)
        note = "exactly"
    else:
        a, b = want.astype(wide), got.astype(wide)
        finite = np.abs(a[np.isfinite(a)])
        if atol is None:
            atol = rtol * float(finite.max(initial=0.0))
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore"):
            error = np.where(same, 0.0, np.abs(a - b))
        allowed = np.where(np.isfinite(a), atol + rtol * np.abs(a), 0.0)
        note = f"to rtol={rtol:.3g}, atol={atol:.3g}"
    bad = ~(error <= allowed)
    if not bad.any():
        return None
    worst = np.unravel_index(int(np.argmax(np.where(np.isnan(error), np.inf, error))), error.shape)
    place = f"[{', '.join(str(int(i)) for i in worst)}]"
    size = f", the largest error {error[worst]:.3g}" if inexact else ""
    return (
        f"({shape_text(want.shape, want.dtype)}): {int(bad.sum())} of "
        f"{count_of(want.size, 'element')} not equal {note}{size} at {place}: "
        f"{got[worst]} where the serial one has {want[worst]}."
    )
