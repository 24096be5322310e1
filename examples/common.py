"""What the training examples share: their options, where a run begins, and what it leaves behind.

The model, the step, the table of layouts and the loop are each example's own.
"""

import argparse
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pypto_spmd import DeviceMesh
from pypto_spmd.training import (
    CheckpointManager,
    Layout,
    MetricsLogger,
    Prefetched,
    graceful_stop,
)

SAVE_EVERY = 50
"""Steps from one checkpoint to the next; the last step is saved too."""

Layouts = Mapping[str, Callable[..., Layout]]
"""Layouts by name, each made from the names of the mesh's axes."""


def training_options(
    description: str | argparse.ArgumentParser,
    layouts: Layouts,
    *,
    layout: str,
    steps: int,
    check: int,
) -> argparse.Namespace:
    """What the command line says, with `mesh` a mesh and `layout` one of `layouts` on it.

    Args:
        description: what the example does, in a sentence; or a parser that has it, and further options.
        layouts: the layouts to choose from.
        layout: the name of the usual one.
        steps: the usual number of steps.
        check: the usual number of steps that are run serially too.
    """
    parser = description
    if isinstance(parser, str):
        parser = argparse.ArgumentParser(description=parser)
    add = parser.add_argument
    usual = "data=4,model=2"
    text = f"the mesh's axes and their sizes (default: {usual}); data=1 is one device"
    add("--mesh", default=usual, type=_axes, metavar="data=N,model=M", help=text)
    names = tuple(layouts)
    text = f"where parameters, optimizer state and batch lie (default: {layout})"
    add("--layout", choices=names, default=layout, help=text)
    text = f"steps of the whole run, resumed ones included (default: {steps})"
    add("--steps", type=_count(1), default=steps, metavar="N", help=text)
    text = f"how many steps to run serially too, and compare (default: {check})"
    add("--check", type=_count(0), default=check, metavar="N", help=text)
    text = f"save a checkpoint here every {SAVE_EVERY} steps, and at the end"
    add("--save", type=Path, metavar="FOLDER", help=text)
    text = "go on from the last checkpoint in the folder of --save, on any mesh, in any layout"
    add("--resume", action="store_true", help=text)
    add("--losses", type=Path, metavar="FILE", help="write the loss of each step here, as JSON")
    options = parser.parse_args()
    if options.resume and options.save is None:
        parser.error("--resume goes on from a checkpoint: say in which folder, with --save FOLDER")
    if options.losses is not None and not options.losses.parent.is_dir():
        parser.error(f"--losses {options.losses}: there is no such folder to write it in")
    axes = options.mesh
    sizes = tuple(axes.values())
    options.mesh = DeviceMesh(np.arange(prod(sizes)).reshape(sizes), tuple(axes))
    options.layout_name, options.layout = options.layout, layouts[options.layout](*axes)
    return options


def _axes(text: str) -> dict[str, int]:
    """The sizes of the axes, by name."""
    pairs = [part.split("=") for part in text.split(",")]
    names = [pair[0] for pair in pairs]
    if not all(len(pair) == 2 and pair[0] and pair[1].isdecimal() for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not like data=4,model=2")
    if len(set(names)) < len(names) or any(int(size) == 0 for _, size in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: each axis is named once, and has 1 or more")
    return {name: int(size) for name, size in pairs}


def _count(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps, {least} or more")
        return int(text)

    return count


def standard_library(length: int) -> np.ndarray:
    """The sources of the standard library's modules as bytes, in pieces: (number, length)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)
    return text[: len(text) // length * length].reshape(-1, length)


class Run:
    """A run of an example: goes on from a checkpoint if asked, tells its losses, and saves.

    Ctrl-C ends it after the step that runs, which is saved.

    Args:
        options: what `training_options` gave.

    Example:
        with Run(options) as run:
            state = run.resumed(state, batches)
            for number in run.steps():
                state, loss = step(state, next(batches))
                run.done(number, loss, state, batches)
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._losses: dict[int, Any] = {}
        self._done, self._position = 0, None
        self._is_over = False

    def __enter__(self) -> "Run":
        options = self._options
        with ExitStack() as stack:
            self._checkpoints = None
            if options.save is not None:
                manager = CheckpointManager(options.save, every=SAVE_EVERY)
                self._checkpoints = stack.enter_context(manager)
            logger = MetricsLogger(every=max(options.steps // 10, 1), total=options.steps)
            self._logger = stack.enter_context(logger)
            self._stop = stack.enter_context(graceful_stop())
            self._exits = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._exits.__exit__(*exception)
        if self._options.losses is not None and self._losses:
            self._options.losses.write_text(json.dumps(self.losses, indent=1) + "\n")

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step that was done, by the step's number; the first is 1."""
        return {number: float(loss) for number, loss in self._losses.items()}

    def resumed(self, state: Any, batches: Prefetched) -> Any:
        """The state to begin with: the given one, or with `--resume` that of the last checkpoint.

        Args:
            state: a new state, laid out as it is to be; nnx modules are changed in place.
            batches: the data, which goes to where it was.
        """
        options, checkpoints = self._options, self._checkpoints
        saved = None if checkpoints is None else checkpoints.latest_step
        if options.resume and checkpoints is not None:
            if saved is None:
                sys.exit(f"--resume: no checkpoint is in {options.save}; begin without --resume")
            if saved >= options.steps:
                sys.exit(f"--resume: {saved} steps are done; ask for more, by --steps")
            state = checkpoints.restore(state, data=batches)
            self._done = saved
            print(f"resumed after step {saved}")
        elif saved is not None:
            what = f"--save {options.save}: a run of {saved} steps is there"
            sys.exit(f"{what}; add --resume to go on with it, or name another folder")
        self._position = batches.get_state()
        return state

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left, until somebody presses Ctrl-C."""
        number = self._done
        while not self._is_over:
            number += 1
            yield number

    def done(self, number: int, loss: jax.Array, state: Any, batches: Prefetched) -> None:
        """Logs a step, and saves the state after it when it is time.

        Args:
            number: the step's number.
            loss: its loss; on the devices, which are not waited for.
            state: the state after it.
            batches: the data, whose position is saved too.
        """
        self._losses[number] = loss
        self._logger.log(number, {"loss": loss})
        self._is_over = number == self._options.steps or bool(self._stop)
        if self._checkpoints is not None:
            self._checkpoints.save(number, state, data=batches, force=self._is_over)

    def compare(
        self,
        serial_step: Callable[[Any, Any], tuple[Any, jax.Array]],
        state: Any,
        batches: Prefetched,
    ) -> None:
        """Runs the first steps serially too, and prints how far the losses are apart.

        Args:
            serial_step: the undecorated step, `(state, batch) -> (state, loss)`.
            state: the state that the run began with, on the host.
            batches: the data, which goes back to where it was.
        """
        self._logger.flush()
        losses = list(self.losses.items())[: self._options.check]
        batches.set_state(self._position)
        serial, apart = float("nan"), 0.0
        for (_, loss), batch in zip(losses, batches, strict=False):
            state, of_step = serial_step(state, jax.device_get(batch))
            serial = float(of_step)
            apart = max(apart, abs(loss - serial) / abs(serial))
        if losses:
            number, loss = losses[-1]
            print(f"step {number}: loss {loss:.6f}, serial {serial:.6f}")
            print(f"largest difference of {len(losses)} losses from the serial ones: {apart:.1e}")
