"""The examples as modules, and as programs."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="session")
def example():
    """Imports an example by its name; examples import one another from their own folder."""
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="session")
def run():
    """Runs an example as a reader would, in another folder, on devices that it makes itself."""

    def run(script, *options):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *(p for p in sys.path if p)])}
        for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
            environment.pop(name, None)
        done = subprocess.run(
            [sys.executable, EXAMPLES / script, *map(str, options)],
            env=environment, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Warning" not in done.stderr, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def figure():
    """The number that a line of an example's output has."""

    def figure(pattern, text):
        found = re.search(pattern, text)
        assert found is not None, text
        return float(found.group(1))

    return figure
