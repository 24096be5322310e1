"""The examples run as a reader would run them, and end with the figures they promise."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script, *options):
    """What an example prints, run from another folder, on devices that it makes itself."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *(p for p in sys.path if p)])}
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / script, *options],
        env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def figure(pattern, text):
    """The number that a line of output has."""
    found = re.search(pattern, text)
    assert found is not None, text
    return float(found.group(1))


def test_gemm_shows_four_plans():
    output = run("gemm.py")
    assert [line for line in output.splitlines() if " on row=2 × col=2 needs " in line] == [
        "gemm_spmd on row=2 × col=2 needs no communication.",
        "matmul on row=2 × col=2 needs 1 collective: each device sends 16MB a call, about 1.68ms.",
        "matmul on row=2 × col=2 needs 1 collective: each device sends 8MB a call, about 840us.",
        "matmul on row=2 × col=2 needs 1 collective: each device sends 4MB a call, about 420us.",
    ]
    assert re.findall(r"^0\. (\w+) of", output, re.MULTILINE) == [
        "AllReduce", "ReduceScatter", "AllGather",
    ]  # fmt: skip
    assert figure(r"largest error of the four products: (\S+) \(float64\)", output) < 1e-10


def test_a_run_goes_on_from_its_checkpoint_on_another_mesh_in_another_layout(tmp_path):
    folder, whole, rest = tmp_path / "run", tmp_path / "whole.json", tmp_path / "rest.json"
    run("train_mlp.py", "--steps", "8", "--check", "0", "--losses", whole)
    run("train_mlp.py", "--steps", "5", "--check", "0", "--save", folder)
    options = ("--layout", "zero1", "--mesh", "data=2", "--resume", "--losses", rest)
    output = run("train_mlp.py", "--steps", "8", "--save", folder, *options)
    assert "resumed after step 5\n" in output
    assert figure(r"of 3 losses from the serial ones: (\S+)\n", output) < 1e-5
    whole, rest = json.loads(whole.read_text()), json.loads(rest.read_text())
    assert list(rest) == ["6", "7", "8"]
    assert rest == pytest.approx({step: whole[step] for step in rest}, rel=1e-5)


@pytest.mark.slow
def test_the_classifier_learns():
    output = run("train_mlp.py", "--mesh", "data=2,model=4")
    assert figure(r"of 200 losses from the serial ones: (\S+)\n", output) < 1e-3
    assert figure(r"test accuracy (\S+)%", output) >= 95


@pytest.mark.slow
def test_the_gpt_learns_as_the_serial_function_does():
    output = run("train_gpt.py", "--steps", "30", "--check", "10")
    assert figure(r"loss of step 10: .*, difference (\S+)\n", output) < 1e-4
    assert figure(r"final loss (\S+) nats a byte", output) < 3.2
