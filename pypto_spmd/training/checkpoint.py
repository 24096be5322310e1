"""Checkpoints: the state, the position in the data and the metrics of a step, saved by orbax.

Each device's parts are written and read by themselves, so that a state is restored on any mesh and in
any layout without a device that holds the whole of it. A checkpoint is written beside the others and
gets its name last: a process that is killed, or a disk that is full, costs the one being written and
no other.
"""

import base64
import errno
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from pypto_spmd.errors import Fault, compose, listed, refuse
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.nnx_body import split_modules
from pypto_spmd.training import saved_state
from pypto_spmd.training.fingerprint import fingerprints
from pypto_spmd.training.position import Resumable
from pypto_spmd.training.saved_state import Record
from pypto_spmd.training.targets import shardings_of

_SUBJECT = "CheckpointManager"
_FORMAT = 1
_STATE, _RECORD = "state", "record"
_FULL = ("No space left on device", "RESOURCE_EXHAUSTED", "Disk quota exceeded", "File too large")
_LONGEST = 400
logger = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written or read, told with its step, its arrays and the fix.

    Args:
        message: The whole text.
        faults: What the text is made of.
    """

    def __init__(self, message: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)


class CheckpointManager:
    """Saves and restores a training run; needs the extra `flax`.

    Saving is asynchronous: `save` returns when the state is copied off the devices, which then may be
    donated to the next step. Leaving it as a context manager waits for the last one.

    Args:
        directory: the folder of this run; one folder a step is made in it.
        max_to_keep: how many of the latest are kept; None for all.
        keep_best: how many of the best are kept beside them, by a metric.
        metric: which metric.
        mode: "min" or "max": what is best.
        every: one of so many steps is saved by `save`, the others are passed over.

    Raises:
        ShardingError: For options that can't be, and if orbax is not installed.

    Example:
        >>> import tempfile
        >>> state = {"w": jax.numpy.arange(4.0), "step": 3}
        >>> with CheckpointManager(tempfile.mkdtemp()) as checkpoints:
        ...     saved = checkpoints.save(3, state)
        ...     again = checkpoints.restore(state)
        >>> again["w"], again["step"]
        (Array([0., 1., 2., 3.], dtype=float32), 3)
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        max_to_keep: int | None = 3,
        keep_best: int = 0,
        metric: str = "loss",
        mode: str = "min",
        every: int = 1,
    ) -> None:
        for name, value, least in (
            ("max_to_keep", max_to_keep, 1),
            ("keep_best", keep_best, 0),
            ("every", every, 1),
        ):
            if value is not None and value < least:
                why = f"It is a number of {least} or more."
                refuse(_SUBJECT, f"{name} is {value}.", why, f"use {name}={least} or more.")
        if mode not in ("min", "max"):
            refuse(
                _SUBJECT,
                f"mode is {mode!r}.",
                "The best is the least or the most.",
                "use 'min' or 'max'.",
            )
        self.directory = Path(directory).absolute()
        self._every, self._max_to_keep = every, max_to_keep
        self._keep_best, self._metric, self._mode = keep_best, metric, mode
        self._ocp = _orbax()
        self._manager = self._open(cleanup=False)
        self._has_saved = False
        self._being_saved: int | None = None

    def _open(self, *, cleanup: bool) -> Any:
        """Orbax's manager; with `cleanup` it removes what a killed process left half written."""
        policies = self._ocp.checkpoint_managers
        keep = policies.LatestN(self._max_to_keep)
        ranked = None
        if self._keeps_best:
            ranked = lambda metrics: _score(metrics[self._metric], self._mode)  # noqa: E731
            best = policies.BestN(
                get_metric_fn=ranked,
                reverse=self._mode == "min",
                n=self._keep_best,
                keep_checkpoints_without_metrics=False,
            )
            keep = policies.AnyPreservationPolicy([keep, best])
        options = self._ocp.CheckpointManagerOptions(
            preservation_policy=keep,
            best_fn=ranked,  # without it orbax writes no metrics
            cleanup_tmp_directories=cleanup,
            save_root_metadata=False,
        )
        return self._ocp.CheckpointManager(self.directory, options=options)

    @property
    def _keeps_best(self) -> bool:
        return self._keep_best > 0 and self._max_to_keep is not None

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are saved whole, in order."""
        return tuple(sorted(self._manager.all_steps()))

    @property
    def latest_step(self) -> int | None:
        """The last of them."""
        return max(self.steps, default=None)

    @property
    def best_step(self) -> int | None:
        """The step whose metric is best, of those that are kept."""
        sign = 1 if self._mode == "min" else -1
        scores = {step: (self.metrics(step) or {}).get(self._metric) for step in self.steps}
        known = {
            step: _score(score, self._mode) for step, score in scores.items() if score is not None
        }
        return min(known, key=lambda step: (sign * known[step], -step), default=None)

    def metrics(self, step: int) -> dict[str, float] | None:
        """The metrics that a step was saved with, if any."""
        return self._record(self._checked_step(step))["metrics"]

    def save(
        self,
        step: int,
        state: Any,
        *,
        data: Resumable | None = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves a step, while the devices go on.

        Args:
            step: its number; higher than that of all that are saved.
            state: a pytree of arrays, random keys and numbers, or an nnx module.
            data: the iterator over the data, whose position is saved. Of several processes, the position of
                the first is kept for all.
            metrics: name -> scalar.
            force: whether to save a step that isn't a multiple of `every`.

        Returns:
            Whether it is being saved: not if `every` passes it over.

        Raises:
            CheckpointError: For a state that can't be saved; and if an earlier save has failed since, which
                loses nothing that was saved before. It may be called again.
        """
        if step % self._every and not force:
            return False
        self.wait()
        latest = self.latest_step
        if latest is not None and step <= latest:
            what = f"step {step} is to be saved, and step {latest} is already."
            why = "The latest checkpoints are kept: those that are to be replaced must go first."
            _refuse(
                what, why, f"call delete_after({step - 1}) if the run has gone back on purpose."
            )
        scores = None if metrics is None else {name: float(m) for name, m in metrics.items()}
        if self._keeps_best and self._metric not in (scores or {}):
            what = f"step {step} has no metric {self._metric!r}."
            why = f"The best {self._keep_best} by it are to be kept."
            _refuse(what, why, f"pass metrics={{{self._metric!r}: ...}}.")
        (state,), _ = split_modules([state])
        leaves, values = saved_state.described(state)
        _raise(saved_state.unsavable(leaves, values))
        plain = [saved_state.plain(value) for value in values]
        texts = [saved_state.text_of(path) for path in saved_state.paths_of(leaves)]
        records = [asdict(_with_implementation(value)) for value in values]
        record = {
            "format": _FORMAT,
            "leaves": dict(zip(texts, records, strict=True)),
            "fingerprints": dict(zip(texts, fingerprints(plain), strict=True)),
            "metrics": scores,
            "data": None if data is None else {"position": _to_json(data.get_state())},
        }
        arrays = saved_state.packed(leaves, plain)
        if not self._has_saved:
            self._manager.close()
            self._manager = self._open(cleanup=True)
            self._has_saved = True
        self._being_saved = step
        args = self._ocp.args
        with self._told():
            self._manager.save(
                step,
                args=args.Composite(
                    **{_STATE: args.PyTreeSave(arrays), _RECORD: args.JsonSave(record)}
                ),
                metrics=scores if self._keeps_best else None,
                force=True,
            )
        return True

    def wait(self) -> None:
        """Waits until what is being saved is on the disk.

        Raises:
            CheckpointError: If it can't be saved.
        """
        with self._told():
            self._manager.wait_until_finished()
            self._being_saved = None

    def delete_after(self, step: int) -> None:
        """Deletes all later steps, for a run that has gone back to this one."""
        self.wait()
        for later in [saved for saved in self.steps if saved > step]:
            self._manager.delete(later)

    def restore(
        self,
        state: Any,
        *,
        step: int | None = None,
        shardings: Any = None,
        mesh: DeviceMesh | Mesh | None = None,
        data: Resumable | None = None,
        partial: bool = False,
    ) -> Any:
        """Restores a step, each array as it is wanted now, whatever mesh and layout it was saved from.

        Args:
            state: what is wanted: a pytree of arrays, `jax.ShapeDtypeStruct`s (`jax.eval_shape` makes them)
                and numbers; or an nnx module, which gets the arrays.
            step: which step; by default the latest.
            shardings: how the state is to lie: what `@spmd` takes as `parameter_shardings`, or the plan of a
                step that has it as an argument; by default as its own arrays and descriptions do.
            mesh: the mesh, where `shardings` names none; by default that of the enclosing `with mesh:`.
            data: the iterator over the data, which is moved to its position.
            partial: whether the state may be a part of what was saved.

        Returns:
            The state.

        Raises:
            CheckpointError: If there is no such step, if it doesn't fit the state, or if it is corrupt; with
                the arrays and what is wrong with each.
        """
        self.wait()
        step = self._checked_step(step)
        where = f"the checkpoint of step {step}"
        (tree,), modules = split_modules([state])
        leaves, values = saved_state.described(tree)
        record = self._record(step)
        saved = {
            path: Record(tuple(r["shape"]), r["dtype"], r["kind"])
            for path, r in record["leaves"].items()
        }
        texts = [saved_state.text_of(path) for path in saved_state.paths_of(leaves)]
        wanted = {
            text: _like(saved.get(text), saved_state.record_of(value))
            for text, value in zip(texts, values, strict=True)
        }
        faults = saved_state.mismatches(saved, wanted, where, partial=partial)
        targets = shardings_of(tree, leaves, values, shardings, mesh, faults)
        kept = record["data"]
        if data is not None and kept is None:
            what = f"{where} has no position in the data."
            why = "It was saved without data=...."
            faults.append(Fault(what, why, "leave data out, and move the iterator by hand."))
        _raise(faults)
        forms = [
            self._form(value, saved[text], sharding)
            for value, text, sharding in zip(values, texts, targets, strict=True)
        ]
        arrays = self._read(step, leaves, forms)
        _raise(
            [
                Fault(
                    f"{text} is corrupt in {where}.",
                    "Its contents are not those that were saved.",
                    self._other_step(step),
                )
                for text, found in zip(texts, fingerprints(arrays), strict=True)
                if found != record["fingerprints"][text]
            ]
        )
        restored = [
            _as_wanted(array, value, saved[text], sharding)
            for array, value, text, sharding in zip(arrays, values, texts, targets, strict=True)
        ]
        if data is not None and kept is not None:
            data.set_state(_from_json(kept["position"]))
        result = jax.tree.unflatten(jax.tree.structure(tree), restored)
        if modules is None:
            return result
        modules.update([result])
        return state

    def close(self) -> None:
        """Waits for what is being saved, and ends.

        Raises:
            CheckpointError: If it can't be saved.
        """
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(str(failed))

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Tells what orbax raises about a save in this library's words, and makes it usable again."""
        try:
            yield
        except Exception as error:
            step, self._being_saved = self._being_saved, None
            self._recover()
            kept = self.steps
            full = _is_full(error)
            what = (
                f"step {step} was not saved: {'the disk is full' if full else _first_line(error)}."
            )
            why = (
                f"Nothing that was saved before is lost: {_steps_text(kept)} can be restored."
                if kept
                else "No other step is saved."
            )
            fix = (
                f"free space on the disk of {self.directory}, or keep fewer, and save again."
                if full
                else "mend it and save again."
            )
            fault = Fault(what, why, fix)
            raise CheckpointError(compose(_SUBJECT, [fault]), [fault]) from error

    def _recover(self) -> None:
        """A manager without the save that failed, its half-written files gone."""
        try:
            self._manager.close()
        except Exception as error:  # it tells the failed save once more
            logger.debug("closing after a failed save: %s", error)
        self._manager = self._open(cleanup=True)

    def _checked_step(self, step: int | None) -> int:
        kept = self.steps
        if not kept:
            why = "A step is there when it is saved whole."
            _refuse(
                f"no step is saved in {self.directory}.", why, "check the folder, or start afresh."
            )
        if step is not None and step not in kept:
            what = f"step {step} is not saved; {_steps_text(kept)} can be restored."
            _refuse(
                what, "Steps that are not among those kept are deleted.", "restore one of these."
            )
        return kept[-1] if step is None else step

    def _record(self, step: int) -> dict[str, Any]:
        """The record of a step."""
        args = self._ocp.args
        try:
            restored = self._manager.restore(
                step, args=args.Composite(**{_RECORD: args.JsonRestore()})
            )
            record = restored[_RECORD]
        except Exception as error:
            self._refuse_corrupt(step, f"its record can't be read: {_first_line(error)}.", error)
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            what = f"the checkpoint of step {step} is of another version of this package."
            _refuse(
                what, f"Its record is not of format {_FORMAT}.", "restore it with that version."
            )
        return record

    def _form(self, value: Any, saved: Record, sharding: Any) -> tuple[Any, Any]:
        """What orbax is told of one array: what it is, and how it is to be read."""
        # Python's numbers have more bits than arrays that they may be restored to.
        is_own = saved_state.is_own_copy(sharding)
        if sharding is None or is_own or saved.kind == "scalar":
            form = np.empty(_plain_shape(value, saved), _plain_dtype(saved))
            return form, self._ocp.RestoreArgs(restore_type=np.ndarray)
        shape, dtype = _plain_shape(value, saved), _plain_dtype(saved)
        form = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        return form, self._ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, dtype=dtype)

    def _read(
        self, step: int, leaves: Sequence[Any], forms: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """The arrays; if they can't be read, an error that names those that can't."""
        paths = saved_state.paths_of(leaves)
        try:
            return self._read_some(step, leaves, forms)
        except Exception as error:
            faults = []
            for leaf, path, form in zip(leaves, paths, forms, strict=True):
                try:
                    self._read_some(step, [leaf], [form])
                except Exception as failed:
                    what = (
                        f"{saved_state.text_of(path)} is corrupt in the checkpoint of step {step}."
                    )
                    why = f"It can't be read: {_first_line(failed)}."
                    faults.append(Fault(what, why, self._other_step(step)))
            if len(faults) in (0, len(leaves)) and len(leaves) > 1:
                self._refuse_corrupt(step, f"it can't be read: {_first_line(error)}.", error)
            raise CheckpointError(compose(_SUBJECT, faults), faults) from error

    def _read_some(
        self, step: int, leaves: Sequence[Any], forms: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        args = self._ocp.args
        item = saved_state.packed(leaves, [form for form, _ in forms])
        how = saved_state.packed(leaves, [how for _, how in forms])
        wanted = args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
        restored = self._manager.restore(step, args=args.Composite(**{_STATE: wanted}))[_STATE]
        return [_at(restored, path) for path in saved_state.paths_of(leaves)]

    def _refuse_corrupt(self, step: int, why: str, error: Exception) -> NoReturn:
        fault = Fault(
            f"the checkpoint of step {step} is corrupt.",
            why[:1].upper() + why[1:],
            self._other_step(step),
        )
        raise CheckpointError(compose(_SUBJECT, [fault]), [fault]) from error

    def _other_step(self, step: int) -> str:
        others = [other for other in self.steps if other != step]
        if not others:
            return "no other step is saved: start afresh."
        return f"restore another one, such as step={others[-1]}."


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        why = "It writes and reads checkpoints, and is an extra of this package."
        refuse(_SUBJECT, "orbax is not installed.", why, 'pip install "pypto_spmd[flax]".')
    return ocp


def _refuse(what: str, why: str, fix: str) -> NoReturn:
    fault = Fault(what, why, fix)
    raise CheckpointError(compose(_SUBJECT, [fault]), [fault])


def _raise(faults: Sequence[Fault]) -> None:
    once = tuple(dict.fromkeys(faults))
    if once:
        raise CheckpointError(compose(_SUBJECT, once), once)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0].partition(" [tensorstore_spec")[0] if lines else type(error).__name__
    return text[:_LONGEST].rstrip(". ")


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if any(text in str(error) for text in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def _steps_text(steps: Sequence[int]) -> str:
    return f"{'step' if len(steps) == 1 else 'steps'} {listed([str(step) for step in steps])}"


def _with_implementation(value: Any) -> Record:
    """The record of a leaf that is there; of random keys the kind is their implementation."""
    record = saved_state.record_of(value)
    if not saved_state.is_key(value):
        return record
    return Record(record.shape, record.dtype, str(jax.random.key_impl(value)))


def _like(saved: Record | None, wanted: Record) -> Record:
    """What is wanted; a description of random keys tells their dtype, which names the implementation."""
    if saved is not None and wanted.kind == "key" and saved.dtype == wanted.dtype:
        return Record(wanted.shape, wanted.dtype, saved.kind)
    return wanted


def _plain_dtype(saved: Record) -> np.dtype:
    return np.dtype(np.uint32) if saved.dtype.startswith("key<") else jax.numpy.dtype(saved.dtype)


def _plain_shape(value: Any, saved: Record) -> tuple[int, ...]:
    if not saved.dtype.startswith("key<"):
        return saved.shape
    described = jax.ShapeDtypeStruct(saved.shape, value.dtype)
    return jax.eval_shape(jax.random.key_data, described).shape


def _as_wanted(array: Any, value: Any, saved: Record, sharding: Any) -> Any:
    """What was read, as the leaf that it is restored to."""
    if sharding is not None and isinstance(array, np.ndarray):
        dtype = array.dtype if saved_state.is_key(value) else value.dtype
        array = jax.device_put(array.astype(dtype), sharding)
    if saved_state.is_key(value):
        return jax.random.wrap_key_data(array, impl=saved.kind)
    if isinstance(value, np.generic):
        return value.dtype.type(array)
    if not hasattr(value, "dtype"):
        return type(value)(np.asarray(array).item())
    return array


def _at(tree: Any, path: Sequence[str]) -> Any:
    for step in path:
        tree = tree[step]
    return tree


_BYTES = "__bytes__"


def _score(value: float, mode: str) -> float:
    """A metric to rank by: what is not a number is the worst."""
    if math.isnan(value):
        return math.inf if mode == "min" else -math.inf
    return value


def _to_json(value: Any) -> Any:
    """A position in the data as JSON holds it."""
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            _refuse_position(value)
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return _refuse_position(value)


def _refuse_position(value: Any) -> NoReturn:
    what = f"the position in the data holds {value!r}."
    why = "It is kept as JSON: dicts by name, lists, strings, bytes, numbers, booleans and None."
    _refuse(what, why, "have get_state() return these only.")


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {_BYTES}:
            return base64.b64decode(value[_BYTES])
        return {key: _from_json(item) for key, item in value.items()}
    return [_from_json(item) for item in value] if isinstance(value, list) else value
