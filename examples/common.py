"""What both training examples need: a mesh from the command line."""

import argparse
from math import prod

import numpy as np

from pypto_spmd import DeviceMesh


def mesh_argument(parser: argparse.ArgumentParser, usual: str) -> None:
    """Adds `--mesh`, which `mesh_of` understands."""
    text = f"sizes of the mesh axes data and model (default: {usual})"
    parser.add_argument("--mesh", default=usual, type=_axes, metavar="data=N,model=M", help=text)


def mesh_of(axes: dict[str, int]) -> DeviceMesh:
    """A mesh of this machine's devices, which are simulated where there is only a CPU."""
    sizes = tuple(axes.values())
    return DeviceMesh(np.arange(prod(sizes)).reshape(sizes), tuple(axes))


def _axes(text: str) -> dict[str, int]:
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {axis: int(size) for axis, size in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like data=4,model=2") from None
