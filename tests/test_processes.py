"""One program in several processes, as on several hosts."""

import pytest

TRAIN = """
import jax.numpy as jnp, numpy as np
from pypto_spmd import DeviceMesh, PartitionSpec as P, spmd

mesh = DeviceMesh(np.arange(8).reshape(2, 4), ["data", "model"])
params = {"w": np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)}
x = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)


def step(params, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), loss


split = {"w": P(None, "model")}
decorated = spmd(step, mesh=mesh, in_shardings=(split, P("data")), out_shardings=(split, P()))
state, serial = params, params
for _ in range(3):
    state, loss = decorated(state, x)
    with jax.default_device(jax.local_devices()[0]):
        serial, want = jax.jit(step)(serial, x)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
for shard in state["w"].addressable_shards:
    np.testing.assert_allclose(shard.data, serial["w"][shard.index], rtol=1e-5, atol=1e-6)
decorated.verify(state, x)
print(len(jax.local_devices()), decorated.plan(state, x).counts()["all_reduce"])
"""


@pytest.mark.slow
def test_two_processes_train_as_one(in_two_processes):
    assert in_two_processes(TRAIN, 4) == ["4 2", "4 2"]
