"""What a training run tells: a table with a progress bar, a CSV file, TensorBoard.

The step is never waited for. What is logged stays on the devices until it is ready, and is written by a
later call; so a loss that is not finite is told some steps late, by the number of the step that made it.
"""

import csv
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pypto_spmd.errors import Fault, compose, count_of, refuse
from pypto_spmd.sharding.leaves import leaves_of

_SUBJECT = "MetricsLogger"
_WIDTH = 12


class NonFiniteError(ArithmeticError):
    """A metric is NaN or infinite: which, in which step, and the first array that is.

    Args:
        message: The whole text.
        step: The step.
        metric: The metric's name.
        leaf: Path of the first array that is not finite, if a state was given and has one.
    """

    def __init__(self, message: str, step: int, metric: str, leaf: str | None) -> None:
        super().__init__(message)
        self.step, self.metric, self.leaf = step, metric, leaf


@dataclass(frozen=True, slots=True)
class _Entry:
    """What was logged and may not be ready; `bad` counts what is not finite in each of the paths."""

    step: int
    values: Mapping[str, Any]
    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    bad: jax.Array | None

    @property
    def is_ready(self) -> bool:
        arrays = [*self.values.values(), self.bad]
        return all(array.is_ready() for array in arrays if hasattr(array, "is_ready"))


class MetricsLogger:
    """Writes metrics where they are wanted, and never makes a step wait.

    Args:
        total: how many steps there will be, for the progress bar; None for no bar.
        every: one of so many steps is in the table.
        table: whether to print the table, with the bar where the output is a terminal.
        csv: a file to write each step to. Steps of an earlier run from the first one on that is logged
            now are replaced, so that a resumed run leaves one line a step.
        tensorboard: a folder to write each step to; needs the extra `tensorboard`.
        check_finite: whether a metric that is NaN or infinite ends the run with a `NonFiniteError`.
        console: where the table goes.

    Raises:
        ShardingError: If TensorBoard is asked for and not installed.

    Example:
        >>> with MetricsLogger(every=2) as logger:
        ...     for step in range(4):
        ...         logger.log(step, {"loss": 1 / (step + 1)})
            step          loss
               0             1
               2      0.333333
    """

    def __init__(
        self,
        *,
        total: int | None = None,
        every: int = 1,
        table: bool = True,
        csv: str | Path | None = None,
        tensorboard: str | Path | None = None,
        check_finite: bool = False,
        console: Console | None = None,
    ) -> None:
        if every < 1:
            why = "It is the number of steps from one line of the table to the next."
            refuse(_SUBJECT, f"every is {every}.", why, "use every=1, or more for fewer lines.")
        self._total, self._every, self._check = total, every, check_finite
        self._console = (console or Console()) if table else None
        self._columns: tuple[str, ...] | None = None
        self._progress: Progress | None = None
        self._csv = None if csv is None else _CsvFile(Path(csv))
        self._tensorboard_folder = tensorboard
        self._tensorboard = None if tensorboard is None else _tensorboard_writer()
        self._writer: Any = None
        self._pending: deque[_Entry] = deque()

    def log(self, step: int, metrics: Mapping[str, Any], *, state: Any = None) -> None:
        """Logs a step; returns at once, whether or not the devices are done with it.

        Args:
            step: the step's number.
            metrics: name -> scalar, on the devices or not.
            state: arrays of the step, such as its parameters and gradients; with `check_finite`, the first
                of them that is not finite is told. Looking at them reads them once on the devices.

        Raises:
            NonFiniteError: If asked for, of this step or an earlier one.
        """
        if self._columns is None:
            self._start(step, metrics)
        values = {name: _fetched(value) for name, value in metrics.items()}
        paths, sizes, bad = (
            _non_finite(state) if self._check and state is not None else ((), (), None)
        )
        self._pending.append(_Entry(step, values, paths, sizes, bad))
        while self._pending and self._pending[0].is_ready:
            self._write(self._pending.popleft())

    def flush(self) -> None:
        """Waits for what was logged and writes it.

        Raises:
            NonFiniteError: As `log`.
        """
        while self._pending:
            self._write(self._pending.popleft())

    def close(self) -> None:
        """Writes what is left, and ends the bar and the files.

        Raises:
            NonFiniteError: As `log`.
        """
        try:
            self.flush()
        finally:
            if self._progress is not None:
                self._progress.stop()
            if self._csv is not None:
                self._csv.close()
            if self._writer is not None:
                self._writer.close()

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.close()
            return
        # What the run ended with is told, not what else is found now.
        check, self._check = self._check, False
        try:
            self.close()
        finally:
            self._check = check

    def _start(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._columns = tuple(metrics)
        if self._tensorboard is not None:
            self._writer = self._tensorboard(str(self._tensorboard_folder), purge_step=step)
        if self._csv is not None:
            self._csv.start(step, self._columns)
        if self._console is None:
            return
        if self._total is not None and self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._progress.add_task("", total=self._total, completed=step)
            self._progress.start()
        self._print(["step", *self._columns])

    def _write(self, entry: _Entry) -> None:
        values = {name: np.asarray(value).item() for name, value in entry.values.items()}
        if self._csv is not None:
            self._csv.write(entry.step, values)
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, entry.step)
        if self._progress is not None:
            self._progress.update(self._task, completed=entry.step + 1)
        if entry.step % self._every == 0 and self._console is not None:
            assert self._columns is not None
            cells = [f"{values[name]:.6g}" if name in values else "" for name in self._columns]
            self._print([str(entry.step), *cells])
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if self._check and bad:
            self._refuse(entry, bad[0], values[bad[0]])

    def _print(self, cells: Sequence[str]) -> None:
        assert self._console is not None
        first, *others = cells
        widths = [max(_WIDTH, len(name) + 1) for name in self._columns or ()]
        line = first.rjust(8) + "".join(
            "  " + cell.rjust(width) for cell, width in zip(others, widths, strict=True)
        )
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _refuse(self, entry: _Entry, metric: str, value: float) -> NoReturn:
        what = f"{metric} is {value} in step {entry.step}."
        leaf = None
        if entry.bad is None:
            why = "No arrays were given to look at: log(step, metrics, state=...)."
        else:
            counts = np.asarray(entry.bad)
            found = [i for i, count in enumerate(counts) if count]
            why = f"All {count_of(len(counts), 'array')} of the state are finite."
            if found:
                leaf = entry.paths[found[0]]
                why = (
                    f"The first array that is not finite is {leaf}: {counts[found[0]]} of its "
                    f"{count_of(entry.sizes[found[0]], 'element')}; {count_of(len(found), 'array')} "
                    f"of {len(counts)} {'is' if len(found) == 1 else 'are'} not."
                )
        fix = "go back to a checkpoint before that step; a lower learning rate, clipping or float32 may help."
        raise NonFiniteError(compose(_SUBJECT, [Fault(what, why, fix)]), entry.step, metric, leaf)


