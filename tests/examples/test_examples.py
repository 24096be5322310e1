"""The examples run as a reader would run them, and end with the figures they promise."""

import json
import re

import pytest


def test_gemm_shows_four_plans(run, figure):
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


def test_a_run_goes_on_from_its_checkpoint_on_another_mesh_in_another_layout(run, figure, tmp_path):
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
def test_the_classifier_learns(run, figure):
    output = run("train_mlp.py", "--mesh", "data=2,model=4")
    assert figure(r"of 200 losses from the serial ones: (\S+)\n", output) < 1e-3
    assert figure(r"test accuracy (\S+)%", output) >= 95


@pytest.mark.slow
def test_the_gpt_learns(run, figure):
    output = run("train_gpt.py", "--check", "0")
    assert "it writes: b'def " in output
    assert figure(r"last loss (\S+) nats a byte", output) < 2.6


@pytest.mark.slow
def test_the_mixture_of_experts_learns_and_uses_all_experts(run, figure):
    output = run("train_moe.py", "--check", "0")
    assert figure(r"last loss (\S+) nats a byte", output) < 2.6
    assert figure(r"unevenness of the experts' loads (\S+);", output) < 1.5
