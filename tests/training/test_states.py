"""Train states in each layout: born split, stepped as serially, never whole on one device."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from pypto_spmd import PartitionSpec, spmd
from pypto_spmd.training import (
    data_parallel,
    flax_metadata,
    fsdp,
    parameter_specs,
    tensor_parallel,
    zero1,
)

P = PartitionSpec
EVERY = fsdp(("data", "model"), min_size=0)


class MLP(nn.Module):
    """Widths that both axes divide."""

    width: int = 64

    @nn.compact
    def __call__(self, x):
        for features in (2 * self.width, self.width):
            x = nn.gelu(nn.Dense(features)(x))
        return nn.Dense(self.width)(x)


def init_of(model, optimizer):
    def init(key, x):
        params = model.init(key, x)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    return init


def train_step(state, x, y):
    def loss_of(params):
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def batch(width=64, seed=0):
    x, y = np.random.default_rng(seed).normal(size=(2, 16, width)).astype(np.float32)
    return x, y


def assert_same(got, want, **tolerance):
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        np.testing.assert_allclose(a, b, err_msg=jax.tree_util.keystr(path), **tolerance)


def assert_lies(tree, layout, mesh):
    specs = jax.tree.leaves(parameter_specs(tree, layout, mesh))
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(tree), specs, strict=True):
        wanted = jax.sharding.NamedSharding(mesh.jax_mesh, spec)
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), (path, leaf.sharding, spec)


def all_of(params):
    return jax.tree.map(lambda _: True, params)


LAYOUTS = [
    data_parallel(),
    zero1(min_size=0),
    EVERY,
    tensor_parallel(),
    fsdp(min_size=0) | tensor_parallel(),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_training_is_serial_training(spmd_mesh, layout):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    init = init_of(MLP(), optimizer)
    parallel_init = spmd(init, mesh=spmd_mesh, parameter_shardings=layout)
    step = spmd(train_step, mesh=spmd_mesh, parameter_shardings=layout, donate_argnames="state")
    key, (x, y) = jax.random.key(0), batch()
    state, serial = parallel_init(key, x), init(key, x)
    for seed in range(4):
        x, y = batch(seed=seed)
        state, loss = step(state, x, y)
        serial, wanted = train_step(serial, x, y)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
        assert_lies(state, layout, spmd_mesh)
    assert_same(state, serial, rtol=1e-3, atol=1e-4)
    step.verify(state, x, y)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optax.lion(1e-3), marks=pytest.mark.slow),
        pytest.param(optax.lamb(1e-3), marks=pytest.mark.slow),
        optax.adafactor(1e-3, min_dim_size_to_factor=32),
        optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2),
        optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1e-2, 0.0, 10)),
        optax.multi_transform(
            {"a": optax.adam(1e-2), "b": optax.masked(optax.sgd(0.1), all_of)},
            lambda params: {name: "a" if name == "Dense_0" else "b" for name in params},
        ),
    ],
    ids=["lion", "lamb", "adafactor", "MultiSteps", "inject_hyperparams", "multi_transform"],
)  # fmt: skip
def test_optimizers(spmd_mesh, optimizer):
    layout = fsdp(min_size=0) | tensor_parallel()
    init = init_of(MLP(), optimizer)
    step = spmd(train_step, mesh=spmd_mesh, parameter_shardings=layout)
    x, y = batch()
    state = spmd(init, mesh=spmd_mesh, parameter_shardings=layout)(jax.random.key(0), x)
    serial = init(jax.random.key(0), x)
    for _ in range(3):
        state, loss = step(state, x, y)
        serial, wanted = train_step(serial, x, y)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert_lies(state, layout, spmd_mesh)
    step.verify(state, x, y)


def test_clipping_costs_one_scalar(spmd_mesh):
    x, y = batch()
    elements = []
    for clip in (optax.identity(), optax.clip_by_global_norm(1.0)):
        init = init_of(MLP(), optax.chain(clip, optax.adamw(1e-3)))
        state = jax.eval_shape(init, jax.random.key(0), x)
        step = spmd(train_step, mesh=spmd_mesh, parameter_shardings=fsdp(min_size=0))
        plan = step.plan(state, x, y)
        plan.assert_counts(all_reduce=1, reduce_scatter=6, all_gather=6)
        elements += [step.elements for step in plan.steps if step.kind == "all_reduce"]
    assert elements == [1, 2]  # the loss, and with it the sum of squares


# Born split


@pytest.mark.parametrize("as_pair", [False, True], ids=["TrainState", "params and opt_state"])
def test_no_device_holds_the_whole_model(spmd_mesh, as_pair):
    model, optimizer = MLP(512), optax.adamw(1e-3)
    make = init_of(model, optimizer)

    def pair(key, x):
        params = model.init(key, x)
        return params, optimizer.init(params)

    serial = pair if as_pair else make
    key, (x, _) = jax.random.key(7), batch(512)
    init = spmd(serial, mesh=spmd_mesh, parameter_shardings=EVERY)
    init.plan(key, x).assert_counts()
    memory = init.lower(key, x).compile().memory_analysis()
    wanted = jax.jit(serial)(key, x)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(wanted))
    assert whole / 8 <= memory.output_size_in_bytes < 1.01 * whole / 8
    assert memory.temp_size_in_bytes < whole / 8
    found = init(key, x)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(got, want)
    assert_lies(found, EVERY, spmd_mesh)


def test_a_step_holds_no_more_than_its_part(spmd_mesh):
    init = init_of(MLP(512), optax.adamw(1e-3))
    x, y = batch(512)
    state = jax.eval_shape(init, jax.random.key(0), x)
    step = spmd(train_step, mesh=spmd_mesh, parameter_shardings=EVERY, donate_argnames="state")
    memory = step.lower(state, x, y).compile().memory_analysis()
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert memory.argument_size_in_bytes < 1.05 * whole / 8
    assert memory.alias_size_in_bytes > 0.99 * whole / 8


def test_optimizer_state_made_of_parameters(spmd_mesh):
    optimizer = optax.adam(1e-3)
    params = {"w": np.ones((64, 32), np.float32)}
    make = spmd(lambda params: optimizer.init(params), mesh=spmd_mesh, parameter_shardings=zero1())
    state = make(params)
    assert state[0].mu["w"].sharding.spec == P("data")
    assert make.plan(params).in_layouts == {"params['w']": "[-, -]"}


def test_out_shardings_go_before(spmd_mesh):
    init = spmd(
        lambda key: {"w": jax.random.normal(key, (64, 32))},
        mesh=spmd_mesh,
        parameter_shardings=fsdp(),
        out_shardings=P(None, "model"),
    )
    assert init(jax.random.key(0))["w"].sharding.spec == P(None, "model")


def test_a_result_that_is_no_state_is_left_to_the_planner(spmd_mesh):
    def apply(params, x):
        return {"logits": x @ params["w"]}

    params, (x, _) = {"w": np.ones((64, 64), np.float32)}, batch()
    decorated = spmd(apply, mesh=spmd_mesh, parameter_shardings=[("w", P("model"))])
    assert decorated.plan(params, x).out_layouts == spmd(
        apply, mesh=spmd_mesh, in_shardings=[P("model"), None]
    ).plan(params, x).out_layouts  # fmt: skip


# nnx


class Net(nnx.Module):
    """A layer with statistics, one with random numbers, and two with weights."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)])
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        x = nnx.gelu(self.layers[0](self.norm(x)))
        return self.layers[1](self.dropout(x))


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_nnx_with_its_optimizer(spmd_mesh, layout):
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def make():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    decorated = spmd(step, mesh=spmd_mesh, parameter_shardings=layout)
    parallel, serial, (x, y) = make(), make(), batch(16)
    for _ in range(3):
        np.testing.assert_allclose(decorated(*parallel, x, y), step(*serial, x, y), rtol=1e-5)
    assert_lies(nnx.state(parallel[0], nnx.Param), layout, spmd_mesh)
    moments = [nnx.to_pure_dict(nnx.state(m[1]))["opt_state"][0]["mu"] for m in (parallel, serial)]
    assert_same(*moments, rtol=1e-3, atol=1e-5)
    kernel = parallel[1].opt_state[0].mu["layers"][0]["kernel"]
    tree = {
        "params": nnx.state(parallel[0], nnx.Param),
        "opt_state": {"mu": nnx.state(parallel[0], nnx.Param)},
    }
    specs = parameter_specs(tree, layout, spmd_mesh)["opt_state"]["mu"]
    (wanted,) = jax.tree.leaves(specs["layers"][0]["kernel"])
    wanted = jax.sharding.NamedSharding(spmd_mesh.jax_mesh, wanted)
    assert kernel[...].sharding.is_equivalent_to(wanted, 2)
    decorated.verify(*parallel, x, y)


