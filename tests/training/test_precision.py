"""Mixed precision on a mesh: what is gathered and reduced in which type, and results as serial ones."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from pypto_spmd import DeviceMesh, PartitionSpec, ShardingError, spmd
from pypto_spmd.training import LossScale, Policy, all_finite, choose, fsdp

P = PartitionSpec
MIXED = Policy.named("mixed_bfloat16")


@pytest.fixture
def mesh():
    return DeviceMesh.simulate((2, 4), ("data", "model"))


def params_of(layers=3, width=16):
    keys = jax.random.split(jax.random.key(0), 5)
    normal = jax.random.normal
    return {
        "embed": normal(keys[0], (32, width)),
        "layers": {
            "w": normal(keys[1], (layers, width, width)) / 4,
            "b": normal(keys[2], (layers, width)),
        },
        "shift": normal(keys[3], (width,)),
        "head": normal(keys[4], (width, 8)),
    }


def loss_of(params, ids, targets):
    """Embedding, layers under scan with remat, a head: each kind of sum that gradients end in."""

    def layer(h, w):
        return jnp.tanh(h @ w["w"] + w["b"] + params["shift"]), None

    h, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][ids], params["layers"])
    return jnp.mean(((h @ params["head"]).astype(jnp.float32) - targets) ** 2)


IDS = np.arange(8, dtype=np.int32) * 3
TARGETS = np.random.default_rng(0).standard_normal((8, 8), dtype=np.float32)


def step_of(policy):
    def step(params, ids, targets):
        loss, grads = policy.value_and_grad(loss_of)(params, ids, targets)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def on(mesh, step, layout):
    return spmd(step, mesh=mesh, in_shardings=[P("data"), P("data")], parameter_shardings=layout)


def steps_of(plan, kind):
    return [step for step in plan.steps if step.kind == kind]


def test_weights_are_gathered_in_the_type_that_is_computed_in(mesh):
    params = params_of()
    split = fsdp("data", min_size=16)
    narrow = on(mesh, step_of(MIXED), split).plan(params, IDS, TARGETS)
    wide = on(mesh, step_of(Policy()), split).plan(params, IDS, TARGETS)
    gathered = steps_of(narrow, "all_gather")
    assert {s.dtype for s in gathered} == {"bfloat16"}
    sent = lambda plan: sum(s.wire_bytes * s.times for s in steps_of(plan, "all_gather"))  # noqa: E731
    assert sent(narrow) == sent(wide) / 2


@pytest.mark.parametrize(
    ("reduce", "dtype"), [(None, "bfloat16"), (jnp.bfloat16, "bfloat16"), (jnp.float32, "float32")]
)
def test_the_type_that_gradients_are_reduced_in_is_a_choice(mesh, reduce, dtype):
    params = params_of()
    policy = Policy(compute=jnp.bfloat16, reduce=reduce)
    step = on(mesh, step_of(policy), fsdp("data", min_size=64))  # biases stay whole
    plan = step.plan(params, IDS, TARGETS)
    reduced = steps_of(plan, "all_reduce") + steps_of(plan, "reduce_scatter")
    (loss,) = [s for s in reduced if s.elements == 1]
    assert {s.kind for s in reduced if s is not loss} == {"all_reduce", "reduce_scatter"}
    assert {s.dtype for s in reduced if s is not loss} == {dtype}
    step.verify(params, IDS, TARGETS)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("float32", fsdp("data", min_size=64)),
        ("mixed_bfloat16", P()),
        ("mixed_bfloat16", fsdp("data", min_size=64)),
    ],
)
def test_a_step_is_the_serial_one_up_to_rounding(mesh, name, layout):
    params = params_of()
    step = step_of(Policy.named(name))
    found, loss = on(mesh, step, layout)(params, IDS, TARGETS)
    wanted, serial = jax.jit(step)(params, IDS, TARGETS)
    tolerance = 1e-5 if name == "float32" else 2e-2
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, theirs, atol=tolerance)
    np.testing.assert_allclose(loss, serial, rtol=tolerance)


def test_sums_in_float32_are_nearer_to_the_truth(mesh):
    w = jnp.zeros((256, 4))
    x = np.random.default_rng(0).uniform(0.5, 1.5, (512, 256)).astype(np.float32)

    def gradient(policy):
        step = lambda w, x: policy.value_and_grad(lambda w, x: jnp.sum(x @ w))(w, x)[1]  # noqa: E731
        on_mesh = spmd(step, mesh=mesh, in_shardings=[P(), P("data")], out_shardings=P())
        return np.asarray(on_mesh(w, x.astype(jnp.bfloat16)))

    exact = x.astype(jnp.bfloat16).astype(np.float64).sum(axis=0)
    error = lambda policy: np.abs(gradient(policy)[:, 0] - exact).max()  # noqa: E731
    assert error(MIXED) < error(Policy(compute=jnp.bfloat16)) / 10


def test_flax_casts_of_its_own_are_seen_too(mesh):
    model = nn.Dense(8, dtype=jnp.bfloat16)
    x = np.ones((8, 16), np.float32)
    params = model.init(jax.random.key(0), x)["params"]
    policy = Policy(reduce=jnp.float32)

    def step(params, x):
        def loss(params):
            return model.apply({"params": params}, x).astype(jnp.float32).sum()

        return policy.reduced(jax.grad(loss)(params))

    on_mesh = spmd(step, mesh=mesh, in_shardings=[P(), P("data")], out_shardings=P())
    plan = on_mesh.plan(params, x)
    assert [s.dtype for s in plan.steps] == ["float32"]


def test_norms_of_flax_are_taken_in_float32():
    model = nn.Sequential([nn.Dense(8), nn.LayerNorm(), nn.BatchNorm(use_running_average=False)])
    variables = MIXED.cast_to_compute(model.init(jax.random.key(0), jnp.ones((4, 8))))
    assert {x.dtype for x in jax.tree.leaves(variables["params"])} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(variables["batch_stats"])} == {jnp.dtype("float32")}
    x = jnp.ones((4, 8), jnp.bfloat16)
    apply = lambda v, x: model.apply(v, x, mutable=["batch_stats"])  # noqa: E731
    jaxpr = jax.make_jaxpr(apply)(variables, x)
    sums = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "reduce_sum"]
    assert sums
    assert {e.invars[0].aval.dtype for e in sums} == {jnp.dtype("float32")}
    assert apply(variables, x)[0].dtype == jnp.bfloat16


def test_what_is_no_float_or_is_named_stays():
    policy = Policy(compute=jnp.bfloat16, keep=("norm",))
    tree = {"norm": jnp.ones(2), "w": jnp.ones(2), "ids": jnp.arange(2), "key": jax.random.key(0)}
    cast = policy.cast_to_compute(tree)
    assert cast["norm"].dtype == jnp.float32
    assert cast["w"].dtype == jnp.bfloat16
    assert cast["ids"] is tree["ids"]
    assert cast["key"] is tree["key"]
    assert policy.cast_to_param(cast)["w"].dtype == jnp.float32
    assert policy.cast_to_output((cast["w"], 1))[0].dtype == jnp.float32


def test_nnx_modules_compute_in_place():
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
    x = jnp.ones((4, 8), jnp.bfloat16)

    def loss(model):
        with MIXED.computing(model):
            assert model.layers[0].kernel.get_value().dtype == jnp.bfloat16
            return model(x).astype(jnp.float32).sum()

    before = np.asarray(model.layers[1].mean.get_value())
    grads = nnx.jit(nnx.grad(loss))(model)
    assert {g.dtype for g in jax.tree.leaves(nnx.to_pure_dict(grads))} == {jnp.dtype("float32")}
    assert model.layers[0].kernel.get_value().dtype == jnp.float32
    assert not np.array_equal(model.layers[1].mean.get_value(), before)
    with pytest.raises(ShardingError, match=r"with policy.computing\(model\)"):
        MIXED.cast_to_compute(model)


def test_policies_that_can_not_be():
    with pytest.raises(ShardingError) as error:
        Policy.named("half")
    assert str(error.value) == (
        "Policy: there is no policy 'half'.\n"
        "  Policies have few names.\n"
        "  Fix: use 'float32', 'mixed_bfloat16', 'mixed_float16' or 'bfloat16', or Policy(...)."
    )
    with pytest.raises(ShardingError, match="compute is <class"):
        Policy(compute=jnp.int32)


OPTIMIZER = optax.adam(1e-2)


def scaled_step(state, ids, targets):
    """A float16 step that is skipped if it overflows."""
    scale, policy = state["scale"], Policy.named("mixed_float16")

    def scaled(params):
        loss = loss_of(params, ids, targets)
        return scale.scale(loss), loss

    (_, loss), grads = policy.value_and_grad(scaled, has_aux=True)(state["params"])
    grads = scale.unscale(grads)
    finite = all_finite(grads)
    updates, opt = OPTIMIZER.update(grads, state["opt"])
    new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
    old = {name: state[name] for name in new}
    return {**choose(finite, new, old), "scale": scale.update(finite)}, loss


@pytest.mark.parametrize("layout", [P(), fsdp("data", min_size=16)], ids=["dp", "fsdp"])
def test_a_step_that_overflows_is_skipped_and_the_scale_follows(mesh, layout):
    params = params_of()
    scale = LossScale.dynamic(2.0**24, growth_every=2)
    state = {"params": params, "opt": OPTIMIZER.init(params), "scale": scale}
    step = on(mesh, scaled_step, layout)
    scales, kept = [], []
    for _ in range(14):
        new, _ = step(state, IDS, TARGETS)
        scales.append(float(new["scale"].value))
        kept.append(np.array_equal(new["params"]["head"], state["params"]["head"]))
        state = new
    skipped = int(state["scale"].skipped_steps)
    assert 0 < skipped == sum(kept) < 14
    assert kept[0]
    assert scales[0] == 2.0**23
    assert int(state["opt"][0].count) == 14 - skipped
    finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state["params"]))
    assert finite


def test_looking_for_overflow_is_one_reduction(mesh):
    params = params_of()
    finite = spmd(all_finite, mesh=mesh, parameter_shardings=fsdp("data", min_size=16),
                  parameter_argnames="tree", out_shardings=P())  # fmt: skip
    finite.plan(params).assert_counts(all_reduce=1)
    assert bool(finite(params))
    assert not bool(finite({**params, "head": params["head"].at[0, 0].set(jnp.nan)}))


def test_a_scale_grows_after_good_steps_and_a_static_one_stays():
    scale = LossScale.dynamic(8.0, growth_every=2, least=4.0)
    values = []
    for finite in (True, True, True, False, False, False):
        scale = scale.update(jnp.bool_(finite))
        values.append(float(scale.value))
    assert values == [8.0, 16.0, 16.0, 8.0, 4.0, 4.0]
    static = LossScale.static(8.0).update(jnp.bool_(False))
    assert float(static.value) == 8.0
    assert int(static.skipped_steps) == 1
    with pytest.raises(ShardingError, match="value is -1"):
        LossScale.static(-1)
