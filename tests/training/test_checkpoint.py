"""A run that is resumed goes on as it would have; what is saved stays saved, whatever happens later."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from pypto_spmd import DeviceMesh, PartitionSpec, ShardingError, ShardingSpec, spmd
from pypto_spmd.training import (
    Batches,
    CheckpointError,
    CheckpointManager,
    data_parallel,
    fsdp,
    prefetch,
)

pytest.importorskip("orbax.checkpoint")
# Orbax leaves the tasks of a read that failed to the garbage collector, which complains.
quiet = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)
P = PartitionSpec


@pytest.fixture
def mesh():
    return DeviceMesh.simulate((2, 4), ("data", "model"))


def put(mesh, value, *spec):
    return jax.device_put(value, ShardingSpec(mesh, P(*spec)).named_sharding)


def a_state(mesh):
    params = {
        "w": put(mesh, jax.random.normal(jax.random.key(0), (64, 32)), "data", "model"),
        "b": put(mesh, jnp.arange(8, dtype=jnp.bfloat16), "model"),
    }
    return {
        "params": params,
        "opt": optax.adam(1e-3).init(params),
        "keys": put(mesh, jax.random.split(jax.random.key(3), 4), "model"),
        "old_key": jax.random.PRNGKey(1),
        "step": 3,
        "rate": 1e-3,
        "table": np.arange(5, dtype=np.int32),
        "scalar": np.float32(0.1),
        "nothing": None,
    }


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert getattr(mine, "dtype", type(mine)) == getattr(theirs, "dtype", type(theirs))
        if hasattr(mine, "dtype") and jax.dtypes.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, theirs = jax.random.key_data(mine), jax.random.key_data(theirs)
        np.testing.assert_array_equal(mine, theirs)


def test_a_state_comes_back_as_it_was(mesh, tmp_path):
    state = a_state(mesh)
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.latest_step is None
        checkpoints.save(5, state)
        found = checkpoints.restore(state)
    assert_same(found, state)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert isinstance(mine, type(theirs))
        if isinstance(theirs, jax.Array):
            assert mine.sharding == theirs.sharding


def test_a_state_is_restored_on_another_mesh_in_another_layout(mesh, tmp_path):
    state = a_state(mesh)
    other = DeviceMesh([[6, 1, 3]], ("one", "three"))
    rules = [("params/w", P()), ("(b|keys)$", P()), (".*", P())]
    two = DeviceMesh([5, 2], ["rows"])
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(5, state)
        whole = checkpoints.restore(state, shardings=rules, mesh=other)
        split = checkpoints.restore(
            jax.eval_shape(lambda: state), shardings=fsdp("rows", min_size=16), mesh=two
        )
    assert_same(whole, state)
    assert whole["params"]["w"].sharding == ShardingSpec(other, P()).named_sharding
    assert split["params"]["w"].sharding == ShardingSpec(two, P("rows")).named_sharding
    assert split["opt"][0].mu["w"].sharding.spec == P("rows")
    assert {s.data.shape for s in split["params"]["w"].addressable_shards} == {(32, 32)}
    np.testing.assert_array_equal(split["params"]["w"], state["params"]["w"])
    assert split["rate"] == np.float32(1e-3)
    assert split["rate"].dtype == np.float32


def test_descriptions_with_shardings_are_a_target(mesh, tmp_path):
    w = put(mesh, jnp.arange(64.0).reshape(8, 8), "data")
    sharding = ShardingSpec(mesh, P(None, ("model", "data"))).named_sharding
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(0, {"w": w})
        target = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)}
        found = checkpoints.restore(target)["w"]
        with pytest.raises(CheckpointError) as error:
            checkpoints.restore({"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)})
    assert found.sharding == sharding
    np.testing.assert_array_equal(found, w)
    assert str(error.value) == (
        "CheckpointManager: w has no sharding.\n"
        "  A jax.ShapeDtypeStruct says where an array lies only if it was made with a sharding.\n"
        "  Fix: pass shardings=... and mesh=..., as for parameter_shardings, or the plan of the step."
    )


def test_the_plan_of_a_step_says_where_its_state_lies(mesh, tmp_path):
    @spmd(mesh, [{"w": P("data", "model")}, P()], {"w": P("data", "model")})
    def step(state, x):
        return {"w": state["w"] + x}

    state = {"w": jnp.ones((8, 8))}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        plan = step.plan(state, jnp.float32(1))
        found = checkpoints.restore(jax.eval_shape(lambda: state), shardings=plan, mesh=mesh)
        with pytest.raises(CheckpointError, match="the plan is for a mesh data=2, model=4"):
            checkpoints.restore(state, shardings=plan, mesh=DeviceMesh([0, 1], ["data"]))
    assert found["w"].sharding == ShardingSpec(mesh, P("data", "model")).named_sharding


def test_nnx_modules_get_their_arrays_in_place(mesh, tmp_path):
    def made(seed):
        model = nnx.Sequential(
            nnx.Linear(8, 16, rngs=nnx.Rngs(seed)), nnx.Dropout(0.5, rngs=nnx.Rngs(seed))
        )
        return nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), model

    with CheckpointManager(tmp_path) as checkpoints:
        (_, saved), (_, model) = made(0), made(1)
        checkpoints.save(0, saved)
        assert checkpoints.restore(model) is model
        (optimizer, _), (again, _) = made(2), made(3)
        checkpoints.save(1, optimizer)
        checkpoints.restore(again)
    assert_same(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(saved)))
    assert_same(nnx.to_pure_dict(nnx.state(again)), nnx.to_pure_dict(nnx.state(optimizer)))


OPTIMIZER = optax.adam(1e-2)
ARRAYS = {
    "x": np.random.default_rng(0).standard_normal((20, 16), dtype=np.float32),
    "y": np.random.default_rng(1).standard_normal((20, 4), dtype=np.float32),
}


def train_step(state, batch):
    """A step with dropout, whose key is part of the state."""
    key, dropout = jax.random.split(state["key"])

    def loss_of(params):
        kept = jax.random.bernoulli(dropout, 0.8, batch["x"].shape)
        return jnp.mean(((batch["x"] * kept) @ params["w"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "key": key, "step": state["step"] + 1}, loss


def run(mesh, layout, folder, steps, resume=False):
    """The losses of a run that saves its second step."""
    step = spmd(
        train_step, mesh=mesh, in_shardings=[P("data")], out_shardings=None,
        parameter_shardings=layout, donate_argnames="state",
    )  # fmt: skip
    params = {"w": jax.random.normal(jax.random.key(1), (16, 4))}
    state = {"params": params, "opt": OPTIMIZER.init(params), "key": jax.random.key(7), "step": 0}
    losses = []
    batches = prefetch(Batches(ARRAYS, 4), P("data"), mesh=mesh)
    with CheckpointManager(folder) as checkpoints, batches:
        if resume:
            state = checkpoints.restore(state, shardings=layout, mesh=mesh, data=batches)
        while state["step"] < steps:
            state, loss = step(state, next(batches))
            losses.append(float(loss))
            if not resume and state["step"] == 2:
                checkpoints.save(2, state, data=batches)
    return losses


def test_a_resumed_run_continues_the_same_losses_bit_for_bit(mesh, tmp_path):
    layout = fsdp("data", min_size=16)
    whole = run(mesh, layout, tmp_path, 8)
    assert run(mesh, layout, tmp_path, 8, resume=True) == whole[2:]


def test_a_run_resumed_elsewhere_continues_the_same_losses(mesh, tmp_path):
    whole = run(mesh, fsdp("data", min_size=16), tmp_path, 8)
    elsewhere = DeviceMesh([3, 4, 5, 6], ["data"])
    again = run(elsewhere, data_parallel("data"), tmp_path, 8, resume=True)
    np.testing.assert_allclose(again, whole[2:], rtol=1e-5)


def test_the_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    grow = jax.jit(lambda w: w + 1, donate_argnums=0)
    w = jnp.zeros((512, 512))
    with CheckpointManager(tmp_path, max_to_keep=None) as checkpoints:
        for step in range(4):
            checkpoints.save(step, {"w": w})
            for _ in range(10):
                w = grow(w)
        for step in range(4):
            found = checkpoints.restore({"w": w}, step=step)["w"]
            np.testing.assert_array_equal(found, np.full((512, 512), 10.0 * step))


def test_the_latest_and_the_best_are_kept(tmp_path):
    w = {"w": jnp.zeros(4)}
    losses = [float("nan"), 1.0, 2.0, 5.0, 4.0]
    with CheckpointManager(tmp_path, max_to_keep=2, keep_best=1) as checkpoints:
        for step, loss in enumerate(losses):
            checkpoints.save(step, w, metrics={"loss": jnp.float32(loss)})
        checkpoints.wait()
        assert checkpoints.steps == (1, 3, 4)
        assert checkpoints.best_step == 1
        assert checkpoints.metrics(1) == {"loss": 1.0}
        with pytest.raises(CheckpointError, match="step 5 has no metric 'loss'"):
            checkpoints.save(5, w)
    with CheckpointManager(tmp_path, max_to_keep=2, keep_best=1) as checkpoints:
        checkpoints.save(5, w, metrics={"loss": 3.0})
        checkpoints.wait()
        assert checkpoints.steps == (1, 4, 5)
    with CheckpointManager(
        tmp_path / "max", max_to_keep=1, keep_best=1, metric="accuracy", mode="max"
    ) as checkpoints:
        for step, accuracy in enumerate([0.5, 0.9, 0.7, 0.6]):
            checkpoints.save(step, w, metrics={"accuracy": accuracy})
        checkpoints.wait()
        assert checkpoints.steps == (1, 3)
        assert checkpoints.best_step == 1


def test_one_of_so_many_steps_is_saved(tmp_path):
    w = {"w": jnp.zeros(4)}
    with CheckpointManager(tmp_path, every=3) as checkpoints:
        saved = [step for step in range(8) if checkpoints.save(step, w)]
        assert checkpoints.save(7, w, force=True)
    assert saved == [0, 3, 6]


def test_a_run_that_goes_back_says_so(tmp_path):
    w = {"w": jnp.zeros(4)}
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, w)
        with pytest.raises(CheckpointError) as error:
            checkpoints.save(11, w)
        assert str(error.value) == (
            "CheckpointManager: step 11 is to be saved, and step 30 is already.\n"
            "  The latest checkpoints are kept: those that are to be replaced must go first.\n"
            "  Fix: call delete_after(10) if the run has gone back on purpose."
        )
        checkpoints.delete_after(10)
        checkpoints.save(11, w)
        checkpoints.wait()
        assert checkpoints.steps == (10, 11)


def test_what_does_not_fit_is_told_leaf_by_leaf(mesh, tmp_path):
    state = {
        "params": {"dense": {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)}},
        "key": jax.random.key(0),
        "step": 1,
    }
    wanted = {
        "params": {"dense": {"kernel": jnp.ones((8, 8)), "bais": jnp.ones(4)}},
        "key": jax.random.key(0, impl="rbg"),
        "step": jnp.float32(1),
    }
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(20, state)
        with pytest.raises(CheckpointError) as error:
            checkpoints.restore(wanted)
    why = "     Restoring may change where an array lies, but not what it is.\n"
    fix = (
        "     Fix: make the state as the run did that saved it, and change it after it is restored."
    )
    where = "the checkpoint of step 20"
    assert str(error.value) == (
        "CheckpointManager: 5 things are wrong.\n"
        f"  1. params/dense/bais is not in {where}. The nearest path in it is params/dense/bias.\n"
        "     A checkpoint finds arrays by their path.\n"
        "     Fix: make the state as the run did that saved it.\n"
        f"  2. {where} has 1 array that the state lacks: params/dense/bias.\n"
        "     Restoring a part by accident would lose the rest with the next checkpoint.\n"
        "     Fix: pass partial=True if the state is meant to be a part.\n"
        f"  3. key is random keys key<fry>[] in {where}, and random keys key<rbg>[] is wanted.\n"
        f"{why}{fix}\n"
        f"  4. params/dense/kernel is f32[8,4] in {where}, and f32[8,8] is wanted.\n"
        f"{why}{fix}\n"
        f"  5. step is a Python int in {where}, and f32[] is wanted.\n"
        f"{why}{fix}"
    )


def test_a_dtype_that_differs(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(0, {"w": jnp.ones(4, jnp.bfloat16)})
        with pytest.raises(CheckpointError, match=r"w is bf16\[4\] in .* and f32\[4\] is wanted"):
            checkpoints.restore({"w": jnp.ones(4)})


def test_a_part_is_restored_if_it_is_asked_for(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(0, {"params": {"w": jnp.arange(4.0)}, "opt": jnp.ones(4)})
        found = checkpoints.restore({"params": {"w": jnp.zeros(4)}}, partial=True)
    np.testing.assert_array_equal(found["params"]["w"], np.arange(4.0))


def test_another_container_with_the_same_names_will_do(tmp_path):
    params = {"w": jnp.arange(4.0)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1, momentum=0.9))
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        assert_same(checkpoints.restore(state).params, params)
        found = checkpoints.restore({"params": params, "step": 0}, partial=True)
    assert found["step"] == 0


@quiet
def test_a_corrupt_checkpoint_names_the_array(mesh, tmp_path):
    random = jax.random.normal(jax.random.key(0), (256, 256))
    state = {"small": jnp.ones(3), "w": random}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
    files = [path for path in (tmp_path / "2" / "state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0x10
    largest.write_bytes(content)
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError) as error:
            checkpoints.restore(state)
        assert_same(checkpoints.restore(state, step=1), state)
        assert_same(
            checkpoints.restore({"small": state["small"]}, partial=True), {"small": jnp.ones(3)}
        )
    what, _, fix = str(error.value).splitlines()
    assert what == "CheckpointManager: w is corrupt in the checkpoint of step 2."
    assert fix == "  Fix: restore another one, such as step=1."


@quiet
@pytest.mark.parametrize("item", ["state/manifest.ocdbt", "record/metadata"])
def test_a_checkpoint_of_which_nothing_can_be_read(tmp_path, item):
    state = {"a": jnp.ones(3), "b": jnp.ones(3)}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(2, state)
    (tmp_path / "2" / item).write_bytes(b"nothing")
    with (
        CheckpointManager(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match="the checkpoint of step 2 is corrupt") as error,
    ):
        checkpoints.restore(state)
    assert str(error.value).endswith("Fix: no other step is saved: start afresh.")


def test_what_is_not_there(tmp_path):
    w = {"w": jnp.ones(3)}
    with CheckpointManager(tmp_path / "none") as checkpoints:
        with pytest.raises(CheckpointError) as error:
            checkpoints.restore(w)
        assert str(error.value) == (
            f"CheckpointManager: no step is saved in {tmp_path / 'none'}.\n"
            "  A step is there when it is saved whole.\n"
            "  Fix: check the folder, or start afresh."
        )
        checkpoints.save(1, w)
        checkpoints.save(2, w)
        with pytest.raises(CheckpointError, match="step 7 is not saved; steps 1 and 2 can be"):
            checkpoints.restore(w, step=7)
        with pytest.raises(CheckpointError, match="step 2 has no position in the data"):
            checkpoints.restore(w, data=Batches(np.zeros(4), 2))


def test_a_state_that_was_donated_can_not_be_saved(tmp_path):
    w = {"w": jnp.ones(3)}
    jax.jit(lambda w: w["w"] + 1, donate_argnums=0)(w)
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.save(0, w)
    assert str(error.value) == (
        "CheckpointManager: w is deleted: its memory was donated to a later step.\n"
        "  A state that was passed as a donated argument is gone.\n"
        "  Fix: save what the step returned."
    )


def test_options_that_can_not_be(tmp_path, monkeypatch):
    with pytest.raises(ShardingError, match="max_to_keep is 0"):
        CheckpointManager(tmp_path, max_to_keep=0)
    with pytest.raises(ShardingError, match="mode is 'least'"):
        CheckpointManager(tmp_path, mode="least")
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ShardingError, match="orbax is not installed"):
        CheckpointManager(tmp_path)


def in_a_process(code, *arguments):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


KILLED = """
import os, pathlib, signal, sys, threading, time
import jax.numpy as jnp
from pypto_spmd.training import CheckpointManager

