"""Which of JAX's primitives have no rule, and why."""

import jax
from jax.extend.core import Primitive, primitives

from pypto_spmd.collectives.rules import registered
from pypto_spmd.collectives.rules.filling import fill_end_p
from pypto_spmd.collectives.rules.splice import splice_p

BODY = "a call or a loop: the graph flattens it"
COLLECTIVE = "a collective whose sizes are known only when it runs"
MUTABLE = "reads or writes a mutable array"
TOKEN = "an ordering token, no array"

WITHOUT_RULE = {
    "after_all": TOKEN,
    "create_token": TOKEN,
    "ragged_all_to_all": COLLECTIVE,
    "cond": BODY,
    "custom_jvp_call": BODY,
    "custom_lin": BODY,
    "custom_linear_solve": BODY,
    "custom_vjp_call": BODY,
    "jit": BODY,
    "remat2": BODY,
    "scan": BODY,
    "while": BODY,
    "get": MUTABLE,
    "swap": MUTABLE,
    "rng_uniform": "gives other numbers on every call, so that no two devices would agree",
    "sharding_constraint": "a request for a layout, which the planner grants",
}
OF_SOME_VERSIONS = {"call": BODY, "closed_call": BODY, "eval_jaxpr": BODY}

WITH_RULE_BUT_NOT_PUBLIC = {
    "all_gather_invariant", "pbroadcast", "psum_invariant", "pvary", "reduce_scatter",
    "cholesky_update", "empty", "ffi_call", "geqp3", "geqrf", "log2", "lu_pivots_to_permutation", "mulhi",
    "one_minus_square", "optimization_barrier", "ormqr", "pallas_call", "polynomial",
    "ragged_dot_general", "random_clone", "random_unwrap", "random_wrap", "scatter-sub", "split", "stack",
    "symmetric_product", "tile", "unstack",
}  # fmt: skip
"""Primitives with a rule that `jax.extend` does not list, in all versions or in some."""


def public() -> set[str]:
    return {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}


def test_primitives_without_a_rule_are_those_of_the_table():
    missing = public() - set(registered())
    assert missing - set(OF_SOME_VERSIONS) == set(WITHOUT_RULE), jax.__version__


def test_rules_are_of_primitives_that_exist():
    own = {splice_p.name, fill_end_p.name}
    assert set(registered()) - public() - own <= WITH_RULE_BUT_NOT_PUBLIC
