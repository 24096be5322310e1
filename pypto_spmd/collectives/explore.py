"""What another layout of an argument would cost: min-marginals of the inferred problem."""

from collections.abc import Callable, Sequence

from pypto_spmd.collectives.inference import input_marginals
from pypto_spmd.collectives.request import Labelling, Request


def explorer(
    request: Request, labelling: Labelling, names: Sequence[str]
) -> Callable[[str], dict[str, float]]:
    """A function from an argument's path to the extra cost of each of its labels on each axis."""

    def explore(path: str) -> dict[str, float]:
        position = names.index(path)
        found = {}
        for axis in labelling.axes:
            for label, cost in input_marginals(request, labelling, axis, position).items():
                # Tie-breakers are fractions of a byte, and nothing that a reader should see.
                found[f"{axis}: {label}"] = float(round(cost))
        return found

    return explore
