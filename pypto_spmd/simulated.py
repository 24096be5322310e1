"""Programs on simulated devices, one at a time.

The devices that JAX simulates on a CPU share its few threads. Each device of a program waits in a collective
for all others; with several programs under way the waiting ones can take every thread, and XLA ends the
process after 40 seconds. So before a program starts, the last one has to be through. On real devices
nothing waits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

_last: list[jax.Array] = []
"""One result of the last program."""


def one_at_a_time(run: Callable[..., Any], results: Sequence[Any]) -> Callable[..., Any]:
    """A compiled program that starts when the last one is through.

    Args:
        run: the program.
        results: its results, as avals.
    """
    if not results:
        return run
    # All results of a program are there at once; the smallest one is cheapest to hold on to.
    smallest = int(np.argmin([result.size for result in results]))

    def started(*values: Any) -> Any:
        for array in _last:
            if not array.is_deleted():
                array.block_until_ready()
        result = run(*values)
        _last[:] = [jax.tree.leaves(result)[smallest]]
        return result

    return started
