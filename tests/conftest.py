"""What tests of several folders use."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

START = """
import sys
import jax
process, port, devices = map(int, sys.argv[1:4])
jax.config.update("jax_num_cpu_devices", devices)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, process)
"""
"""What a process starts with; its own arguments come behind the first three."""


@pytest.fixture
def in_two_processes() -> Callable[..., list[str]]:
    """Runs code in two processes of one JAX program, as on two hosts.

    The function takes the code, the number of devices of each process, and what the code finds in
    `sys.argv[4:]`, and gives the last line that each process prints. The code knows its `process`.
    """

    def run(code: str, devices: int, *arguments: str) -> list[str]:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", START + code, str(i), str(port), str(devices), *arguments],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for i in range(2)
        ]  # fmt: skip
        try:
            told = [process.communicate(timeout=200) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, (_, errors) in zip(processes, told, strict=True):
            assert process.returncode == 0, errors
        return [printed.splitlines()[-1] for printed, _ in told]

    return run
