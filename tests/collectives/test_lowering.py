"""SPMD equals serial, and what is planned runs: programs of every kind under sampled layouts."""

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend import source_info_util
from jax.sharding import PartitionSpec

from pypto_spmd.collectives import effects, lowering
from pypto_spmd.collectives.flatten import build_graph
from pypto_spmd.collectives.planner import make_program
from pypto_spmd.collectives.program import Program
from pypto_spmd.collectives.reconcile import reconcile
from pypto_spmd.mesh import DeviceMesh

MESHES = {"2x4": {"a": 2, "b": 4}, "2x2x2": {"a": 2, "b": 2, "c": 2}}
OBJECTIVES = ("standard", "bytes")
Function = Callable[..., Any]


def mesh_of(name: str) -> DeviceMesh:
    return DeviceMesh.simulate(tuple(MESHES[name].values()), tuple(MESHES[name]))


def flat_function(function: Function, args: Sequence[Any]) -> tuple[Function, list[Any]]:
    """The function on flat arguments, giving a tuple of flat results; and the arguments."""
    leaves, tree = jax.tree.flatten(tuple(args))
    return lambda *flat: tuple(jax.tree.leaves(function(*jax.tree.unflatten(tree, flat)))), leaves


def plan(
    function: Function, args: Sequence[Any], mesh: DeviceMesh, ins, outs, objective="standard"
) -> Program:
    """The program of a function that takes and gives a flat tuple of arrays."""
    graph = build_graph(jax.make_jaxpr(function)(*args))
    return make_program(
        graph,
        mesh=mesh,
        inputs=ins,
        outputs=outs,
        is_state=[False] * len(args),
        objective=objective,
        function_name="example",
    )


def check(
    function: Function,
    args: Sequence[Any],
    mesh: DeviceMesh,
    ins,
    outs,
    objective="standard",
    *,
    rtol: float = 3e-5,
) -> Program:
    """Plans, compiles, compares with the serial function, reconciles."""
    program = plan(function, args, mesh, ins, outs, objective)
    mapped = jax.jit(lowering.shard_mapped(program, program.mesh.jax_mesh), keep_unused=True)
    compiled = mapped.lower(*args).compile()
    shardings = jax.tree.leaves(compiled.input_shardings[0])
    results = compiled(*map(jax.device_put, args, shardings))
    compare(results, jax.jit(function)(*args), rtol)
    reconcile(program.plan.steps, compiled.as_text(), dict(mesh.shape)).check()
    return program


def compare(results: Sequence[Any], expected: Sequence[Any], rtol: float) -> None:
    for result, want in zip(results, expected, strict=True):
        assert (result.shape, result.dtype) == (want.shape, want.dtype)
        result, want = np.asarray(result), np.asarray(want)
        if want.dtype.kind == "f":
            largest = np.abs(want[np.isfinite(want)]).max(initial=0)
            np.testing.assert_allclose(result, want, 10 * rtol, rtol * max(largest, 1e-3))
        else:
            np.testing.assert_array_equal(result, want)


def any_spec(
    choice: random.Random, shape: tuple[int, ...], axes: dict[str, int]
) -> PartitionSpec | None:
    """Some spec that divides the shape, or None for the planner to choose."""
    if choice.random() < 0.2:
        return None
    dims: list[list[str]] = [[] for _ in shape]
    for axis in choice.sample(list(axes), len(axes)):
        if shape and choice.random() < 0.4:
            dim = choice.randrange(len(shape))
            if shape[dim] % (axes[axis] * int(np.prod([axes[a] for a in dims[dim]]))) == 0:
                dims[dim].append(axis)
    return PartitionSpec(*(tuple(d) if d else None for d in dims))


def check_sampled(
    function: Function, args: Sequence[Any], seed: str, mesh: str, **how: Any
) -> None:
    """`check` under specs and an objective that the seed gives."""
    choice = random.Random(seed)
    flat, leaves = flat_function(function, args)
    ins = [any_spec(choice, np.shape(x), MESHES[mesh]) for x in leaves]
    outs = [any_spec(choice, x.shape, MESHES[mesh]) for x in jax.eval_shape(flat, *leaves)]
    check(flat, leaves, mesh_of(mesh), ins, outs, choice.choice(OBJECTIVES), **how)


