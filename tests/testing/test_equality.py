"""assert_spmd_equal: what passes, and what it says about what doesn't."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pypto_spmd.testing import assert_spmd_equal


def decorated(serial, spmd=None):
    """Something with the surface of an @spmd function, the parallel side as the test wants it."""

    @functools.wraps(serial)
    def fn(*args, **kwargs):
        return (spmd or serial)(*args, **kwargs)

    def plan(*args, **kwargs):
        leaves = jax.tree.leaves((args, kwargs))
        assert not any(isinstance(leaf, jax.Array) for leaf in leaves), "it may be donated"
        layouts = {f"x{i}": f"[{', '.join('-' * leaf.ndim)}]" for i, leaf in enumerate(leaves)}
        return SimpleNamespace(in_layouts=layouts, out_layouts={"result": "[data]"})

    fn.plan = plan
    return fn


def step(x):
    return {"loss": x.sum(), "x": x * 2}


def message(fn, *args, **kwargs):
    with pytest.raises(AssertionError) as caught:
        assert_spmd_equal(fn, *args, **kwargs)
    return str(caught.value)


def test_equal_to_rounding():
    x = np.random.RandomState(0).randn(4096).astype(np.float32)
    other_order = decorated(lambda a: a.cumsum(), lambda a: a.cumsum(dtype=float).astype(a.dtype))
    assert (other_order(x) != other_order.__wrapped__(x)).any(), "a rounding difference is wanted"
    assert_spmd_equal(other_order, x)


def test_sums_that_cancel_are_measured_by_the_largest_element():
    x = np.array([1e4, 1.0], np.float32)
    fn = decorated(lambda a: a - 1e4, lambda a: a - 1e4 + np.float32([0.0, 0.05]))
    assert_spmd_equal(fn, x)
    assert "1 of 2 elements not equal to rtol=0, atol=0.01" in message(fn, x, rtol=0, atol=0.01)


@pytest.mark.parametrize("dtype", [np.float64, np.complex64, ml_dtypes.bfloat16, np.float16])
def test_tolerances_are_of_the_dtype(dtype):
    x = np.array([1.0, -3.0], dtype)
    eps = float(ml_dtypes.finfo(dtype).eps)
    wide = complex if dtype is np.complex64 else float
    for roundings, is_equal in ((2, True), (1e6, False)):
        off = functools.partial(
            lambda factor, a: (a.astype(wide) * factor).astype(dtype), 1 + roundings * eps
        )
        fn = decorated(lambda a: a, off)
        if is_equal:
            assert_spmd_equal(fn, x)
        else:
            assert "2 of 2 elements not equal" in message(fn, x)


def test_nan_and_infinity_are_equal_in_their_places_only():
    x = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    assert_spmd_equal(decorated(lambda a: a), x)
    text = message(decorated(lambda a: a, lambda a: a[::-1].copy()), x)
    assert "(f32[4]): 4 of 4 elements not equal" in text
    text = message(decorated(lambda a: a, lambda a: np.where(np.isnan(a), 0, a)), x)
    assert (
        "1 of 4 elements not equal to rtol=2e-05, atol=2e-05, the largest error nan at [0]" in text
    )


def test_integers_bools_and_keys_are_equal_exactly():
    key = jax.random.key(0)
    assert_spmd_equal(decorated(lambda k: (k, 3, np.arange(4) > 2)), key)
    text = message(decorated(lambda k: k, lambda k: jax.random.fold_in(k, 1)), key)
    assert "(u32[2]): 2 of 2 elements not equal exactly" in text
    text = message(decorated(lambda a: a, lambda a: a + np.array([0, 1])), np.array([5, 6]))
    assert text == (
        "@spmd function '<lambda>' differs from the serial function.\n"
        "  result (i64[2]): 1 of 2 elements not equal exactly at [1]: 7 where the serial one has "
        "6.\n"
        "  argument x0 was laid out as [-].\n"
        "  result was laid out as [data]."
    )


def test_python_numbers_have_no_width():
    """As the step count of a flax `TrainState`, which starts as an int."""
    x = np.zeros(2)
    assert_spmd_equal(decorated(lambda x: 3, lambda x: jnp.int32(3)), x)
    assert_spmd_equal(decorated(lambda x: 0.1, lambda x: jnp.float32(0.1)), x)
    assert "not equal exactly" in message(decorated(lambda x: 3, lambda x: jnp.int32(4)), x)
    assert "is i32[]" in message(decorated(lambda x: 3.0, lambda x: jnp.int32(3)), x)


def test_the_leaf_the_error_and_the_layouts_are_named():
    x = jnp.ones((4, 8), np.float32)

    def wrong(x):
        return {"loss": x.sum() + 1, "x": (x * 2).at[2, 3].add(0.5)}

    text = message(decorated(step, wrong), x)
    assert text == (
        "@spmd function 'step' differs from the serial function.\n"
        "  result['loss'] (f32[]): 1 of 1 element not equal to rtol=2e-05, atol=0.00064, the "
        "largest error 1 at []: 33.0 where the serial one has 32.0.\n"
        "  result['x'] (f32[4,8]): 1 of 32 elements not equal to rtol=2e-05, atol=4e-05, the "
        "largest error 0.5 at [2, 3]: 2.5 where the serial one has 2.0.\n"
        "  argument x0 was laid out as [-, -].\n"
        "  result was laid out as [data]."
    )


@pytest.mark.parametrize(
    ("spmd", "problem"),
    [
        (lambda x: {"loss": x.sum()}, "result['x'] is missing."),
        (
            lambda x: {**step(x), "y": x},
            "result['y'] is there, which the serial function doesn't return.",
        ),
        (lambda x: {**step(x), "x": x[:2]}, "result['x'] is f32[2,8], the serial one f32[4,8]."),
        (
            lambda x: {**step(x), "x": x.astype(np.float64)},
            "result['x'] is f64[4,8], the serial one f32[4,8].",
        ),
    ],
)
def test_structure_shape_and_dtype(spmd, problem):
    x = np.ones((4, 8), np.float32)
    assert message(decorated(step, spmd), x).splitlines()[1] == f"  {problem}"


def test_containers_of_another_kind():
    text = message(decorated(lambda x: (x, x), lambda x: [x, x]), np.ones(2))
    assert "it returns PyTreeDef([*, *]), not PyTreeDef((*, *))." in text


def test_a_serial_function_that_writes_into_its_argument():
    def serial(x):
        x += 1
        return x

    x = np.zeros(3)
    assert_spmd_equal(decorated(serial, lambda x: x + 1), x)
    assert x.tolist() == [0, 0, 0]


def test_keywords_and_donated_arguments():
    serial = lambda x, *, scale: x * scale  # noqa: E731
    fn = decorated(serial, jax.jit(serial, donate_argnames="x"))
    assert_spmd_equal(fn, x=jnp.ones(4), scale=2.0)
    wrong = decorated(serial, jax.jit(lambda x, scale: x + scale, donate_argnames="x"))
    assert "4 of 4 elements" in message(wrong, x=jnp.ones(4), scale=np.float32(2.0))
