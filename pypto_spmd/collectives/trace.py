"""`PYPTO_TRACE_COMM=1`: what each program communicates, told when it is compiled.

On stdout, a line for the program and one for each step::

    train_step: 2 collectives on data=2 × model=4
    Step 0: AllReduce (size=256MB) on axis=data
    Step 1: AllGather (size=1.5KB) on axis=data,model x12

(`x12`: in a loop of twelve trips; `x?` where the number is not known). In `comm_trace.json`, or the file
that `PYPTO_TRACE_FILE` names, the plan's JSON; once a process has compiled several programs, a JSON list
of their plans in that order. `load_trace` reads both. The file is that of the last process that wrote it.
"""

import json
import os
from pathlib import Path

import jax

from pypto_spmd.collectives.plan import TITLES, CommPlan, CommStep, show_bytes
from pypto_spmd.errors import count_of

SWITCH = "PYPTO_TRACE_COMM"
FILE = "PYPTO_TRACE_FILE"
USUAL_FILE = "comm_trace.json"

_reported: list[CommPlan] = []


def report(plan: CommPlan) -> None:
    """Tells a plan that is being compiled, if the environment asks for it; each plan once.

    Of several processes, which all run the same plan, the first one tells it.
    """
    if os.environ.get(SWITCH, "0") in ("", "0") or any(told is plan for told in _reported):
        return
    _reported.append(plan)
    if jax.process_index() == 0:
        print("\n".join(trace_lines(plan)), flush=True)
        save_trace(_reported, os.environ.get(FILE) or USUAL_FILE)


def trace_lines(plan: CommPlan) -> list[str]:
    """What is printed of a plan."""
    mesh = " × ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    head = f"{plan.function}: {count_of(len(plan.steps), 'collective')} on {mesh}"
    return [head, *(_step_line(step) for step in plan.steps)]


def _step_line(step: CommStep) -> str:
    times = "" if step.repeat == 1 else f" x{'?' if step.repeat is None else step.repeat}"
    size, axes = show_bytes(step.bytes), ",".join(step.axes)
    return f"Step {step.index}: {TITLES[step.kind]} (size={size}) on axis={axes}{times}"


def save_trace(plans: list[CommPlan], path: str | Path) -> None:
    """Writes one plan as it is, several as a list."""
    texts = [plan.to_json() for plan in plans]
    Path(path).write_text(texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]")


def load_trace(path: str | Path) -> list[CommPlan]:
    """The plans that a traced process wrote, in the order in which they were compiled.

    Raises:
        ValueError: if the file is no trace, or of another schema version.
    """
    text = Path(path).read_text()
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} holds no communication plan: {error}") from None
    return [CommPlan.from_json(json.dumps(d)) for d in (data if isinstance(data, list) else [data])]
