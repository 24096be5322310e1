"""ShardingSpec as a value, and the faults of a spec on a mesh and for a shape, word for word."""

from dataclasses import FrozenInstanceError

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from pypto_spmd import AUTO, DeviceMesh, PartitionSpec, ShardingError, ShardingSpec

P = PartitionSpec


@pytest.fixture
def mesh():
    return DeviceMesh.simulate((2, 4), ("data", "model"))


def test_what_it_holds(mesh):
    spec = ShardingSpec(mesh, P("data", None))
    assert spec.mesh is mesh
    assert spec.partition_spec == P("data", None)
    assert spec.named_sharding == NamedSharding(mesh.jax_mesh, P("data", None))
    assert str(spec) == "PartitionSpec('data', None)"
    assert eval(repr(spec)) == spec
    assert hash(spec) == hash(ShardingSpec(mesh, P("data", None)))
    assert spec != ShardingSpec(mesh, P(None, "data"))
    assert PartitionSpec is jax.sharding.PartitionSpec
    with pytest.raises(FrozenInstanceError):
        spec.mesh = mesh  # pyright: ignore[reportAttributeAccessIssue]


def test_auto_is_one_value():
    assert repr(AUTO) == str(AUTO) == "AUTO"
    assert type(AUTO)("AUTO") is AUTO
    assert jax.tree.leaves([AUTO]) == [AUTO]


@pytest.mark.parametrize(
    ("spec", "shape", "shard"),
    [
        (P("data", None), (8, 6), (4, 6)),
        (P(None, "model"), (8, 12), (8, 3)),
        (P(("data", "model")), (16, 3), (2, 3)),
        (P(("model", "data"), None), (16, 3), (2, 3)),
        (P("model", "data"), (8, 6), (2, 3)),
        (P(), (5,), (5,)),
        (P(), (), ()),
        (P("data"), (0, 3), (0, 3)),
        (P((), "data"), (3, 4), (3, 2)),
    ],
)
def test_the_shape_of_a_shard_is_that_of_jax(mesh, spec, shape, shard):
    ours = ShardingSpec(mesh, spec)
    assert ours.shard_shape(shape) == shard
    if 0 not in shape:
        placed = jax.device_put(np.zeros(shape), ours.named_sharding)
        assert placed.addressable_shards[0].data.shape == shard


BAD_SPECS = {
    "unknown axis": (
        P("dta"),
        "ShardingSpec: partition_spec is PartitionSpec('dta').\n"
        "  PartitionSpec('dta') names the mesh axis 'dta', but the mesh has 'data' and 'model'.\n"
        "  Fix: write 'data', or use one of 'data' and 'model'.",
    ),
    "unknown axis, nothing like it": (
        P(None, "xyz"),
        "ShardingSpec: partition_spec is PartitionSpec(None, 'xyz').\n"
        "  PartitionSpec(None, 'xyz') names the mesh axis 'xyz', but the mesh has 'data' and "
        "'model'.\n"
        "  Fix: use one of 'data' and 'model'.",
    ),
    "duplicate axis": (
        P("data", None, "data"),
        "ShardingSpec: partition_spec is PartitionSpec('data', None, 'data').\n"
        "  PartitionSpec('data', None, 'data') has a duplicate axis: 'data' splits dims 0 and 2, "
        "but can split once only.\n"
        "  Fix: split one dim over each mesh axis, and once.",
    ),
    "duplicate axis in one dim": (
        P(("data", "data")),
        "ShardingSpec: partition_spec is PartitionSpec(('data', 'data')).\n"
        "  PartitionSpec(('data', 'data')) has a duplicate axis: 'data' splits dim 0 twice, "
        "but can split once only.\n"
        "  Fix: split one dim over each mesh axis, and once.",
    ),
    "both": (
        P("model", "model", "modle"),
        "ShardingSpec: 2 things are wrong.\n"
        "  1. partition_spec is PartitionSpec('model', 'model', 'modle').\n"
        "     PartitionSpec('model', 'model', 'modle') names the mesh axis 'modle', but the mesh "
        "has 'data' and 'model'.\n"
        "     Fix: write 'model', or use one of 'data' and 'model'.\n"
        "  2. partition_spec is PartitionSpec('model', 'model', 'modle').\n"
        "     PartitionSpec('model', 'model', 'modle') has a duplicate axis: 'model' splits dims "
        "0 and 1, but can split once only.\n"
        "     Fix: split one dim over each mesh axis, and once.",
    ),
    "no axis": (
        P(3, "data"),
        "ShardingSpec: partition_spec is PartitionSpec(3, 'data').\n"
        "  PartitionSpec(3, 'data') holds 3, but each entry is a mesh axis, a tuple of them, or "
        "None.\n"
        "  Fix: use the mesh's axes, 'data' and 'model', or AUTO in place of the whole spec.",
    ),
    "unconstrained": (
        P(P.UNCONSTRAINED),
        "ShardingSpec: partition_spec is PartitionSpec(UNCONSTRAINED).\n"
        "  PartitionSpec(UNCONSTRAINED) holds UNCONSTRAINED, but each entry is a mesh axis, a "
        "tuple of them, or None.\n"
        "  Fix: use the mesh's axes, 'data' and 'model', or AUTO in place of the whole spec.",
    ),
    "unreduced": (
        P("data", unreduced={"model"}),
        "ShardingSpec: partition_spec is PartitionSpec('data').\n"
        "  PartitionSpec('data') is unreduced over 'model'.\n"
        "  Fix: leave unreduced out: partial sums stay inside the function.",
    ),
    "a string": (
        "data",
        "ShardingSpec: partition_spec is 'data', which is no PartitionSpec.\n"
        "  A PartitionSpec has one entry a dim: a mesh axis, a tuple of them, or None.\n"
        "  Fix: write PartitionSpec('data').",
    ),
    "a tuple": (
        ("data", None),
        "ShardingSpec: partition_spec is ('data', None), which is no PartitionSpec.\n"
        "  A PartitionSpec has one entry a dim: a mesh axis, a tuple of them, or None.\n"
        "  Fix: write PartitionSpec('data', None).",
    ),
}