# The programs ----------------------------------------------------------------------------------


def numbers(*shape: int, scale: float = 1.0) -> np.ndarray:
    random_numbers = np.random.default_rng(7 * sum(shape) + len(shape))
    return (scale * random_numbers.standard_normal(shape)).astype(np.float32)


PARAMS = {
    "w1": numbers(16, 32, scale=0.2),
    "b1": numbers(32, scale=0.1),
    "w2": numbers(32, 32, scale=0.2),
    "w3": numbers(32, 8, scale=0.2),
}
BATCH = (numbers(16, 16), numbers(16, 8))


def mlp_loss(params, x, y, activation=jax.nn.relu):
    hidden = activation(x @ params["w1"] + params["b1"])
    hidden = activation(hidden @ params["w2"])
    return jnp.mean((hidden @ params["w3"] - y) ** 2)


def mlp(activation):
    return jax.value_and_grad(functools.partial(mlp_loss, activation=activation))


def remat(params, x, y):
    def loss(params):
        block = jax.checkpoint(lambda h, w: jax.nn.gelu(h @ w))
        hidden = block(block(x, params["w1"]), params["w2"])
        return jnp.mean((hidden @ params["w3"] - y) ** 2)

    return jax.value_and_grad(loss)(params)


def adamw(params, x, y):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = optimizer.init(params)
    loss = jnp.float32(0)
    for _ in range(2):
        loss, gradient = jax.value_and_grad(mlp_loss)(params, x, y)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return loss, params, state


def accumulated(params, x, y):
    def add(total, batch):
        gradient = jax.grad(mlp_loss)(params, *batch)
        return jax.tree.map(jnp.add, total, gradient), None

    batches = x.reshape(4, -1, x.shape[-1]), y.reshape(4, -1, y.shape[-1])
    total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, total)


def mixed_precision(params, x, y):
    low = functools.partial(jax.tree.map, lambda a: a.astype(jnp.bfloat16))
    gradient = jax.grad(mlp_loss)(low(params), low(x), low(y))
    return jax.tree.map(lambda a: a.astype(jnp.float32), gradient)


def recurrent(w, u, xs, h0):
    def loss(w, u):
        def trip(h, x):
            h = jnp.tanh(h @ w + x @ u)
            return h, h.mean(-1)

        h, means = lax.scan(trip, h0, xs)
        return (h**2).sum() + means.sum(), means

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(w, u)


def layers(weights, x):
    def loss(weights):
        h, _ = lax.scan(lambda h, w: (jax.nn.relu(h @ w) + h, None), x, weights)
        return (h**2).mean()

    return jax.value_and_grad(loss)(weights)


def remat_layers(weights, x):
    def loss(weights, x):
        block = jax.checkpoint(lambda h, w: jax.nn.silu(h @ w) + h)
        h, _ = lax.scan(lambda h, w: (block(h, w), None), x, weights, unroll=2)
        return (h**2).mean()

    return jax.value_and_grad(loss, argnums=(0, 1))(weights, x)


def backward_scan(weights, x):
    def trip(c, w):
        c = c * 0.5 + w
        return c, (c.sum(), c @ w.T)

    return lax.scan(trip, x, weights, reverse=True)


def while_loop(x, w):
    def goes_on(state):
        return (state[0] < 4) & (jnp.abs(state[1]).max() < 100)

    def trip(state):
        i, c, total = state
        c = jnp.sin(c @ w)
        return i + 1, c, total + c.sum(0)

    return lax.while_loop(goes_on, trip, (0, x, jnp.zeros(w.shape[1])))


def branches(x, w, k):
    def loss(x, w):
        y = lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: jnp.sin(x) @ w + 1, x)
        return y.sum()

    y = lax.switch(k, [lambda x: x * 2, lambda x: jnp.exp(-x * x), lambda x: x - 1.0], x)
    return jax.value_and_grad(loss)(x, w), y


@jax.custom_vjp
def rounded(x):
    return jnp.round(x)


rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, gradient: (gradient,))


def straight_through(x, w):
    return jax.grad(lambda w: (rounded(x @ w) ** 2).sum())(w)


