"""What @spmd costs beside the program that one would write by hand: per call, and to compile.

Each program is made three ways: decorated with @spmd, as `jax.jit(jax.shard_map(...))` with its
collectives written by hand, and as plain `jax.jit` with the same shardings. All compute the same.
Calls alternate in one run, so that whatever else the machine does falls on all of them alike; each
ratio is the median of the ratios of neighbouring calls. Compiling is told in processor time, which other
processes disturb least. A small GPT has no version by hand.

    python benchmarks/call_overhead.py [--calls 300] [--compiles 3]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from gpt import Sizes, gpt_train_step
from jax import lax
from jax.sharding import NamedSharding

from pypto_spmd import DeviceMesh, PartitionSpec, spmd

P = PartitionSpec
GOAL_CALL, GOAL_COMPILE = 1.1, 1.2
LEARNING_RATE = 1e-2
COLUMNS = ("spmd", "by hand", "jit", "spmd / by hand", "spmd / jit")


@dataclass(frozen=True)
class Program:
    """One program, serial and by hand.

    Args:
        serial: the function over whole arrays.
        local: the same over shards, its collectives in place; None if nobody wrote it.
        inputs: specs of the arguments.
        outputs: specs of the results, a pytree prefix.
        arguments: makes the arguments.
    """

    serial: Callable[..., Any]
    local: Callable[..., Any] | None
    inputs: tuple[Any, ...]
    outputs: Any
    arguments: Callable[[], tuple[Any, ...]]


def gemm(a: jax.Array, b: jax.Array) -> jax.Array:
    """A product so small that the call is all there is."""
    return a @ b


def local_gemm(a: jax.Array, b: jax.Array) -> jax.Array:
    """The same, its contracted dim split."""
    return lax.psum(a @ b, "model")


def train_step(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    """A step of gradient descent on two layers, the squared error its loss."""

    def loss_of(params: Any) -> jax.Array:
        return ((jax.nn.relu(x @ params["up"]) @ params["down"] - y) ** 2).sum() / y.size

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads), loss


def local_train_step(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    """The same, batch over `data`, hidden features over `model`, in four collectives."""
    hidden = x @ params["up"]
    active = jax.nn.relu(hidden)
    error = lax.psum(active @ params["down"], "model") - y
    size = y.size * lax.axis_size("data")
    loss = lax.psum((error**2).sum() / size, "data")
    d_out = 2 * error / size
    d_hidden = jnp.where(hidden > 0, d_out @ params["down"].T, 0)
    grads = lax.psum({"up": x.T @ d_hidden, "down": active.T @ d_out}, "data")
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads), loss


def many_arguments(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Fifty small parameters, as train states have them."""
    total = sum((p * x).sum() for p in params)
    return [p * 0.5 for p in params], jnp.asarray(total)


