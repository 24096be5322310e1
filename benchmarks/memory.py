"""What one device holds in a train step: parameters, optimizer state, and all that the program needs.

Beside each of the examples' steps stands plain `jax.jit` of the same serial step with the same layouts of
arguments and results. Bytes of arguments, results and temporaries are those of the compiled programs,
`memory_analysis()`; results that take the place of donated arguments are not counted twice.

    python benchmarks/memory.py [--examples mlp,gpt] [--layouts dp,fsdp]
"""

from typing import Any

import jax
import numpy as np
from example_steps import ExampleStep, example_steps, options
from jax.stages import Compiled

from pypto_spmd.collectives.plan import show_bytes
from pypto_spmd.sharding.leaves import leaves_of

GOAL = 1.05
COLUMNS = (
    "parameters", "optimizer", "of whole", "arguments", "of jit", "results", "of jit", "temporary", "of jit"
)  # fmt: skip


def state_bytes(step: ExampleStep, ours: Compiled) -> tuple[int, int, int]:
    """Bytes of parameters and of optimizer state on one device, and of both whole."""
    shardings = ours.input_shardings[0][: len(step.states)]
    held, whole = {False: 0, True: 0}, 0
    for state, of_state in zip(step.states, shardings, strict=True):
        # An nnx optimizer is a state of its own; in all else paths and types say what is an optimizer's.
        alone = type(state).__name__ == "Optimizer"
        found = leaves_of(state)
        for leaf, sharding in zip(found, jax.tree.leaves(of_state), strict=True):
            if not isinstance(leaf.dtype, np.dtype):
                continue
            size = leaf.dtype.itemsize
            whole += leaf.size * size
            held[alone or leaf.is_optimizer] += (
                int(np.prod(sharding.shard_shape(leaf.shape))) * size
            )
    return held[False], held[True], whole


def program_bytes(compiled: Compiled) -> tuple[int, int, int]:
    """Bytes of arguments, of results that take no argument's place, and of temporaries, on one device."""
    memory: Any = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes, results, memory.temp_size_in_bytes


def ratio(ours: float, theirs: float) -> str:
    """Ours by theirs."""
    return f"{ours / theirs:.3f}" if theirs else "1.000" if ours == theirs else "more"


def main() -> None:
    """Measures and prints the table."""
    said = options("What one device holds in the examples' train steps.")
    print(f"{'':14s}" + "".join(f"{name:>12s}" for name in COLUMNS))
    for step in example_steps(said.examples, said.layouts):
        ours = step.compiled()
        parameters, optimizer, whole = state_bytes(step, ours)
        cells = [show_bytes(parameters), show_bytes(optimizer)]
        cells.append(f"{(parameters + optimizer) / whole:.3f}")
        pairs = list(zip(program_bytes(ours), program_bytes(step.jitted()), strict=True))
        for mine, theirs in pairs:
            cells += [show_bytes(mine), ratio(mine, theirs)]
        above = any(mine > GOAL * theirs for mine, theirs in pairs[:2])
        total = [sum(of_all) for of_all in zip(*pairs, strict=True)]
        verdict = f"  in all {ratio(*total)}"
        if above:
            verdict += f"  above the goal of {GOAL}"
        name = f"{step.example} {step.name}"
        print(f"{name:14s}" + "".join(f"{cell:>12s}" for cell in cells) + verdict, flush=True)


if __name__ == "__main__":
    main()
