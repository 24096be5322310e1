"""The form of messages, word for word."""

import ml_dtypes
import numpy as np
import pytest

from pypto_spmd import ShardingError
from pypto_spmd.errors import (
    Fault,
    divisibility_fix,
    divisors_near,
    listed,
    quoted,
    raise_faults,
    shape_text,
    spmd_function,
)

INDIVISIBLE = Fault(
    "argument 'x' has shape f32[10,4].",
    "PartitionSpec('data', None) splits dim 0 (size 10) over mesh axis 'data' (size 4), "
    "which does not divide it.",
    divisibility_fix(0, 10, 4, 1, "PartitionSpec(None, None)"),
)


def test_one_fault_follows_the_function():
    with pytest.raises(ShardingError) as caught:
        raise_faults(spmd_function("train_step"), [INDIVISIBLE])
    assert str(caught.value) == (
        "@spmd function 'train_step': argument 'x' has shape f32[10,4].\n"
        "  PartitionSpec('data', None) splits dim 0 (size 10) over mesh axis 'data' (size 4), "
        "which does not divide it.\n"
        "  Fix: pad dim 0 to 12, use an axis of size 1, 2, 5 or 10, or leave the dim whole: "
        "PartitionSpec(None, None)."
    )
    assert caught.value.faults == (INDIVISIBLE,)
    assert isinstance(caught.value, ValueError)


def test_several_faults_are_numbered_in_one_error_and_none_is_told_twice():
    other = Fault("b is 2.", "It was to be 1.", "make it 1.")
    with pytest.raises(ShardingError) as caught:
        raise_faults("DeviceMesh", [other, INDIVISIBLE, other])
    lines = str(caught.value).splitlines()
    assert lines[:5] == [
        "DeviceMesh: 2 things are wrong.",
        "  1. b is 2.",
        "     It was to be 1.",
        "     Fix: make it 1.",
        "  2. argument 'x' has shape f32[10,4].",
    ]
    assert len(lines) == 7


def test_of_very_many_faults_ten_are_told():
    faults = [Fault(f"leaf {i} is bad.", "So it is.", "mend it.") for i in range(200)]
    with pytest.raises(ShardingError) as caught:
        raise_faults("f", faults)
    lines = str(caught.value).splitlines()
    assert lines[0] == "f: 200 things are wrong."
    assert lines[-1] == "  ... and 190 more."
    assert len(lines) == 1 + 10 * 3 + 1
    assert len(caught.value.faults) == 200


def test_no_fault_raises_nothing():
    raise_faults("f", [])


@pytest.mark.parametrize(
    ("size", "wanted", "divisors"),
    [
        (10, 4, (1, 2, 5, 10)),
        (1, 4, (1,)),
        (19, 4, (1, 19)),
        (4096, 3, (1, 2, 4, 8, 16, 32)),
        (3600, 7, (5, 6, 8, 9, 10, 12)),
    ],
)
def test_the_divisors_told_are_those_near_the_wanted_size(size, wanted, divisors):
    assert divisors_near(size, wanted) == divisors


def test_several_axes_are_told_by_their_product():
    assert divisibility_fix(1, 19, 8, 2, "PartitionSpec()") == (
        "pad dim 1 to 24, use axes whose sizes multiply to 1 or 19, or leave the dim whole: "
        "PartitionSpec()."
    )


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (np.float32, "f32[2,3]"),
        (np.dtype("float64"), "f64[2,3]"),
        (ml_dtypes.bfloat16, "bf16[2,3]"),
        (np.dtype(ml_dtypes.float8_e4m3fn), "f8_e4m3fn[2,3]"),
        (np.int32, "i32[2,3]"),
        (np.uint8, "u8[2,3]"),
        (np.bool_, "bool[2,3]"),
        (np.complex64, "c64[2,3]"),
    ],
)
def test_shapes_are_written_as_jax_writes_them(dtype, text):
    assert shape_text((2, 3), dtype) == text


def test_words():
    assert listed([]) == ""
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"], "or") == "a, b or c"
    assert quoted("x") == "'x'"
    assert quoted("params['w']") == "params['w']"
