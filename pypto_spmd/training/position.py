"""Where an iterator over batches is, as a value that a checkpoint keeps."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from pypto_spmd.errors import count_of, refuse


@runtime_checkable
class Resumable(Protocol):
    """An iterator that can say where it is, and go there: what `grain`'s iterators do, and these here.

    A position is made of dicts, lists, strings, bytes, numbers, booleans and None.
    """

    def get_state(self) -> Any:
        """Where it is: what `set_state` takes to give the same batches from here on."""

    def set_state(self, state: Any) -> None:
        """Goes to where `get_state` was called."""


class Batches:
    """Batches of arrays that are in memory, shuffled anew in each epoch; it knows its position.

    Args:
        arrays: a pytree of arrays of one length.
        batch_size: how many examples a batch has; the last of an epoch may have fewer.
        seed: seed of the order, which depends on nothing else; None for the order of the arrays.
        epochs: how many passes over the arrays; None for no end.
        drop_last: whether to leave out a last batch that is short.

    Example:
        >>> batches = Batches(np.arange(5), 2, seed=None, epochs=1)
        >>> next(batches), batches.get_state()
        (array([0, 1]), {'epoch': 0, 'batch': 1})
        >>> [batch.tolist() for batch in batches]
        [[2, 3], [4]]
    """

    def __init__(
        self,
        arrays: Any,
        batch_size: int,
        *,
        seed: int | None = 0,
        epochs: int | None = None,
        drop_last: bool = False,
    ) -> None:
        leaves, self._tree = jax.tree.flatten(arrays)
        self._arrays: Sequence[np.ndarray] = [np.asarray(leaf) for leaf in leaves]
        lengths = sorted({len(array) if array.ndim else 0 for array in self._arrays})
        if len(lengths) != 1:
            what = f"the arrays have {count_of(len(lengths), 'length')}: {lengths}."
            why = "A batch takes the same examples of all arrays."
            refuse("Batches", what, why, "give arrays whose first dims are equal.")
        if not 0 < batch_size <= lengths[0]:
            what = f"batch_size is {batch_size}, of {count_of(lengths[0], 'example')}."
            why = "A batch has at least one example, and no more than there are."
            refuse("Batches", what, why, f"use a batch_size from 1 to {lengths[0]}.")
        self._length, self._size = lengths[0], batch_size
        self._seed, self._epochs = seed, epochs
        self._per_epoch = lengths[0] // batch_size if drop_last else -(-lengths[0] // batch_size)
        self._epoch = self._batch = 0
        self._order = self._order_of(0)

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._seed is None:
            return np.arange(self._length)
        return np.random.default_rng((self._seed, epoch)).permutation(self._length)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._batch == self._per_epoch:
            self._epoch, self._batch = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        if self._epochs is not None and self._epoch >= self._epochs:
            raise StopIteration
        chosen = self._order[self._batch * self._size : (self._batch + 1) * self._size]
        self._batch += 1
        return jax.tree.unflatten(self._tree, [array[chosen] for array in self._arrays])

    def get_state(self) -> dict[str, int]:
        """The epoch, and how many of its batches were given."""
        return {"epoch": self._epoch, "batch": self._batch}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Goes to where `get_state` was called."""
        self._epoch, self._batch = state["epoch"], state["batch"]
        self._order = self._order_of(self._epoch)
