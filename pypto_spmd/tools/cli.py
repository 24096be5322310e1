"""The command `pypto`: one subcommand a module.

A subcommand's module has `NAME`, `HELP`, `add_arguments(parser)` and `run(arguments) -> exit code`, and is
listed in `COMMANDS`. It imports what it needs when it runs, so that `pypto --help` is quick.

Exit codes: 0 for success, 1 if what was asked for is not there or not so, 2 for wrong usage.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from pypto_spmd.errors import ShardingError
from pypto_spmd.tools import rules

FAILED = 1
"""Exit code where what was asked for is not there or not so."""


class Command(Protocol):
    """What a subcommand's module has."""

    @property
    def NAME(self) -> str:
        """What it is called."""
        ...

    @property
    def HELP(self) -> str:
        """What it does, as a clause."""
        ...

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None:
        """Adds the subcommand's arguments to its parser."""

    def run(self, arguments: argparse.Namespace, /) -> int:
        """Does it, and gives the exit code."""
        ...


COMMANDS: tuple[Command, ...] = (rules,)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="pypto",
        description="Serial array code in, communication plan out, run on a mesh of devices.",
    )
    parser.add_argument("--version", action="version", version=f"pypto_spmd {_version()}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.NAME, help=command.HELP, description=command.HELP[0].upper() + command.HELP[1:]
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
    except ShardingError as error:
        print(f"pypto: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # The reader has seen enough, as `head` does. What is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code


def _version() -> str:
    try:
        return version("pypto_spmd")
    except PackageNotFoundError:
        return "(not installed)"
