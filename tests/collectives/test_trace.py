"""PYPTO_TRACE_COMM=1: what is printed and written when a program is compiled."""

import json
from dataclasses import replace

import numpy as np
import pytest
from jax import lax

from pypto_spmd import CommPlan, CommStep, PartitionSpec, spmd
from pypto_spmd.collectives import trace
from pypto_spmd.collectives.plan import SCHEMA_VERSION

P = PartitionSpec
STEP = CommStep(
    0, "all_reduce", ("data",), 1 << 28, 0.0, 0.0, 1, "dot_general", "w", "a.py:1", "why", 1 << 26, "float32"
)  # fmt: skip


@pytest.fixture(autouse=True)
def traced(monkeypatch, tmp_path):
    monkeypatch.setenv(trace.SWITCH, "1")
    monkeypatch.delenv(trace.FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trace, "_reported", [])
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "Step 0: AllReduce (size=256MB) on axis=data"),
        ({"index": 3, "bytes": 1536.0}, "Step 3: AllReduce (size=1.5KB) on axis=data"),
        ({"bytes": 512.0}, "Step 0: AllReduce (size=512B) on axis=data"),
        ({"bytes": 3 * 2**30}, "Step 0: AllReduce (size=3GB) on axis=data"),
        ({"axes": ("data", "model")}, "Step 0: AllReduce (size=256MB) on axis=data,model"),
        ({"repeat": 12}, "Step 0: AllReduce (size=256MB) on axis=data x12"),
        ({"repeat": None}, "Step 0: AllReduce (size=256MB) on axis=data x?"),
        ({"kind": "all_gather"}, "Step 0: AllGather (size=256MB) on axis=data"),
        ({"kind": "reduce_scatter"}, "Step 0: ReduceScatter (size=256MB) on axis=data"),
        ({"kind": "all_to_all"}, "Step 0: AllToAll (size=256MB) on axis=data"),
        ({"kind": "collective_permute"}, "Step 0: CollectivePermute (size=256MB) on axis=data"),
    ],
)
def test_lines(changes, line):
    plan = CommPlan("step", {"data": 2, "model": 4}, "standard", (replace(STEP, **changes),))
    assert trace.trace_lines(plan) == ["step: 1 collective on data=2 × model=4", line]


def total(a):
    return a.sum()


def test_told_once_when_it_is_compiled(spmd_mesh, capsys, traced):
    decorated = spmd(total, mesh=spmd_mesh, in_shardings=P("data"))
    a = np.ones((8, 4), np.float32)
    plan = decorated.plan(a)
    assert capsys.readouterr().out == ""
    for _ in range(3):
        decorated(a)
    decorated.lower(a)
    decorated.verify(a)
    assert capsys.readouterr().out == (
        "total: 1 collective on data=2 × model=4\nStep 0: AllReduce (size=4B) on axis=data\n"
    )
    written = json.loads((traced / "comm_trace.json").read_text())
    assert written["schema_version"] == SCHEMA_VERSION
    assert written["steps"][0]["kind"] == "all_reduce"
    assert CommPlan.load("comm_trace.json") == plan
    assert trace.load_trace("comm_trace.json") == [plan]


def test_several_programs_are_a_list(spmd_mesh, capsys, monkeypatch, traced):
    monkeypatch.setenv(trace.FILE, str(traced / "elsewhere.json"))
    decorated = spmd(total, mesh=spmd_mesh, in_shardings=P("data"))

    @spmd(mesh=spmd_mesh, in_shardings=P(None, "model"))
    def loop(a):
        return lax.scan(lambda c, row: (c + row @ a.T, None), a[0], a)[0]

    plans = []
    for function, a in (
        (decorated, np.ones(8)),
        (loop, np.ones((4, 4))),
        (decorated, np.ones((2, 2))),
    ):
        function(a)
        plans.append(function.plan(a))
    assert trace.load_trace("elsewhere.json") == plans
    assert not (traced / "comm_trace.json").exists()
    assert capsys.readouterr().out.count("total: 1 collective") == 2


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_told_unless_asked(spmd_mesh, capsys, monkeypatch, traced, value):
    if value is None:
        monkeypatch.delenv(trace.SWITCH)
    else:
        monkeypatch.setenv(trace.SWITCH, value)
    spmd(total, mesh=spmd_mesh, in_shardings=P("data"))(np.ones(8))
    assert capsys.readouterr().out == ""
    assert not list(traced.iterdir())


def test_a_file_that_is_no_trace(traced):
    (traced / "comm_trace.json").write_text("not json")
    with pytest.raises(ValueError, match=r"comm_trace\.json holds no communication plan"):
        trace.load_trace("comm_trace.json")
