"""Batches are placed as their spec says, ahead of the step, and never later than they should end."""

import gc
import itertools
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from pypto_spmd import DeviceMesh, PartitionSpec, ShardingError
from pypto_spmd.training import Batches, Resumable, prefetch

P = PartitionSpec


@pytest.fixture
def mesh():
    return DeviceMesh.simulate((2, 4), ("data", "model"))


def arrays(count=24):
    return {"x": np.arange(count * 2.0, dtype=np.float32).reshape(count, 2), "y": np.arange(count)}


def threads():
    return [t for t in threading.enumerate() if t.name == "pypto_spmd prefetch"]


def no_thread_left():
    for _ in range(100):
        if not threads():
            return True
        time.sleep(0.02)
    return False


def test_batches_are_placed_by_their_spec_in_order(mesh):
    given = list(prefetch(Batches(arrays(), 8, seed=None, epochs=1), P("data"), mesh=mesh))
    assert [batch["y"].tolist() for batch in given] == np.arange(24).reshape(3, 8).tolist()
    assert given[0]["x"].sharding.spec == P("data")
    assert given[0]["x"].addressable_shards[0].data.shape == (4, 2)
    assert no_thread_left()


def test_each_array_may_have_its_own_spec_and_the_first_axis_is_usual(mesh):
    batches = [arrays(8)]
    (batch,) = prefetch(batches, {"x": P(None, "data"), "y": P(("data", "model"))}, mesh=mesh)
    assert batch["x"].sharding.spec == P(None, "data")
    assert batch["y"].sharding.spec == P(("data", "model"))
    with mesh:
        (batch,) = prefetch(batches)
    assert batch["x"].sharding.spec == P("data")


def test_a_loader_may_fill_its_buffer_again(mesh):
    def loader():
        buffer = np.zeros((64, 64), np.float32)
        for i in range(20):
            buffer[:] = i
            yield buffer

    for i, batch in enumerate(prefetch(loader(), P("data"), mesh=mesh)):
        np.testing.assert_array_equal(batch, np.full((64, 64), i, np.float32))


def test_a_short_batch_is_an_error_that_names_its_size(mesh):
    batches = prefetch(Batches(arrays(20), 8, epochs=1), P("data"), mesh=mesh)
    next(batches), next(batches)
    with pytest.raises(ShardingError) as error:
        next(batches)
    assert str(error.value) == (
        "prefetch: batch 2 is short: it has 4 examples, the ones before had 8.\n"
        "  A step is compiled for one size of batch.\n"
        "  Fix: pass pad=True to get it filled up, with a mask, or have the loader drop it."
    )
    with pytest.raises(StopIteration):
        next(batches)


def test_a_short_batch_is_padded_with_a_mask(mesh):
    source = Batches(arrays(20), 8, seed=None, epochs=1)
    *full, (batch, mask) = prefetch(source, P("data"), mesh=mesh, pad=True)
    assert all(mask.all() for _, mask in full)
    assert batch["y"].tolist() == [16, 17, 18, 19, 19, 19, 19, 19]
    assert mask.tolist() == [True] * 4 + [False] * 4
    assert mask.sharding.spec == P("data")


def test_a_first_batch_that_is_short_is_padded_to_the_shards(mesh):
    ((batch, mask),) = prefetch([arrays(5)], P("model"), mesh=mesh, pad=True)
    assert batch["y"].shape == (8,)
    assert mask.sum() == 5


def test_a_batch_that_the_mesh_does_not_divide(mesh):
    with pytest.raises(ShardingError) as error:
        next(prefetch([arrays(6)], P("model"), mesh=mesh))
    assert str(error.value) == (
        "prefetch: batch 0 has 6 examples, which 4 shards don't divide.\n"
        "  Its first dim is split over the mesh data=2 × model=4.\n"
        "  Fix: use batches of 4 or 8, or pass pad=True."
    )


def test_arrays_of_different_lengths(mesh):
    with pytest.raises(ShardingError) as error:
        next(prefetch([{"x": np.zeros((4, 2)), "y": np.zeros(3)}], P("data"), mesh=mesh))
    assert str(error.value) == (
        "prefetch: the first dims of batch 0 differ: batch['x'] is 4 and batch['y'] is 3.\n"
        "  The first dim of each array is the batch.\n"
        "  Fix: give arrays of one length."
    )


def test_a_wrong_spec_and_no_mesh(mesh):
    with pytest.raises(ShardingError, match="rows"):
        next(prefetch([arrays(8)], P("rows"), mesh=mesh))
    with pytest.raises(ShardingError, match="there is no mesh"):
        prefetch([arrays(8)], P("data"))