folder = pathlib.Path(sys.argv[1])

def kill_in_the_middle():
    while not list(folder.glob("2.*/*")):
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGKILL)

checkpoints = CheckpointManager(folder, max_to_keep=1)
checkpoints.save(1, {"w": jnp.arange(4.0)})
checkpoints.wait()
threading.Thread(target=kill_in_the_middle, daemon=True).start()
checkpoints.save(2, {"w": jnp.arange(8e6)})
checkpoints.wait()
"""


def test_a_process_that_is_killed_while_it_saves_loses_nothing_that_is_saved(tmp_path):
    done = in_a_process(KILLED, tmp_path)
    assert done.returncode == -9, done.stderr
    assert list(tmp_path.glob("2.*"))
    state = {"w": jnp.zeros(4)}
    with CheckpointManager(tmp_path, max_to_keep=2) as checkpoints:
        assert checkpoints.steps == (1,)
        np.testing.assert_array_equal(checkpoints.restore(state)["w"], np.arange(4.0))
        checkpoints.save(3, state)
        checkpoints.wait()
        assert checkpoints.steps == (1, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]


FULL = """
import resource, sys
import jax, jax.numpy as jnp
from pypto_spmd.training import CheckpointError, CheckpointManager

small, large = {"w": jnp.arange(4.0)}, {"w": jax.random.normal(jax.random.key(0), (100_000,))}
checkpoints = CheckpointManager(sys.argv[1], max_to_keep=1)
checkpoints.save(1, small)
checkpoints.wait()
# Files can't grow any more, which to those who write is as a full disk.
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
checkpoints.save(2, large)
try:
    checkpoints.wait()
