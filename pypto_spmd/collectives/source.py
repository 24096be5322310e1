"""Where an equation comes from: `file.py:line` in the user's own code.

Frames of JAX, flax, optax and of this package are not the user's. An equation inside a library's jitted
helper has no user frame of its own and takes that of the call it stands in.
"""

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jax.extend import source_info_util

_LIBRARIES = ("flax", "optax", "orbax", "chex", "pypto_spmd")


@lru_cache(maxsize=1)
def exclude_libraries() -> None:
    """Tells JAX once that frames of the libraries around it are not the user's."""
    for name in _LIBRARIES:
        spec = importlib.util.find_spec(name)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            source_info_util.register_exclusion(str(place))


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A place in user code, worked out only when asked, since few equations are.

    Args:
        info: JAX's source info of the equation.
        enclosing: the source of the call that the equation was inlined from.
    """

    info: Any
    enclosing: "Source | None" = None

    @staticmethod
    def of(info: Any, enclosing: "Source | None") -> "Source":
        """The source of an equation, cheaply."""
        return Source(info, enclosing)

    @staticmethod
    def unknown() -> "Source":
        """The source of what the user did not write."""
        return Source(None)

    def __str__(self) -> str:
        """`file.py:line`, or "" if no user code is known."""
        exclude_libraries()
        place: Source | None = self
        while place is not None:
            if place.info is not None:
                text = _summary(place.info.traceback)
                if text:
                    return text
            place = place.enclosing
        return ""


@lru_cache(maxsize=100_000)
def _summary(traceback: Any) -> str:
    if traceback is None:
        return ""
    info = source_info_util.new_source_info().replace(traceback=traceback)
    text = source_info_util.summarize(info)  # "/path/file.py:12:8 (function)"
    path, _, rest = text.partition(":")
    if not path:
        return ""
    line = rest.split(":")[0].split(" ")[0]
    return f"{Path(path).name}:{line}"


def said_here(subject: str) -> str:
    """What an error is about, with the user's line that runs now where that is known."""
    place = str(Source(source_info_util.current()))
    return f"{subject} at {place}" if place else subject
