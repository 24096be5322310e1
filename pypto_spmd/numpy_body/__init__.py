"""Serial functions written in NumPy, traced as `jax.numpy` with NumPy's dtypes and semantics."""

from pypto_spmd.numpy_body.choice import numpy_body
from pypto_spmd.numpy_body.evidence import uses_no_library, uses_numpy
from pypto_spmd.numpy_body.rewrite import as_jax

__all__ = ["as_jax", "numpy_body", "uses_no_library", "uses_numpy"]