def test_modules_are_born_split(spmd_mesh):
    def init(key):
        model = Net(nnx.Rngs(key))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    model, optimizer = spmd(init, mesh=spmd_mesh, parameter_shardings=EVERY)(jax.random.key(0))
    wanted, _ = init(jax.random.key(0))
    assert_same(nnx.state(model, nnx.Param), nnx.state(wanted, nnx.Param), rtol=1e-6)
    assert_lies(nnx.state(model, nnx.Param), EVERY, spmd_mesh)
    moment = optimizer.opt_state[0].mu["layers"][0]["kernel"]
    assert moment[...].sharding == model.layers[0].kernel[...].sharding


def test_annotated_modules(spmd_mesh):
    kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    with nnx.use_eager_sharding(False):
        model = nnx.Linear(16, 32, kernel_init=kernel, rngs=nnx.Rngs(0))
    x, _ = batch(16)
    layout = flax_metadata() | data_parallel()
    decorated = spmd(lambda model, x: model(x), mesh=spmd_mesh, parameter_shardings=layout)
    wanted = model(x)
    np.testing.assert_allclose(decorated(model, x), wanted, rtol=1e-5, atol=1e-6)
    assert decorated.plan(model, x).in_layouts == {
        "model['bias']": "[-]",
        "model['kernel']": "[-, model]",
        "x": "[data, -]",
    }
