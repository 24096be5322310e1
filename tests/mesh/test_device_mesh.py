"""DeviceMesh as a value: what it holds, what it refuses, what it does to the process."""

import contextlib
import copy
import pickle
import re
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from pypto_spmd import DeviceMesh, ShardingError
from pypto_spmd.mesh import Topology, current_mesh

EIGHT = [[0, 1, 2, 3], [4, 5, 6, 7]]
NAMES = ("data", "model")


def test_what_it_holds():
    mesh = DeviceMesh(devices=EIGHT, axis_names=["data", "model"])
    assert dict(mesh.shape) == {"data": 2, "model": 4}
    assert list(mesh.shape) == ["data", "model"]
    assert mesh.axis_names == NAMES
    assert mesh.size == 8
    assert mesh.devices.shape == (2, 4)
    assert mesh.devices[1, 2] is jax.devices()[6]
    assert mesh.jax_mesh == Mesh(np.array(jax.devices()[:8]).reshape(2, 4), NAMES)
    assert mesh.jax_mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert mesh.jax_mesh is mesh.jax_mesh
    assert str(mesh) == "data=2 × model=4"


@pytest.mark.parametrize(
    "devices",
    [
        EIGHT,
        tuple(map(tuple, EIGHT)),
        np.arange(8).reshape(2, 4),
        lambda: np.array(jax.devices()[:8]).reshape(2, 4),
        lambda: [jax.devices()[:4], jax.devices()[4:8]],
    ],
)
def test_one_mesh_however_its_devices_are_given(devices):
    mesh = DeviceMesh(devices() if callable(devices) else devices, NAMES)
    same = DeviceMesh.simulate((2, 4), NAMES)
    assert mesh == same
    assert hash(mesh) == hash(same)
    assert mesh == DeviceMesh.from_jax(same.jax_mesh)
    assert eval(repr(mesh)) == mesh
    assert repr(mesh) == "DeviceMesh([[0, 1, 2, 3], [4, 5, 6, 7]], ('data', 'model'))"


def test_an_explicit_jax_mesh_becomes_one_with_auto_axes():
    explicit = jax.make_mesh((2, 4), NAMES, axis_types=(AxisType.Explicit,) * 2)
    mesh = DeviceMesh.from_jax(explicit)
    assert mesh.axis_names == NAMES
    assert mesh.jax_mesh.axis_types == (AxisType.Auto, AxisType.Auto)


@pytest.mark.parametrize("shape", [(3,), (2, 1, 4), (1, 2, 2, 2)])
def test_any_rank_and_any_part_of_the_devices(shape):
    names = tuple("abcd"[: len(shape)])
    mesh = DeviceMesh.simulate(shape, names)
    assert tuple(mesh.shape.values()) == shape
    assert mesh.devices.shape == shape


def test_order_names_and_shape_tell_meshes_apart():
    mesh = DeviceMesh([[0, 1], [2, 3]], ("a", "b"))
    others = [
        DeviceMesh([[0, 2], [1, 3]], ("a", "b")),
        DeviceMesh([[0, 1], [2, 3]], ("b", "a")),
        DeviceMesh([[0, 1, 2, 3]], ("a", "b")),
        DeviceMesh([[4, 5], [6, 7]], ("a", "b")),
        mesh.with_topology({"a": "infiniband_ndr", "b": "nvlink_h100"}),
    ]
    assert len({mesh, *others}) == 6
    assert all(mesh != other for other in others)
    assert mesh.same_places(others[-1])
    assert not mesh.same_places(others[0])
    assert mesh != "mesh"


def test_it_cannot_be_changed():
    mesh = DeviceMesh([0, 1], ("a",))
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'axis_names'"):
        mesh.axis_names = ("b",)
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'shape'"):
        del mesh.shape
    with pytest.raises(TypeError):
        mesh.shape["a"] = 3  # pyright: ignore[reportIndexIssue]


def test_it_can_be_copied_and_pickled():
    mesh = DeviceMesh(EIGHT, NAMES, topology={"data": "infiniband_ndr", "model": "nvlink_h100"})
    assert copy.deepcopy(mesh) == mesh
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert eval(repr(mesh), {"DeviceMesh": DeviceMesh, **vars(sys.modules[Topology.__module__])})


def test_the_default_mesh_is_that_of_the_innermost_block_in_this_thread():
    outer, inner = DeviceMesh([0, 1], ("a",)), DeviceMesh([2, 3], ("b",))
    seen = []
    assert current_mesh() is None
    with outer as entered:
        assert entered is outer
        with inner, outer:
            assert current_mesh() is outer
        with contextlib.suppress(KeyError), inner:
            assert current_mesh() is inner
            raise KeyError  # which must not leave the inner mesh behind
        assert current_mesh() is outer
        thread = threading.Thread(target=lambda: seen.append(current_mesh()))
        thread.start()
        thread.join()
    assert current_mesh() is None
    # Python 3.14 without the GIL hands a thread the context of the one that started it.
    assert seen in ([None], [outer])


