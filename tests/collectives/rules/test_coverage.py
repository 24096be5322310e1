"""Every primitive has a rule or a reason why not, and training steps as people write them have rules."""

import subprocess
import sys
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.custom_derivatives import linear_call
from jax.extend.core import Primitive, primitives

from pypto_spmd import DeviceMesh, PartitionSpec, spmd
from pypto_spmd.collectives.flatten import build_graph
from pypto_spmd.collectives.rules import has_rule, registered
from pypto_spmd.collectives.rules.examples import EXAMPLES, WITHOUT_EXAMPLE
from pypto_spmd.collectives.rules.whole import ELSEWHERE, WITHOUT_RULE, is_looked_into
from pypto_spmd.testing import assert_spmd_equal


def test_every_primitive_that_jax_exports_has_a_rule_or_a_reason():
    exported = {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}
    missing = exported - set(registered()) - set(WITHOUT_RULE)
    assert missing == set(), (
        f"JAX {jax.__version__} has new primitives: register a rule, or say in whole.py why there is none"
    )


def test_every_primitive_that_exists_has_a_rule_or_a_reason():
    # In a process of its own: tests make primitives.
    program = """
import gc, flax, jax, jax.experimental.pallas, jax.nn, jax.scipy.linalg, optax
from flax import nnx
from jax.extend.core import Primitive
from pypto_spmd.collectives.rules import registered
from pypto_spmd.collectives.rules.whole import ELSEWHERE, WITHOUT_RULE
known = {*registered(), *WITHOUT_RULE, *ELSEWHERE}
print(*sorted({o.name for o in gc.get_objects() if isinstance(o, Primitive)} - known))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.split() == []


def test_a_primitive_has_either_a_rule_or_a_reason():
    reasons = set(WITHOUT_RULE) | set(ELSEWHERE)
    assert reasons & set(registered()) == set()
    assert set(WITHOUT_RULE) & set(ELSEWHERE) == set()


def test_every_rule_of_ours_has_an_example():
    assert set(EXAMPLES) & set(WITHOUT_EXAMPLE) == set()
    assert {*EXAMPLES, *WITHOUT_EXAMPLE} <= set(registered())
    program = "from pypto_spmd.collectives.rules import registered; print(*registered())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert set(done.stdout.split()) - {*EXAMPLES, *WITHOUT_EXAMPLE} == set()


def test_examples_bind_their_primitive():
    missing = set()
    for name, example in EXAMPLES.items():
        try:
            example.shown(name)
        except LookupError:
            missing.add(name)
    assert missing <= {"log2", "one_minus_square", "polynomial"}  # of newer versions


MESH = DeviceMesh.simulate((2, 4), ("data", "model"))
ROWS = np.random.default_rng(0).standard_normal((8, 4), dtype=np.float32)


@partial(lax.composite, name="spmd_test.square")
def composite_square(x):
    return x * x


@jax.custom_batching.custom_vmap
def batched_by_hand(x):
    return jnp.sin(x)


batched_by_hand.def_vmap(lambda size, batched, x: (jnp.sin(x), batched[0]))

CALLS = {
    "composite": composite_square,
    "custom_vmap": batched_by_hand,
    "vmap of custom_vmap": jax.vmap(batched_by_hand),
    "linear_call": lambda x: linear_call(lambda r, x: r * x, lambda r, t: r * t, ROWS[0], x),
    "platform_dependent": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    "searchsorted": lambda x: jnp.searchsorted(jnp.sort(x[:, 0]), x),
    "gradient of searchsorted": jax.grad(lambda x: (x * jnp.searchsorted(ROWS[0], x)).sum()),
}


@pytest.mark.parametrize("function", CALLS.values(), ids=CALLS)
def test_calls_are_looked_into(function: Any):
    split = (
        PartitionSpec(None, "model") if function is CALLS["searchsorted"] else PartitionSpec("data")
    )
    call = spmd(function, mesh=MESH, in_shardings=split, out_shardings=split, strict=True)
    if function is not CALLS["searchsorted"]:
        call.plan(ROWS).assert_counts()
    assert_spmd_equal(call, ROWS)
    call.verify(ROWS)
    assert is_looked_into("composite")


def test_derivatives_of_a_function_that_searches():
    searched = spmd(
        lambda x: x * jnp.searchsorted(ROWS[0], x), mesh=MESH, in_shardings=PartitionSpec("data")
    )
    gradient = jax.grad(lambda x: searched(x).sum())(ROWS)
    np.testing.assert_array_equal(gradient, np.searchsorted(ROWS[0], ROWS))


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def primitives_without_rule(function: Any, *args: Any) -> set[str]:
    graph = build_graph(jax.make_jaxpr(function)(*args))
    found = {equation.name for equation, _ in graph.equations() if not equation.bodies}
    return {name for name in found if not has_rule(name) and name != "sharding_constraint"}


def shapes(function: Any, *args: Any) -> Any:
    return jax.eval_shape(function, *args)


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3))(x)))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.gelu(nn.GroupNorm(4)(nn.Conv(16, (3, 3), strides=2)(x)))
        x = nn.Conv(16, (3, 3), feature_group_count=16)(x)
        x = nn.ConvTranspose(8, (3, 3), strides=(2, 2))(x)
        x = nn.avg_pool(x, (2, 2), strides=(2, 2)).mean((1, 2))
        return nn.Dense(10)(nn.Dropout(0.1, deterministic=False)(x))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        attention = nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=False)
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(64)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.1, deterministic=False)(nn.Dense(32)(hidden))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        position = self.param("position", nn.initializers.normal(), (16, 32))
        x = nn.Embed(64, 32)(tokens) + position
        for _ in range(2):
            x = nn.remat(Block)()(x)
        return nn.Dense(64)(nn.RMSNorm()(x))


def test_conv_net_step():
    model, x, labels = ConvNet(), jnp.ones((8, 16, 16, 3)), jnp.zeros(8, int)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = shapes(model.init, keys, x)

    def step(variables: Any, state: Any, x: Any, labels: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            logits, more = model.apply(
                {**variables, "params": params}, x, mutable=["batch_stats"], rngs={"dropout": key}
            )
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), more

        (value, more), gradients = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, state = OPTIMIZER.update(gradients, state, variables["params"])
        return value, optax.apply_updates(variables["params"], updates), more, state

    state = shapes(OPTIMIZER.init, variables["params"])
    missing = primitives_without_rule(step, variables, state, x, labels, keys["dropout"])
    assert missing == set()


def test_transformer_step():
    model, tokens = Transformer(), jnp.zeros((4, 16), int)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = shapes(model.init, keys, tokens)

    def step(params: Any, state: Any, tokens: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = nn.log_softmax(model.apply(params, tokens, rngs={"dropout": key}))
            by_index = jnp.take_along_axis(logits, tokens[..., None], -1).mean()
            by_one_hot = (nn.one_hot(tokens, 64) * logits).sum(-1).mean()
            return -by_index - by_one_hot

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    state = shapes(OPTIMIZER.init, params)
    assert primitives_without_rule(step, params, state, tokens, keys["dropout"]) == set()


class Recurrent(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, rngs=rngs, decode=False)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.cell = nnx.RNN(nnx.LSTMCell(32, 32, rngs=rngs))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.cell(self.dropout(self.norm(self.attention(self.embed(tokens)))))


def test_nnx_gradient():
    definition, params, rest = nnx.split(Recurrent(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, rest: Any, tokens: Any) -> Any:
        return (nnx.merge(definition, params, rest, copy=True)(tokens) ** 2).sum()

    missing = primitives_without_rule(jax.grad(loss), params, rest, jnp.zeros((4, 16), int))
    assert missing == set()


OPTIMIZERS = {
    name: getattr(optax, name, None) or getattr(optax.contrib, name)
    for name in (
        "adafactor", "adagrad", "adam", "lamb", "lars", "lion", "muon", "novograd", "radam", "rmsprop",
        "sgd", "sm3", "yogi",
    )
}  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(optimizer: Any):
    made = optimizer(1e-3)
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}

    def update(params: Any, gradients: Any) -> Any:
        return made.update(gradients, made.init(params), params)

    assert primitives_without_rule(update, params, params) == set()


def test_of_code_for_several_platforms_one_branch_is_planned():
    def extremes(x):
        return lax.platform_dependent(
            x, cpu=lambda x: x.sum(0), default=lambda x: x.max(0) + x.min(0)
        )

    call = spmd(extremes, mesh=MESH, in_shardings=PartitionSpec("data"))
    call.plan(ROWS).assert_counts(all_reduce=1)
    assert_spmd_equal(call, ROWS)
    call.verify(ROWS)


def test_a_diagonal():
    square = jnp.asarray(ROWS @ ROWS.T)
    split = PartitionSpec("data")
    call = spmd(jnp.diagonal, mesh=MESH, in_shardings=split, out_shardings=split)
    call.plan(square).assert_counts(reduce_scatter=1)
    assert_spmd_equal(call, square)
    call.verify(square)
