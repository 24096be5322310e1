"""The pytest plugin, as a project that has the package installed sees it."""

import os
import subprocess
import sys

import pytest

from pypto_spmd import DeviceMesh


def test_this_project_runs_on_eight_devices(spmd_mesh):
    assert spmd_mesh == DeviceMesh.simulate((2, 4), ("data", "model"))


@pytest.mark.spmd_mesh(row=3, col=1, depth=2)
def test_the_marker_names_the_axes(spmd_mesh):
    assert dict(spmd_mesh.shape) == {"row": 3, "col": 1, "depth": 2}


@pytest.mark.spmd_mesh(data=8)
class TestMarkedClass:
    def test_has_the_mesh_of_its_class(self, spmd_mesh):
        assert dict(spmd_mesh.shape) == {"data": 8}

    @pytest.mark.spmd_mesh(data=2)
    def test_the_closest_marker_counts(self, spmd_mesh):
        assert dict(spmd_mesh.shape) == {"data": 2}


def pytest_run(folder, test, *options, settings=""):
    """What pytest prints for one test file of another project, and its exit code."""
    (folder / "test_it.py").write_text(test)
    (folder / "pytest.ini").write_text(f"[pytest]\nfilterwarnings = error\n{settings}\n")
    plugin = "-ppypto_spmd.testing.plugin"
    command = [sys.executable, "-m", "pytest", plugin, "-pno:cacheprovider", "-q", *options]
    # Other plugins would only cost time; that the entry point is there, this run itself shows.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, check=False
    )
    return done.stdout + done.stderr, done.returncode


COUNT = "import jax\ndef test_count():\n    assert jax.device_count() == {}\n"
USE = "def test_use(spmd_mesh):\n    assert spmd_mesh.devices.shape == (2, 4)\n"


@pytest.mark.parametrize(
    ("test", "options", "settings"),
    [
        (COUNT.format(1), (), ""),  # a run that asks for nothing is left alone
        (COUNT.format(5), (), "spmd_devices = 5"),
        (COUNT.format(6), ("--spmd-devices=6",), "spmd_devices = 5"),
        (USE + COUNT.format(8), (), ""),  # the fixture makes the usual eight
        (USE.replace("(2, 4)", "(2, 2)") + COUNT.format(4), ("--spmd-devices=4",), ""),
        (USE.replace("(2, 4)", "(1, 3)") + COUNT.format(3), (), "spmd_devices = 3"),
    ],
)
def test_how_many_devices_there_are(tmp_path, test, options, settings):
    printed, code = pytest_run(tmp_path, test, *options, settings=settings)
    assert code == 0, printed


def test_too_few_devices(tmp_path):
    printed, code = pytest_run(tmp_path, COUNT.format(1) + USE)
    assert code == 1
    assert "1 passed, 1 error" in printed
    assert (
        "DeviceMesh: the mesh needs device 7, so 8 devices, but there is 1 device.\n"
        "  JAX's backend is up already, and keeps the number of devices it started with.\n"
        in printed
    )
    assert "  In tests: run pytest with --spmd-devices=8 or set spmd_devices = 8 for it." in printed
    assert "another exception occurred" not in printed


def test_a_backend_that_is_up_before_the_run_is_configured(tmp_path):
    (tmp_path / "early.py").write_text("import jax; jax.devices()")
    printed, code = pytest_run(tmp_path, USE, "-pearly", "--spmd-devices=8")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "--spmd-devices=8: DeviceMesh: the mesh needs device 7, so 8 devices" in printed


def test_a_setting_that_is_no_number(tmp_path):
    printed, code = pytest_run(tmp_path, USE, settings="spmd_devices = many")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "spmd_devices must be a number of devices, not 'many'" in printed


def test_a_marker_without_names(tmp_path):
    tests = "".join(
        f"@pytest.mark.spmd_mesh({arguments})\n{USE.replace('use', f'use_{number}')}"
        for number, arguments in enumerate(("", "2, 4", "2, data=4"))
    )
    printed, code = pytest_run(tmp_path, f"import pytest\n{tests}")
    assert code == 1
    assert "3 errors" in printed
    wanted = "name the axes and their sizes: @pytest.mark.spmd_mesh(data=2, model=4)"
    assert printed.count(f"\n{wanted}") == 3