except CheckpointError as error:
    print(error)
print(checkpoints.steps)
checkpoints.save(3, small)
checkpoints.wait()
print(checkpoints.steps)
try:
    with checkpoints:
        checkpoints.save(4, large)
        raise KeyError("mine")
except KeyError as error:
    print(error.__notes__[0].splitlines()[0])
"""


def test_a_full_disk_loses_nothing_and_is_told(tmp_path):
    done = in_a_process(FULL, tmp_path)
    assert done.stdout == (
        "CheckpointManager: step 2 was not saved: the disk is full.\n"
        "  Nothing that was saved before is lost: step 1 can be restored.\n"
        f"  Fix: free space on the disk of {tmp_path}, or keep fewer, and save again.\n"
        "(1,)\n"
        "(3,)\n"
        "CheckpointManager: step 4 was not saved: the disk is full.\n"
    ), done.stderr
    with CheckpointManager(tmp_path) as checkpoints:
        found = checkpoints.restore({"w": jnp.zeros(4)})
    np.testing.assert_array_equal(found["w"], np.arange(4.0))


PROCESS = """
import numpy as np
from pypto_spmd import DeviceMesh, PartitionSpec as P
from pypto_spmd.training import CheckpointManager, prefetch

mesh = DeviceMesh(np.arange(4), ["data"])
mine = np.arange(8, dtype=np.float32).reshape(4, 2) + 100 * process
(batch,) = prefetch([mine], P("data"), mesh=mesh)
state = {"batch": batch, "key": jax.random.key(0), "step": 3}
with CheckpointManager(sys.argv[4]) as checkpoints:
    checkpoints.save(1, state)
    found = checkpoints.restore(state)
    assert found["batch"].shape == (8, 2)
    for mine, theirs in zip(found["batch"].addressable_shards, batch.addressable_shards):
        np.testing.assert_array_equal(mine.data, theirs.data)
    np.testing.assert_array_equal(*map(jax.random.key_data, (found["key"], state["key"])))
    print(found["step"], float(found["batch"].addressable_shards[0].data[0, 0]))
"""


@pytest.mark.slow
def test_several_processes_give_save_and_restore_their_own_parts(tmp_path, in_two_processes):
    assert in_two_processes(PROCESS, 2, str(tmp_path)) == ["3 0.0", "3 100.0"]
