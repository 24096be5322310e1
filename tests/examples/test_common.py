"""What the training examples share: what a mistake on the command line is answered with."""

import json
import signal
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from pypto_spmd import DeviceMesh
from pypto_spmd.training import Batches, CheckpointManager, data_parallel, prefetch

LAYOUTS = {"dp": lambda *axes: data_parallel(axes), "first": lambda first, *_: data_parallel(first)}


@pytest.fixture(scope="module")
def common(example):
    return example("common")


@pytest.fixture
def options_of(common, monkeypatch):
    def options_of(*words):
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words)])
        return common.training_options("Trains.", LAYOUTS, layout="dp", steps=10, check=2)

    return options_of


def test_options(options_of):
    options = options_of("--mesh", "data=2,model=4", "--layout", "first", "--steps", "7")
    assert options.mesh == DeviceMesh.simulate((2, 4), ("data", "model"))
    assert (options.layout_name, options.layout) == ("first", data_parallel("data"))
    assert (options.steps, options.check, options.save, options.resume) == (7, 2, None, False)
    assert options_of().layout == data_parallel(("data", "model"))
    assert options_of("--mesh", "data=1").mesh.size == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh", "data=4,model"], "argument --mesh: 'data=4,model' is not like data=4,model=2"),
        (["--mesh", "data=-4"], "argument --mesh: 'data=-4' is not like data=4,model=2"),
        (["--mesh", ""], "argument --mesh: '' is not like data=4,model=2"),
        (
            ["--mesh", "data=0"],
            "argument --mesh: 'data=0': each axis is named once, and has 1 or more",
        ),
        (
            ["--mesh", "a=2,a=2"],
            "argument --mesh: 'a=2,a=2': each axis is named once, and has 1 or more",
        ),
        (["--steps", "0"], "argument --steps: '0' is not a number of steps, 1 or more"),
        (["--check", "-1"], "argument --check: '-1' is not a number of steps, 0 or more"),
        (
            ["--losses", "none/losses.json"],
            "--losses none/losses.json: there is no such folder to write it in",
        ),
        (
            ["--resume"],
            "--resume goes on from a checkpoint: say in which folder, with --save FOLDER",
        ),
    ],
)
def test_wrong_options(options_of, capsys, words, message):
    with pytest.raises(SystemExit) as exit:
        options_of(*words)
    assert exit.value.code == 2
    assert capsys.readouterr().err.endswith(f"train.py: error: {message}\n")


def refused(common, options):
    """What a run that can't begin is answered with."""
    data = prefetch(Batches(np.zeros((16, 2)), 8), mesh=options.mesh)
    with data as batches, common.Run(options) as run, pytest.raises(SystemExit) as exit:
        run.resumed({"w": jnp.zeros(3)}, batches)
    return exit.value.code


def test_runs_that_cannot_begin(common, options_of, tmp_path):
    folder = tmp_path / "run"
    message = f"--resume: no checkpoint is in {folder}; begin without --resume"
    assert refused(common, options_of("--save", folder, "--resume")) == message
    with CheckpointManager(folder) as checkpoints:
        checkpoints.save(4, {"w": jnp.zeros(3)})
    message = "a run of 4 steps is there; add --resume to go on with it, or name another folder"
    assert refused(common, options_of("--save", folder)) == f"--save {folder}: {message}"
    options = options_of("--save", folder, "--resume", "--steps", "4")
    assert refused(common, options) == "--resume: 4 steps are done; ask for more, by --steps"


def test_a_run_that_is_stopped_saves_its_last_step(common, options_of, tmp_path):
    options = options_of("--save", tmp_path / "run", "--losses", tmp_path / "losses.json")
    data = prefetch(Batches(np.zeros((16, 2)), 8), mesh=options.mesh)
    done = []
    with data as batches, common.Run(options) as run:
        state = run.resumed({"w": jnp.zeros(3)}, batches)
        for number in run.steps():
            next(batches)
            if number == 3:
                signal.raise_signal(signal.SIGINT)
            run.done(number, jnp.float32(number), state, batches)
            done.append(number)
    assert done == [1, 2, 3]
    assert json.loads((tmp_path / "losses.json").read_text()) == {"1": 1, "2": 2, "3": 3}
    with CheckpointManager(tmp_path / "run") as checkpoints:
        assert checkpoints.latest_step == 3
