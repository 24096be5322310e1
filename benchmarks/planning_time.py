"""How long planning takes beyond tracing, and how it grows: GPT-2 small's train step by depth.

The step is flax's, with gradients clipped by their global norm and AdamW, batch 32×256, every
parameter split over both axes of a 2×4 mesh. Nothing is compiled and no array is made. Each depth
runs in a process of its own, so that none profits from what another one has remembered. Seconds are of
processor time, which other processes disturb least.

    python benchmarks/planning_time.py [layers ...]
"""

import subprocess
import sys
import time

import jax
from gpt import Sizes, gpt_train_step

from pypto_spmd import DeviceMesh, spmd

DEPTHS = (3, 6, 12, 24)
GOAL_S, GOAL_LAYERS = 5.0, 12


def measure(layers: int) -> str:
    """One line: depth, equations, seconds of tracing and of planning, and the plan's summary."""
    step = gpt_train_step(Sizes(layers=layers))
    mesh = DeviceMesh.simulate((2, 4), ("data", "model"))
    start = time.process_time()
    traced = jax.make_jaxpr(step.function)(*step.arguments)
    trace_s = time.process_time() - start
    decorated = spmd(mesh=mesh, in_shardings=step.in_specs, out_shardings=step.out_specs)(
        step.function
    )
    start = time.process_time()
    plan = decorated.plan(*step.arguments)
    # JAX remembers the traces of inner functions, so that tracing again is a little quicker.
    retrace = time.process_time()
    jax.make_jaxpr(lambda *args: step.function(*args))(*step.arguments)
    retrace_s = time.process_time() - retrace
    plan_s = retrace - start - retrace_s
    size = len(traced.jaxpr.eqns)
    summary = plan.summary().partition(": ")[2]
    return f"{layers:6d}{size:11d}{trace_s:10.2f}{plan_s:10.2f}   {summary}"


def main() -> None:
    """Prints a table."""
    depths = [int(text) for text in sys.argv[1:]] or DEPTHS
    if len(depths) == 1:
        print(measure(depths[0]), flush=True)
        return
    print(f"planning GPT-2 small's train step (goal: {GOAL_S} s at {GOAL_LAYERS} layers)")
    print(f"{'layers':>6s}{'equations':>11s}{'trace, s':>10s}{'plan, s':>10s}   plan", flush=True)
    for depth in depths:
        subprocess.run([sys.executable, __file__, str(depth)], check=True)


if __name__ == "__main__":
    main()
