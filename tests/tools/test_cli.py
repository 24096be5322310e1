"""The command `pypto`, as a shell runs it."""

import json
import os
import subprocess
import sys

import pytest

from pypto_spmd.tools import rules
from pypto_spmd.tools.cli import main

ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "COLUMNS": "80"}


def shell(*arguments, **more):
    return subprocess.run(
        [sys.executable, "-m", "pypto_spmd", *arguments],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        **more,
    )


def table(capsys, *names):
    assert main(["rules", *names]) == 0
    return capsys.readouterr().out


TABLE = """\
 primitive     rule                    reduced   linear in      exchanged, or why whole
 dot_general   i j k, i k l -> i j l   k sum     0 or 1
 top_k         i j -> i _, i _                                  j: AllGather, 2 candidates of each device
 mul           i j, i j -> i j                   0 or 1
 add           i j, i j -> i j                   0+1
 clamp         (), i j, () -> i j                1 (max, min)
 scan                                                           a call or a loop: what it runs is planned, equation by equation
 rng_uniform                                                    gives other numbers on every call, so that no two devices would agree

7 primitives: 5 can be split, 0 run whole, 2 are not a matter of rules or have no example; each with its reason.
"""  # noqa: E501


def test_the_table_of_some_primitives(capsys):
    names = ("dot_general", "top_k", "mul", "add", "clamp", "scan", "rng_uniform")
    head, rule, *rest = table(capsys, *names).splitlines(keepends=True)
    assert set(rule.strip()) == {"─"}
    assert "".join([head, *rest]) == TABLE


def test_all_primitives(capsys):
    lines = table(capsys).splitlines()
    names = [line.split()[0] for line in lines[2:-2]]
    assert names == rules.all_primitives()
    assert all(line == line.rstrip() for line in lines)


def test_json(capsys):
    assert main(["rules", "--json", "reduce_sum", "cumsum"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == {
        "primitive": "reduce_sum",
        "rule": "i j -> i",
        "example": "f32[4,8] -> f32[4]",
        "reduced": {"j": "sum"},
        "linear": [{"operands": [0], "ops": ["sum"]}],
        "exchanges": [],
        "works": False,
        "reason": "",
    }
    assert second["exchanges"] == [
        {"factor": "j", "kind": "all_gather", "what": "the totals of the blocks"}
    ]


def test_every_primitive_has_a_rule_or_a_reason(capsys):
    assert main(["rules", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    splits = [any(c.isalpha() for c in r["rule"]) for r in rows]
    nothing = [
        r["primitive"]
        for r, split in zip(rows, splits, strict=True)
        if not split and not r["reason"]
    ]
    assert nothing == []


def test_an_unknown_primitive(capsys):
    assert main(["rules", "dotgeneral", "qzx"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "pypto rules: no primitive 'dotgeneral' is known; did you mean dot_general or ragged_dot_general?\n"
        "pypto rules: no primitive 'qzx' is known\n"
    )


@pytest.mark.parametrize(
    ("arguments", "code"), [([], 2), (["nothing"], 2), (["--help"], 0), (["--version"], 0)]
)
def test_exit_codes_of_the_command_itself(arguments, code, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == code
    printed = capsys.readouterr()
    assert (printed.out == "") == bool(code)


def test_help_of_a_command(capsys):
    with pytest.raises(SystemExit):
        main(["rules", "--help"])
    assert "a letter is a dim that operands and results share" in " ".join(
        capsys.readouterr().out.split()
    )


def test_as_a_module():
    done = shell("rules", "neg", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)[0]["rule"] == "i j -> i j"
    assert shell("rules", "negative").returncode == 1


def test_a_reader_that_stops_early():
    process = subprocess.Popen(
        [sys.executable, "-m", "pypto_spmd", "rules", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    )
    assert process.stdout.readline() == "[\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait()


def test_the_installed_command_is_this_one():
    from importlib.metadata import entry_points

    found = [e for e in entry_points(group="console_scripts") if e.name == "pypto"]
    if not found:
        pytest.skip("the package is not installed")
    assert found[0].load() is main
