"""pytest on fake meshes: ``--spmd-devices``, the ``spmd_mesh`` fixture and its marker.

A test asks for the fixture and gets a mesh of simulated CPU devices, 2×4 with the axes ``data`` and
``model`` (2×N/2 where the run says fewer devices than 8) unless its marker names another::

    @pytest.mark.spmd_mesh(data=2, model=4)
    def test_gemm(spmd_mesh):
        ...

The devices are made before the tests if ``--spmd-devices=N`` or the setting ``spmd_devices = N`` says
so, as it should where tests run JAX before they ask for a mesh; else when the first mesh is asked for.
Runs with none of these are left alone.
"""

from math import prod

import pytest

from pypto_spmd.errors import ShardingError
from pypto_spmd.mesh import DeviceMesh, simulate

USUAL_DEVICES = 8
USUAL_AXES = {"data": 2, "model": 4}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option and the setting."""
    text = f"how many CPU devices to simulate for tests of @spmd functions ({USUAL_DEVICES})"
    parser.getgroup("spmd").addoption(
        "--spmd-devices", type=int, default=None, metavar="N", help=text
    )
    parser.addini("spmd_devices", text, default=None)


def pytest_configure(config: pytest.Config) -> None:
    """Makes the devices, if the run says how many, before any test can start a backend."""
    config.addinivalue_line(
        "markers", "spmd_mesh(**axes): the axes and sizes of the mesh that `spmd_mesh` gives"
    )
    count = _devices_said(config)
    if count is not None:
        try:
            _ = DeviceMesh.simulate((count,), ("devices",))
        except ShardingError as error:
            raise pytest.UsageError(f"--spmd-devices={count}: {error}") from error


def _devices_said(config: pytest.Config) -> int | None:
    """What the option, or else the setting, says."""
    option = config.getoption("--spmd-devices")
    if option is not None:
        return option
    setting = config.getini("spmd_devices")
    if not setting:
        return None
    if not str(setting).isdecimal():
        raise pytest.UsageError(f"spmd_devices must be a number of devices, not {setting!r}")
    return int(setting)


@pytest.fixture
def spmd_mesh(request: pytest.FixtureRequest) -> DeviceMesh:
    """A mesh of simulated CPU devices: data=2 × model=4, or as the marker ``spmd_mesh`` says."""
    marker = request.node.get_closest_marker("spmd_mesh")
    said = _devices_said(request.config)
    axes = _usual_axes(said) if marker is None else dict(marker.kwargs)
    if marker is not None and (marker.args or not axes):
        pytest.fail("name the axes and their sizes: @pytest.mark.spmd_mesh(data=2, model=4)", False)
    if said is None:
        simulate.request_cpu_devices(USUAL_DEVICES)
    try:
        mesh = DeviceMesh.simulate(tuple(axes.values()), tuple(axes))
        _ = mesh.devices  # so that too few devices are this fixture's error, not the test's
        return mesh
    except ShardingError as error:
        problem = str(error)
    size = prod(axes.values())
    setting = f"run pytest with --spmd-devices={size} or set spmd_devices = {size} for it."
    pytest.fail(f"{problem}\n  In tests: {setting}", pytrace=False)


def _usual_axes(devices: int | None) -> dict[str, int]:
    """Those of a test that names none, over no more devices than the run says."""
    if devices is None or devices >= USUAL_DEVICES:
        return USUAL_AXES
    data = 2 if devices % 2 == 0 else 1
    return {"data": data, "model": devices // data}
