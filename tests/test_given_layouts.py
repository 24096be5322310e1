"""in_shardings beside parameter_shardings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pypto_spmd import AUTO, PartitionSpec, ShardingError, spmd
from pypto_spmd.training import data_parallel, fsdp, tensor_parallel

P = PartitionSpec


@pytest.fixture
def x():
    return np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def layouts(mesh, *arguments, function=None, **options):
    def train_step(params, data, labels):
        return jnp.mean((data @ params["w"] - labels) ** 2)

    decorated = spmd(function or train_step, mesh=mesh, **options)
    return decorated.plan(*arguments).in_layouts


# in_shardings beside parameter_shardings


@pytest.mark.parametrize(
    ("in_shardings", "data", "labels"),
    [
        ([P("data")], "[data, -]", None),
        ([P("data"), P()], "[data, -]", "[-, -]"),
        ((P("data"), AUTO), "[data, -]", None),
        ([AUTO, P("data"), P("data")], "[data, -]", "[data, -]"),
        (P("data"), "[data, -]", "[data, -]"),
        ({"labels": P("data")}, None, "[data, -]"),
        ({"labels": P("data"), "data": P()}, "[-, -]", "[data, -]"),
    ],
)
def test_entries_are_for_what_is_no_parameter(spmd_mesh, x, in_shardings, data, labels):
    found = layouts(
        spmd_mesh, {"w": x}, x, x, in_shardings=in_shardings, parameter_shardings=P("model")
    )
    assert found["params['w']"] == "[model, -]"
    assert data is None or found["data"] == data
    assert labels is None or found["labels"] == labels


def test_labels_follow_the_data(spmd_mesh, x):
    """A planner's choice: what meets the data is split as it is."""
    found = layouts(spmd_mesh, {"w": x}, x, x, in_shardings=[P("data")], parameter_shardings=P())
    assert found["labels"] == "[data, -]"


def test_parameters_last_or_between(spmd_mesh, x):
    def loss(data, params, labels, opt_state):
        return jnp.mean((data @ params["w"] - labels) ** 2) + opt_state[0].trace["w"].sum()

    opt_state = optax.sgd(0.1, momentum=0.9).init({"w": x})
    found = layouts(
        spmd_mesh, x, {"w": x}, x, opt_state, function=loss,
        in_shardings=[P("data"), P(None, "data")], parameter_shardings=P("model"),
    )  # fmt: skip
    assert found == {
        "data": "[data, -]",
        "params['w']": "[model, -]",
        "labels": "[-, data]",
        "opt_state[0].trace['w']": "[model, -]",
    }


def test_an_argument_of_its_own_spec(spmd_mesh, x):
    found = layouts(
        spmd_mesh, {"w": x}, x, x,
        in_shardings=[{"w": P()}, P("data"), P()], parameter_shardings=P("model"),
    )  # fmt: skip
    assert found["params['w']"] == "[-, -]"


def test_too_many_entries_are_told(spmd_mesh, x):
    def loss(params, state, data):
        return jnp.mean(data @ params["w"] @ state["w"])

    decorated = spmd(
        loss, mesh=spmd_mesh, in_shardings=[P("data"), P("data")], parameter_shardings=P("model")
    )
    with pytest.raises(ShardingError) as caught:
        decorated({"w": x}, {"w": x}, x)
    assert str(caught.value) == (
        "@spmd function 'loss': in_shardings has 2 entries but the function was called with 3 arguments.\n"
        "  in_shardings has one entry for each argument, and the arguments are: 'params', 'state' and "
        "'data'.\n"
        "  Fix: give 3 entries, AUTO where the planner is to choose: in_shardings=[..., ..., ...]."
    )


def test_too_few_entries_without_parameter_shardings_are_told(spmd_mesh, x):
    with pytest.raises(ShardingError, match="in_shardings has 1 entry"):
        layouts(spmd_mesh, {"w": x}, x, x, in_shardings=[P("data")])


# Named layouts split the batch


def test_a_named_layout_splits_what_nothing_is_said_about(spmd_mesh, x):
    def loss(params, data, labels, key, weight):
        noise = jax.random.normal(key, data.shape)
        return jnp.mean(((data + noise) @ params["w"] - labels) ** 2) * weight

    arguments = ({"w": x}, x, x, jax.random.PRNGKey(0), 2.0)
    layout = data_parallel() | tensor_parallel([("w", P("model"))])
    found = layouts(spmd_mesh, *arguments, function=loss, parameter_shardings=layout)
    assert found == {
        "params['w']": "[model, -]",
        "data": "[data, -]",
        "labels": "[data, -]",
        "key": "[-]",
        "weight": "[]",
    }
    found = layouts(
        spmd_mesh,
        *arguments,
        function=loss,
        parameter_shardings=layout,
        in_shardings=[P(("data", "model"))],
    )
    assert (found["data"], found["labels"]) == ("[(data,model), -]", "[data, -]")
    found = layouts(
        spmd_mesh, *arguments, function=loss, parameter_shardings=layout, in_shardings={"data": P()}
    )
    assert (found["data"], found["labels"]) == ("[-, -]", "[data, -]")


def test_a_batch_that_is_not_divisible(spmd_mesh, x):
    decorated = spmd(
        lambda params, batch: batch @ params["w"], mesh=spmd_mesh, parameter_shardings=fsdp()
    )
    with pytest.raises(ShardingError) as caught:
        decorated({"w": x}, x[:5])
    assert str(caught.value).splitlines()[:2] == [
        "@spmd function '<lambda>': argument 'batch' has shape f32[5,8].",
        "  PartitionSpec('data') splits dim 0 (size 5) over mesh axis 'data' (size 2), which does not "
        "divide it.",
    ]


def test_faults_of_rules_and_of_specs_are_told_together(spmd_mesh, x):
    decorated = spmd(
        lambda params, batch: batch @ params["w"],
        mesh=spmd_mesh,
        in_shardings=[P("dota")],
        parameter_shardings=[("v", P())],
    )
    with pytest.raises(ShardingError) as caught:
        decorated({"w": x}, x)
    assert str(caught.value).splitlines()[0] == "@spmd function '<lambda>': 3 things are wrong."


def test_rules_see_all_arguments_together(spmd_mesh, x):
    def loss(w1, w2, batch):
        return jnp.mean(jnp.tanh(batch @ w1) @ w2)

    rules = [("^w1$", P(None, "model")), ("^w2$", P("model"))]
    found = layouts(spmd_mesh, x, x, x, function=loss, parameter_shardings=rules)
    assert (found["w1"], found["w2"]) == ("[-, model]", "[model, -]")


def test_one_spec_for_results_passes_over_scalars(spmd_mesh, x):
    decorated = spmd(lambda a: (a.sum(), 2 * a), mesh=spmd_mesh, out_shardings=P("data"))
    total, doubled = decorated(x)
    assert total.sharding.spec == P()
    assert doubled.sharding.spec == P("data")
