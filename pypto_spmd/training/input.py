"""Host batches, placed on the mesh ahead of the step that takes them.

A thread takes batches from the loader and places each by its sharding while the devices work on an
earlier one. What it has taken ahead is not part of the position: that is of the last batch given out.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from pypto_spmd.errors import count_of, listed, raise_faults, refuse
from pypto_spmd.mesh import DeviceMesh, current_mesh
from pypto_spmd.sharding.resolve import resolve
from pypto_spmd.sharding.spec import ShardingSpec, entries

_SUBJECT = "prefetch"
_CLOSE_SECONDS = 5.0


def prefetch(
    batches: Iterable[Any],
    shardings: Any = None,
    *,
    mesh: DeviceMesh | Mesh | None = None,
    depth: int = 2,
    pad: bool = False,
) -> "Prefetched":
    """Places batches on the mesh, some ahead of the one that is worked on.

    Of several processes each gives its own part of a batch, and gets the whole one.

    Args:
        batches: host batches, pytrees of arrays whose first dim is the batch: any iterable, such as a
            generator, `Batches` or a `grain` loader.
        shardings: how a batch lies: a spec (PartitionSpec, ShardingSpec or NamedSharding), or a pytree
            prefix of them; by default split by its first dim over the mesh's first axis.
        mesh: the mesh, where no spec names one; by default that of the enclosing `with mesh:`.
        depth: how many batches are ready at most, beside the one that was given out last.
        pad: whether a last short batch is filled up with copies of its last example; then each batch is
            given as a pair of the batch and a mask, (batch,), that is true for what was there.

    Returns:
        An iterator that is closed when it ends, by `close()`, by leaving it as a context manager, or
        when nobody holds it. It is `Resumable`.

    Raises:
        ShardingError: for shardings that can't be; while iterating, for a batch that is not of the size
            of the first one, or that the mesh doesn't divide.
    """
    if depth < 1:
        why = "At least one batch is placed ahead."
        refuse(_SUBJECT, f"depth is {depth}.", why, "use depth=2, or 1 to save memory.")
    found = mesh or _mesh_of(shardings) or current_mesh()
    if found is None:
        why = "Batches are placed on the devices of a mesh."
        refuse(_SUBJECT, "there is no mesh.", why, "pass mesh=..., or call it inside `with mesh:`.")
    on_mesh = DeviceMesh.from_jax(found) if isinstance(found, Mesh) else found
    if shardings is None:
        shardings = PartitionSpec(on_mesh.axis_names[0])
    return Prefetched(batches, _Placer(on_mesh, shardings, pad), depth)


def _mesh_of(shardings: Any) -> DeviceMesh | Mesh | None:
    is_leaf = lambda x: isinstance(x, PartitionSpec | ShardingSpec | NamedSharding)  # noqa: E731
    for leaf in jax.tree.leaves(shardings, is_leaf=is_leaf):
        mesh = getattr(leaf, "mesh", None)
        if isinstance(mesh, DeviceMesh | Mesh):
            return mesh
    return None


class Prefetched:
    """Batches on the mesh; made by :func:`prefetch`."""

    def __init__(self, batches: Iterable[Any], placer: "_Placer", depth: int) -> None:
        self._source = iter(batches)
        self._given = 0
        self._placer, self._depth = placer, depth
        self._position = self._source_position()
        self._ahead: _Ahead | None = None
        self._finalizer: weakref.finalize | None = None
        self._closed = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        if self._ahead is None:
            position = getattr(self._source, "get_state", None)
            self._ahead = _Ahead(self._source, position, self._placer, self._depth)
            # The thread must not hold this object: it ends when nobody else does.
            self._finalizer = weakref.finalize(self, self._ahead.stop)
            self._ahead.start()
        try:
            batch, self._position = self._ahead.take()
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                self.close()
            raise
        self._given += 1
        return batch

    def get_state(self) -> Any:
        """The position after the last batch that was given out, whatever was taken ahead of it."""
        if hasattr(self._source, "get_state"):
            return self._position
        return {"given": self._given}

    def set_state(self, state: Any) -> None:
        """Goes to where `get_state` was called; a loader that can't is read up to there.

        Raises:
            ShardingError: If that is before where a loader is that can't go back.
        """
        if hasattr(self._source, "set_state"):
            self._stop()
            self._source.set_state(state)  # pyright: ignore[reportAttributeAccessIssue]
            self._position = state
            return
        taken = self._given if self._ahead is None else self._ahead.taken
        wanted = state["given"]
        if self._given == wanted:
            return
        if taken > wanted:
            why = "It has no set_state, so it can only be read on."
            fix = (
                "make a new one and set its state before the first batch is taken, or use Batches."
            )
            what = f"{count_of(taken, 'batch', 'batches')} of the loader were read, {wanted} are asked for."
            refuse(_SUBJECT, what, why, fix)
        self._stop()
        for _ in range(wanted - taken):
            next(self._source)
        self._given = wanted

    def _source_position(self) -> Any:
        position = getattr(self._source, "get_state", None)
        return None if position is None else position()

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._ahead = self._finalizer = None

    def close(self) -> None:
        """Ends the thread and drops what it has placed; nothing more is given."""
        self._closed = True
        self._stop()

    def __enter__(self) -> "Prefetched":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Ahead:
    """The thread, and what it has placed; all that is shared is behind one condition."""

    def __init__(
        self,
        source: Iterator[Any],
        position: Callable[[], Any] | None,
        placer: "_Placer",
        depth: int,
    ) -> None:
        self._source, self._position = source, position
        self._placer, self._depth = placer, depth
        self._changed = threading.Condition()
        self._ready: deque[tuple[Any, Any]] = deque()
        self._end: BaseException | None = None
        self._stopped = False
        self.taken = 0
        self._thread = threading.Thread(target=self._run, name="pypto_spmd prefetch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._has_room():
                batch = next(self._source)
                self.taken += 1
                position = None if self._position is None else self._position()
                placed = self._placer.place(batch)
                with self._changed:
                    self._ready.append((placed, position))
                    self._changed.notify_all()
        except (
            BaseException
        ) as error:  # the end of the loader too; it is raised where batches are taken
            with self._changed:
                self._end = error
                self._changed.notify_all()

    def _has_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._depth)
            return not self._stopped

    def take(self) -> tuple[Any, Any]:
        """The next batch and the position after it; what the loader raised, after its last batch."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._end is not None)
            if not self._ready:
                assert self._end is not None
                raise self._end
            item = self._ready.popleft()
            self._changed.notify_all()
            return item

    def stop(self) -> None:
        """Ends the thread; one that hangs in the loader is left behind, and ends with the process."""
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)


