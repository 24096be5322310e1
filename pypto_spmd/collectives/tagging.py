"""Tag the collectives of a plan step, so that they can be found again in the optimized HLO.

The metadata survives every XLA pass, merged instructions included ("0,1"); the name scope shows in
profiles and backs the metadata up.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental.xla_metadata import set_xla_metadata

STEP_ATTRIBUTE = "spmd_step"


@contextmanager
def step_scope(index: int) -> Iterator[None]:
    """Tag every operation traced inside with the index of a plan step.

    Args:
        index: the index of the step in its plan.
    """
    with set_xla_metadata(**{STEP_ATTRIBUTE: index}), jax.named_scope(f"{STEP_ATTRIBUTE}{index}"):
        yield