def _fetched(value: Any) -> Any:
    """The value, on its way to the host."""
    if hasattr(value, "copy_to_host_async"):
        value.copy_to_host_async()
    return value


def _non_finite(state: Any) -> tuple[tuple[str, ...], tuple[int, ...], jax.Array | None]:
    """Paths and sizes of a state's inexact arrays, and how many elements of each are not finite."""
    pairs = [
        (leaf, array)
        for leaf, array in zip(leaves_of(state), jax.tree.leaves(state), strict=True)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if not pairs:
        return (), (), None
    bad = _count_non_finite([array for _, array in pairs])
    bad.copy_to_host_async()
    return tuple(leaf.text for leaf, _ in pairs), tuple(leaf.size for leaf, _ in pairs), bad


@jax.jit
def _count_non_finite(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.sum(~jnp.isfinite(array), dtype=jnp.int32) for array in arrays])


class _CsvFile:
    """A CSV file with one line a step, whose columns may grow."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        self._columns: list[str] = []

    def start(self, step: int, columns: Sequence[str]) -> None:
        """Opens it, keeping what an earlier run wrote of the steps before."""
        rows: list[dict[str, str]] = []
        if self._path.exists():
            with self._path.open(newline="") as file:
                reader = csv.DictReader(file)
                rows = [row for row in reader if _is_before(row.get("step"), step)]
                columns = [*(reader.fieldnames or ["step"])[1:], *columns]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = list(dict.fromkeys(["step", *columns]))
        self._rewrite(rows)

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        # Through another file, so that a full disk loses nothing that was there.
        fresh = self._path.with_name(self._path.name + ".new")
        with fresh.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        fresh.replace(self._path)
        self._file = self._path.open("a", newline="")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a line, and columns for names that weren't there."""
        new = [name for name in values if name not in self._columns]
        if new:
            self.close()
            with self._path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            self._columns += new
            self._rewrite(rows)
        csv.DictWriter(self._file, self._columns, restval="").writerow({"step": step, **values})
        self._file.flush()  # a killed process loses no line

    def close(self) -> None:
        """Closes the file, if it was opened."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _is_before(text: str | None, step: int) -> bool:
    """Whether a line is of an earlier step; one that a killed process left half written is not."""
    return text is not None and text.isdecimal() and int(text) < step


def _tensorboard_writer() -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        what = "tensorboard is asked for, and tensorboardX is not installed."
        why = "It writes TensorBoard's files, and is an extra of this package."
        refuse(_SUBJECT, what, why, 'pip install "pypto_spmd[tensorboard]".')
    return SummaryWriter
