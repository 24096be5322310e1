"""The cheapest legs between layouts, and what they send: a table of known ones."""

import itertools

import pytest
from jax.sharding import PartitionSpec as P

from pypto_spmd.sharding.layout import Layout
from pypto_spmd.sharding.layout import P as Partial
from pypto_spmd.sharding.redistribute import redistribute, redistribution_bytes

SIZES = {"data": 2, "model": 4}
SHAPE, ITEMSIZE = (16, 16), 4
WHOLE = 16 * 16 * ITEMSIZE


def layout(spec: P, **partial: str) -> Layout:
    found = Layout.from_spec(spec, len(SHAPE))
    for axis, op in partial.items():
        found = found.with_label(axis, Partial(op))
    return found


@pytest.mark.parametrize(
    ("source", "target", "kinds", "sent"),
    [
        (layout(P()), layout(P("data")), ["slice"], 0),
        (layout(P("data")), layout(P()), ["all_gather"], WHOLE / 2),
        (layout(P(("data", "model"))), layout(P("data")), ["all_gather"], WHOLE / 2 * 3 / 4),
        # Only the innermost axis can be gathered alone, so that the blocks change places first.
        (
            layout(P(("data", "model"))),
            layout(P("model")),
            ["collective_permute", "all_gather"],
            WHOLE / 8 + WHOLE / 4 / 2,
        ),
        (layout(P("data")), layout(P(None, "data")), ["all_to_all"], WHOLE / 4),
        # Each device's block of the target lies within a block that some device has: one is sent.
        (layout(P("data")), layout(P("model", "data")), ["collective_permute"], WHOLE / 8),
        (layout(P("data", "model")), layout(P("model", "data")), None, WHOLE / 8 + WHOLE * 7 / 64),
        (layout(P(), data="sum"), layout(P()), ["all_reduce"], WHOLE),
        (layout(P(), data="sum"), layout(P("data")), ["reduce_scatter"], WHOLE / 2),
        (layout(P(), data="sum", model="sum"), layout(P()), ["all_reduce"], 2 * WHOLE * 7 / 8),
        (layout(P(), data="max"), layout(P("data")), ["all_reduce", "slice"], WHOLE),
        (layout(P("model"), data="sum"), layout(P()), None, WHOLE / 4 + WHOLE * 3 / 4),
        (layout(P("data")), layout(P("data"), model="sum"), ["mask"], 0),
    ],
)
def test_cheapest_legs(source, target, kinds, sent):
    legs = redistribute(source, target, SHAPE, ITEMSIZE, SIZES)
    assert (legs[0].source, legs[-1].target) == (source, target)
    assert all(a.target == b.source for a, b in itertools.pairwise(legs))
    if kinds is not None:
        assert [leg.kind for leg in legs] == kinds
    assert redistribution_bytes(source, target, SHAPE, ITEMSIZE, SIZES) == sent


def test_what_cannot_be_reached():
    with pytest.raises(ValueError, match="no redistribution from"):
        redistribute(layout(P()), layout(P("model")), (6, 6), ITEMSIZE, SIZES)
