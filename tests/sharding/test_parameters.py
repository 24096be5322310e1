"""What may be said about parameters, and how optimizer state follows them."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from pypto_spmd import AUTO, DeviceMesh, PartitionSpec, ShardingError, ShardingSpec
from pypto_spmd.sharding.parameters import Argument, parameter_specs, resolve_parameters

P = PartitionSpec


@pytest.fixture
def mesh():
    return DeviceMesh.simulate((2, 4), ("data", "model"))


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = {
    "dense": {"bias": array(8), "kernel": array(16, 8)},
    "out": {"bias": array(6), "kernel": array(8, 6)},
}
SPECS = {
    "dense": {"bias": P("model"), "kernel": P(None, "model")},
    "out": {"bias": P(), "kernel": P("model")},
}
RULES = [("dense/kernel", P(None, "model")), ("(dense/bias|out/kernel)$", P("model")), (".", P())]


def state_of(optimizer, params=PARAMS):
    make = lambda params: TrainState.create(apply_fn=None, params=params, tx=optimizer)  # noqa: E731
    return jax.eval_shape(make, params)


def by_path(tree, specs):
    """Specs by path, of all arrays that are not whole."""
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: x is AUTO)
    assert len(leaves) == len(jax.tree.leaves(tree))
    named = {jax.tree_util.keystr(p, simple=True, separator="/"): spec for p, spec in leaves}
    return {path: spec for path, spec in named.items() if spec != P()}


def refused(shardings, tree, mesh, name="state"):
    with pytest.raises(ShardingError) as caught:
        parameter_specs(tree, shardings, mesh, name=name)
    return str(caught.value)


# Forms


@pytest.mark.parametrize(
    "shardings",
    [
        RULES,
        tuple(RULES),
        [[re.compile("DENSE/KERNEL", re.IGNORECASE), P(None, "model")], *RULES[1:]],
        lambda path, leaf: SPECS[path.split("/")[1]][path.split("/")[2]],
        SPECS,
        SPECS | {"out": {"bias": AUTO, "kernel": P("model")}},
    ],
    ids=["rules", "tuple", "compiled", "function", "tree", "tree with AUTO"],
)
def test_each_form(mesh, shardings):
    found = parameter_specs(PARAMS, shardings, mesh, name="params")
    found["out"]["bias"] = P()
    assert found == SPECS


def test_one_spec_is_fitted(mesh):
    spec = ShardingSpec(mesh, P("data", "model"))
    assert parameter_specs(PARAMS, spec, mesh) == {
        "dense": {"bias": P("data"), "kernel": P("data", "model")},
        "out": {"bias": P("data"), "kernel": P("data")},  # 4 does not divide 6
    }
    assert by_path(PARAMS, parameter_specs(PARAMS, P(), mesh)) == {}


def test_auto(mesh):
    assert set(jax.tree.leaves(parameter_specs(PARAMS, AUTO, mesh))) == {AUTO}


def test_prefixes(mesh):
    found = parameter_specs(PARAMS, {"dense": P("data"), "out": P()}, mesh)
    assert found["dense"] == {"bias": P("data"), "kernel": P("data")}
    layers = [{"w": array(8, 8)}, {"w": array(8, 8)}]
    assert parameter_specs(layers, [P("data"), {"w": AUTO}], mesh) == [
        {"w": P("data")},
        {"w": AUTO},
    ]
    assert parameter_specs(layers, (P("data"), P()), mesh)[0] == {"w": P("data")}


def test_a_tree_may_be_of_the_state_or_of_its_parameters(mesh):
    state = state_of(optax.sgd(0.1, momentum=0.9))
    wanted = {
        "params/dense/bias": P("model"),
        "params/dense/kernel": P(None, "model"),
        "params/out/kernel": P("model"),
        "opt_state/0/trace/dense/bias": P("model"),
        "opt_state/0/trace/dense/kernel": P(None, "model"),
        "opt_state/0/trace/out/kernel": P("model"),
    }
    whole = jax.tree.map(lambda _: P(), state).replace(params=SPECS)
    opt_state = jax.tree.map(lambda spec: spec, state.opt_state[0]._replace(trace=SPECS))
    for tree in (
        SPECS,
        {"params": SPECS},
        whole.replace(opt_state=(opt_state, optax.EmptyState())),
    ):
        assert by_path(state, parameter_specs(state, tree, mesh)) == wanted
    # What it says itself of the optimizer's state goes before the parameters.
    del wanted["opt_state/0/trace/dense/bias"]
    del wanted["opt_state/0/trace/dense/kernel"]
    del wanted["opt_state/0/trace/out/kernel"]
    assert by_path(state, parameter_specs(state, whole, mesh)) == wanted


def test_scalars_counters_and_keys_need_no_spec(mesh):
    tree = {
        "w": array(8),
        "scale": array(),
        "seen": array(8, dtype="int32"),
        "key": array(2, dtype="uint32"),
    }
    whole = {"scale": P(), "seen": P(), "key": P()}
    for said in ([("w", P("data"))], P("data"), {"w": P("data")}):
        assert parameter_specs(tree, said, mesh) == {"w": P("data")} | whole
    named = parameter_specs(tree, [("w|seen|scale", P("data"))], mesh)
    assert named == {"w": P("data")} | whole | {"seen": P("data")}
    assert parameter_specs({"w": array(8, dtype="int8")}, P("data"), mesh) == {"w": P("data")}


def test_arguments_that_are_arrays(mesh):
    arguments = [Argument("w1", array(8, 8)), Argument("w2", array(8, 4)), Argument("b", array(8))]
    faults = []
    rules = [("^w1$", P("data")), ("w2", P("model")), ("b", P())]
    assert resolve_parameters(rules, arguments, mesh, faults) == [[P("data")], [P("model")], [P()]]
    assert faults == []


def test_known_specs_are_kept_and_mirrored(mesh):
    state = jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, PARAMS)
    known = Argument("params", PARAMS, tuple(jax.tree.leaves(SPECS)))
    faults = []
    given, found = resolve_parameters(P(), [known, Argument("opt_state", state)], mesh, faults)
    assert (given, faults) == (list(known.given), [])
    assert found == list(known.given)


# Optimizer state follows its parameters

SPLIT = {"dense/bias": P("model"), "dense/kernel": P(None, "model"), "out/kernel": P("model")}


def trees(*fields):
    return {f"opt_state/{field}/{path}": spec for field in fields for path, spec in SPLIT.items()}


def of_layer(layer, *fields):
    return {path: spec for path, spec in trees(*fields).items() if f"/{layer}/" in path}


LABELS = {"dense": "a", "out": "b"}
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
OPTIMIZERS = {
    "adamw": (optax.adamw(SCHEDULE), trees("0/mu", "0/nu")),
    "lion": (optax.lion(1e-3), trees("0/mu")),
    "lamb": (optax.lamb(1e-3), trees("0/mu", "0/nu")),
    "amsgrad": (optax.amsgrad(1e-3), trees("0/mu", "0/nu", "0/nu_max")),
    "momentum": (optax.sgd(0.1, momentum=0.9), trees("0/trace")),
    "novograd": (optax.novograd(1e-3), trees("0/mu")),
    "sm3": (optax.sm3(1e-3), trees("0/nu")),
    "chain": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3), optax.ema(0.9)),
        trees("1/0/mu", "1/0/nu", "2/ema"),
    ),
    "MultiSteps": (
        optax.MultiSteps(optax.adam(1e-3), 4),
        trees("inner_opt_state/0/mu", "inner_opt_state/0/nu", "acc_grads"),
    ),
    "inject_hyperparams": (
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
        trees("inner_state/0/mu", "inner_state/0/nu"),
    ),
    "masked": (
        optax.masked(optax.sgd(0.1, momentum=0.9), {"dense": True, "out": False}),
        of_layer("dense", "inner_state/0/trace"),
    ),
    "multi_transform": (
        optax.multi_transform({"a": optax.adam(1e-3), "b": optax.sgd(0.1, momentum=0.9)}, LABELS),
        of_layer("dense", "inner_states/a/inner_state/0/mu", "inner_states/a/inner_state/0/nu")
        | of_layer("out", "inner_states/b/inner_state/0/trace"),
    ),
    "apply_if_finite": (
        optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3), trees("inner_state/0/trace")
    ),
    "lookahead memory": (
        optax.scale_by_lbfgs(memory_size=3),
        trees("params", "updates")
        | {
            f"opt_state/diff_{field}_memory/{path}": P(None, *spec)
            for field in ("params", "updates")
            for path, spec in SPLIT.items()
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("together", [True, False], ids=["TrainState", "arguments"])
def test_optimizer_state(mesh, name, together):
    optimizer, wanted = OPTIMIZERS[name]
    if together:
        state = state_of(optimizer)
        found = by_path(state, parameter_specs(state, RULES, mesh, name="state"))
    else:
        state = jax.eval_shape(optimizer.init, PARAMS)
        both = [Argument("params", PARAMS), Argument("opt_state", state)]
        faults = []
        _, specs = resolve_parameters(RULES, both, mesh, faults)
        assert faults == []
        specs = jax.tree.unflatten(jax.tree.structure(state), specs)
        found = by_path({"opt_state": state}, {"opt_state": specs})
    assert {k: v for k, v in found.items() if k.startswith("opt_state")} == wanted


def test_factors_keep_the_dims_that_they_have(mesh):
    params = {"wide": array(4, 128, 256), "square": array(256, 256), "small": array(8, 8)}
    rules = [
        ("wide", P(None, "data", "model")),
        ("square", P("data", "model")),
        ("small", P("data")),
    ]
    state = state_of(optax.adafactor(1e-3), params)
    found = by_path(state, parameter_specs(state, rules, mesh))
    field = lambda name: {k.split("/")[-1]: v for k, v in found.items() if f"/{name}/" in k}  # noqa: E731
    assert field("v_row") == {"wide": P(None, "data"), "square": P("data")}
    assert field("v_col") == {"wide": P(None, "model"), "square": P("model")}
    assert field("v") == {"small": P("data")}
    shapes = state.opt_state[0].v_row
    assert (shapes["wide"].shape, shapes["square"].shape) == ((4, 128), (256,))


def test_the_nearest_parameter_is_mirrored(mesh):
    """Two networks with the same paths, each with its own optimizer."""
    one, other = {"w": array(8, 8)}, {"w": array(8, 8)}
    optimizer = optax.sgd(0.1, momentum=0.9)
    tree = {
        name: {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
        for name, params in (("actor", one), ("critic", other))
    }
    found = parameter_specs(tree, [("actor", P("data")), ("critic", P("model"))], mesh)
    assert found["actor"]["opt_state"][0].trace == {"w": P("data")}
    assert found["critic"]["opt_state"][0].trace == {"w": P("model")}
    assert found["critic"]["params"] == {"w": P("model")}


def test_rules_for_the_optimizer_alone(mesh):
    state = state_of(optax.adam(1e-3))
    found = parameter_specs(state, [("/mu/.*kernel", P("data")), *RULES], mesh, name="state")
    assert found.params == SPECS
    assert found.opt_state[0].nu == SPECS
    assert found.opt_state[0].mu["dense"] == {"bias": P("model"), "kernel": P("data")}


def test_a_plain_tree_of_moments(mesh):
    arguments = [
        Argument("params", PARAMS),
        Argument("moments", {"first": PARAMS, "second": PARAMS}),
    ]
    _, moments = resolve_parameters(RULES, arguments, mesh, [])
    assert moments == [*jax.tree.leaves(SPECS)] * 2


def test_optimizer_state_without_its_parameters(mesh):
    state = jax.eval_shape(optax.adam(1e-3).init, PARAMS)
    specs = parameter_specs(state, RULES, mesh, name="opt_state")
    assert specs[0].mu == SPECS


def test_linen_boxes_are_no_steps(mesh):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
            return nn.Dense(8, kernel_init=kernel, name="dense")(x)

    variables = jax.eval_shape(lambda: Net().init(jax.random.key(0), jnp.ones((2, 16))))
    state = state_of(optax.adam(1e-3), variables["params"])
    found = parameter_specs(
        state, [("dense/kernel$", P("data")), ("bias", P())], mesh, name="state"
    )
    assert by_path(state, found) == {
        "params/dense/kernel/value": P("data"),
        "opt_state/0/mu/dense/kernel/value": P("data"),
        "opt_state/0/nu/dense/kernel/value": P("data"),
    }


# Faults


def test_rules_that_are_wrong_are_told_together(mesh):
    rules = [
        ("densee", P("data")),
        ("out/", P(None, "model")),
        ("dense/bias", P("modle")),
        ("(", P()),
    ]
    assert refused(rules, PARAMS, mesh, "params") == (
        "parameter_specs: 2 things are wrong.\n"
        "  1. the spec of parameter_shardings[2] is PartitionSpec('modle').\n"
        "     PartitionSpec('modle') names the mesh axis 'modle', but the mesh has 'data' and 'model'.\n"
        "     Fix: write 'model', or use one of 'data' and 'model'.\n"
        "  2. parameter_shardings[3] has the pattern '('.\n"
        "     It is no regular expression: missing ), unterminated subpattern at position 0.\n"
        "     Fix: correct it, or escape it with re.escape."
    )
    assert refused(rules[:2], PARAMS, mesh, "params") == (
        "parameter_specs: 3 things are wrong.\n"
        "  1. parameter_shardings[0], 'densee', matches no parameter.\n"
        "     The paths are: params/dense/bias, params/dense/kernel, params/out/bias and "
        "params/out/kernel.\n"
        "     Fix: correct the pattern, or take the rule out.\n"
        "  2. parameter_shardings[1], 'out/', doesn't fit 2 of the 2 arrays that it matches: "
        "params/out/bias f32[6] and params/out/kernel f32[8,6].\n"
        "     The first, params/out/bias: PartitionSpec(None, 'model') has 2 entries but the array has "
        "rank 1.\n"
        "     Fix: put a rule for them before this one; or give at most 1 entry, one a dim.\n"
        "  3. no rule in parameter_shardings matches 2 parameters: params/dense/bias and "
        "params/dense/kernel.\n"
        "     Every array of a model or train state needs a rule; the first that matches is taken.\n"
        "     Fix: add rules for them, or a last one for all the rest: ('.*', PartitionSpec())."
    )


def test_many_paths_are_counted(mesh):
    layers = [{"w": array(6, 6)} for _ in range(20)]
    text = refused([("w", P("model"))], layers, mesh, "layers")
    assert "doesn't fit 20 of the 20 arrays" in text
    assert "layers/7/w f32[6,6] and 12 more." in text


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (("w",), "parameter_shardings[1] is ('w',)."),
        (("w", "data"), "parameter_shardings[1] is ('w', 'data')."),
        ("w", "parameter_shardings[1] is 'w'."),
    ],
)
def test_what_is_no_rule(mesh, rule, told):
    assert refused([("v", P()), rule], {"w": array(8)}, mesh) == (
        f"parameter_specs: {told}\n"
        "  A rule is a pair: a pattern and a spec.\n"
        "  Fix: write ('kernel', PartitionSpec('axis', ...))."
    )


def test_one_spec_that_splits_nothing(mesh):
    assert refused(P(None, None, "data"), PARAMS["out"], mesh, "params") == (
        "parameter_specs: parameter_shardings is PartitionSpec(None, None, 'data'), which splits no "
        "parameter.\n"
        "  None has a dim there that can be split so. The parameters are: params/bias f32[6] and "
        "params/kernel f32[8,6].\n"
        "  Fix: name a dim that they have, or lay them out by rules: parameter_shardings=[(pattern, "
        "spec), ...]."
    )


def test_functions_are_exact(mesh):
    said = {"bias": P(None, "data"), "kernel": "data"}
    assert refused(lambda path, leaf: said[path.split("/")[-1]], PARAMS["out"], mesh, "p") == (
        "parameter_specs: 2 things are wrong.\n"
        "  1. parameter p['bias'] has shape f32[6].\n"
        "     PartitionSpec(None, 'data') has 2 entries but the array has rank 1.\n"
        "     Fix: give at most 1 entry, one a dim.\n"
        "  2. parameter_shardings('p/kernel', f32[8,6]) is 'data'.\n"
        "     A ShardingSpec, PartitionSpec, NamedSharding, AUTO or None is wanted there.\n"
        "     Fix: give PartitionSpec('data')."
    )


MIRROR = (
    "  The specs must be a prefix of the tree that they are for; this is where they differ.\n"
    "  Fix: mirror the tree, with AUTO where the planner is to choose, or give one spec for all of it."
)


def test_trees_that_differ(mesh):
    tree = {"dense": SPECS["dense"], "outt": P()}
    text = (
        "parameter_specs: 2 things are wrong.\n  1. parameter_shardings has nothing for argument p"
    )
    assert refused(tree, PARAMS, mesh, "p").startswith(text + "['out']['bias'].\n")
    assert refused(SPECS | {"last": P()}, PARAMS, mesh, "p") == (
        f"parameter_specs: parameter_shardings['last'] is for nothing: there is no last.\n{MIRROR}"
    )
    assert refused(
        {"dense": P(), "out": {"bias": P(), "kernel": P("data", None, None)}}, PARAMS, mesh, "p"
    ) == (
        "parameter_specs: parameter p['out']['kernel'] has shape f32[8,6].\n"
        "  PartitionSpec('data', None, None) has 3 entries but the array has rank 2.\n"
        "  Fix: give at most 2 entries, one a dim."
    )


def test_what_is_no_form(mesh):
    assert refused(3, {"w": array(8)}, mesh, "p") == (
        "parameter_specs: parameter_shardings is 3.\n"
        "  A ShardingSpec, PartitionSpec, NamedSharding, AUTO or None is wanted there.\n"
        "  Fix: give PartitionSpec('axis', ...) with one entry a dim, or AUTO."
    )


def test_state_of_other_parameters(mesh):
    other = {"dense": {"bias": array(8), "kernel": array(16, 4)}, "last": {"kernel": array(8, 6)}}
    state = TrainState(
        step=np.int32(0), apply_fn=None, params=PARAMS, tx=None,
        opt_state=jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, other),
    )  # fmt: skip
    assert refused(RULES, state, mesh) == (
        "parameter_specs: 2 things are wrong.\n"
        "  1. state/opt_state/0/trace/dense/kernel is f32[16,4], but the parameter that it mirrors, "
        "state/params/dense/kernel, is f32[16,8].\n"
        "     An optimizer's state mirrors the parameters: it has their shapes.\n"
        "     Fix: make the state with the optimizer's init, of these parameters.\n"
        "  2. state/opt_state/0/trace/last/kernel is f32[8,6] and mirrors no parameter.\n"
        "     An optimizer's state mirrors the parameters: its paths end with theirs.\n"
        "     Fix: make the state with the optimizer's init, of the parameters that are passed here."
    )
