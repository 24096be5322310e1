"""Dims that mesh axes do not divide: stored padded inside a program, true at its boundary."""

from pypto_spmd.collectives.padding.boundary import Uneven, is_uneven, pad_inner, pad_uneven

__all__ = ["Uneven", "is_uneven", "pad_inner", "pad_uneven"]
