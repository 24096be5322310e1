"""Callbacks in decorated functions: once for a call, with the whole value, in order where that is asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

from pypto_spmd import DeviceMesh, PartitionSpec, ShardingError, local, spmd

MESH = DeviceMesh.simulate((2, 4), ("data", "model"))
SPLIT = PartitionSpec("data", "model")
X = np.arange(32.0, dtype=np.float32).reshape(8, 4)
WAYS = pytest.mark.parametrize("lower_to", ["shard_map", "jit"])


def decorated(function, lower_to="shard_map", **options):
    return spmd(function, mesh=MESH, in_shardings=SPLIT, lower_to=lower_to, **options)


def lines(capfd, function, *args):
    """What one call prints."""
    jax.block_until_ready(function(*args))
    jax.effects_barrier()
    return capfd.readouterr().out.splitlines()


@WAYS
def test_a_print_comes_once_with_the_whole_value(lower_to, capfd):
    def run(x):
        jax.debug.print("sum {s}, row {r}", s=x.sum(), r=x[0])
        return x * 2

    assert lines(capfd, decorated(run, lower_to), X) == ["sum 496.0, row [0. 1. 2. 3.]"]


@WAYS
def test_debug_callback_gets_whole_arrays_once(lower_to):
    seen = []

    def run(x):
        jax.debug.callback(lambda y, *, name: seen.append((name, np.asarray(y))), x, name="x")
        return x

    jax.block_until_ready(decorated(run, lower_to)(X))
    jax.effects_barrier()
    ((name, value),) = seen
    assert name == "x"
    np.testing.assert_array_equal(value, X)


@WAYS
def test_derivatives_and_batches_print_as_often_as_the_serial_function(lower_to, capfd):
    def run(x):
        jax.debug.print("sum {s}", s=x.sum())
        return (x**2).sum()

    for transform, x in ((jax.grad, X), (jax.value_and_grad, X), (jax.vmap, np.stack([X, X]))):
        expected = lines(capfd, transform(run), x)
        assert lines(capfd, transform(decorated(run, lower_to)), x) == expected
    assert lines(capfd, decorated(jax.grad(run), lower_to), X) == ["sum 496.0"]


@WAYS
def test_ordered_actions_come_in_order_through_loops_and_branches(lower_to, capfd):
    def run(x):
        jax.debug.print("start", ordered=True)

        def trip(carry, row):
            jax.debug.print("row {s}", s=row.sum(), ordered=True)
            return carry + row.sum(), row.sum()

        total, sums = lax.scan(trip, 0.0, x)

        def halve(state):
            count, value = state
            jax.debug.callback(lambda c: print("half", c), count, ordered=True)
            return count + 1, value / 2

        count, total = lax.while_loop(lambda s: s[0] < 3, halve, (0, total))
        lax.cond(
            total > 0,
            lambda t: jax.debug.print("positive {t}", t=t, ordered=True),
            lambda t: jax.debug.print("negative {t}", t=t, ordered=True),
            total,
        )
        io_callback(lambda c: print("count", c), None, count, ordered=True)
        return sums, total

    rows = [f"row {s}" for s in X.sum(1)]
    halves = ["half 0", "half 1", "half 2"]
    printed = lines(capfd, decorated(run, lower_to), X)
    assert printed == ["start", *rows, *halves, "positive 62.0", "count 3"]


@WAYS
def test_what_a_callback_returns_is_on_all_devices(lower_to):
    calls = []

    def draw(x):
        calls.append(np.asarray(x))
        return np.asarray(x) * len(calls), np.bool_(True), np.int32(len(calls))

    def run(x):
        shapes = (
            jax.ShapeDtypeStruct((4,), np.float32),
            jax.ShapeDtypeStruct((), bool),
            jax.ShapeDtypeStruct((), np.int32),
        )
        row, yes, count = io_callback(draw, shapes, x.sum(0))
        return jnp.where(yes, x + row, 0) * count

    function = decorated(run, lower_to)
    np.testing.assert_allclose(function(X), X + X.sum(0))
    assert len(calls) == 1
    if lower_to == "shard_map":
        step = next(
            s for s in function.plan(X).steps if s.op == "io_callback" and "one device" in s.reason
        )
        assert (step.kind, step.axes, step.elements, step.tensors) == (
            "all_reduce", ("data", "model"), 6, 3,
        )  # fmt: skip
        assert step.reason == "io_callback runs on one device, and all need what it returns"
        function.verify(X)


def test_ordered_callbacks_with_values_come_in_order():
    calls = []

    def run(x):
        first = io_callback(
            lambda v: (calls.append("a"), v + 1)[1], X[0, :1], x[0, :1], ordered=True
        )
        second = io_callback(
            lambda v: (calls.append("b"), v * 2)[1], X[0, :1], x[0, 1:2], ordered=True
        )
        io_callback(lambda: calls.append("c"), None, ordered=True)
        return first - second

    function = decorated(run)
    np.testing.assert_allclose(function(X), [-1.0])
    jax.effects_barrier()
    assert calls == ["a", "b", "c"]
    function.verify(X)


@WAYS
def test_pure_callbacks_get_whole_values(lower_to):
    def run(x):
        whole = jax.pure_callback(np.cumsum, jax.ShapeDtypeStruct((32,), np.float32), x)
        return whole[-1] + x

    function = decorated(run, lower_to)
    np.testing.assert_allclose(function(X), X.sum() + X)
    if lower_to == "shard_map":
        function.verify(X)


def test_in_a_function_on_parts_each_device_acts(capfd):
    def whole(x, axis_names):
        def part(p):
            jax.debug.print("{s}", s=p.sum())
            return p

        spec = PartitionSpec("data")
        return local(part, spec, spec, axis_names=axis_names)(x)

    both = decorated(lambda x: whole(x, {"data", "model"}))
    assert sorted(lines(capfd, both, X)) == ["120.0"] * 4 + ["376.0"] * 4
    one = decorated(lambda x: whole(x, {"data"}))
    assert sorted(lines(capfd, one, X)) == ["120.0", "376.0"]


def too_small(x):
    checkify.check(x.sum() > 1000, "the sum is {s}", s=x.sum())
    return x * 2


@WAYS
def test_checks_are_of_whole_values_inside_and_outside(lower_to):
    inside = decorated(checkify.checkify(too_small), lower_to)
    outside = checkify.checkify(decorated(too_small, lower_to))
    for function in (inside, outside, jax.jit(outside)):
        error, result = function(X)
        assert error.get().startswith("the sum is 496.0 (`check` failed)")
        np.testing.assert_allclose(result, 2 * X)
        error, _ = function(X + 100)
        assert error.get() is None


def test_automatic_checks_look_inside():
    checked = checkify.checkify(decorated(lambda x: jnp.log(x - 5).sum()), checkify.float_checks)
    error, _ = checked(X)
    assert error.get().startswith("nan generated by primitive: log.")


def test_a_check_in_no_checkified_function_is_an_error():
    with pytest.raises(ShardingError) as error:
        decorated(too_small)(X)
    line = too_small.__code__.co_firstlineno + 1
    assert str(error.value) == (
        f"@spmd function 'too_small': checkify.check at test_effects.py:{line} is in no checkified "
        "function.\n"
        "  An error that depends on values is a result, which checkify.checkify makes of it.\n"
        "  Fix: put checkify.checkify around it, inside or outside of @spmd, and throw() the error that "
        "it returns."
    )


def test_a_call_on_known_arrays_in_a_compiled_function_is_part_of_it():
    function = decorated(lambda x: jnp.sin(x).sum())
    expected = np.sin(X).sum() + 1
    x = jnp.asarray(X)
    np.testing.assert_allclose(jax.jit(lambda y: function(x) + y)(1.0), expected, rtol=1e-5)
    function(x)
    np.testing.assert_allclose(jax.jit(lambda y: function(x) + y)(1.0), expected, rtol=1e-5)


@WAYS
def test_how_an_array_lies_is_told_as_planned(lower_to):
    seen = []

    def run(x):
        jax.debug.inspect_array_sharding(x * 2, callback=seen.append)
        return x + 1

    function = decorated(run, lower_to)
    np.testing.assert_array_equal(function(X), X + 1)
    (sharding,) = seen
    assert sharding.is_equivalent_to(jax.NamedSharding(MESH.jax_mesh, SPLIT), 2)
    function.plan(X).assert_counts()
