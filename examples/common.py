"""What both training examples need: a mesh from the command line, and batches to it."""

import argparse
from math import prod

import numpy as np

from pypto_spmd import DeviceMesh


def mesh_from(text: str) -> DeviceMesh:
    """The mesh that `data=4,model=2` names: this machine's devices, simulated ones on a CPU."""
    axes = dict(part.split("=") for part in text.split(","))
    sizes = [int(size) for size in axes.values()]
    return DeviceMesh(np.arange(prod(sizes)).reshape(sizes), tuple(axes))


def mesh_argument(parser: argparse.ArgumentParser, usual: str) -> None:
    """Adds `--mesh`, with the axes `data` and `model`."""
    text = f"sizes of the mesh axes data and model (default: {usual})"
    parser.add_argument(
        "--mesh", type=mesh_from, default=usual, metavar="data=N,model=M", help=text
    )