def attention(x, *weights):
    def loss(*weights):
        def heads(w):
            return (x @ w).reshape(*x.shape[:2], 4, -1).transpose(0, 2, 1, 3)

        q, k, v = map(heads, weights[:3])
        scores = q @ k.swapaxes(2, 3) / np.float32(np.sqrt(q.shape[-1]))
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -1e9)
        mixed = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ weights[3]
        centred = mixed - mixed.mean(-1, keepdims=True)
        normed = centred / jnp.sqrt(mixed.var(-1, keepdims=True) + 1e-5)
        return ((normed - jnp.sin(x)) ** 2).mean()

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(*weights)


def reductions(x):
    return (
        jnp.max(x, 0), jnp.min(x), jnp.argmax(x, 1), jnp.cumsum(x, 0), jnp.sort(x, 1),
        jnp.prod(1 + x * 0.01, 1), jnp.any(x > 1, 0), jnp.all(x > -3), jax.nn.logsumexp(x, 1),
        jnp.linalg.norm(x),
    )  # fmt: skip


def dropout(x, w):
    first, second = jax.random.split(jax.random.key(0))

    def loss(w):
        h = x @ w
        h = jnp.where(jax.random.bernoulli(first, 0.7, h.shape), h / 0.7, 0)
        return (h * jax.random.normal(second, h.shape)).sum()

    return jax.value_and_grad(loss)(w)


def embedding(table, ids):
    def loss(table):
        scores = jax.nn.log_softmax(table[ids] @ table.T)
        return -jnp.take_along_axis(scores, ids[..., None], -1).mean()

    return jax.value_and_grad(loss)(table)


def mapped(x, w):
    one = lambda row: (row @ w) / (1 + jnp.abs(row).sum())  # noqa: E731
    return lax.map(lambda row: jnp.tanh(row @ w).sum(), x), jax.vmap(one)(x)


def constants(x):
    column = np.arange(16, dtype=np.float32)[:, None]
    return x + column, jnp.ones((16, 8)), x * 0 + jnp.eye(16, 8), jnp.zeros(4), 3.0


PROGRAMS: dict[str, tuple[Function, tuple[Any, ...]]] = {
    "relu": (mlp(jax.nn.relu), (PARAMS, *BATCH)),
    "gelu": (mlp(jax.nn.gelu), (PARAMS, *BATCH)),
    "remat": (remat, (PARAMS, *BATCH)),
    "adamw": (adamw, (PARAMS, *BATCH)),
    "accumulated": (accumulated, (PARAMS, numbers(64, 16), numbers(64, 8))),
    "recurrent": (
        recurrent,
        (numbers(16, 16, scale=0.2), numbers(8, 16, scale=0.2), numbers(8, 16, 8), numbers(16, 16)),
    ),
    "layers": (layers, (numbers(8, 16, 16, scale=0.2), numbers(16, 16))),
    "remat_layers": (remat_layers, (numbers(8, 16, 16, scale=0.2), numbers(16, 16))),
    "backward_scan": (backward_scan, (numbers(8, 16, 16, scale=0.2), numbers(16, 16))),
    "while_loop": (while_loop, (numbers(16, 16, scale=0.3), numbers(16, 16, scale=0.2))),
    "branches": (branches, (numbers(16, 16), numbers(16, 8), np.int32(1))),
    "straight_through": (straight_through, (numbers(16, 16), numbers(16, 8))),
    "attention": (
        attention,
        (numbers(8, 16, 32), *(numbers(32, 32 + i, scale=0.2)[:, :32] for i in range(4))),
    ),
    "reductions": (reductions, (numbers(16, 8),)),
    "dropout": (dropout, (numbers(16, 16), numbers(16, 8))),
    "embedding": (embedding, (numbers(32, 16), np.arange(64).reshape(8, 8) * 7 % 32)),
    "mapped": (mapped, (numbers(16, 16), numbers(16, 8))),
    "constants": (constants, (numbers(16, 8),)),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, mesh):
    check_sampled(*PROGRAMS[name], f"{name} 0", mesh)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_under_more_layouts(name, mesh, seed):
    check_sampled(*PROGRAMS[name], f"{name} {seed}", mesh)


