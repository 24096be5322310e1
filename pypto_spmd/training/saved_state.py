"""A state as checkpoints hold it: arrays by path, and beside them a record of what each one is.

Nothing but paths, shapes and dtypes ties a checkpoint to the state that it was made of, so that one can
be restored on another mesh, in another layout, and into another container with the same names. Random
keys are held as their words, Python's numbers as arrays of no dims.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from pypto_spmd.errors import Fault, count_of, shape_text
from pypto_spmd.sharding.leaves import Leaf, leaves_of

MOST_PATHS = 5
_SCALARS = (bool, int, float, complex)
_CONTAINER = "value"  # stands for the path of a state that is one array


@dataclass(frozen=True, slots=True)
class Record:
    """What one array of a checkpoint is.

    Args:
        shape: its shape.
        dtype: its dtype's name, such as "float32" or "key<fry>".
        kind: "array", "scalar" of a Python number, or the name of a random key's implementation.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str

    def __str__(self) -> str:
        if self.kind == "scalar":
            return f"a Python {'bool' if self.dtype == 'bool' else self.dtype.rstrip('0123456789')}"
        if self.kind == "array":
            return shape_text(self.shape, _NamedDtype(self.dtype))
        return f"random keys {self.dtype}[{','.join(map(str, self.shape))}]"

    def fits(self, wanted: "Record") -> bool:
        """Whether what is saved so is what is wanted; a Python number fits an array of no dims."""
        if "scalar" in (self.kind, wanted.kind):
            return self.shape == wanted.shape and _letter(self.dtype) == _letter(wanted.dtype)
        return self == wanted


@dataclass(frozen=True, slots=True)
class _NamedDtype:
    name: str


def _letter(dtype: str) -> str:
    return dtype.replace("bfloat", "float")[:1]


def paths_of(leaves: Sequence[Leaf]) -> list[tuple[str, ...]]:
    """The path of each array in a checkpoint."""
    return [leaf.path[1:] or (_CONTAINER,) for leaf in leaves]


def text_of(path: Sequence[str]) -> str:
    """A path as it is written in records and messages."""
    return "/".join(path)


def described(state: Any) -> tuple[list[Leaf], list[Any]]:
    """The leaves of a state, and their values."""
    return leaves_of(state), jax.tree.leaves(state)


def record_of(value: Any) -> Record:
    """What a leaf is, or would be, in a checkpoint."""
    if isinstance(value, _SCALARS) and not isinstance(value, np.generic):
        return Record((), np.asarray(value).dtype.name, "scalar")
    dtype = value.dtype
    if isinstance(dtype, np.dtype):
        return Record(tuple(value.shape), dtype.name, "array")
    return Record(tuple(value.shape), str(dtype), "key")


def is_key(value: Any) -> bool:
    """Whether a leaf is an array of typed random keys, or describes one."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and not isinstance(dtype, np.dtype)


def unsavable(leaves: Sequence[Leaf], values: Sequence[Any]) -> list[Fault]:
    """A fault for each leaf that is no array, and for paths that two leaves share."""
    faults = []
    seen: dict[str, Leaf] = {}
    for leaf, path, value in zip(leaves, paths_of(leaves), values, strict=True):
        text = text_of(path)
        if text in seen:
            what = f"two arrays have the path {text}."
            fix = "give one of the keys another name."
            faults.append(Fault(what, "A checkpoint finds arrays by their path.", fix))
        seen[text] = leaf
        if isinstance(value, jax.Array) and value.is_deleted():
            what = f"{text} is deleted: its memory was donated to a later step."
            why = "A state that was passed as a donated argument is gone."
            faults.append(Fault(what, why, "save what the step returned."))
    return faults


def packed(leaves: Sequence[Leaf], values: Sequence[Any]) -> dict[str, Any]:
    """The arrays as nested dicts by path."""
    tree: dict[str, Any] = {}
    for path, value in zip(paths_of(leaves), values, strict=True):
        below = tree
        for step in path[:-1]:
            below = below.setdefault(step, {})
        below[path[-1]] = value
    return tree


def plain(value: Any) -> Any:
    """A leaf as an array of numbers; on the host if each of several processes has its own copy."""
    if is_key(value):
        value = jax.random.key_data(value)
    if not isinstance(value, jax.Array) or is_own_copy(value.sharding):
        return np.asarray(value)
    return value


def is_own_copy(sharding: Sharding | None) -> bool:
    """Whether an array that lies so is of this process alone, of several."""
    return sharding is not None and jax.process_count() > 1 and sharding.is_fully_addressable


def mismatches(
    saved: Mapping[str, Record], wanted: Mapping[str, Record], where: str, *, partial: bool
) -> list[Fault]:
    """What keeps a checkpoint from being restored as a state.

    Args:
        saved: what is in the checkpoint, by path.
        wanted: what the state has, by path.
        where: the checkpoint, for messages.
        partial: whether the checkpoint may have more than the state.
    """
    faults = []
    missing = [path for path in wanted if path not in saved]
    extra = [path for path in saved if path not in wanted]
    for path in missing[:MOST_PATHS]:
        close = difflib.get_close_matches(path, extra, 1) or difflib.get_close_matches(
            path, saved, 1
        )
        hint = f" The nearest path in it is {close[0]}." if close else ""
        fix = "make the state as the run did that saved it."
        faults.append(Fault(f"{path} is not in {where}.{hint}", _PATHS, fix))
    if len(missing) > MOST_PATHS:
        what = (
            f"{count_of(len(missing) - MOST_PATHS, 'more array')} of the state are not in {where}."
        )
        faults.append(Fault(what, _PATHS, "make the state as the run did that saved it."))
    if extra and not partial:
        shown = ", ".join(extra[:MOST_PATHS])
        more = f" and {len(extra) - MOST_PATHS} more" if len(extra) > MOST_PATHS else ""
        what = f"{where} has {count_of(len(extra), 'array')} that the state lacks: {shown}{more}."
        why = "Restoring a part by accident would lose the rest with the next checkpoint."
        faults.append(Fault(what, why, "pass partial=True if the state is meant to be a part."))
    for path, want in wanted.items():
        have = saved.get(path)
        if have is not None and not have.fits(want):
            what = f"{path} is {have} in {where}, and {want} is wanted."
            why = "Restoring may change where an array lies, but not what it is."
            fix = "make the state as the run did that saved it, and change it after it is restored."
            faults.append(Fault(what, why, fix))
    return faults


_PATHS = "A checkpoint finds arrays by their path."
