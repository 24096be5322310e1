"""Pytree prefixes of specs: which leaf gets which, and all that can be wrong with them."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import pytest
from jax import ShapeDtypeStruct
from jax.sharding import AbstractMesh, NamedSharding

from pypto_spmd import AUTO, DeviceMesh, PartitionSpec, ShardingError, ShardingSpec
from pypto_spmd.errors import raise_faults, spmd_function
from pypto_spmd.sharding.resolve import resolve

P = PartitionSpec
NAMES = ("x", "y", "z")


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclass
class State:
    step: Any
    params: Any


def array(*shape):
    return ShapeDtypeStruct(shape, "float32")


@pytest.fixture
def mesh():
    return DeviceMesh.simulate((2, 4), ("data", "model"))


def specs(mesh, prefix, tree, role="argument", names=NAMES):
    """The specs of the leaves, or the error of all faults."""
    faults = []
    names = names[: len(tree)] if role == "argument" and names else None
    found = resolve(prefix, tree, mesh, role=role, names=names, faults=faults)
    assert len(found) == len(jax.tree.leaves(tree))
    raise_faults(spmd_function("f"), faults)
    return found


def test_each_kind_of_spec(mesh):
    given = [
        ShardingSpec(mesh, P("data")),
        P("model"),
        NamedSharding(mesh.jax_mesh, P(None, "model")),
        NamedSharding(AbstractMesh((2, 4), ("data", "model")), P(("data", "model"))),
        AUTO,
        None,
    ]
    found = specs(mesh, given, (array(8, 8),) * 6, names=None)
    assert found == [P("data"), P("model"), P(None, "model"), P(("data", "model")), None, None]


@pytest.mark.parametrize(
    ("everything", "each"), [(P("data"), P("data")), (AUTO, None), (None, None)]
)
def test_one_spec_for_all_arguments(mesh, everything, each):
    tree = (array(8), {"w": array(4, 4), "b": [array(2)]})
    assert specs(mesh, everything, tree) == [each] * 3


TREE = {"dense": {"bias": array(8), "kernel": array(8, 8)}, "out": [array(8), array(4)]}


@pytest.mark.parametrize(
    "prefix",
    [
        [{"dense": {"bias": P(), "kernel": P("model", "data")}, "out": [P("data"), P("data")]}],
        ({"dense": {"bias": P(), "kernel": P("model", "data")}, "out": P("data")},),
        ({"dense": {"bias": P(), "kernel": P("model", "data")}, "out": (P("data"),) * 2},),
        # One argument needs no list around its spec.
        {"dense": {"bias": P(), "kernel": P("model", "data")}, "out": P("data")},
        # The order of a dict is no matter, nor which kind of dict it is.
        [OrderedDict(out=P("data"), dense={"kernel": P("model", "data"), "bias": P()})],
    ],
)
def test_prefixes_of_one_tree(mesh, prefix):
    assert specs(mesh, prefix, (TREE,)) == [P(), P("model", "data"), P("data"), P("data")]


def test_named_tuples_and_dataclasses(mesh):
    tree = (State(array(), {"w": array(8, 8)}), Pair(array(8), array(4)))
    prefix = [State(AUTO, {"w": P("data")}), Pair(P("model"), None)]
    assert specs(mesh, prefix, tree) == [None, P("data"), P("model"), None]
    assert specs(mesh, [State(None, P("data")), (P("model"), None)], tree) == [
        None,
        P("data"),
        P("model"),
        None,
    ]
    assert specs(mesh, Pair(P("model"), P()), (tree[1],)) == [P("model"), P()]


def test_parts_without_arrays_need_no_spec(mesh):
    tree = ({"a": array(8), "b": None, "c": ()},)
    assert specs(mesh, [{"a": P("data")}], tree) == [P("data")]
    assert specs(mesh, [{"a": P("data"), "b": None, "c": AUTO}], tree) == [P("data")]


def test_results(mesh):
    assert specs(mesh, P("data"), array(8), "result") == [P("data")]
    assert specs(mesh, [P("data"), None], (array(8), array(8)), "result") == [P("data"), None]
    assert specs(mesh, AUTO, {"loss": array()}, "result") == [None]


def message(mesh, *arguments, **keywords):
    with pytest.raises(ShardingError) as caught:
        specs(mesh, *arguments, **keywords)
    return str(caught.value)


COUNT_WHY = "  in_shardings has one entry for each argument, and the arguments are: 'x' and 'y'.\n"


@pytest.mark.parametrize(
    ("prefix", "what"),
    [
        ([P("data")], "in_shardings has 1 entry but the function was called with 2 arguments."),
        ((AUTO,) * 3, "in_shardings has 3 entries but the function was called with 2 arguments."),
        ({"x": P()}, "in_shardings is a dict but the function was called with 2 arguments."),
    ],
)
def test_the_wrong_number_of_entries(mesh, prefix, what):
    assert message(mesh, prefix, (array(8), array(8))) == (
        f"@spmd function 'f': {what}\n{COUNT_WHY}"
        "  Fix: give 2 entries, AUTO where the planner is to choose: in_shardings=[..., ...]."
    )


def test_a_spec_for_a_function_of_no_argument(mesh):
    assert message(mesh, [P("data")], ()) == (
        "@spmd function 'f': in_shardings has 1 entry but the function was called with 0 "
        "arguments.\n"
        "  in_shardings has one entry for each argument, and the arguments are: none.\n"
        "  Fix: give 0 entries, AUTO where the planner is to choose: in_shardings=[]."
    )


DIFFER = (
    "  The specs must be a prefix of the tree that they are for; this is where they differ.\n"
    "  Fix: mirror the tree, with AUTO where the planner is to choose, or give one spec for all of "
    "it."
)


@pytest.mark.parametrize(
    ("prefix", "what"),
    [
        (
            {"dense": {"bias": P()}, "out": P()},
            "in_shardings[0]['dense'] has nothing for argument params['dense']['kernel'].",
        ),
        (
            {"dense": P(), "out": P(), "extra": P()},
            "in_shardings[0]['extra'] is for nothing: there is no params['extra'].",
        ),
        (
            {"dense": P(), "out": [P()]},
            "in_shardings[0]['out'] has 1 entry, but argument params['out'] has 2.",
        ),
        (
            {"dense": [P(), P()], "out": P()},
            "in_shardings[0]['dense'] is a list, but argument params['dense'] is a dict.",
        ),
        (
            State(P(), P()),
            "in_shardings[0] is a State, but argument 'params' is a dict.",
        ),
    ],
)
def test_the_first_path_that_differs_is_named(mesh, prefix, what):
    assert message(mesh, [prefix], (TREE,), names=("params",)) == (
        f"@spmd function 'f': {what}\n{DIFFER}"
    )


def test_a_tree_of_specs_for_an_array(mesh):
    assert message(mesh, [[P(), P()]], (array(8, 2),)) == (
        "@spmd function 'f': in_shardings[0] is a list, but argument 'x' is the array f32[8,2].\n"
        "  Specs are given for the whole of a tree or for its parts, as the tree has them.\n"
        "  Fix: give one spec in place of in_shardings[0]."
    )
    assert message(mesh, (P(),), array(8), "result").startswith(
        "@spmd function 'f': out_shardings is a tuple, but result is the array f32[8].\n"
    )


@pytest.mark.parametrize(
    ("entry", "shown", "fix"),
    [
        ("data", "'data'", "write PartitionSpec('data')."),
        (3, "3", "write PartitionSpec('axis', ...) with one entry a dim, or AUTO."),
    ],
)
def test_what_is_no_spec(mesh, entry, shown, fix):
    assert message(mesh, [AUTO, entry], (array(8), array(8))) == (
        f"@spmd function 'f': in_shardings[1] is {shown}.\n"
        "  A ShardingSpec, PartitionSpec, NamedSharding, AUTO or None is wanted there.\n"
        f"  Fix: {fix}"
    )


def test_indivisible_arguments_are_named_by_their_path(mesh):
    text = message(mesh, [P("model", None)], (array(10, 4),))
    assert text == (
        "@spmd function 'f': argument 'x' has shape f32[10,4].\n"
        "  PartitionSpec('model', None) splits dim 0 (size 10) over mesh axis 'model' (size 4), "
        "which does not divide it.\n"
        "  Fix: pad dim 0 to 12, use an axis of size 1, 2, 5 or 10, or leave the dim whole: "
        "PartitionSpec(None, None)."
    )
    text = message(
        mesh, [P(None, "model")], ({"dense": {"kernel": array(8, 6)}},), names=["params"]
    )
    assert text.startswith(
        "@spmd function 'f': argument params['dense']['kernel'] has shape f32[8,6].\n"
    )


def test_indivisible_results_are_named_by_their_path(mesh):
    assert message(mesh, P("data"), array(5), "result").startswith(
        "@spmd function 'f': result has shape f32[5].\n  PartitionSpec('data') splits dim 0"
    )
    assert message(mesh, (None, P("data")), (array(5), array(5)), "result").startswith(
        "@spmd function 'f': result[1] has shape f32[5].\n"
    )


def test_a_spec_longer_than_the_rank(mesh):
    assert message(mesh, [P("data", None, "model")], (array(8, 8),)) == (
        "@spmd function 'f': argument 'x' has shape f32[8,8].\n"
        "  PartitionSpec('data', None, 'model') has 3 entries but the array has rank 2.\n"
        "  Fix: give at most 2 entries, one a dim."
    )


def test_a_bad_axis_is_told_once_however_many_arrays_it_is_for(mesh):
    assert message(mesh, P("data", "data"), (TREE, TREE)) == (
        "@spmd function 'f': in_shardings is PartitionSpec('data', 'data').\n"
        "  PartitionSpec('data', 'data') has a duplicate axis: 'data' splits dims 0 and 1, but can "
        "split once only.\n"
        "  Fix: split one dim over each mesh axis, and once."
    )
    assert message(mesh, [P("modal")], (TREE,)) == (
        "@spmd function 'f': in_shardings[0] is PartitionSpec('modal').\n"
        "  PartitionSpec('modal') names the mesh axis 'modal', but the mesh has 'data' and "
        "'model'.\n"
        "  Fix: write 'model', or use one of 'data' and 'model'."
    )


OTHER = DeviceMesh.simulate((2, 2), ("data", "model"))


@pytest.mark.parametrize(
    "entry",
    [
        ShardingSpec(OTHER, P("data")),
        NamedSharding(AbstractMesh((2, 2), ("data", "model")), P("data")),
    ],
)
def test_a_spec_of_another_mesh(mesh, entry):
    assert message(mesh, [entry], (array(8),)) == (
        "@spmd function 'f': in_shardings[0] is PartitionSpec('data').\n"
        "  It is of another mesh (data=2 × model=2) than the function's (data=2 × model=4).\n"
        "  Fix: make the spec of the function's mesh, or pass a bare PartitionSpec."
    )


def test_the_same_shape_on_other_devices_is_another_mesh(mesh):
    turned = DeviceMesh([[4, 5, 6, 7], [0, 1, 2, 3]], ("data", "model"))
    for entry in (ShardingSpec(turned, P()), NamedSharding(turned.jax_mesh, P())):
        assert "another mesh" in message(mesh, [entry], (array(8),))
    rated = mesh.with_topology({"data": "cpu", "model": "nvlink_h100"})
    assert specs(mesh, [ShardingSpec(rated, P("data"))], (array(8),)) == [P("data")]


def test_all_faults_at_once(mesh):
    faults = []
    arguments = (array(10, 4), {"w": array(8)}, array(3))
    prefix = [P("model"), {"w": P("data", None)}, P("nope")]
    resolve(prefix, arguments, mesh, role="argument", names=NAMES, faults=faults)
    resolve([P("data")] * 2, (array(3), array()), mesh, role="result", faults=faults)
    assert [fault.what for fault in faults] == [
        "argument 'x' has shape f32[10,4].",
        "argument y['w'] has shape f32[8].",
        "in_shardings[2] is PartitionSpec('nope').",
        "result[0] has shape f32[3].",
        "result[1] has shape f32[].",
    ]
