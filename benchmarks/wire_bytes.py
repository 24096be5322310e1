"""What each device sends in a train step, by the plan, beside what plain `jax.jit` makes it send.

Both are given the same layouts of arguments and results. What `jax.jit` sends is read from its optimized
HLO, loops by their trips. On CPUs XLA never makes a ReduceScatter, but an AllReduce and a slice; elsewhere it
would send up to half as much where gradients are split (`zero1`, `fsdp`).

    python benchmarks/wire_bytes.py [--examples mlp,gpt] [--layouts dp,fsdp]
"""

from collections import Counter
from collections.abc import Mapping
from math import prod

from example_steps import example_steps, options

from pypto_spmd.collectives.hlo import HloCollective, parse_collectives
from pypto_spmd.collectives.plan import show_bytes
from pypto_spmd.sharding.redistribute import wire_bytes

COLUMNS = ("standard", "bytes", "jit", "standard / jit", "bytes / jit")
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "s32": 4, "u32": 4, "f32": 4, "bf16": 2, "f16": 2}


def sent(found: HloCollective, mesh: Mapping[str, int]) -> float:
    """What each device sends for one instruction, all its trips."""
    group = prod(mesh[axis] for axis in found.axes) if found.axes else prod(mesh.values())
    elements = found.elements * (group if found.kind == "all_to_all" else 1)
    if found.kind == "collective_permute":
        group = 2
    once = wire_bytes(found.kind, elements * _SIZES[found.dtype], group)
    return once * (found.trip_count or 1)


def main() -> None:
    """Measures and prints the table."""
    said = options("What each device sends in the examples' train steps.")
    print(f"{'':14s}" + "".join(f"{name:>16s}" for name in COLUMNS))
    for step in example_steps(said.examples, said.layouts):
        plans = [
            step.planned(objective).plan(*step.arguments) for objective in ("standard", "bytes")
        ]
        standard, fewest = (plan.wire_bytes for plan in plans)
        hlo = step.jitted().as_text() or ""
        found = parse_collectives(hlo, step.mesh.shape)
        theirs = sum(sent(one, step.mesh.shape) for one in found)
        cells = [show_bytes(size) for size in (standard, fewest, theirs)]
        cells += [f"{size / theirs:.3f}" if theirs else "-" for size in (standard, fewest)]
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(one.kind for one in found).items())
        above = "  above the goal of 1" if fewest > theirs * 1.001 + 16 else ""
        name = f"{step.example} {step.name}"
        line = "".join(f"{cell:>16s}" for cell in cells)
        print(f"{name:14s}{line}{above}  (jit: {kinds})", flush=True)


if __name__ == "__main__":
    main()
