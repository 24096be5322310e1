"""Rules of slices, pads and updates: the truth on shards, and that no more is sent than must be."""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pypto_spmd.collectives.rules import Aval, Rule, rule_for
from pypto_spmd.collectives.rules.halo import parts
from pypto_spmd.testing.rule_truth import check_rule


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def boolean(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


def int_(value: int, dtype: Any = jnp.int32) -> jax.Array:
    return jnp.asarray(value, dtype)


def padded(low: int, high: int, interior: int = 0, value: float = 0.0) -> Callable[..., Any]:
    return lambda a: lax.pad(a, np.float32(value), [(low, high, interior)])


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "half of a dim": (lambda a: a[:, :24], (f32(3, 48),)),
    "the other half": (lambda a: a[24:], (f32(48),)),
    "a middle that straddles blocks": (lambda a: a[5:45], (f32(48),)),
    "two dims": (lambda a: a[3:19, 1:17], (f32(24, 24),)),
    "every other": (lambda a: a[::2], (boolean(48),)),
    "every third, from the second": (lambda a: a[1::3], (f32(48),)),
    "one row": (lambda a: a[5:6], (f32(24, 8),)),
    "all but the last": (lambda a: a[:-1], (f32(24),)),
    "a row of bools": (lambda a: a[5:6], (boolean(24),)),
    "pad": (padded(3, 5), (f32(8),)),
    "pad with ones": (padded(3, 5, value=1.0), (f32(8),)),
    "pad before": (padded(24, 0), (f32(24),)),
    "shift by padding": (padded(-3, 3), (f32(24),)),
    "crop by padding": (padded(-3, -5, value=1.0), (f32(24),)),
    "pad between, in step": (padded(1, 0, 1), (f32(8),)),
    "pad between, in step and beyond": (padded(5, 2, 2, value=1.0), (f32(6),)),
    "pad between, in step and before": (padded(-7, 8, 1), (f32(12),)),
    "pad between": (padded(1, 0, 1), (f32(24),)),
    "pad between, and crop": (padded(-2, -5, 2, value=1.0), (f32(13),)),
    "pad by a traced value": (
        lambda a, v: lax.pad(a, v, [(8, 8, 0), (1, 0, 0)]),
        (f32(8, 8), f32()),
    ),
    "dynamic slice of a dim": (
        lambda a, i: lax.dynamic_slice(a, (i, 0), (5, 8)),
        (f32(24, 8), int_(9)),
    ),
    "dynamic slice beyond the end": (
        lambda a, i: lax.dynamic_slice(a, (i,), (5,)),
        (f32(24), int_(100)),
    ),
    "dynamic slice larger than a block": (
        lambda a, i: lax.dynamic_slice(a, (i,), (17,)),
        (f32(24), int_(2, jnp.int8)),
    ),
    "dynamic row of bools": (
        lambda a, i: lax.dynamic_slice(a, (i,), (1,)),
        (boolean(24), int_(23, jnp.uint8)),
    ),
    "dynamic update": (
        lambda a, b, i: lax.dynamic_update_slice(a, b, (i, 0)),
        (f32(24, 8), f32(5, 8), int_(9)),
    ),
    "dynamic update beyond the end": (
        lambda a, b, i: lax.dynamic_update_slice(a, b, (i,)),
        (f32(24), f32(5), int_(100)),
    ),
    "dynamic update larger than a block": (
        lambda a, b, i: lax.dynamic_update_slice(a, b, (i,)),
        (f32(24), f32(17), int_(2, jnp.uint8)),
    ),
    "dynamic update in two dims": (
        lambda a, b, i: lax.dynamic_update_slice(a, b, (i, i)),
        (f32(24, 16), f32(5, 9), int_(4)),
    ),
}
PRIMITIVES = ("slice", "pad", "dynamic_slice", "dynamic_update_slice")


@pytest.mark.parametrize("name", CASES)
def test_against_the_truth(name: str):
    function, args = CASES[name]
    report = check_rule(function, *args, primitives=PRIMITIVES, most_nested=12)
    assert report.checked
    assert not report.wrong, str(report)


def test_indices_of_64_bits():
    with jax.enable_x64(True):
        report = check_rule(
            lambda a, b, i: lax.dynamic_update_slice(
                lax.dynamic_slice(a, (i, 0), (16, 8)), b, (i, i)
            ),
            f32(24, 8),
            f32(3, 4),
            jnp.asarray(3, jnp.int64),
            primitives=PRIMITIVES,
            most_nested=12,
        )
    assert not report.wrong, str(report)


def sent(rule: Rule, factor: str, shards: int) -> list[float]:
    """Elements that each exchange of a factor sends when only that factor is split."""
    index = rule.factor(factor)
    sizes = [f.size // (shards if i == index else 1) for i, f in enumerate(rule.factors)]
    return [e.full_elements(sizes, shards) for e in rule.factors[index].exchanges_for(shards)]


def avals(*shapes: tuple[int, ...]) -> tuple[Aval, ...]:
    return tuple(Aval(shape, np.dtype("float32")) for shape in shapes)


def pad_rule(size: int, low: int, high: int) -> Rule:
    params = {"padding_config": ((low, high, 0), (0, 0, 0))}
    return rule_for("pad", params, avals((size, 10), ()), avals((size + low + high, 10)))


def slice_rule(size: int, start: int, limit: int, stride: int = 1) -> Rule:
    params = {"start_indices": (start,), "limit_indices": (limit,), "strides": (stride,)}
    return rule_for("slice", params, avals((size,)), avals(((limit - start) // stride,)))


def test_a_shift_sends_the_rows_that_change_owner():
    assert sent(pad_rule(64, 3, -3), "d0", 8) == [30.0]
    assert sent(pad_rule(64, -3, 3), "d0", 8) == [30.0]


def test_a_shift_by_whole_blocks_sends_whole_blocks():
    assert sent(pad_rule(64, 16, -16), "d0", 8) == [80.0]


def test_aligned_slices_send_nothing():
    assert sent(slice_rule(64, 0, 64, 2), "d0", 8) == []


def test_half_a_dim_is_spread_over_all_devices():
    # Blocks of 16 rows are wanted as blocks of 8: the first from the first, the others move.
    assert sent(slice_rule(64, 0, 32), "d0", 4) == [8.0, 8.0]


def test_few_rows_are_read_and_not_fetched():
    rule = slice_rule(64, 8, 16)
    assert str(rule) == "d0 -> _"
    assert rule.factors[0].reduce == "sum"


def test_parts_of_windows_are_in_bounds():
    random = np.random.default_rng(0)
    for _ in range(200):
        pieces, block, length = (int(n) for n in random.integers(1, 7, 3))
        starts = tuple(int(n) for n in random.integers(-10, pieces * block + 10, pieces))
        whole = np.arange(pieces * block)
        windows = np.full((pieces, length), -1)
        for part in parts(block, starts, length):
            for (source, piece), offset, position in zip(
                part.pairs, part.offsets, part.positions, strict=True
            ):
                assert source == piece + part.shift
                assert 0 <= offset <= block - part.size
                for row in range(part.size):
                    if 0 <= position + row < length:
                        windows[piece, position + row] = whole[source * block + offset + row]
        for piece, start in enumerate(starts):
            rows = np.arange(start, start + length)
            inside = (rows >= 0) & (rows < prod((pieces, block)))
            assert np.array_equal(windows[piece], np.where(inside, rows, -1))