def test_a_recomputation_waits_for_the_backward_pass():
    """Its inputs are held back together, the cotangent among them."""

    def run(w, x):
        block = jax.checkpoint(lambda w: jnp.sin(jnp.tanh(x @ w) @ w))
        return (jax.grad(lambda w: (block(w) ** 2).sum())(w),)

    mesh = mesh_of("2x4")
    specs = [PartitionSpec("b"), PartitionSpec("a", "b")]
    args = numbers(8, 8), numbers(8, 8)
    program = plan(run, args, mesh, specs, specs[:1])
    assert program.plan.counts()["all_reduce"] + program.plan.counts()["reduce_scatter"] > 0
    (outer,) = jax.make_jaxpr(lowering.shard_mapped(program, program.mesh.jax_mesh))(*args).eqns
    barriers = [e for e in outer.params["jaxpr"].eqns if e.primitive.name == "optimization_barrier"]
    (barrier,) = barriers
    assert len(barrier.invars) == 3


def test_an_axis_of_size_one_sends_nothing():
    mesh = DeviceMesh.simulate((1, 8), ("a", "b"))
    ins = [PartitionSpec(None, ("a", "b")), PartitionSpec("b", "a")]
    outs = [PartitionSpec("a", "b")]
    program = check(lambda x, w: (x @ w,), (numbers(8, 16), numbers(16, 8)), mesh, ins, outs)
    program.plan.assert_counts(reduce_scatter=1)


@pytest.mark.parametrize("mesh", MESHES)
def test_low_precision(mesh):
    check_sampled(mixed_precision, (PARAMS, *BATCH), "mixed 1", mesh, rtol=2e-2)


# Programs put together at random ---------------------------------------------------------------

UNARY: list[Callable[[Any, Any, Any], Any]] = [
    lambda a, w, v: jnp.tanh(a),
    lambda a, w, v: -a * 2.5,
    lambda a, w, v: jax.nn.relu(a),
    lambda a, w, v: a - a.mean(0),
    lambda a, w, v: a / (1 + jnp.abs(a).sum(1, keepdims=True)),
    lambda a, w, v: jax.nn.softmax(a, 0),
    lambda a, w, v: a @ w @ w.T * 0.1,
    lambda a, w, v: a + v,
    lambda a, w, v: a.reshape(4, 4, 8).sum(1).repeat(4, 0),
    lambda a, w, v: a.reshape(128)[::-1].reshape(16, 8),
    lambda a, w, v: a.T.reshape(8, 16).T,
    lambda a, w, v: jnp.cumsum(a, 0),
    lambda a, w, v: jnp.where(a > 0, a, v),
    lambda a, w, v: jnp.roll(a, 1, 0),
    lambda a, w, v: jnp.concatenate([a[8:], a[:8]]),
    lambda a, w, v: jnp.pad(a, ((1, 0), (0, 0)))[:16],
    lambda a, w, v: jnp.max(a, 0, keepdims=True) - a,
    lambda a, w, v: a * a.sum(),
    lambda a, w, v: a.at[2].set(0.5),
    lambda a, w, v: lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c) + v, a),
    lambda a, w, v: lax.scan(lambda c, t: (c * 0.5 + t, c + t), v, a)[1],
    lambda a, w, v: lax.cond(a.sum() > 0, lambda a: a * 2, lambda a: a - v, a),
    lambda a, w, v: jnp.take(a, jnp.array([3, 1, 0, 2] * 4), axis=0),
    lambda a, w, v: jnp.einsum("ij,kj->ik", a, a) @ a * 0.05,
    lambda a, w, v: a.reshape(2, 8, 8).transpose(1, 0, 2).reshape(16, 8),
]
BINARY: list[Callable[[Any, Any], Any]] = [
    jnp.add,
    jnp.multiply,
    jnp.maximum,
    lambda a, b: a @ b.T @ a * 0.05,
    lambda a, b: jnp.where(a > b, a, b * 0.5),
    lambda a, b: a.sum(0) * b,
    lambda a, b: a + b.mean(),
]


