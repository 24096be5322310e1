"""What lies between a program's ends, of sizes that no axis divides: only rows that change owner move."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

from pypto_spmd import DeviceMesh, PartitionSpec, spmd
from pypto_spmd.collectives.padding import boundary
from pypto_spmd.testing import assert_spmd_equal

MESH = DeviceMesh.simulate((2, 4), ("data", "model"))
ROWS, BOTH, WHOLE = PartitionSpec("model"), PartitionSpec("data", "model"), PartitionSpec()
X = jnp.asarray(np.random.default_rng(0).standard_normal((32, 16), np.float32))
ROW = 16 * 4
"""Bytes of a row."""

LOGITS = jnp.asarray(np.random.default_rng(1).standard_normal((4, 16, 8), np.float32))
TOKENS = jnp.asarray(np.random.default_rng(2).integers(0, 8, (4, 16)))


def laplacian(x: jax.Array) -> jax.Array:
    around = x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]
    return x.at[1:-1, 1:-1].add(0.1 * (around - 4 * x[1:-1, 1:-1]))


def smooth(x: jax.Array) -> jax.Array:
    return x.at[1:-1].set((x[:-2] + x[2:]) / 2)


def variation(x: jax.Array) -> jax.Array:
    return ((x[1:] - x[:-1]) ** 2).sum()


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1)
    return -chosen.mean()


CASES: dict[str, tuple[Callable[..., Any], Any, Any, tuple[Any, ...], dict[str, int]]] = {
    "stencil": (smooth, ROWS, ROWS, (X,), {"collective_permute": 2}),
    "stencil of two dims": (laplacian, BOTH, BOTH, (X,), {"collective_permute": 7}),
    "stencil in a loop": (
        lambda x: lax.fori_loop(0, 5, lambda _, x: smooth(x), x),
        ROWS,
        ROWS,
        (X,),
        {"collective_permute": 2},
    ),
    "differences": (
        lambda x: jnp.diff(x, axis=0, prepend=0),
        ROWS,
        ROWS,
        (X,),
        {"collective_permute": 1},
    ),
    "total variation": (
        variation,
        ROWS,
        WHOLE,
        (X,),
        {"collective_permute": 1, "all_reduce": 1},
    ),
    "gradient of total variation": (
        jax.grad(variation),
        ROWS,
        ROWS,
        (X,),
        {"collective_permute": 2},
    ),
    "rows set": (lambda x: x.at[3:9].set(0), ROWS, ROWS, (X,), {}),
    "next tokens, sequence split": (
        next_token_loss,
        [BOTH, BOTH],
        WHOLE,
        (LOGITS, TOKENS),
        {"collective_permute": 1, "all_reduce": 1},
    ),
}


@pytest.mark.parametrize("garbage", [False, True], ids=["zeros", "garbage"])
@pytest.mark.parametrize("name", CASES)
def test_plan_and_result(name: str, garbage: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(boundary, "GARBAGE", garbage)
    function, ins, outs, arguments, counts = CASES[name]
    decorated = spmd(lambda *args: function(*args), mesh=MESH, in_shardings=ins, out_shardings=outs)
    if not garbage:
        decorated.plan(*arguments).assert_counts(**counts)
    assert_spmd_equal(decorated, *arguments)
    decorated.verify(*arguments)


def test_a_stencil_sends_its_rows():
    plan = spmd(smooth, mesh=MESH, in_shardings=ROWS, out_shardings=ROWS).plan(X)
    assert plan.wire_bytes == 3 * ROW


def test_a_scan_of_pairs_sends_few_rows_at_each_depth():
    def scan(x):
        return lax.associative_scan(lambda a, b: a * 0.9 + b, x)

    decorated = spmd(scan, mesh=MESH, in_shardings=ROWS, out_shardings=ROWS)
    long = jnp.tile(X, (8, 1))
    assert decorated.plan(long).wire_bytes < long.nbytes / 10
    assert_spmd_equal(decorated, long)
    decorated.verify(long)


def test_what_is_not_split_is_left_alone():
    columns = PartitionSpec(None, "model")
    decorated = spmd(smooth, mesh=MESH, in_shardings=columns, out_shardings=columns)
    decorated.plan(X).assert_counts()
    assert decorated.plan(X).notes == ()


STEPS = [
    lambda x: x[1:] if x.shape[0] > 2 else x, lambda x: x[:, :-2] if x.shape[1] > 4 else x,
    lambda x: x[::2] if x.shape[0] > 8 else x, lambda x: x[3::2] if x.shape[0] > 8 else x,
    lambda x: jnp.pad(x, ((1, 1), (0, 2))), lambda x: jnp.concatenate([x[:1], x]),
    lambda x: x.at[1:-1].set(x[1:-1] * 2), lambda x: x.at[:-1, 1:].add(x[1:, :-1]),
    lambda x: jnp.pad(x, ((2, 1), (0, 0)), mode="wrap"), lambda x: x - x.mean(0), jnp.exp,
    lambda x: lax.pad(x, 0.0, ((0, 1, 1), (0, 0, 0))), lambda x: jax.nn.softmax(x, 0),
    lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "VALID"), lambda x: x[::-1],
    lambda x: jax.grad(lambda x: (jnp.sin(x[1:] * x[:-1]) ** 2).sum())(x), lambda x: 1 / x,
    lambda x: lax.dynamic_update_slice(x, x[:2] + 1, (1, 0)), lambda x: jnp.cumsum(x, 0),
    lambda x: jax.grad(lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (2, 1), "SAME").var())(x),
]  # fmt: skip


@pytest.mark.parametrize("garbage", [False, True], ids=["zeros", "garbage"])
@settings(
    deadline=None, max_examples=12, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    chosen=st.lists(st.sampled_from(STEPS), min_size=2, max_size=5),
    size=st.sampled_from([8, 16, 24]),
    spec=st.sampled_from([ROWS, BOTH, PartitionSpec(("data", "model"))]),
)
def test_random_windows(garbage, chosen, size, spec):
    def function(x):
        for step in chosen:
            if x.size < 2000 and min(x.shape) > 2:
                x = step(x)
        return x

    x = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, (size, 16)).astype(np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boundary, "GARBAGE", garbage)
        decorated = spmd(function, mesh=MESH, in_shardings=spec, objective="bytes")
        serial = np.asarray(function(x))
        largest = np.abs(serial[np.isfinite(serial)]).max(initial=0)
        assert_spmd_equal(decorated, x, rtol=1e-3, atol=1e-5 + 1e-3 * largest)
        decorated.verify(x)
