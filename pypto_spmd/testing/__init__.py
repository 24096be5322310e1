"""For tests of ``@spmd`` functions, in this project and in others: fake meshes and equality."""

from pypto_spmd.testing.equality import assert_spmd_equal

__all__ = ["assert_spmd_equal"]
