"""Metrics are written where they are wanted, late and complete; what is not finite is named."""

import csv
import io
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from pypto_spmd import DeviceMesh, PartitionSpec, ShardingError, spmd
from pypto_spmd.training import MetricsLogger, NonFiniteError


def lines(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_has_every_so_many_steps(capsys):
    with MetricsLogger(every=2) as logger:
        for step in range(4):
            logger.log(step, {"loss": jnp.float32(1 / (step + 1)), "accuracy": 0.5})
    assert capsys.readouterr().out == (
        "    step          loss      accuracy\n"
        "       0             1           0.5\n"
        "       2      0.333333           0.5\n"
    )


def test_a_terminal_gets_a_bar_and_its_table_above(capsys):
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with MetricsLogger(total=3, console=console) as logger:
        for step in range(3):
            logger.log(step, {"loss": 1.5})
    text = console.file.getvalue()
    assert "1.5" in text
    assert "3/3" in text
    assert capsys.readouterr().out == ""


class Slow:
    """Stands for an array that the devices are still working on."""

    def __init__(self, value):
        self.value, self.ready = value, False

    def copy_to_host_async(self):
        pass

    def is_ready(self):
        return self.ready

    def __array__(self, dtype=None, copy=None):
        self.ready = True
        return np.array(self.value)


def test_nothing_is_waited_for(tmp_path):
    path = tmp_path / "log.csv"
    logger = MetricsLogger(table=False, csv=path)
    value = Slow(2.0)
    logger.log(0, {"loss": value})
    logger.log(1, {"loss": 3.0})
    assert lines(path) == []
    assert not value.ready
    value.ready = True
    logger.log(2, {"loss": 4.0})
    assert [line["loss"] for line in lines(path)] == ["2.0", "3.0", "4.0"]
    logger.close()


def test_a_resumed_run_leaves_one_line_a_step(tmp_path):
    path = tmp_path / "logs" / "log.csv"
    with MetricsLogger(table=False, csv=path) as logger:
        for step in range(5):
            logger.log(step, {"loss": step})
    with path.open("a") as file:
        file.write("5")  # a process was killed while it wrote
    with MetricsLogger(table=False, csv=path) as logger:
        for step in range(3, 6):
            logger.log(step, {"loss": 10 * step, "accuracy": 1.0})
            logger.flush()
    assert [line["step"] for line in lines(path)] == list("012345")
    assert [line["loss"] for line in lines(path)] == ["0", "1", "2", "30", "40", "50"]
    assert [line["accuracy"] for line in lines(path)] == [""] * 3 + ["1.0"] * 3


def test_a_name_that_comes_later_gets_a_column(tmp_path):
    path = tmp_path / "log.csv"
    with MetricsLogger(table=False, csv=path) as logger:
        logger.log(0, {"loss": 1.0})
        logger.log(1, {"loss": 2.0, "test accuracy": 0.5})
    assert lines(path)[0] == {"step": "0", "loss": "1.0", "test accuracy": ""}
    assert lines(path)[1] == {"step": "1", "loss": "2.0", "test accuracy": "0.5"}


def test_a_loss_that_is_not_finite_names_step_and_first_array():
    mesh = DeviceMesh.simulate((2, 4), ("data", "model"))
    split = PartitionSpec("data", "model")

    @spmd(mesh, split, split, donate_argnums=0)
    def grow(w):
        return w * w

    w = {"a": jnp.ones((2, 4)), "w": jnp.full((4, 8), 1e10).at[1, 2].set(1e30)}

    def run(w):
        with MetricsLogger(table=False, check_finite=True) as logger:
            for step in range(3):
                logger.log(step, {"lr": 0.1, "loss": w["w"].sum()}, state={"params": w})
                w = {"a": w["a"], "w": grow(w["w"])}

    with pytest.raises(NonFiniteError) as error:
        run(w)
    assert str(error.value) == (
        "MetricsLogger: loss is inf in step 1.\n"
        "  The first array that is not finite is params/w: 1 of its 32 elements; 1 array of 2 is not.\n"
        "  Fix: go back to a checkpoint before that step; a lower learning rate, clipping or float32 "
        "may help."
    )
    assert (error.value.step, error.value.metric, error.value.leaf) == (1, "loss", "params/w")


def test_without_a_state_the_metric_alone_is_named(capsys):
    logger = MetricsLogger(table=False, check_finite=True)
    with pytest.raises(NonFiniteError, match=r"loss is nan in step 3.\n  No arrays were given"):
        logger.log(3, {"loss": float("nan")})
    with MetricsLogger() as logger:
        logger.log(3, {"loss": float("nan")})
    assert "nan" in capsys.readouterr().out


def test_what_ended_the_run_is_what_is_raised(tmp_path):
    path = tmp_path / "log.csv"

    def run():
        with MetricsLogger(table=False, csv=path, check_finite=True) as logger:
            logger.log(0, {"loss": Slow(float("nan"))})
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run()
    assert lines(path) == [{"step": "0", "loss": "nan"}]


def test_tensorboard_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ShardingError) as error:
        MetricsLogger(tensorboard=tmp_path)
    assert str(error.value) == (
        "MetricsLogger: tensorboard is asked for, and tensorboardX is not installed.\n"
        "  It writes TensorBoard's files, and is an extra of this package.\n"
        '  Fix: pip install "pypto_spmd[tensorboard]".'
    )


def test_tensorboard_gets_each_step(tmp_path):
    pytest.importorskip("tensorboardX", exc_type=ImportError)
    with MetricsLogger(table=False, tensorboard=tmp_path) as logger:
        logger.log(0, {"loss": jnp.float32(1.0)})
    (file,) = tmp_path.iterdir()
    assert b"loss" in file.read_bytes()