def random_program(seed: int) -> Function:
    """Some operations on what is there so far, or the gradient of them."""

    def run(x, y, w, v):
        choice = random.Random(seed)
        pool = [x, y]
        for _ in range(choice.randint(2, 7)):
            if choice.random() < 0.6:
                pool.append(choice.choice(UNARY)(choice.choice(pool), w, v))
            else:
                pool.append(choice.choice(BINARY)(choice.choice(pool), choice.choice(pool)))
        # Large values are the products of many: their rounding must not decide the loss.
        return sum((p / (1 + p * p)).sum() for p in pool[-2:]), pool[-1]

    if seed % 3:
        return jax.value_and_grad(run, argnums=(0, 2, 3), has_aux=True)
    return run


@pytest.mark.parametrize(
    "seed", [*range(16), *(pytest.param(s, marks=pytest.mark.slow) for s in range(16, 200))]
)
def test_random_programs(seed):
    args = numbers(16, 8), numbers(8, 16).T.copy(), numbers(8, 16, scale=0.3), numbers(8)
    check_sampled(random_program(seed), args, f"random {seed}", list(MESHES)[seed % 2])


# What single parts do --------------------------------------------------------------------------


def test_a_stack_that_is_dealt_out_is_scanned_by_index():
    mesh = mesh_of("2x4")
    weights, x = numbers(8, 16, 16, scale=0.2), numbers(16, 16)
    ins = [PartitionSpec(("a", "b")), PartitionSpec()]
    flat, leaves = flat_function(layers, (weights, x))
    program = check(flat, leaves, mesh, ins, [PartitionSpec(), PartitionSpec(("a", "b"))])
    # Each trip's weights come from the one device that has them; the whole stack is nowhere.
    assert all(step.elements < weights.size for step in program.plan.steps)


@pytest.mark.parametrize("index", [-3, 0, 1, 2, 7])
def test_a_branch_index_out_of_range_means_the_nearest_branch(index):
    def run(i, x):
        return (lax.switch(i, [lambda x: x + 1, lambda x: x * 2, lambda x: -x], x),)

    specs = [PartitionSpec("b")]
    check(run, (np.int32(index), numbers(8)), mesh_of("2x4"), [PartitionSpec(), *specs], specs)


def test_whiles_and_branches_in_each_other():
    def run(x, w):
        def trip(state):
            i, c = state
            c = lax.cond(i % 2 == 0, lambda c: c @ w, lambda c: lax.fori_loop(0, 2, halve, c), c)
            return i + 1, c

        halve = lambda _, c: c / 2 + w.sum(0)  # noqa: E731
        return lax.while_loop(lambda s: s[0] < 5, trip, (0, x))

    specs = [PartitionSpec("a", "b"), PartitionSpec("b", None)]
    check(run, (numbers(8, 8), numbers(8, 8, scale=0.3)), mesh_of("2x4"), specs, [None, specs[0]])


def test_random_keys_come_and_go():
    def run(keys, x):
        noise = jax.vmap(lambda k: jax.random.normal(k, (8,)))(keys)
        return jax.vmap(jax.random.fold_in, (0, None))(keys, 3), x + noise

    mesh = mesh_of("2x4")
    args = jax.random.split(jax.random.key(1), 8), numbers(8, 8)
    specs = [PartitionSpec("b"), PartitionSpec("a")]
    program = plan(run, args, mesh, specs, specs[::-1])
    keys, x = jax.jit(lowering.shard_mapped(program, program.mesh.jax_mesh))(*args)
    want_keys, want_x = run(*args)
    compare([jax.random.key_data(keys), x], [jax.random.key_data(want_keys), want_x], 1e-6)


def test_empty_tensors():
    def run(x, w):
        return x @ w, (x @ w).sum(0), jnp.concatenate([x, x])

    specs = [PartitionSpec(None, "b"), PartitionSpec("b", "a")]
    check(run, (numbers(0, 8), numbers(8, 4)), mesh_of("2x4"), specs, [None, None, None])


def test_a_scan_of_no_trips():
    def run(x):
        last, pile = lax.scan(lambda c, t: (c + t.sum() + c[::-1], c), x[0], x[:0])
        return last, pile

    check(
        run,
        (numbers(8, 8),),
        mesh_of("2x4"),
        [PartitionSpec(None, "b")],
        [PartitionSpec("b"), None],
    )