def test_what_the_loader_raises_comes_after_its_batches(mesh):
    def loader():
        yield arrays(8)
        raise OSError("the disk is gone")

    batches = prefetch(loader(), P("data"), mesh=mesh)
    next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert no_thread_left()


def test_no_more_is_taken_ahead_than_asked(mesh):
    taken = []

    def loader():
        for i in itertools.count():
            taken.append(i)
            yield arrays(8)

    with prefetch(loader(), P("data"), mesh=mesh, depth=2) as batches:
        next(batches)
        time.sleep(0.2)
        assert len(taken) <= 3
    assert no_thread_left()


def test_an_early_break_ends_the_thread(mesh):
    batches = prefetch(itertools.repeat(arrays(8)), P("data"), mesh=mesh)
    for _ in batches:
        break
    assert threads()
    del batches
    gc.collect()
    assert no_thread_left()


def test_the_position_is_that_of_the_last_batch_given(mesh):
    def run(position=None, count=7):
        batches = prefetch(Batches(arrays(20), 4, seed=3), P("data"), mesh=mesh, depth=3)
        if position is not None:
            batches.set_state(position)
        with batches:
            return [next(batches)["y"].tolist() for _ in range(count)], batches.get_state()

    every, _ = run()
    first, position = run(count=3)
    assert position == {"epoch": 0, "batch": 3}
    rest, _ = run(position, 4)
    assert first + rest == every


def test_a_loader_without_a_position_is_read_up_to_it(mesh):
    def batches():
        return prefetch((arrays(8 * i) for i in (1, 1, 1)), P("data"), mesh=mesh)

    first = batches()
    next(first), next(first)
    assert first.get_state() == {"given": 2}
    again = batches()
    again.set_state({"given": 2})
    assert len(list(again)) == 1
    with pytest.raises(ShardingError, match="3 batches of the loader were read, 1 are asked for"):
        again.set_state({"given": 1})


def test_going_back_while_it_runs(mesh):
    batches = prefetch(Batches(arrays(), 4), P("data"), mesh=mesh)
    assert isinstance(batches, Resumable)
    start = batches.get_state()
    first = [next(batches)["y"].tolist() for _ in range(3)]
    batches.set_state(start)
    assert [next(batches)["y"].tolist() for _ in range(3)] == first
    batches.close()


def test_batches_are_shuffled_anew_and_by_the_seed_alone():
    def epoch(seed, number):
        source = Batches(np.arange(12), 5, seed=seed, epochs=2)
        every = [batch.tolist() for batch in source]
        assert [len(batch) for batch in every] == [5, 5, 2] * 2
        return [i for batch in every[3 * number : 3 * number + 3] for i in batch]

    assert epoch(0, 0) == epoch(0, 0) != epoch(0, 1)
    assert epoch(1, 0) != epoch(0, 0)
    assert sorted(epoch(0, 1)) == list(range(12))
    assert len(list(Batches(np.arange(12), 5, epochs=1, drop_last=True))) == 2


def test_batches_of_what_can_not_be():
    with pytest.raises(ShardingError) as error:
        Batches({"x": np.zeros(4), "y": np.zeros(3)}, 2)
    assert str(error.value) == (
        "Batches: the arrays have 2 lengths: [3, 4].\n"
        "  A batch takes the same examples of all arrays.\n"
        "  Fix: give arrays whose first dims are equal."
    )
    with pytest.raises(ShardingError, match="batch_size is 9, of 4 examples"):
        Batches(np.zeros(4), 9)


def test_ctrl_c_while_waiting_for_the_loader_does_not_hang(tmp_path):
    code = """
import itertools, os, signal, threading, time
import numpy as np
from pypto_spmd import DeviceMesh, PartitionSpec
from pypto_spmd.training import prefetch

# A shell that starts a job in the background has it ignore Ctrl-C, and so its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

def loader():
    yield np.zeros((8, 2))
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(60)

mesh = DeviceMesh.simulate((2,), ("data",))
batches = prefetch(loader(), PartitionSpec("data"), mesh=mesh)
next(batches)
try:
    next(batches)
except KeyboardInterrupt:
    print("stopped", flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout == "stopped\n", done.stderr


def test_grain_is_a_loader_whose_position_is_kept(mesh):
    grain = pytest.importorskip("grain", exc_type=ImportError)

    def batches():
        data = grain.MapDataset.source(np.arange(40)).shuffle(seed=1).batch(8).to_iter_dataset()
        return prefetch(data, P("data"), mesh=mesh)

    every = [batch.tolist() for batch in batches()]
    first = batches()
    assert [next(first).tolist() for _ in range(2)] == every[:2]
    again = batches()
    again.set_state(first.get_state())
    assert [batch.tolist() for batch in again] == every[2:]
    first.close()
