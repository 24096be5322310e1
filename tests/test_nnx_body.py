"""flax nnx modules as arguments: changed in place, as by the serial function."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from pypto_spmd import AUTO, PartitionSpec, ShardingError, spmd

P = PartitionSpec


class Net(nnx.Module):
    """A layer with statistics, one with random numbers, and two with weights."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.gelu(self.norm(self.first(x)))))


def train_step(model, optimizer, x, y):
    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    return value


def make():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def assert_same(model, other):
    for (path, a), (_, b) in zip(
        *(jax.tree_util.tree_leaves_with_path(nnx.state(m)) for m in (model, other)), strict=True
    ):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=str(path))


@pytest.fixture
def batch():
    return np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32), np.arange(8) % 4


@pytest.mark.parametrize("model_specs", [AUTO, P(), {"first": {"kernel": P(None, "model")}}])
def test_a_train_step(spmd_mesh, batch, model_specs):
    if isinstance(model_specs, dict):
        model_specs = copy.deepcopy(model_specs)
        model_specs["first"]["bias"] = AUTO
        model_specs.update(norm=AUTO, dropout=AUTO, last=AUTO)
    decorated = spmd(
        train_step,
        mesh=spmd_mesh,
        in_shardings=[model_specs, AUTO, P("data"), P("data")],
        donate_argnames=("model", "optimizer"),
    )
    serial, parallel = make(), make()
    for _ in range(4):
        want, got = train_step(*serial, *batch), decorated(*parallel, *batch)
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same(serial[0], parallel[0])
    assert_same(serial[1], parallel[1])
    assert parallel[0].first.kernel.sharding.mesh == spmd_mesh.jax_mesh
    decorated.verify(*parallel, *batch)


def test_names_of_their_arrays(spmd_mesh, batch):
    decorated = spmd(lambda model, x: model(x).sum(), mesh=spmd_mesh)
    plan = decorated.plan(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), batch[0])
    assert list(plan.in_layouts) == ["model['bias']", "model['kernel']", "x"]
    assert list(plan.out_layouts) == ["new model['bias']", "new model['kernel']", "result"]


def test_a_plan_without_memory(spmd_mesh):
    model = nnx.eval_shape(lambda: nnx.Linear(1 << 15, 1 << 15, rngs=nnx.Rngs(0)))
    decorated = spmd(
        lambda model, x: model(x),
        mesh=spmd_mesh,
        in_shardings=[{"kernel": P("model"), "bias": P()}, P("data")],
    )
    x = jax.ShapeDtypeStruct((64, 1 << 15), "float32")
    decorated.plan(model, x).assert_counts(all_reduce=1)


def test_faults_name_their_arrays(spmd_mesh, batch):
    decorated = spmd(
        lambda model, x: model(x), mesh=spmd_mesh, in_shardings=[P("model"), P("data")]
    )
    with pytest.raises(ShardingError) as caught:
        decorated(nnx.Linear(8, 6, rngs=nnx.Rngs(0)), batch[0])
    assert str(caught.value).splitlines()[0] == (
        "@spmd function '<lambda>': argument model['bias'].value has shape f32[6]."
    )


def test_gradient_of_one(spmd_mesh, batch):
    decorated = spmd(
        lambda model, x: jnp.mean(model(x) ** 2), mesh=spmd_mesh, in_shardings=[P(), P("data")]
    )
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    got = nnx.grad(decorated)(model, batch[0])
    want = nnx.grad(decorated.__wrapped__)(model, batch[0])
    np.testing.assert_allclose(got["kernel"][...], want["kernel"][...], rtol=1e-5, atol=1e-6)


def test_as_a_method_of_a_module(spmd_mesh, batch):
    class Layer(nnx.Module):
        """Counts its calls."""

        def __init__(self):
            self.weight = nnx.Param(jnp.eye(8))
            self.calls = nnx.Variable(jnp.zeros(()))

        @spmd(mesh=spmd_mesh, in_shardings=[AUTO, P("data")])
        def __call__(self, x):
            self.calls[...] += 1
            return x @ self.weight[...]

    layer = Layer()
    for _ in range(3):
        np.testing.assert_allclose(layer(batch[0]), batch[0], rtol=1e-6)
    assert layer.calls[...] == 3
