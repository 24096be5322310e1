"""The truth test finds rules that are wrong, that misstate their collectives, and that lack something."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pypto_spmd.collectives.rules import Exchange, Linear, factor_rule, registry
from pypto_spmd.testing.rule_truth import check_rule

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


@pytest.fixture
def use_rule(monkeypatch):
    """Gives a primitive another rule for one test."""

    def use(name, notation, **more):
        def make(params, ins, outs):
            return factor_rule(notation, [a.shape for a in ins], [a.shape for a in outs], **more)

        monkeypatch.setattr(registry, "_CACHE", {})
        monkeypatch.setitem(registry._RULES, name, make)

    return use


def test_a_right_rule_passes():
    report = check_rule(lambda a: jnp.exp(a), X, incomplete=True)
    assert str(report) == "23 labellings checked, 0 wrong."


def test_a_wrong_linear_group(use_rule):
    use_rule("sin", "i j -> i j", linear=(Linear(frozenset({0})),))
    report = check_rule(lax.sin, X, mesh_shapes=((2,),))
    (wrong,) = report.wrong
    assert wrong.startswith(
        "sin(f32[4,8]) -> f32[4,8] by the rule 'i j -> i j', with operand 0 partial (sum) over 'x' on 2 "
        "devices: result 0 is wrong on device (0,): 32 of 32 elements differ, at (0, 0) "
    )


def test_a_wrong_correspondence_of_dims(use_rule):
    use_rule("rev", "i j -> i j")  # a reversed dim that is split needs another shard
    report = check_rule(lambda a: lax.rev(a, (0,)), X, mesh_shapes=((2,),))
    (wrong,) = report.wrong
    assert (
        "with factor 'i' split over 'x' on 2 devices: result 0 is wrong on device (0,): 16 of 16"
        in wrong
    )
    advice = "keep 'i' whole, whole='i', or say how the parts combine, reduce={'i': ...}."
    assert report.advice == (advice,)
    assert str(report).splitlines()[1:] == [f"  wrong: {wrong}", f"  Fix: {advice}"]
    with pytest.raises(AssertionError) as raised:
        report.check()
    assert str(raised.value) == str(report)


def test_a_bind_that_fails(use_rule):
    def bind(ctx, operand):
        raise KeyError("axis")

    use_rule("sin", "_ _ -> _ _", bind=bind)
    report = check_rule(lax.sin, X, mesh_shapes=((2,),))
    assert report.wrong == (
        "sin(f32[4,8]) -> f32[4,8] by the rule '_ _ -> _ _', with all whole on 2 devices: KeyError: 'axis'",
    )


def test_a_result_of_the_wrong_shape(use_rule):
    use_rule("sin", "i j -> i _", reduce={"j": "sum"})
    (wrong,) = check_rule(lax.sin, X, mesh_shapes=((2,),)).wrong
    assert wrong.endswith(
        "with factor 'j' split over 'x' on 2 devices: ValueError: "
        "bind gave float32[4, 4] for result 0, not float32[4, 8]"
    )


def test_a_rule_that_does_not_fit_the_shapes(monkeypatch):
    made = factor_rule("i -> i", [(4,)], [(4,)])
    monkeypatch.setattr(registry, "_CACHE", {})
    monkeypatch.setitem(registry._RULES, "sin", lambda params, ins, outs: made)
    report = check_rule(lax.sin, X, mesh_shapes=())
    assert report.wrong == (
        "sin(f32[4,8]) -> f32[4,8] by the rule 'i -> i': operand 0 has sizes [4] by the rule",
        "sin(f32[4,8]) -> f32[4,8] by the rule 'i -> i': result 0 has sizes [4] by the rule",
    )


@pytest.mark.parametrize(
    ("elements", "problem"),
    [
        (8, ""),
        (4, "('all_reduce', ('x',), 8) is stated as ('all_reduce', ('x',), 4)"),
    ],
)
def test_the_collectives_are_those_of_the_rule(use_rule, elements, problem):
    def bind(ctx, operand):
        local = ctx.bind(operand)
        return ctx.exchange("i", 0, lambda axes: lax.psum(local, axes)) if ctx.axes("i") else local

    exchange = Exchange("all_reduce", (), elements, 4, reduce_op="sum")
    use_rule("reduce_sum", "i _ -> _", exchanges={"i": [exchange]}, bind=bind)
    report = check_rule(lambda a: a.sum(0), X, mesh_shapes=((2,),))
    assert [w.split(" on 2 devices: ")[1] for w in report.wrong] == ([problem] if problem else [])


def test_collectives_that_the_rule_does_not_state(use_rule):
    def bind(ctx, operand):
        local = ctx.bind(operand)
        return lax.psum(local, "x") if ctx.axes("i") else local

    exchange = Exchange("all_reduce", (), 8, 4, reduce_op="sum")
    use_rule("reduce_sum", "i _ -> _", exchanges={"i": [exchange]}, bind=bind)
    report = check_rule(lambda a: a.sum(0), X, mesh_shapes=((2,),))
    assert [w.split(" on 2 devices: ")[1] for w in report.wrong] == [
        "('all_reduce', ('x',), 8) is no exchange of the rule",
        "('all_reduce', ('x',), 8) is stated and never runs",
    ]


def test_labellings_that_are_missing(use_rule):
    use_rule("neg", "i _ -> i _")
    report = check_rule(lax.neg, X, mesh_shapes=(), incomplete=True)
    about = "neg(f32[4,8]) -> f32[4,8] by the rule 'i _ -> i _': "
    assert report.incomplete == (
        about + "operand 0 split along dim 1 would give result 0 split along dim 1",
        about + "operand 0 as a partial sum would give result 0 as a partial sum",
    )
    report.check()
    with pytest.raises(AssertionError, match="0 wrong"):
        report.check(complete=True)


def test_a_primitive_without_a_rule(monkeypatch):
    monkeypatch.setattr(registry, "_CACHE", {})
    monkeypatch.delitem(registry._RULES, "sin")
    report = check_rule(lax.sin, X, mesh_shapes=())
    assert report.incomplete == ("sin has no rule",)
