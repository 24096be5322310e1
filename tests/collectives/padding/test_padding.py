"""Dims that no mesh axis divides: results are the serial ones, whatever stands in the padding.

Every program is run as it is, and with garbage (NaN, the largest integer, True) written over the padding
of every argument and of every result on the way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from pypto_spmd import AUTO, DeviceMesh, PartitionSpec, spmd
from pypto_spmd.collectives.padding import boundary
from pypto_spmd.testing import assert_spmd_equal

P = PartitionSpec
MESH = DeviceMesh.simulate((2, 4), ("x", "y"))
LINE = DeviceMesh.simulate((8,), ("x",))
CUBE = DeviceMesh.simulate((2, 2, 2), ("x", "y", "z"))


@pytest.fixture(params=[False, True], ids=["zeros", "garbage"])
def padding(request, monkeypatch):
    monkeypatch.setattr(boundary, "GARBAGE", request.param)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def whole(*shape: int, below: int = 1000, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).integers(0, below, size=shape).astype(np.int32)


def check(
    function: Callable[..., Any],
    *args: Any,
    mesh: DeviceMesh = MESH,
    ins: Any = None,
    outs: Any = None,
    **options: Any,
) -> Any:
    decorated = spmd(
        function, mesh=mesh, in_shardings=ins, out_shardings=outs, uneven="pad", **options
    )
    assert_spmd_equal(decorated, *args)
    decorated.verify(*args)
    return decorated.plan(*args)


class Case(NamedTuple):
    """A program.

    Args:
        function: on arrays of the shapes below.
        shapes: of its arguments; letters stand for sizes.
        ins: the layouts of its arguments, as entries.
    """

    function: Callable[..., Any]
    shapes: tuple[str, ...]
    ins: tuple[Any, ...]


def batch_norm(x):
    mean, variance = x.mean((0, 1)), x.var((0, 1))
    return (x - mean) * lax.rsqrt(variance + 1e-5)


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(q, k, v):
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
    return jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ v


def heads(x, w):
    b, s, d = x.shape
    y = (x.reshape(b * s, d) @ w).reshape(b, s, -1)
    return jax.nn.softmax(y, 1).transpose(1, 0, 2)


def cross_entropy(logits):
    labels = jnp.arange(logits.shape[0]) % logits.shape[1]
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    return -found.mean()


def lookup(table, x):
    rows = jnp.clip(jnp.abs(x[:, 0] * 5).astype(int), 0, table.shape[0] + 2)
    return table[rows], (-table).at[rows].get(mode="clip"), table.at[rows].get(mode="fill")


def updates(table, x):
    rows = jnp.abs(x[:, 0] * 5).astype(int) - 1
    return (
        table.at[rows].add(x),
        table.at[rows].max(x, mode="clip"),
        table.at[rows].mul(x, mode="drop"),
        table.at[rows].set(x),
        table.at[1:].set(0.5),
        table.at[:, 0].set(x[0, 0]),
    )


def dynamic(x, w):
    place = (w[0, 0] * 100).astype(int)
    part = lax.dynamic_slice_in_dim(x, place, 1, 0)
    late = lax.dynamic_update_slice_in_dim(x, part, 99, 0)
    return part, late, lax.dynamic_index_in_dim(x, -place, 0), x[-1], x[0]


def scanned(x, w):
    def step(carry, row):
        carry = jnp.tanh(carry + row @ w)
        return carry, carry.max(-1)

    return lax.scan(step, jnp.zeros((x.shape[1], w.shape[1])), x)


def until_large(x):
    def trip(carry):
        value, count = carry
        return value * 1.5 + 0.1, count + 1

    return lax.while_loop(lambda c: (jnp.abs(c[0]).sum() < 100) & (c[1] < 9), trip, (x, 0))


def branched(x):
    return lax.cond(x.sum() > 0, lambda x: x - x.mean(0), lambda x: jnp.sort(x, 0), x)


def moved(x):
    return (
        jnp.roll(x, 1, 0), x[::-1], jnp.concatenate([x, x[:1]]), jnp.pad(x, ((1, 2), (0, 0))),
        x[1:] - x[:-1], x[::2], x.T, x[:, None] + x[None], jnp.repeat(x, 2, 0), jnp.tile(x, (2, 1)),
        x.reshape(-1), jnp.diag(x @ x.T), jnp.stack([x, -x], 1), jnp.split(x, [1])[1],
    )  # fmt: skip


def reduced(x):
    positive = x > 0
    return (
        x.sum(0), x.max(0), x.min(), x.prod(0), x.mean(), x.std(0), positive.any(0), positive.all(0),
        jnp.argmax(x, 0), jnp.argmin(x, 0), jnp.median(x, 0), jnp.linalg.norm(x),
        jax.nn.logsumexp(x, 0), (x * 9).astype(int).sum(0), jnp.bitwise_or.reduce((x * 9).astype(int)),
        jnp.bitwise_and.reduce((x * 9).astype(int)), jnp.nanmax(jnp.where(x > 1, jnp.nan, x)),
    )  # fmt: skip


def inverses(x):
    return (1 / x).sum(0), jnp.log(jnp.abs(x)).mean(), (x / x.sum(0)).max(), jnp.exp(1 / x**2).min(0)


def ordered(x):
    largest, where = lax.top_k(x.T, 1)
    return (
        jnp.sort(x, 0), jnp.argsort(x, 0), jnp.sort(x, 1), jnp.argsort(x, 1), largest, where,
        lax.top_k(x, x.shape[1]), jnp.searchsorted(jnp.sort(x[:, 0]), 0.1),
        jnp.sort(jnp.where(x > 1, jnp.nan, x), 0),
    )  # fmt: skip


def accumulated(x):
    return (
        jnp.cumsum(x, 0), lax.cumsum(x, 0, reverse=True), jnp.cumprod(x, 0), lax.cummax(x, 0),
        lax.cummin(x, 0, reverse=True), lax.cumlogsumexp(x, 0, reverse=True), jnp.cumsum(x, 1),
        lax.associative_scan(jnp.add, x),
    )  # fmt: skip


def transformed(x):
    square = jnp.einsum("ij,ik->ijk", x, x) + jnp.eye(x.shape[1])
    return jnp.fft.fft(x, axis=0), jnp.fft.rfft(x), jnp.linalg.cholesky(square)


def convolved(image, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    z = lax.conv_general_dilated(image, kernel, (2, 2), "SAME", dimension_numbers=numbers)
    pooled = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
    mean = lax.reduce_window(y, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    return y, z, pooled, mean


def convolved_depthwise(image, kernel):
    kernel = kernel[:, :, :1, :].transpose(0, 1, 2, 3)
    kernel = jnp.broadcast_to(kernel.mean(-1, keepdims=True), (*kernel.shape[:3], image.shape[-1]))
    return lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=image.shape[-1],
    )  # fmt: skip


def convolution_gradient(image, kernel):
    return jax.grad(lambda i, k: (convolved(i, k)[0] ** 2).sum() + convolved(i, k)[2].sum(), (0, 1))(
        image, kernel
    )


def drawn(x):
    key = jax.random.key(0)
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.where(kept, x, 0), x + jax.random.normal(key, x.shape), jax.random.permutation(key, x)


def by_keys(x):
    keys = jax.random.split(jax.random.key(1), x.shape[0])
    return jax.vmap(lambda key, row: row * jax.random.uniform(key, row.shape))(keys, x)


def network_step(params, x, labels):
    def loss(params):
        hidden = jax.nn.relu(layer_norm(x) @ params["w"] + params["b"])
        logits = hidden @ params["v"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


CASES = {
    "batch norm": Case(batch_norm, ("nbc",), (("x", None, "y"),)),
    "layer norm": Case(layer_norm, ("nb",), (("x", "y"),)),
    "matmul": Case(jnp.matmul, ("nb", "bc"), (("x", "y"), ("y",))),
    "attention": Case(attention, ("nbc", "nbc", "nbc"), (("x", "y"), ("x", "y"), ("x", "y"))),
    "heads": Case(heads, ("nbc", "cd"), (("x",), (None, "y"))),
    "cross entropy": Case(cross_entropy, ("nc",), (("x", "y"),)),
    "its gradient": Case(jax.grad(cross_entropy), ("nc",), (("x", "y"),)),
    "lookup": Case(lookup, ("nb", "cb"), (("x",), ("y",))),
    "updates": Case(updates, ("nb", "cb"), (("x",), ("y",))),
    "dynamic": Case(dynamic, ("nb", "bc"), (("x", "y"), None)),
    "scan": Case(scanned, ("nbc", "cc"), (("x", "y"), None)),
    "scan's gradient": Case(
        jax.grad(lambda x, w: scanned(x, w)[0].sum()), ("nbc", "cc"), (("x", "y"), None)
    ),
    "while": Case(until_large, ("nb",), (("x", "y"),)),
    "cond": Case(branched, ("nb",), (("x", "y"),)),
    "moved": Case(moved, ("nb",), (("x", "y"),)),
    "reduced": Case(reduced, ("nb",), (("x", "y"),)),
    "inverses": Case(inverses, ("nb",), (("x", "y"),)),
    "ordered": Case(ordered, ("nb",), (("x", "y"),)),
    "accumulated": Case(accumulated, ("nb",), (("x", "y"),)),
    "transformed": Case(transformed, ("nb",), (("x", "y"),)),
    "convolution": Case(convolved, ("nbcd", "33de"), (("x", None, None, "y"), None)),
    "convolution, image split": Case(convolved, ("nbcd", "33de"), ((None, "x", "y"), None)),
    "convolution, depthwise": Case(
        convolved_depthwise, ("nbcd", "33de"), (("x", None, None, "y"), None)
    ),
    "convolution's gradient": Case(
        convolution_gradient, ("nbcd", "33de"), (("x", None, None, "y"), (None, None, None, "y"))
    ),
    "convolution's gradient, image split": Case(
        convolution_gradient, ("nbcd", "33de"), ((None, "x", "y"), None)
    ),
    "random": Case(drawn, ("nb",), (("x", "y"),)),
    "random keys": Case(by_keys, ("nb",), (("x", "y"),)),
}

SIZES = (
    {"n": 19, "b": 7, "c": 5, "d": 3, "e": 6, "3": 3},
    {"n": 1, "b": 2, "c": 3, "d": 1, "e": 2, "3": 2},
    {"n": 6, "b": 9, "c": 10, "d": 5, "e": 1, "3": 3},
    {"n": 3, "b": 13, "c": 1, "d": 6, "e": 9, "3": 3},
)


def arguments(case: Case, sizes: dict[str, int]) -> list[jax.Array]:
    return [
        jnp.asarray(normal(*(sizes[letter] for letter in shape), seed=i))
        for i, shape in enumerate(case.shapes)
    ]


def specs(case: Case) -> list[Any]:
    return [None if spec is None else P(*spec) for spec in case.ins]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"n={sizes['n']}")
@pytest.mark.parametrize("name", CASES)
def test_results_are_the_serial_ones(name, sizes, padding):
    case = CASES[name]
    check(case.function, *arguments(case, sizes), ins=specs(case))