RAGGED_FIX = (
    "  The devices must form a full array, one dim a mesh axis.\n"
    "  Fix: give all lists at one level the same length."
)

BAD_MESHES = {
    "axis count": (
        ([[0, 1], [2, 3]], ["row"]),
        "DeviceMesh: devices has 2 dims (shape (2, 2)) but axis_names has 1 name: ('row',).\n"
        "  Each dim of devices is one mesh axis and has one name.\n"
        "  Fix: give 2 names, or nest the devices 1 deep.",
    ),
    "ragged": (
        ([[0, 1], [2]], NAMES),
        "DeviceMesh: devices is ragged: devices[1] has 1 entry where its neighbours have 2 entries.\n"
        + RAGGED_FIX,
    ),
    "ragged, too deep": (
        ([0, [1]], NAMES),
        "DeviceMesh: devices is ragged: devices[1] is a list where its neighbours are devices.\n"
        + RAGGED_FIX,
    ),
    "ragged, too flat": (
        ([[0], 1], NAMES),
        "DeviceMesh: devices is ragged: devices[1] is a device, not a list.\n" + RAGGED_FIX,
    ),
    "twice": (
        ([[0, 1], [1, 2]], NAMES),
        "DeviceMesh: devices uses 1 (2 times) more than once.\n"
        "  Each device holds one place in the mesh.\n"
        "  Fix: list 4 different devices, such as 0 to 3.",
    ),
    "negative": (
        ([0, -1], ["a"]),
        "DeviceMesh: devices holds the negative index -1.\n"
        "  Indices count jax.devices() from its start, from 0 on.\n"
        "  Fix: use the device's index from the start.",
    ),
    "no device": (
        ([0, "1"], ["a"]),
        "DeviceMesh: devices holds '1'.\n"
        "  A mesh is made of integers (indices into jax.devices()) or of jax.Devices.\n"
        "  Fix: use one kind: DeviceMesh([0, 1], ...) or DeviceMesh(jax.devices(), ...).",
    ),
    "empty": (
        ([[], []], NAMES),
        "DeviceMesh: devices is empty along dim 1.\n"
        "  A mesh has at least one device along each axis.\n"
        "  Fix: list the indices of the devices to use, such as [0].",
    ),
    "no list": (
        (8, ["a"]),
        "DeviceMesh: devices is 8, which is no list.\n"
        "  Each level of nesting is one mesh axis, so there is at least one.\n"
        "  Fix: nest the devices in lists, such as [[0, 1], [2, 3]].",
    ),
    "repeated name": (
        (EIGHT, ["a", "a"]),
        "DeviceMesh: axis_names ('a', 'a') has 'a' twice.\n"
        "  A spec that names this axis could mean either.\n"
        "  Fix: give each axis a name of its own.",
    ),
    "name no string": (
        (EIGHT, ["a", 1]),
        "DeviceMesh: axis_names holds 1.\n"
        "  Specs name the axes, so each name is a string that isn't empty.\n"
        "  Fix: use strings, such as axis_names=('axis0', 'axis1').",
    ),
    "larger than the devices": (
        ([0, 99], ["a"]),
        "DeviceMesh: the mesh needs device 99, so 100 devices, but there are 8 devices.\n"
        "  JAX's backend is up already, and keeps the number of devices it started with.\n"
        "  Fix: move this DeviceMesh(...) above the first call that runs JAX (jnp arrays, "
        'jax.devices(), random keys), or say jax.config.update("jax_num_cpu_devices", 100) '
        "first thing, or set XLA_FLAGS=--xla_force_host_platform_device_count=100.",
    ),
}


@pytest.mark.parametrize("case", BAD_MESHES)
def test_a_bad_mesh_is_told_in_full(case):
    assert len(jax.devices()) == 8
    (devices, names), message = BAD_MESHES[case]
    with pytest.raises(ShardingError) as caught:
        DeviceMesh(devices, names)
    assert str(caught.value) == message


def test_integers_and_devices_do_not_mix():
    with pytest.raises(ShardingError, match=re.escape("devices holds both integers and jax.Dev")):
        DeviceMesh([0, jax.devices()[1]], ["a"])


def test_all_faults_of_the_names_at_once():
    with pytest.raises(ShardingError) as caught:
        DeviceMesh(EIGHT, ["a", "a", 3])
    assert len(caught.value.faults) == 3


@pytest.mark.parametrize("shape", [(), (2, 0), (2, 2.0), (True, 2)])
def test_a_bad_shape_to_simulate(shape):
    with pytest.raises(ShardingError) as caught:
        DeviceMesh.simulate(shape, NAMES)
    assert caught.value.faults[0].why == ("A mesh has at least one axis, each of size 1 or more.")


