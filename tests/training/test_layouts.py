"""Layouts by name: the specs they give, and the plans of training steps in them, counted exactly."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from pypto_spmd import DeviceMesh, PartitionSpec, ShardingError, spmd
from pypto_spmd.training import (
    combine,
    data_parallel,
    expert_parallel,
    flax_metadata,
    fsdp,
    parameter_specs,
    tensor_parallel,
    zero1,
    zero2,
)

P = PartitionSpec
WIDTH, HEADS, LAYERS, LENGTH, VOCABULARY = 64, 4, 2, 16, 4096


@pytest.fixture
def mesh():
    return DeviceMesh.simulate((2, 4), ("data", "model"))


class MLP(nn.Module):
    """Four matrices without names of their own."""

    @nn.compact
    def __call__(self, x):
        for features in (128, 64, 128):
            x = nn.gelu(nn.Dense(features)(x))
        return nn.Dense(64)(x)


class Block(nn.Module):
    """A transformer layer."""

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(name="norm_1")(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS, name="attention")(y, y)
        y = nn.LayerNorm(name="norm_2")(x)
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(4 * WIDTH, name="up")(y)))


class GPT(nn.Module):
    """A small transformer with a vocabulary that outweighs its activations."""

    @nn.compact
    def __call__(self, tokens):
        position = nn.Embed(LENGTH, WIDTH, name="position")(jnp.arange(tokens.shape[1]))
        x = nn.Embed(VOCABULARY, WIDTH, name="token")(tokens) + position
        for layer in range(LAYERS):
            x = Block(name=f"block_{layer}")(x)
        return nn.Dense(VOCABULARY, name="head")(nn.LayerNorm(name="norm")(x))


def mean_squares(output, target):
    return jnp.mean((output - target) ** 2)


def cross_entropy(output, target):
    return optax.softmax_cross_entropy_with_integer_labels(output, target).mean()


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


MODELS = {
    "mlp": (MLP(), mean_squares, array(16, 64)),
    "gpt": (GPT(), cross_entropy, array(16, LENGTH, dtype="int32")),
}


def step_of(loss_of):
    def train_step(state, x, y):
        loss, grads = jax.value_and_grad(lambda p: loss_of(state.apply_fn({"params": p}, x), y))(
            state.params
        )
        return state.apply_gradients(grads=grads), loss

    return train_step


def state_of(model, x, optimizer):
    def init(key):
        params = model.init(key, jnp.zeros(x.shape, x.dtype))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    return init


def plan_of(mesh, name, layout, optimizer=None):
    model, loss_of, x = MODELS[name]
    state = jax.eval_shape(state_of(model, x, optimizer or optax.adamw(1e-3)), jax.random.key(0))
    decorated = spmd(step_of(loss_of), mesh=mesh, parameter_shardings=layout)
    return decorated.plan(state, x, x), state


# Specs

NETWORK = {
    "up": {"kernel": array(64, 256), "bias": array(256)},
    "down": {"kernel": array(256, 64), "bias": array(64)},
}


def test_data_parallel(mesh):
    assert data_parallel().batch == P("data")
    assert data_parallel(("model", "data")).batch == P(("model", "data"))
    state = jax.eval_shape(optax.adam(1e-3).init, NETWORK)
    for tree in (NETWORK, {"params": NETWORK, "opt_state": state}):
        assert set(jax.tree.leaves(parameter_specs(tree, data_parallel(), mesh))) == {P()}


def test_zero_splits_more_and_more(mesh):
    params = {"kernel": array(64, 256)}
    optimizer = optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2)
    tree = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    split = P(None, "data")
    for layout, wanted in (
        (data_parallel(), (P(), P(), P())),
        (zero1(), (split, P(), P())),
        (zero2(), (split, split, P())),
        (fsdp(), (split, split, split)),
    ):
        found = parameter_specs(tree, layout, mesh)
        moments = found["opt_state"].inner_opt_state[0].trace["kernel"]
        gradients = found["opt_state"].acc_grads["kernel"]
        assert (moments, gradients, found["params"]["kernel"]) == wanted
        assert layout.batch == P("data")


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((64, 256), P(None, "data")),
        ((256, 64), P("data")),
        ((64, 64), P(None, "data")),
        ((7, 7, 3, 64), P(None, None, None, "data")),
        ((1025, 64), P(None, "data")),
        ((1025, 3), P()),
        ((4, 8), P()),
        ((1024,), P("data")),
        ((1022,), P()),
    ],
)
def test_fsdp_splits_the_largest_dim_that_can_be(mesh, shape, wanted):
    assert parameter_specs({"w": array(*shape)}, fsdp(), mesh) == {"w": wanted}


def test_fsdp_with_a_minimum_size(mesh):
    tree = {"small": array(4, 8), "large": array(64, 64)}
    assert parameter_specs(tree, fsdp(min_size=0), mesh)["small"] == P(None, "data")
    assert parameter_specs(tree, fsdp(min_size=5000), mesh)["large"] == P()
    both = fsdp(("data", "model"), min_size=0)
    assert parameter_specs(tree, both, mesh) == {
        "small": P(None, ("data", "model")),
        "large": P(None, ("data", "model")),
    }


def test_combinations(mesh):
    for layout in (fsdp() | tensor_parallel(), combine(tensor_parallel(), fsdp())):
        assert layout.batch == P("data")
        assert parameter_specs(NETWORK, layout, mesh) == {
            "up": {"kernel": P("data", "model"), "bias": P("model")},
            "down": {"kernel": P("model", "data"), "bias": P()},
        }
    layout = zero1() | tensor_parallel([("up/kernel", P(None, "model"))])
    tree = {"params": NETWORK, "opt_state": jax.eval_shape(optax.adam(1e-3).init, NETWORK)}
    found = parameter_specs(tree, layout, mesh)
    assert found["params"]["up"] == {"kernel": P(None, "model"), "bias": P()}
    assert found["opt_state"][0].mu["up"] == {"kernel": P("data", "model"), "bias": P()}
    assert found["opt_state"][0].mu["down"]["kernel"] == P("data")
    assert (data_parallel("data") | fsdp("model")).batch == P(("data", "model"))
    # Where no dim is left, the axis goes inside one that is split already.
    rules = tensor_parallel([("w", P("model"))])
    assert parameter_specs({"w": array(64)}, rules | fsdp(min_size=0), mesh) == {
        "w": P(("model", "data"))
    }


def test_layouts_are_values():
    layout = fsdp(min_size=8) | tensor_parallel([("up", P(None, "model"))])
    names = {"fsdp": fsdp, "tensor_parallel": tensor_parallel, "PartitionSpec": P, "P": P}
    assert eval(repr(layout), names) == layout
    assert hash(layout) == hash(fsdp(min_size=8) | tensor_parallel([("up", P(None, "model"))]))
    experts = repr(expert_parallel([("experts", "model")], axis="model"))
    assert experts == "expert_parallel((('experts', 'model'),), axis='model')"
    assert repr(zero1() | flax_metadata()) == "zero1('data') | flax_metadata()"


# Tensor parallelism by conventional names


def test_attention_by_name(mesh):
    x = jnp.ones((2, LENGTH, WIDTH))
    params = jax.eval_shape(lambda: Block().init(jax.random.key(0), x))["params"]
    found = parameter_specs(params, tensor_parallel(), mesh)
    inner = {"kernel": P(None, "model"), "bias": P("model")}
    assert found["attention"] == {
        "query": inner,
        "key": inner,
        "value": inner,
        "out": {"kernel": P("model"), "bias": P()},
    }
    assert found["up"] == inner
    assert found["down"] == {"kernel": P("model"), "bias": P()}
    assert found["norm_1"] == {"scale": P(), "bias": P()}


def test_several_axes_by_name(mesh):
    up, down = {"kernel": array(64, 256), "bias": array(256)}, {"kernel": array(256, 64)}
    params, both = {"up": up, "down": down}, ("data", "model")
    found = parameter_specs(params, tensor_parallel(axis=both), mesh)
    assert found == {"up": {"kernel": P(None, both), "bias": P(both)}, "down": {"kernel": P(both)}}
    one, none = tensor_parallel(axis=("model",)), tensor_parallel(axis=())
    assert parameter_specs(params, one, mesh) == parameter_specs(params, tensor_parallel(), mesh)
    assert parameter_specs(params, data_parallel() | none, mesh) == {
        "up": {"kernel": P(), "bias": P()},
        "down": {"kernel": P()},
    }


def test_stacked_layers_by_name(mesh):
    stacked = nn.scan(
        lambda block, x, _: (block(x), None),
        variable_axes={"params": 0}, split_rngs={"params": True}, length=3,
    )  # fmt: skip

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            return stacked(Block(name="layers"), x, None)[0]

    x = jnp.ones((2, LENGTH, WIDTH))
    params = jax.eval_shape(lambda: Stack().init(jax.random.key(0), x))["params"]["layers"]
    assert params["attention"]["query"]["kernel"].shape == (3, WIDTH, HEADS, WIDTH // HEADS)
    found = parameter_specs(params, tensor_parallel(), mesh)
    inner = {"kernel": P(None, None, "model"), "bias": P(None, "model")}
    assert found["attention"]["query"] == inner
    assert found["attention"]["out"] == {"kernel": P(None, "model"), "bias": P()}
    assert found["up"] == inner
    assert found["down"] == {"kernel": P(None, "model"), "bias": P()}


def test_grouped_queries_by_name(mesh):
    heads = lambda count: {"kernel": array(64, count, 16)}  # noqa: E731
    tree = {"q": heads(4), "k": heads(2), "v": heads(2), "o": {"kernel": array(4, 16, 64)}}
    split, whole = {"kernel": P(None, "model")}, {"kernel": P()}
    found = parameter_specs(tree, tensor_parallel(), mesh)
    assert found == {"q": split, "k": whole, "v": whole, "o": {"kernel": P("model")}}


@pytest.mark.parametrize(
    "names",
    [
        ("gate_proj", "up_proj", "down_proj"),
        ("w1", "w3", "w2"),
        ("wi_0", "wi_1", "wo"),
        ("gate", "up", "down"),
    ],
)
def test_gated_networks_by_name(mesh, names):
    first, second, last = names
    tree = {first: array(64, 128), second: array(64, 128), last: array(128, 64)}
    wanted = {first: P(None, "model"), second: P(None, "model"), last: P("model")}
    assert parameter_specs(tree, tensor_parallel(), mesh) == wanted


def test_numbered_layers_by_order(mesh):
    x = MODELS["mlp"][2]
    params = jax.eval_shape(lambda: MLP().init(jax.random.key(0), jnp.zeros(x.shape)))["params"]
    found = parameter_specs(params, tensor_parallel(), mesh)
    column, row = (
        {"kernel": P(None, "model"), "bias": P("model")},
        {"kernel": P("model"), "bias": P()},
    )
    assert found == {"Dense_0": column, "Dense_1": row, "Dense_2": column, "Dense_3": row}
    layers = [{"w": array(8, 16), "b": array(16)}, {"w": array(16, 8)}, {"w": array(8, 10)}]
    found = parameter_specs(layers, tensor_parallel(), mesh)
    assert found == [{"w": P(None, "model"), "b": P("model")}, {"w": P("model")}, {"w": P()}]


def test_vocabularies_by_name(mesh):
    tree = {
        "token": {"embedding": array(64, 8)},
        "position": {"embedding": array(64, 8)},
        "wte": array(64, 8),
        "lm_head": {"kernel": array(8, 64), "bias": array(64)},
        "classifier": {"kernel": array(8, 10)},
    }
    assert parameter_specs(tree, tensor_parallel(), mesh) == {
        "token": {"embedding": P("model")},
        "position": {"embedding": P()},
        "wte": P("model"),
        "lm_head": {"kernel": P(None, "model"), "bias": P("model")},
        "classifier": {"kernel": P()},
    }


def test_nnx_by_name(mesh):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(4, 64, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)])

    state = nnx.state(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
    specs = jax.tree_util.tree_leaves_with_path(parameter_specs(state, tensor_parallel(), mesh))
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): spec for path, spec in specs}
    assert {path.removesuffix("/value"): spec for path, spec in named.items() if spec != P()} == {
        "attention/key/bias": P("model"),
        "attention/key/kernel": P(None, "model"),
        "attention/out/kernel": P("model"),
        "attention/query/bias": P("model"),
        "attention/query/kernel": P(None, "model"),
        "attention/value/bias": P("model"),
        "attention/value/kernel": P(None, "model"),
        "layers/0/bias": P("model"),
        "layers/0/kernel": P(None, "model"),
        "layers/1/kernel": P("model"),
    }


# flax's own metadata


def boxed(names, box=nn.with_partitioning):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = box(nn.initializers.lecun_normal(), names)
            return nn.Dense(8, kernel_init=kernel, name="dense")(x)

    init = lambda: Net().init(jax.random.key(0), jnp.ones((2, 16)))  # noqa: E731
    return jax.eval_shape(init)["params"]


def kernel_spec(specs):
    return specs["dense"]["kernel"].value


def test_linen_metadata(mesh):
    params = boxed((None, "model"))
    found = parameter_specs(params, flax_metadata(), mesh)
    assert (kernel_spec(found), found["dense"]["bias"]) == (P(None, "model"), P())
    tree = {"params": params, "opt_state": jax.eval_shape(optax.adam(1e-3).init, params)}
    found = parameter_specs(tree, flax_metadata() | zero1(min_size=0), mesh)
    assert kernel_spec(found["params"]) == P(None, "model")
    assert kernel_spec(found["opt_state"][0].mu) == P("data", "model")


def test_logical_axes(mesh):
    params = boxed(("embed", "mlp"), nn.with_logical_partitioning)
    rules = (("embed", "data"), ("mlp", "data"), ("mlp", "model"))
    assert kernel_spec(parameter_specs(params, flax_metadata(rules), mesh)) == P("data", "model")
    with nn.logical_axis_rules([("embed", None), ("mlp", ("data", "model"))]):
        found = parameter_specs(params, flax_metadata(), mesh)
        assert kernel_spec(found) == P(None, ("data", "model"))
        found = parameter_specs(params, flax_metadata([("mlp", "model")]), mesh)
        assert kernel_spec(found) == P(None, "model")


def test_nnx_metadata(mesh):
    def init():
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "model"))
        with nnx.use_eager_sharding(False):
            return nnx.Linear(16, 8, kernel_init=kernel, rngs=nnx.Rngs(0))

    state = nnx.state(nnx.eval_shape(init))
    found = parameter_specs(state, flax_metadata([("embed", "data")]), mesh)
    assert jax.tree.leaves(found) == [P(), P("data", "model")]


def test_specs_that_flax_gives(mesh):
    params = boxed((None, "model"))
    specs = nn.get_partition_spec(params)
    found = parameter_specs(nn.unbox(params), specs, mesh)
    assert found == {"dense": {"bias": P(), "kernel": P(None, "model")}}
    assert kernel_spec(parameter_specs(params, specs, mesh)) == P(None, "model")


# Faults


def refused(layout, tree, mesh):
    with pytest.raises(ShardingError) as caught:
        parameter_specs(tree, layout, mesh, name="params")
    return str(caught.value)


def test_an_axis_that_is_not_there(mesh):
    assert refused(fsdp("dota"), NETWORK, mesh) == (
        "parameter_specs: the layout is fsdp('dota').\n"
        "  PartitionSpec('dota') names the mesh axis 'dota', but the mesh has 'data' and 'model'.\n"
        "  Fix: write 'data', or use one of 'data' and 'model'."
    )


def test_an_axis_for_two_purposes():
    with pytest.raises(ShardingError) as caught:
        fsdp() | tensor_parallel(axis="data")
    assert str(caught.value) == (
        "fsdp('data') | tensor_parallel('auto', axis='data'): 'data' is used by two of its parts.\n"
        "  Each kind of parallelism has mesh axes of its own.\n"
        "  Fix: give them different axes, or use one of them."
    )


def test_names_that_say_nothing(mesh):
    assert refused(tensor_parallel(), {"a": array(8, 8), "b": array(8)}, mesh) == (
        "parameter_specs: tensor_parallel('auto', axis='model') splits no parameter.\n"
        "  None has a conventional name and a size that 4 divides. The paths are: params/a f32[8,8] and "
        "params/b f32[8].\n"
        "  Fix: give rules: tensor_parallel([(pattern, spec), ...])."
    )
    with pytest.raises(ShardingError) as caught:
        tensor_parallel("megatron")
    assert str(caught.value) == (
        "tensor_parallel: rules is 'megatron'.\n"
        "  Rules are pairs of a pattern and a spec.\n"
        '  Fix: use rules="auto", or [(pattern, spec), ...].'
    )


def test_tensor_parallel_rules_that_do_not_fit(mesh):
    rules = [("up/bias", P(None, "model")), ("left", P())]
    assert refused(tensor_parallel(rules), NETWORK, mesh) == (
        "parameter_specs: 2 things are wrong.\n"
        "  1. tensor_parallel[1], 'left', matches no parameter.\n"
        "     The paths are: params/down/bias, params/down/kernel, params/up/bias and params/up/kernel.\n"
        "     Fix: correct the pattern, or take the rule out.\n"
        "  2. tensor_parallel[0], 'up/bias', doesn't fit 1 of the 1 array that it matches: "
        "params/up/bias f32[256].\n"
        "     PartitionSpec(None, 'model') has 2 entries but the array has rank 1.\n"
        "     Fix: put a rule for it before this one; or give at most 1 entry, one a dim."
    )


def test_metadata_that_says_nothing(mesh):
    assert refused(flax_metadata(), NETWORK["up"], mesh) == (
        "parameter_specs: no parameter has flax metadata: params/bias and params/kernel.\n"
        "  Annotations stand on arrays in flax's boxes: nn.Partitioned, or nnx variables.\n"
        "  Fix: annotate them with with_partitioning, and pass the tree before nn.unbox."
    )
    assert refused(flax_metadata(), boxed(("embed", "model")), mesh) == (
        "parameter_specs: flax metadata names the axis 'embed', of params/dense/kernel.\n"
        "  It has no rule and is no mesh axis; the mesh has 'data' and 'model'.\n"
        "  Fix: give it a rule: flax_metadata([('embed', 'axis')]), or None there."
    )


# Plans: the counts of the textbook

TENSOR = 2  # AllReduces of a tensor parallel layer or pair, forward and backward


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        # the loss, and all gradients in one bucket
        (data_parallel(), {"all_reduce": 2}),
        (data_parallel(("data", "model")), {"all_reduce": 2}),
        (zero1(min_size=0), {"all_reduce": 1, "reduce_scatter": 8, "all_gather": 8}),
        # biases are whole: one more AllReduce, of their gradients
        (zero1(), {"all_reduce": 2, "reduce_scatter": 4, "all_gather": 4}),
        (zero2(min_size=0), {"all_reduce": 1, "reduce_scatter": 8, "all_gather": 8}),
        (fsdp(min_size=0), {"all_reduce": 1, "reduce_scatter": 8, "all_gather": 8}),
        (fsdp(), {"all_reduce": 2, "reduce_scatter": 4, "all_gather": 4}),
        (
            fsdp(("data", "model"), min_size=0),
            {"all_reduce": 1, "reduce_scatter": 8, "all_gather": 8},
        ),
        # two pairs, of which the first needs no gradient of its input
        (tensor_parallel(), {"all_reduce": 2 * TENSOR - 1}),
        (data_parallel() | tensor_parallel(), {"all_reduce": 2 * TENSOR - 1 + 2}),
        (
            fsdp() | tensor_parallel(),
            {"all_reduce": 2 * TENSOR - 1 + 2, "reduce_scatter": 4, "all_gather": 4},
        ),
        (
            zero1() | tensor_parallel(),
            {"all_reduce": 2 * TENSOR - 1 + 2, "reduce_scatter": 4, "all_gather": 4},
        ),
    ],
    ids=lambda value: repr(value) if not isinstance(value, dict) else "",
)
def test_plans_of_an_mlp(mesh, layout, counts):
    plan, _ = plan_of(mesh, "mlp", layout)
    plan.assert_counts(**counts)


KERNELS = 6 * LAYERS + 3  # and the two embeddings, and the head
LARGE = KERNELS + 1  # and the head's bias
TRANSFORMER = 2 * TENSOR * LAYERS
VOCABULARY_SPLIT = 3  # lookup; maxima and sums of the cross-entropy
HEAD = 1  # the gradient of what the head reads


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        (data_parallel(), {"all_reduce": 2}),
        (zero1(), {"all_reduce": 2, "reduce_scatter": LARGE, "all_gather": LARGE}),
        (zero1(min_size=0), {"all_reduce": 1, "reduce_scatter": 38, "all_gather": 38}),
        (fsdp(), {"all_reduce": 2, "reduce_scatter": LARGE, "all_gather": LARGE}),
        (fsdp(min_size=0), {"all_reduce": 1, "reduce_scatter": 38, "all_gather": 38}),
        # both axes at once, and nothing to put in order afterwards
        (
            fsdp(("data", "model"), min_size=0),
            {"all_reduce": 1, "reduce_scatter": 38, "all_gather": 38},
        ),
        # the loss too is a sum over the split vocabulary
        (tensor_parallel(), {"all_reduce": TRANSFORMER + VOCABULARY_SPLIT + HEAD + 1}),
        (
            data_parallel() | tensor_parallel(),
            {"all_reduce": TRANSFORMER + VOCABULARY_SPLIT + HEAD + 2},
        ),
    ],
    ids=lambda value: repr(value) if not isinstance(value, dict) else "",
)
def test_plans_of_a_transformer(mesh, layout, counts):
    plan, state = plan_of(mesh, "gpt", layout)
    assert len(jax.tree.leaves(state.params)) == 38
    plan.assert_counts(**counts)


@pytest.mark.parametrize("layout", [zero1(("data", "model")), fsdp(("data", "model"))], ids=repr)
def test_clipping_adds_no_collective(mesh, layout):
    """Gradients are read for their norm and again to be scaled, small ones whole, large ones split."""
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    plan, _ = plan_of(mesh, "gpt", layout, clipped)
    # the small gradients, and the loss with the norm
    plan.assert_counts(all_reduce=2, reduce_scatter=LARGE, all_gather=LARGE)
    assert sorted(step.tensors for step in plan.steps if step.kind == "all_reduce")[0] == 2


# Experts

EXPERTS = [("experts", P("model"))]


def mixture(params, x):
    """Each token goes to its best expert, if there is room for it in its row: (batch, length, width)."""
    scores = jax.nn.softmax(x @ params["router"])
    chosen = jax.nn.one_hot(scores.argmax(axis=-1), scores.shape[-1], dtype=int)
    places = jax.nn.one_hot(jnp.cumsum(chosen, axis=1) * chosen - 1, LENGTH // 4)
    sent = jnp.einsum("gsec,gsm->egcm", places, x)
    hidden = nn.gelu(jnp.einsum("egcm,emh->egch", sent, params["experts"]["up"]))
    back = jnp.einsum("egch,ehm->egcm", hidden, params["experts"]["down"])
    return jnp.einsum("gsec,gse,egcm->gsm", places, scores, back)


def test_experts(mesh):
    layer = {
        "router": array(WIDTH, 8),
        "experts": {"up": array(8, WIDTH, 256), "down": array(8, 256, WIDTH)},
    }
    params = {"first": array(WIDTH, WIDTH), "layers": [layer, layer]}

    def train_step(params, x, y):
        def loss_of(params):
            out = x @ params["first"]
            for of_layer in params["layers"]:
                out = out + mixture(of_layer, out)
            return mean_squares(out, y)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    x = array(16, LENGTH, WIDTH)
    both = ("data", "model")
    for layout, reductions in (
        # the loss, what all have alike, and the experts' own
        (data_parallel() | expert_parallel(EXPERTS, axis="model"), [both, both, ("data",)]),
        (expert_parallel([("experts", P(both))], axis=both), [both, both]),
        (expert_parallel(EXPERTS, axis="model"), [("model",)] * 2),
    ):
        specs = parameter_specs(params, layout, mesh)
        assert specs["layers"][1]["experts"]["down"] in (P("model"), P(both))
        assert specs["first"] == specs["layers"][0]["router"] == P()
        plan = spmd(train_step, mesh=mesh, parameter_shardings=layout).plan(params, x, x)
        # There and back, in both passes, a layer.
        plan.assert_counts(all_to_all=4 * 2, all_reduce=len(reductions))
        assert sorted(s.axes for s in plan.steps if s.kind == "all_reduce") == sorted(reductions)
    assert (data_parallel() | expert_parallel(EXPERTS, axis="model")).batch == P(both)
