"""The examples in docstrings run."""

import doctest
import importlib
from pathlib import Path

import pytest

import pypto_spmd

PACKAGE = Path(pypto_spmd.__file__).parent
MODULES = sorted(
    ".".join(("pypto_spmd", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in PACKAGE.rglob("*.py")
    if not path.name.startswith("__") and ">>>" in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    results = doctest.testmod(importlib.import_module(name), extraglobs=vars(pypto_spmd))
    assert results.attempted
    assert results.failed == 0
