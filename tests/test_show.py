"""The table of how a state lies."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from pypto_spmd import AUTO, DeviceMesh, PartitionSpec, ShardingError, show_shardings, spmd
from pypto_spmd.training import fsdp, zero1

P = PartitionSpec


@pytest.fixture
def mesh():
    return DeviceMesh.simulate((2, 4), ("data", "model"))


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def shown(capsys, *arguments, **options):
    show_shardings(*arguments, **options)
    return capsys.readouterr().out


PARAMS = {
    "dense": {"kernel": array(64, 128), "bias": array(128, dtype="bfloat16")},
    "step": array(),
}
SPLIT = """\
path           shape    dtype      layout              bytes per device
───────────────────────────────────────────────────────────────────────
dense/bias     128      bfloat16   [-]                             256B
dense/kernel   64×128   float32    [-, (data,model)]                4KB
step           scalar   float32    []                                4B
───────────────────────────────────────────────────────────────────────
3 arrays       32.3KB                                             4.3KB
"""


def test_what_would_be(mesh, capsys):
    layout = fsdp(("data", "model"))
    assert shown(capsys, PARAMS, layout, mesh=mesh) == SPLIT
    assert shown(capsys, PARAMS, layout, mesh=mesh.jax_mesh) == SPLIT
    with mesh:
        assert shown(capsys, PARAMS, [("kernel", P(None, ("data", "model"))), (".", P())]) == SPLIT
    specs = {"dense": {"kernel": P(None, ("data", "model")), "bias": P()}, "step": P()}
    named = jax.tree.map(lambda spec: NamedSharding(mesh.jax_mesh, spec), specs)
    assert shown(capsys, PARAMS, named) == SPLIT


def test_what_is(mesh, capsys):
    arrays = {
        "numpy": np.ones(8, np.float32),
        "one": jax.device_put(np.ones((4, 8), np.float32), jax.devices()[3]),
        "split": jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh.jax_mesh, P("data"))),
        "abstract": jax.ShapeDtypeStruct((8,), "int32", sharding=NamedSharding(mesh.jax_mesh, P("model"))),
        "key": jax.random.key(0),
    }  # fmt: skip
    assert shown(capsys, arrays) == (
        "path       shape    dtype      layout          bytes per device\n"
        "───────────────────────────────────────────────────────────────\n"
        "abstract   8        int32      [model]                       8B\n"
        "key        scalar   key<fry>   on one device                 8B\n"
        "numpy      8        float32    on no device                 32B\n"
        "one        4×8      float32    on one device               128B\n"
        "split      4×8      float32    [data, -]                    64B\n"
        "───────────────────────────────────────────────────────────────\n"
        "5 arrays   328B                                            240B\n"
    )


def test_what_is_planned(mesh, capsys):
    params = {"w": array(64, 64)}
    tree = {"params": params, "opt_state": jax.eval_shape(optax.adam(1e-3).init, params)}
    step = spmd(
        lambda state, x: (state, x @ state["params"]["w"]), mesh=mesh, parameter_shardings=zero1()
    )
    plan = step.plan(tree, array(8, 64))
    table = shown(capsys, tree, plan)
    assert table == shown(capsys, tree, zero1(), mesh=mesh)
    assert [line.split() for line in table.splitlines()[2:6]] == [
        ["opt_state/0/count", "scalar", "int32", "[]", "4B"],
        ["opt_state/0/mu/w", "64×64", "float32", "[-,", "data]", "8KB"],
        ["opt_state/0/nu/w", "64×64", "float32", "[-,", "data]", "8KB"],
        ["params/w", "64×64", "float32", "[-,", "-]", "16KB"],
    ]
    image = spmd(lambda image, key: image, mesh=mesh, in_shardings=[P("data"), P()])
    plan_of_image = image.plan(array(8, 64), array(2, dtype="uint32"))
    assert "[data, -]" in shown(capsys, array(8, 64), plan_of_image)
    with pytest.raises(ShardingError) as caught:
        show_shardings(array(8, 64), plan)
    assert str(caught.value).splitlines()[0] == (
        "show_shardings: the state could be any of state['opt_state'][0].mu['w'], "
        "state['opt_state'][0].nu['w'], state['params']['w'] and 'x'."
    )
    with pytest.raises(ShardingError) as caught:
        show_shardings({"v": array(8)}, plan)
    assert str(caught.value) == (
        "show_shardings: the state is no argument or result of '<lambda>'.\n"
        "  No argument of the plan has its paths. The arguments are: state, x.\n"
        "  Fix: pass the argument that the plan was made for, or a tree of its structure."
    )


def test_modules(mesh, capsys):
    model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    assert shown(capsys, model, AUTO, mesh=mesh).splitlines()[3].split()[:2] == ["kernel", "64×32"]
    assert "[data, -]" in shown(capsys, model, fsdp(), mesh=mesh)


def test_no_mesh():
    with pytest.raises(ShardingError) as caught:
        show_shardings(PARAMS, fsdp())
    assert str(caught.value) == (
        "show_shardings: there is no mesh.\n"
        "  What a spec names are the axes of a mesh of devices.\n"
        "  Fix: pass it, show_shardings(state, shardings, mesh=mesh), or call this inside `with mesh:`."
    )
