"""flax nnx modules as arguments: their arrays in, their new arrays out, and put back by reference.

An nnx function changes its modules in place: batch statistics, random counts, an optimizer's step. The
traced function is a pure one: it gets the modules' states, merges them with their graph, calls the
function, and gives the new states beside the result. All modules of a call are split together, so that
what they share stays shared.

Nothing here imports flax unless it is imported already, since otherwise no argument can be a module.
"""

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Modules:
    """The modules among the arguments of one call, without their arrays.

    Args:
        graph: their joint graph.
        places: their places among the arguments.
        live: the modules themselves, which get the new arrays.
    """

    graph: Any
    places: tuple[int, ...]
    live: tuple[Any, ...]

    @property
    def key(self) -> Hashable:
        """What a program depends on."""
        return (self.graph, self.places)

    def call(self, values: Sequence[Any], function: Callable[[list[Any]], Any]) -> tuple[Any, ...]:
        """Calls a function with modules in place of their states.

        Args:
            values: the arguments, states in place of modules.
            function: takes the arguments with the modules.

        Returns:
            The new states, and last the result.
        """
        nnx = sys.modules["flax.nnx"]
        joint = nnx.State({i: values[place] for i, place in enumerate(self.places)})
        modules = nnx.merge(self.graph, joint)
        arguments = list(values)
        for place, module in zip(self.places, modules, strict=True):
            arguments[place] = module
        result = function(arguments)
        _, states = nnx.split(modules)
        return (*_each(states, len(self.places)), result)

    def update(self, states: Sequence[Any]) -> None:
        """Puts new arrays into the modules."""
        nnx = sys.modules["flax.nnx"]
        nnx.update(self.live, nnx.State(dict(enumerate(states))))


def split_modules(values: Sequence[Any]) -> tuple[tuple[Any, ...], Modules | None]:
    """The arguments with states in place of modules, and the modules if there are any."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tuple(values), None
    places = tuple(i for i, value in enumerate(values) if isinstance(value, nnx.Pytree))
    if not places:
        return tuple(values), None
    live = tuple(values[i] for i in places)
    graph, joint = nnx.split(live)
    split = list(values)
    for place, state in zip(places, _each(joint, len(places)), strict=True):
        split[place] = state
    return tuple(split), Modules(graph, places, live)


def _each(joint: Any, count: int) -> list[Any]:
    """The state of each module; of one whose arrays are all shared with an earlier one, an empty one."""
    nnx = sys.modules["flax.nnx"]
    return [joint[i] if i in joint else nnx.State({}) for i in range(count)]
