"""The plans of textbook layouts: exact counts, zeros included, at toy and at real sizes.

Sources of the counts: the data, tensor and sequence parallel layouts of Megatron-LM (Shoeybi et al. 2019,
Korthikanti et al. 2022), ZeRO (Rajbhandari et al. 2020), and the tests of Alpa (Zheng et al. 2022).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pypto_spmd import CommPlan, DeviceMesh, spmd

COLUMN, ROW = P(None, "model"), P("model")

TOY = {"width": 64, "hidden": 128, "batch": 16, "length": 32, "vocab": 1024}
REAL = {"width": 4096, "hidden": 16384, "batch": 64, "length": 2048, "vocab": 65536}


@pytest.fixture(params=[TOY, REAL], ids=["toy", "real"])
def size(request: pytest.FixtureRequest) -> dict[str, int]:
    return request.param


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def descend(loss: Callable[..., jax.Array]) -> Callable[..., tuple[Any, jax.Array]]:
    """A gradient-descent step of a loss of `(params, *batch)`."""

    def step(params: Any, *batch: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def mlp(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ params["up"]) @ params["down"]


def mlp_loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((mlp(params, x) - y) ** 2)


def attention(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    batch, length, _ = x.shape
    q, k, v = ((x @ params[name]).reshape(batch, length, 8, -1) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8, axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v)
    return mixed.reshape(batch, length, -1) @ params["o"]


def normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def mlp_shapes(size: dict[str, int]) -> dict[str, jax.ShapeDtypeStruct]:
    width, hidden = size["width"], size["hidden"]
    return {"up": floats(width, hidden), "down": floats(hidden, width)}


def attention_shapes(size: dict[str, int]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: floats(size["width"], size["width"]) for name in "qkvo"}


MLP_TENSOR_PARALLEL = {"up": COLUMN, "down": ROW}
ATTENTION_TENSOR_PARALLEL = {"q": COLUMN, "k": COLUMN, "v": COLUMN, "o": ROW}


def plan_step(
    mesh: DeviceMesh, loss: Any, specs: Any, batch_spec: Any, shapes: Any, *batch: Any
) -> CommPlan:
    decorated = spmd(
        descend(loss),
        mesh=mesh,
        in_shardings=[specs, *[batch_spec] * len(batch)],
        out_shardings=(specs, P()),
    )
    return decorated.plan(shapes, *batch)


@pytest.fixture
def examples(size: dict[str, int]) -> jax.ShapeDtypeStruct:
    return floats(size["batch"], size["width"])


@pytest.fixture
def tokens(size: dict[str, int]) -> jax.ShapeDtypeStruct:
    return floats(size["batch"], size["length"], size["width"])


# Training steps of a two-layer MLP -------------------------------------------------------------------


def test_data_parallel(spmd_mesh, size, examples):
    plan = plan_step(spmd_mesh, mlp_loss, P(), P("data"), mlp_shapes(size), examples, examples)
    plan.assert_counts(all_reduce=2)  # the loss; all gradients in one bucket
    assert [step.tensors for step in plan.steps] == [1, 2]
    assert {step.axes for step in plan.steps} == {("data",)}


def test_fully_sharded(spmd_mesh, size, examples):
    plan = plan_step(
        spmd_mesh, mlp_loss, P("data"), P("data"), mlp_shapes(size), examples, examples
    )
    plan.assert_counts(all_gather=2, reduce_scatter=2, all_reduce=1)


def test_tensor_parallel(spmd_mesh, size, examples):
    shapes = mlp_shapes(size)
    plan = plan_step(spmd_mesh, mlp_loss, MLP_TENSOR_PARALLEL, P(), shapes, examples, examples)
    plan.assert_counts(all_reduce=1)  # the input needs no gradient, so the backward pass has none
    assert plan.steps[0].axes == ("model",)


def test_data_and_tensor_parallel(spmd_mesh, size, examples):
    shapes = mlp_shapes(size)
    plan = plan_step(
        spmd_mesh, mlp_loss, MLP_TENSOR_PARALLEL, P("data"), shapes, examples, examples
    )
    plan.assert_counts(all_reduce=3)
    assert [step.axes for step in plan.steps].count(("model",)) == 1


def test_fully_sharded_and_tensor_parallel(spmd_mesh, size, examples):
    specs = {"up": P("data", "model"), "down": P("model", "data")}
    plan = plan_step(spmd_mesh, mlp_loss, specs, P("data"), mlp_shapes(size), examples, examples)
    plan.assert_counts(all_gather=2, reduce_scatter=2, all_reduce=2)
    gathers = [step for step in plan.steps if step.kind == "all_gather"]
    assert {step.axes for step in gathers} == {("data",)}


def test_optimizer_state_split(spmd_mesh, size, examples):
    def adam(params, moments, x, y):
        value, gradients = jax.value_and_grad(mlp_loss)(params, x, y)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments["first"], gradients)
        second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, moments["second"], gradients)
        update = lambda p, m, v: p - 0.1 * m / (jnp.sqrt(v) + 1e-8)  # noqa: E731
        return (
            jax.tree.map(update, params, first, second),
            {"first": first, "second": second},
            value,
        )

    shapes = mlp_shapes(size)
    decorated = spmd(
        adam,
        mesh=spmd_mesh,
        in_shardings=[P(), P("data"), P("data"), P("data")],
        out_shardings=(P(), P("data"), P()),
    )
    plan = decorated.plan(shapes, {"first": shapes, "second": shapes}, examples, examples)
    plan.assert_counts(reduce_scatter=2, all_gather=2, all_reduce=1)


def test_gradient_accumulation_reduces_once(spmd_mesh, size, examples):
    def accumulate(params, xs, ys):
        def microbatch(total, batch):
            gradients = jax.grad(mlp_loss)(params, *batch)
            return jax.tree.map(jnp.add, total, gradients), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        gradients, _ = jax.lax.scan(microbatch, zeros, (xs, ys))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    many = floats(4, *examples.shape)
    decorated = spmd(
        accumulate,
        mesh=spmd_mesh,
        in_shardings=[P(), P(None, "data"), P(None, "data")],
        out_shardings=P(),
    )
    plan = decorated.plan(mlp_shapes(size), many, many)
    plan.assert_counts(all_reduce=1)
    assert plan.steps[0].repeat == 1


def test_clipping_by_global_norm_costs_one_scalar(spmd_mesh, size, examples):
    def clipped(params, x, y):
        gradients = jax.grad(mlp_loss)(params, x, y)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
        scale = jnp.minimum(1.0, 1.0 / norm)
        return jax.tree.map(lambda p, g: p - 0.1 * scale * g, params, gradients)

    decorated = spmd(clipped, mesh=spmd_mesh, in_shardings=[P("data")] * 3, out_shardings=P("data"))
    plan = decorated.plan(mlp_shapes(size), examples, examples)
    plan.assert_counts(all_gather=2, reduce_scatter=2, all_reduce=1)
    (norm,) = [step for step in plan.steps if step.kind == "all_reduce"]
    assert norm.elements == 1


# Attention and transformer layers --------------------------------------------------------------------


def test_tensor_parallel_attention(spmd_mesh, size, tokens):
    loss = lambda p, x, y: jnp.mean((x + attention(p, x) - y) ** 2)  # noqa: E731
    shapes = attention_shapes(size)
    plan = plan_step(spmd_mesh, loss, ATTENTION_TENSOR_PARALLEL, P(), shapes, tokens, tokens)
    plan.assert_counts(all_reduce=1)


def transformer_loss(params: list[dict[str, jax.Array]], x: jax.Array, y: jax.Array) -> jax.Array:
    for layer in params:
        x = x + attention(layer, normalised(x))
        x = x + mlp(layer, normalised(x))
    return jnp.mean((x - y) ** 2)


@pytest.mark.parametrize("layers", [1, 3])
def test_tensor_parallel_transformer(spmd_mesh, size, tokens, layers):
    shapes = [attention_shapes(size) | mlp_shapes(size)] * layers
    specs = [ATTENTION_TENSOR_PARALLEL | MLP_TENSOR_PARALLEL] * layers
    plan = plan_step(spmd_mesh, transformer_loss, specs, P(), shapes, tokens, tokens)
    # Two forward and two backward a layer, but that the first attention's input needs no gradient.
    plan.assert_counts(all_reduce=4 * layers - 1)


def test_data_and_tensor_parallel_transformer(spmd_mesh, size, tokens):
    shapes = [attention_shapes(size) | mlp_shapes(size)] * 2
    specs = [ATTENTION_TENSOR_PARALLEL | MLP_TENSOR_PARALLEL] * 2
    plan = plan_step(spmd_mesh, transformer_loss, specs, P("data"), shapes, tokens, tokens)
    plan.assert_counts(all_reduce=4 * 2 - 1 + 2)  # and the loss, and one bucket of gradients
    assert [step.axes for step in plan.steps].count(("data",)) == 2


def test_sequence_parallel_transformer_layer(spmd_mesh, size, tokens):
    """Between the blocks the sequence is split: AllGather and ReduceScatter instead of AllReduce."""
    split = NamedSharding(spmd_mesh.jax_mesh, P("data", "model"))

    def layer(p, x):
        x = jax.lax.with_sharding_constraint(x, split)
        x = jax.lax.with_sharding_constraint(x + attention(p, normalised(x)), split)
        return jax.lax.with_sharding_constraint(x + mlp(p, normalised(x)), split)

    shapes = attention_shapes(size) | mlp_shapes(size)
    decorated = spmd(
        layer,
        mesh=spmd_mesh,
        in_shardings=[ATTENTION_TENSOR_PARALLEL | MLP_TENSOR_PARALLEL, P("data")],
        out_shardings=P("data", "model"),
    )
    decorated.plan(shapes, tokens).assert_counts(all_gather=2, reduce_scatter=2)


@pytest.mark.parametrize("layout", ["fully sharded", "data parallel"])
def test_scanned_layers(spmd_mesh, size, examples, layout):
    """A stack of layers is gathered, and its gradients scattered, one layer at a time."""

    def loss(params, x, y):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])
        return jnp.mean((x - y) ** 2)

    shapes = {"stack": floats(6, size["width"], size["width"])}
    specs = {"stack": P(None, "data") if layout == "fully sharded" else P()}
    plan = plan_step(spmd_mesh, loss, specs, P("data"), shapes, examples, examples)
    if layout == "data parallel":
        plan.assert_counts(all_reduce=2)  # the loss, and all gradients once, after the loop
        assert [step.repeat for step in plan.steps] == [1, 1]
        return
    plan.assert_counts(all_gather=2, reduce_scatter=1, all_reduce=1)
    in_loop = [step for step in plan.steps if step.kind != "all_reduce"]
    assert {step.repeat for step in in_loop} == {6}
    assert {step.elements for step in in_loop} == {size["width"] ** 2}


@pytest.mark.parametrize("layout", ["fully sharded", "data parallel"])
def test_scanned_layers_whose_gradients_are_clipped(spmd_mesh, size, examples, layout):
    """Read twice, for their norm and to be scaled, gradients are still reduced as without clipping."""

    def loss(params, x, y):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])
        return jnp.mean((x @ params["head"] - y) ** 2)

    def step(params, x, y):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
        clipped = lambda p, g: p - 0.1 * jnp.where(norm < 1, g, g / norm)  # noqa: E731
        return jax.tree.map(clipped, params, gradients), value

    width = size["width"]
    shapes = {"stack": floats(6, width, width), "head": floats(width, width)}
    is_sharded = layout == "fully sharded"
    specs = {"stack": P(None, "data"), "head": P("data")} if is_sharded else P()
    decorated = spmd(
        step, mesh=spmd_mesh, in_shardings=[specs, P("data"), P("data")], out_shardings=(specs, P())
    )
    plan = decorated.plan(shapes, examples, examples)
    if is_sharded:
        plan.assert_counts(all_gather=3, reduce_scatter=2, all_reduce=1)  # the loss and the norm
    else:
        plan.assert_counts(all_reduce=2)
        assert [(step.tensors, step.repeat) for step in plan.steps] == [(1, 1), (2, 1)]


# Vocabularies ----------------------------------------------------------------------------------------


def test_vocabulary_split_embedding(spmd_mesh, size):
    words = ints(size["batch"], size["length"])
    table = {"embedding": floats(size["vocab"], size["width"])}
    lookup = spmd(
        lambda params, words: params["embedding"][words],
        mesh=spmd_mesh,
        in_shardings=[ROW, P("data")],
        out_shardings=P("data"),
    )
    lookup.plan(table, words).assert_counts(all_reduce=1)

    def loss(params, words):
        return jnp.mean(jnp.tanh(params["embedding"][words]) ** 2)

    # The gradient is scattered where it belongs, without communication.
    plan_step(spmd_mesh, loss, ROW, P(), table, words).assert_counts(all_reduce=1)


@pytest.mark.parametrize("by", ["take_along_axis", "one_hot"])
def test_vocabulary_split_cross_entropy(spmd_mesh, size, tokens, by):
    def loss(params, x, labels):
        logs = jax.nn.log_softmax(x @ params["head"])
        if by == "one_hot":
            return -jnp.mean(jnp.sum(logs * jax.nn.one_hot(labels, logs.shape[-1]), axis=-1))
        return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], axis=-1))

    head = {"head": floats(size["width"], size["vocab"])}
    labels = ints(size["batch"], size["length"])
    plan = plan_step(spmd_mesh, loss, COLUMN, P(), head, tokens, labels)
    plan.assert_counts(all_reduce=3)  # of the maxima, of the sums, and of the loss
    rows = size["batch"] * size["length"]
    assert max(step.elements for step in plan.steps) == rows  # rows, never logits
