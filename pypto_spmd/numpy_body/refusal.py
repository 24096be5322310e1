"""What NumPy code can't do while it is traced, told with the user's line and what to use instead."""

import linecache
import sys
from contextvars import ContextVar
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np

from pypto_spmd.errors import Fault, raise_faults, spmd_function

BODY_NAME: ContextVar[str] = ContextVar("BODY_NAME", default="<NumPy body>")

_INSIDE = tuple(
    str(Path(module_file).parent) for module_file in (__file__, np.__file__, jax.__file__)
)


def refuse(what: str, fix: str, why: str = "") -> NoReturn:
    """Raise, naming the line of the user's code that is running.

    Args:
        what: what was tried, in words that go on with "at file:line".
        fix: what to do instead.
        why: why it can't be; by default that a traced array has no values.

    Raises:
        ShardingError: always.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    path, line = frame.f_code.co_filename, frame.f_lineno
    code = linecache.getline(path, line).strip()
    shown = f" ({code})" if code else ""
    fault = Fault(
        what=f"{what} at {Path(path).name}:{line}{shown}.",
        why=why or "While the function is traced, its arrays have shapes and dtypes but no values.",
        fix=fix,
    )
    raise_faults(spmd_function(BODY_NAME.get()), [fault])
    raise AssertionError("one fault always raises")