@pytest.mark.parametrize("case", BAD_SPECS)
def test_a_bad_spec_is_refused_at_once(mesh, case):
    spec, message = BAD_SPECS[case]
    with pytest.raises(ShardingError) as caught:
        ShardingSpec(mesh, spec)
    assert str(caught.value) == message


def test_the_mesh_must_be_a_device_mesh(mesh):
    with pytest.raises(ShardingError) as caught:
        ShardingSpec(mesh.jax_mesh, P("data"))
    assert str(caught.value) == (
        "ShardingSpec: mesh is of type Mesh.\n"
        "  A ShardingSpec says where an array lies on a DeviceMesh.\n"
        "  Fix: make one: DeviceMesh([[0, 1], [2, 3]], ['row', 'col']), or of a "
        "jax.sharding.Mesh DeviceMesh.from_jax(mesh)."
    )


BAD_SHAPES = {
    "rank": (
        P("data", None, "model"),
        (8, 8),
        "ShardingSpec: the shape is (8, 8).\n"
        "  PartitionSpec('data', None, 'model') has 3 entries but the array has rank 2.\n"
        "  Fix: give at most 2 entries, one a dim.",
    ),
    "scalar": (
        P(None),
        (),
        "ShardingSpec: the shape is ().\n"
        "  PartitionSpec(None) has 1 entry but the array has rank 0.\n"
        "  Fix: leave a scalar whole: PartitionSpec().",
    ),
    "two dims at once": (
        P("data", "model"),
        (3, 10),
        "ShardingSpec: 2 things are wrong.\n"
        "  1. the shape is (3, 10).\n"
        "     PartitionSpec('data', 'model') splits dim 0 (size 3) over mesh axis 'data' (size "
        "2), which does not divide it.\n"
        "     Fix: pad dim 0 to 4, use an axis of size 1 or 3, or leave the dim whole: "
        "PartitionSpec(None, 'model').\n"
        "  2. the shape is (3, 10).\n"
        "     PartitionSpec('data', 'model') splits dim 1 (size 10) over mesh axis 'model' (size "
        "4), which does not divide it.\n"
        "     Fix: pad dim 1 to 12, use an axis of size 1, 2, 5 or 10, or leave the dim whole: "
        "PartitionSpec('data', None).",
    ),
    "two axes": (
        P(None, ("model", "data")),
        (3, 12),
        "ShardingSpec: the shape is (3, 12).\n"
        "  PartitionSpec(None, ('model', 'data')) splits dim 1 (size 12) over mesh axes 'model' "
        "(size 4) and 'data' (size 2), whose product 8 does not divide it.\n"
        "  Fix: pad dim 1 to 16, use axes whose sizes multiply to 1, 2, 3, 4, 6 or 12, or leave "
        "the dim whole: PartitionSpec(None, None).",
    ),
}


@pytest.mark.parametrize("case", BAD_SHAPES)
def test_a_shape_that_does_not_fit(mesh, case):
    spec, shape, message = BAD_SHAPES[case]
    with pytest.raises(ShardingError) as caught:
        ShardingSpec(mesh, spec).shard_shape(shape)
    assert str(caught.value) == message