def test_a_print_comes_once_with_the_whole_value(capfd):
    def run(x):
        jax.debug.print("the sum is {s}, the first {f}", s=x.sum(), f=x[0])
        jax.debug.callback(lambda y: print("shape", y.shape), x)
        return (lax.fori_loop(0, 2, lambda i, c: (jax.debug.print("trip {i}", i=i), c * 2)[1], x),)

    specs = [PartitionSpec("b")]
    program = plan(run, (np.arange(8.0),), mesh_of("2x4"), specs, specs)
    result = jax.jit(lowering.shard_mapped(program, program.mesh.jax_mesh))(np.arange(8.0))
    jax.block_until_ready(result)
    jax.effects_barrier()
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == ["shape (8,)", "the sum is 28.0, the first 0.0", "trip 0", "trip 1"]


@pytest.mark.parametrize("lower", [lowering.shard_mapped, lowering.lower_with_constraints])
def test_ordered_prints_come_in_order(lower, capfd):
    def run(x):
        jax.debug.print("sum {s}", s=x.sum(), ordered=True)
        jax.debug.callback(lambda y: print("largest", y), x.max(), ordered=True)
        return (x * 2,)

    specs = [PartitionSpec("b")]
    program = plan(run, (np.arange(8.0),), mesh_of("2x4"), specs, specs)
    result = jax.jit(lower(program, program.mesh.jax_mesh))(np.arange(8.0))
    jax.block_until_ready(result)
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["sum 28.0", "largest 7.0"]


def test_the_effects_of_a_program_are_unordered():
    def run(x):
        jax.debug.print("{x}", x=x, ordered=True)

    def plain(x):
        jax.debug.print("{x}", x=x)
        io_callback(lambda: None, None)

    ordered, both = jax.make_jaxpr(run)(1.0).effects, jax.make_jaxpr(plain)(1.0).effects
    assert effects.unordered(ordered) == both
    assert effects.unordered(both) == both
    assert effects.unordered(set()) == set()


def test_equations_keep_the_users_lines_and_layers():
    def run(x, w):
        with jax.named_scope("Dense_0"):
            y = x @ w
        return (jnp.tanh(y),)

    specs = [PartitionSpec(None, "b"), PartitionSpec("b")]
    program = plan(run, (numbers(8, 8), numbers(8, 8)), mesh_of("2x4"), specs, [None])
    mapped = lowering.shard_mapped(program, program.mesh.jax_mesh)
    (outer,) = jax.make_jaxpr(mapped)(numbers(8, 8), numbers(8, 8)).eqns
    found = {
        eqn.primitive.name: (
            str(eqn.source_info.name_stack),
            source_info_util.summarize(eqn.source_info),
        )
        for eqn in outer.params["jaxpr"].eqns
    }
    first = run.__code__.co_firstlineno
    assert found["dot_general"][0] == "Dense_0"
    assert f"test_lowering.py:{first + 2}:" in found["dot_general"][1]
    assert found["tanh"][0] == ""
    assert f"test_lowering.py:{first + 3}:" in found["tanh"][1]


@pytest.mark.parametrize("name", ["gelu", "layers", "while_loop", "branches", "constants"])
def test_layouts_as_constraints(name):
    function, args = PROGRAMS[name]
    flat, leaves = flat_function(function, args)
    mesh, choice = mesh_of("2x4"), random.Random(name)
    ins = [any_spec(choice, np.shape(x), MESHES["2x4"]) for x in leaves]
    outs = [any_spec(choice, x.shape, MESHES["2x4"]) for x in jax.eval_shape(flat, *leaves)]
    program = plan(flat, leaves, mesh, ins, outs)
    results = jax.jit(lowering.lower_with_constraints(program, program.mesh.jax_mesh))(*leaves)
    compare(results, jax.jit(flat)(*leaves), 3e-5)
    for result, layout in zip(results, program.outputs, strict=True):
        wanted = jax.NamedSharding(mesh.jax_mesh, layout.spec)
        assert result.sharding.is_equivalent_to(wanted, result.ndim)
