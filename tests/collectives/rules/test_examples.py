"""The example of every rule, on shards."""

import jax
import pytest

from pypto_spmd.collectives.rules.examples import EXAMPLES, Example
from pypto_spmd.testing import check_rule

NOT_RUN = {
    "ffi_call": "there is no such target",
    "mulhi": "CPUs have none",
}


ACCEPTED = {
    "nextafter": "what it changes is below the test's tolerance, so that it passes for a sum",
    "optimization_barrier": "partial values are reduced first, since a recomputation would reduce them again",
    "pallas_call": "the kernel has no rule",
    "random_seed": "the words of keys are no numbers that somebody adds",
    "random_wrap": "the words of keys are no numbers that somebody adds",
    "scaled_dot": "values of 8 bits are no sums",
    "symmetric_product": "in the example the second operand counts for nothing: beta is 0",
}
"""Primitives of whose rules a labelling is missing that would be right, and why it may be."""

CRASHES = {"ormqr"}
"""LAPACK ends the process over operands that do not fit."""


def is_here(name: str, example: Example) -> bool:
    """Whether this version of JAX has the primitive, and it can run outside a region."""
    if name in NOT_RUN or example.axes:
        return False
    try:
        example.equation(name)
    except LookupError:
        return False
    return True


HERE = [name for name, example in EXAMPLES.items() if is_here(name, example)]


@pytest.mark.parametrize("name", HERE)
def test_rule_of_the_example(name: str):
    example = EXAMPLES[name]
    report = check_rule(
        example.function, *example.args, primitives=[name], mesh_shapes=[(2, 2)], most_nested=2
    )
    report.check()
    can_split = any(f.size > 1 for f in example.shown(name).rule.factors if f.splittable)
    assert report.checked > 1 or not can_split


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HERE if name not in CRASHES])
def test_no_right_labelling_is_missing(name: str):
    example = EXAMPLES[name]
    report = check_rule(
        example.function, *example.args, primitives=[name], mesh_shapes=[], incomplete=True
    )
    assert bool(report.incomplete) == (name in ACCEPTED), str(report)


def test_as_many_examples_as_primitives():
    assert len(HERE) > 150, jax.__version__
