"""For tests of ``@spmd`` functions, in this project and in others: fake meshes, equality, and rules."""

from pypto_spmd.testing.equality import assert_spmd_equal
from pypto_spmd.testing.rule_truth import RuleReport, check_rule

__all__ = ["RuleReport", "assert_spmd_equal", "check_rule"]