@dataclass(slots=True)
class _Placer:
    """Places batches; the first one says how large they are."""

    mesh: DeviceMesh
    shardings: Any
    pad: bool
    size: int | None = None
    parts: int = 1
    flat: list[NamedSharding] = field(default_factory=list)
    structure: Any = None
    given: int = 0

    def place(self, batch: Any) -> Any:
        """The batch on the mesh; with `pad`, a pair of it and its mask."""
        with_paths, tree = tree_flatten_with_path(batch)
        arrays = [np.asarray(leaf) for _, leaf in with_paths]
        size = self._size_of([keystr(path) for path, _ in with_paths], arrays)
        if self.structure is None or tree != self.structure:
            self._resolve(arrays, tree)
        if self.size is None:
            self.size = -(-size // self.parts) * self.parts if self.pad else size
        self._check(size)
        self.given += 1
        missing = self.size - size
        if missing:
            arrays = [np.concatenate([a, np.repeat(a[-1:], missing, axis=0)]) for a in arrays]
        leaves = [_placed(a, sharding) for a, sharding in zip(arrays, self.flat, strict=True)]
        # A copy may still be under way, and loaders fill their buffers again.
        placed = jax.block_until_ready(jax.tree.unflatten(tree, leaves))
        if not self.pad:
            return placed
        first = self.flat[0]
        rows = NamedSharding(first.mesh, PartitionSpec(*first.spec.partitions[:1]))
        return placed, _placed(np.arange(self.size) < size, rows)

    def _size_of(self, paths: Sequence[str], arrays: Sequence[np.ndarray]) -> int:
        sizes = {
            f"batch{path}": a.shape[0] if a.ndim else None
            for path, a in zip(paths, arrays, strict=True)
        }
        if len(set(sizes.values())) != 1 or None in sizes.values():
            found = [f"{path} is {'a scalar' if n is None else n}" for path, n in sizes.items()]
            what = f"the first dims of batch {self.given} differ: {listed(found)}."
            why = "The first dim of each array is the batch."
            refuse(_SUBJECT, what, why, "give arrays of one length.")
        (size,) = set(sizes.values())
        assert size is not None
        return size

    def _resolve(self, arrays: Sequence[np.ndarray], tree: Any) -> None:
        """One sharding for each array, and into how many parts this process's batch is split."""
        described = jax.tree.unflatten(
            tree, [jax.ShapeDtypeStruct((0, *a.shape[1:]), a.dtype) for a in arrays]
        )
        faults: list[Any] = []
        specs = resolve(
            self.shardings,
            (described,),
            self.mesh,
            role="argument",
            names=["batch"],
            label="shardings",
            faults=faults,
        )
        raise_faults(_SUBJECT, faults)
        on = self.mesh.jax_mesh
        self.flat = [NamedSharding(on, PartitionSpec() if s is None else s) for s in specs]
        self.structure = tree
        splits = [next(entries(s.spec), ()) for s in self.flat]
        parts = max((prod(self.mesh.shape[axis] for axis in axes) for axes in splits), default=1)
        self.parts = max(parts // jax.process_count(), 1)

    def _check(self, size: int) -> None:
        assert self.size is not None
        batch = f"batch {self.given}"
        examples = count_of(size, "example")
        if size > self.size or size == 0:
            what = f"{batch} has {examples}, the first one had {self.size}."
            refuse(_SUBJECT, what, "All batches but the last have one size.", "batch them evenly.")
        if size < self.size and not self.pad:
            what = f"{batch} is short: it has {examples}, the ones before had {self.size}."
            why = "A step is compiled for one size of batch."
            fix = "pass pad=True to get it filled up, with a mask, or have the loader drop it."
            refuse(_SUBJECT, what, why, fix)
        if self.size % self.parts:
            what = f"{batch} has {examples}, which {self.parts} shards don't divide."
            why = f"Its first dim is split over the mesh {self.mesh}."
            near = max(self.size // self.parts, 1) * self.parts
            fix = f"use batches of {near} or {near + self.parts}, or pass pad=True."
            refuse(_SUBJECT, what, why, fix)


def _placed(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    if next(iter(sharding.device_set)).platform == "cpu":
        array = array.copy()  # the device's memory may be that of the loader's buffer
    if jax.process_count() > 1:
        return jax.make_array_from_process_local_data(sharding, array)
    return jax.device_put(array, sharding)