def local_many_arguments(
    params: list[jax.Array], x: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """The same, all split over `model`."""
    total = sum((p * x).sum() for p in params)
    return [p * 0.5 for p in params], lax.psum(jnp.asarray(total), "model")


def random(*shape: int) -> jax.Array:
    """Small random numbers."""
    return jax.random.normal(jax.random.key(0), shape) * 0.1


def small_gpt() -> Program:
    """A train step of two layers, its parameters split over both axes."""
    sizes = Sizes(layers=2, width=128, heads=4, vocabulary=256, context=64, batch=16)
    step = gpt_train_step(sizes)
    tokens = jax.random.randint(jax.random.key(0), (16, 64), 0, 256)
    arguments = lambda: (*step.initial(jax.random.key(0)), tokens, tokens)  # noqa: E731
    return Program(step.function, None, step.in_specs, step.out_specs, arguments)


def programs() -> dict[str, Program]:
    """All that is measured."""
    split = {"up": P(None, "model"), "down": P("model", None)}
    return {
        "gemm 8x8": Program(
            gemm, local_gemm, (P(None, "model"), P("model", None)), P(),
            lambda: (random(8, 8), random(8, 8)),
        ),
        "fifty parameters": Program(
            many_arguments, local_many_arguments, (P("model"), P("model")), (P("model"), P()),
            lambda: ([random(8)] * 50, random(8)),
        ),
        "train step 256x512": Program(
            train_step, local_train_step, (split, P("data"), P("data")), (split, P()),
            lambda: (
                {"up": random(256, 512), "down": random(512, 256)}, random(256, 256), random(256, 256)
            ),
        ),
        "small GPT": small_gpt(),
    }  # fmt: skip


def named(specs: Any, mesh: DeviceMesh) -> Any:
    """The specs as JAX's shardings."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh.jax_mesh, spec), specs,
        is_leaf=lambda spec: isinstance(spec, PartitionSpec),
    )  # fmt: skip


def variants(program: Program, mesh: DeviceMesh) -> dict[str, Callable[..., Any]]:
    """The three ways, all freshly made, so that nothing of them is compiled yet."""
    serial = lambda *args: program.serial(*args)  # noqa: E731
    specs = {"in_shardings": program.inputs, "out_shardings": program.outputs}
    shardings = {option: named(spec, mesh) for option, spec in specs.items()}
    made = {
        "spmd": spmd(mesh=mesh, **specs)(serial),
        "jit": jax.jit(serial, **shardings),
    }
    if program.local is not None:
        local = program.local
        by_hand = jax.shard_map(
            lambda *args: local(*args), mesh=mesh.jax_mesh,
            in_specs=program.inputs, out_specs=program.outputs, check_vma=False,
        )  # fmt: skip
        made["by hand"] = jax.jit(by_hand, **shardings)
    return made


def call_times(
    functions: dict[str, Callable[..., Any]], args: tuple[Any, ...], calls: int
) -> dict[str, list[float]]:
    """Seconds a call, each until its results are there."""
    for function in functions.values():
        for _ in range(3):
            jax.block_until_ready(function(*args))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(calls):
        order = list(functions)[:: 1 if number % 2 else -1]
        for name in order:
            start = time.perf_counter()
            jax.block_until_ready(functions[name](*args))
            times[name].append(time.perf_counter() - start)
    return times


def compile_times(
    program: Program, mesh: DeviceMesh, args: tuple[Any, ...], repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of processor time to trace, plan and lower a new function, and to compile it."""
    times: dict[str, dict[str, list[float]]] = {"lower": {}, "compile": {}}
    for number in range(repeats + 1):
        for name, function in variants(program, mesh).items():
            jax.clear_caches()
            start = time.process_time()
            lowered = function.lower(*args)
            middle = time.process_time()
            lowered.compile()
            end = time.process_time()
            if number:  # the first one warms everything up
                times["lower"].setdefault(name, []).append(middle - start)
                times["compile"].setdefault(name, []).append(end - middle)
    return times


def row(title: str, times: dict[str, list[float]], unit: float, goal: float) -> str:
    """Medians, and the median ratios to the other ways."""
    cells = {name: f"{statistics.median(found) / unit:.1f}" for name, found in times.items()}
    goals = []
    for other in ("by hand", "jit"):
        if other in times:
            ratio = statistics.median(
                a / b for a, b in zip(times["spmd"], times[other], strict=True)
            )
            cells[f"spmd / {other}"] = f"{ratio:.2f}"
            goals.append(ratio <= goal)
    # The hand-written program is the same one; XLA may choose another.
    verdict = "" if goals[0] else f"  above the goal of {goal}"
    return f"{title:20s}" + "".join(f"{cells.get(name, ''):>16s}" for name in COLUMNS) + verdict


def main() -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description="Call and compile time of @spmd functions.")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--compiles", type=int, default=3)
    options = parser.parse_args()
    mesh = DeviceMesh.simulate((2, 4), ("data", "model"))
    _ = mesh.devices
    header = f"{'':20s}" + "".join(f"{name:>16s}" for name in COLUMNS)
    cases = {
        title: (program, jax.device_put(program.arguments(), named(program.inputs, mesh)))
        for title, program in programs().items()
    }

    print(f"one call, microseconds (median of {options.calls}; goal {GOAL_CALL})\n{header}")
    for title, (program, args) in cases.items():
        times = call_times(variants(program, mesh), args, options.calls)
        print(row(title, times, 1e-6, GOAL_CALL), flush=True)

    print(
        f"\nto compile, milliseconds of processor time (median of {options.compiles}; "
        f"goal {GOAL_COMPILE})\n{header}"
    )
    planned = {}
    for title, (program, args) in cases.items():
        times = compile_times(program, mesh, args, options.compiles)
        planned[title] = times["lower"]
        print(row(title, times["compile"], 1e-3, GOAL_COMPILE), flush=True)

    print(
        f"\nbefore that: to trace, plan (spmd) and lower, milliseconds of processor time\n{header}"
    )
    for title, times in planned.items():
        print(row(title, times, 1e-3, float("inf")), flush=True)


if __name__ == "__main__":
    main()