def test_a_topology_must_be_of_the_mesh_s_axes():
    with pytest.raises(ShardingError) as caught:
        DeviceMesh([0, 1], ["a"], topology={"b": "cpu"})
    assert str(caught.value) == (
        "DeviceMesh: 2 things are wrong.\n"
        "  1. topology has no link for 'a'.\n"
        "     Each mesh axis has one link.\n"
        "     Fix: add 'a' to topology.\n"
        "  2. topology has a link for 'b', which is no axis of this mesh.\n"
        "     The mesh axes are 'a'.\n"
        "     Fix: name the links as the axes are named."
    )


def run(code: str, **environment: str) -> str:
    """What a fresh process prints, one whose only devices can be CPUs."""
    variables = {"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin", **environment}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_devices_are_simulated_before_the_backend_is_up_and_a_log_line_says_so():
    printed = run(
        "import logging, sys\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s')\n"
        "from pypto_spmd import DeviceMesh\n"
        "from pypto_spmd.mesh.simulate import backend_is_up\n"
        "small = DeviceMesh([0, 1], ['a'])\n"
        "mesh = DeviceMesh([[0, 1, 2], [3, 4, 5]], ['a', 'b'])\n"
        "hash(mesh), repr(mesh), mesh == mesh, mesh.topology\n"
        "print(backend_is_up())\n"
        "print(len(mesh.devices.flat), len(small.devices))\n"
        "print(backend_is_up())\n"
        "import jax; print(jax.device_count())\n"
    )
    assert printed.splitlines() == [
        "simulating 2 host devices (jax.config.update('jax_num_cpu_devices', 2))",
        "simulating 6 host devices (jax.config.update('jax_num_cpu_devices', 6))",
        "False",
        "6 2",
        "True",
        "6",
    ]


def test_devices_that_the_environment_promises_are_taken_as_they_are():
    code = (
        "from pypto_spmd import DeviceMesh; import jax\n"
        "mesh = DeviceMesh([0, 1, 2], ['a'])\n"
        "print(jax.config.jax_num_cpu_devices, mesh.devices.size, jax.device_count())"
    )
    flags = "--xla_force_host_platform_device_count=4"
    assert run(code, XLA_FLAGS=flags) == "-1 3 4"
    assert run(code, JAX_NUM_CPU_DEVICES="5") == "5 3 5"


def test_after_the_backend_is_up_with_too_few_devices():
    printed = run(
        "import jax; jax.devices()\n"
        "from pypto_spmd import DeviceMesh, ShardingError\n"
        "try: DeviceMesh([[0, 1], [2, 3]], ['a', 'b'])\n"
        "except ShardingError as error: print(error)"
    )
    assert printed == (
        "DeviceMesh: the mesh needs device 3, so 4 devices, but there is 1 device.\n"
        "  JAX's backend is up already, and keeps the number of devices it started with.\n"
        "  Fix: move this DeviceMesh(...) above the first call that runs JAX (jnp arrays, "
        'jax.devices(), random keys), or say jax.config.update("jax_num_cpu_devices", 4) '
        "first thing, or set XLA_FLAGS=--xla_force_host_platform_device_count=4."
    )


def test_a_process_with_accelerators_keeps_its_devices():
    printed = run(
        "from unittest import mock\n"
        "from pypto_spmd import DeviceMesh\n"
        "from pypto_spmd.mesh import simulate\n"
        "import jax\n"
        "with mock.patch.object(simulate, 'cpu_only', lambda: False):\n"
        "    DeviceMesh([0, 1], ['a'])\n"
        "    print(jax.config.jax_num_cpu_devices)\n"
        "    mesh = DeviceMesh.simulate((2, 2), ('a', 'b'))\n"
        "    print(mesh, mesh.topology['a'].bandwidth_bytes_per_s)\n"
        "    print(repr(mesh), eval(repr(mesh)) == mesh)\n"
        "    print(jax.config.jax_num_cpu_devices, mesh.devices.size)\n"
    )
    assert printed.splitlines() == [
        "-1",
        "a=2 × b=2 10000000000.0",
        "DeviceMesh.simulate((2, 2), ('a', 'b')) True",
        "4 4",
    ]


def test_accelerators_are_looked_for_where_jax_looks(tmp_path):
    code = "from pypto_spmd.mesh.simulate import cpu_only; print(cpu_only())"
    plugin = tmp_path / "jax_plugins" / "some_gpu"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").touch()
    path = ":".join([str(tmp_path), *sys.path])
    for platforms in ("cpu", "cpu,cuda"):
        assert run(code, PYTHONPATH=path, JAX_PLATFORMS=platforms) == "True"
    for platforms in ("", "cuda", "tpu,cpu"):
        assert run(code, PYTHONPATH=path, JAX_PLATFORMS=platforms) == "False"
