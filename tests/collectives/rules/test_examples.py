"""The example of every rule, on shards."""

import jax
import pytest

from pypto_spmd.collectives.rules.examples import EXAMPLES, Example
from pypto_spmd.testing import check_rule

NOT_RUN = {
    "ffi_call": "there is no such target",
    "mulhi": "CPUs have none",
    "random_seed": "its operand is no array",
}


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


def test_as_many_examples_as_primitives():
    assert len(HERE) > 150, jax.__version__
