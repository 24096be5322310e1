"""Programs are compiled for real on 2 by 4 devices, and their HLO held against a plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from pypto_spmd.collectives.hlo import HloCollective, parse_collectives
from pypto_spmd.collectives.reconcile import VerificationError, reconcile
from pypto_spmd.collectives.tagging import step_scope

P = PartitionSpec
MESH_AXES = {"d": 2, "m": 4}


@dataclass(frozen=True)
class Step:
    index: int
    kind: str
    axes: tuple[str, ...]
    elements: int
    repeat: int | None = 1


def compile_hlo(
    fn: Callable,
    *shapes: tuple[int, ...],
    in_specs: tuple[PartitionSpec, ...],
    dtype: jnp.dtype = jnp.float32,
    mesh_axes: dict[str, int] = MESH_AXES,
    devices: Sequence[int] = range(8),
) -> str:
    grid = np.array(jax.devices())[list(devices)].reshape(tuple(mesh_axes.values()))
    mesh = Mesh(grid, tuple(mesh_axes))
    sharded = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=False)
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(sharded).lower(*args).compile().as_text()


def all_reduce(x, axes, index):
    with step_scope(index):
        return lax.psum(x, axes)


def all_gather(x, axes, index, dim=0):
    with step_scope(index):
        return lax.all_gather(x, axes, axis=dim, tiled=True)


def reduce_scatter(x, axes, index):
    with step_scope(index):
        return lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)


def all_to_all(x, axes, index):
    with step_scope(index):
        return lax.all_to_all(x, axes, 1, 0, tiled=True)


def permute(x, axis, index):
    size = MESH_AXES[axis]
    with step_scope(index):
        return lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


SPLIT = P("d", "m")

SINGLE = {
    "psum": (
        lambda x: all_reduce(x, "m", 0),
        [(8, 4)],
        SPLIT,
        [Step(0, "all_reduce", ("m",), 4)],
    ),
    "psum over two axes": (
        lambda x: all_reduce(x, ("m", "d"), 0),
        [(8, 4)],
        SPLIT,
        [Step(0, "all_reduce", ("d", "m"), 4)],
    ),
    "psum of a tuple": (
        lambda x, y: all_reduce((x, y), "d", 0),
        [(8, 4), (16, 8)],
        SPLIT,
        [Step(0, "all_reduce", ("d",), 20)],
    ),
    "two psums, merged": (
        lambda x, y: (all_reduce(x, "d", 0), all_reduce(y, "d", 1)),
        [(8, 4), (16, 8)],
        SPLIT,
        [Step(0, "all_reduce", ("d",), 4), Step(1, "all_reduce", ("d",), 16)],
    ),
    "psums over different axes": (
        lambda x: all_reduce(all_reduce(x, "d", 0), "m", 1),
        [(8, 4)],
        SPLIT,
        [Step(0, "all_reduce", ("d",), 4), Step(1, "all_reduce", ("m",), 4)],
    ),
    "psum_scatter": (
        lambda x: reduce_scatter(x, "m", 0),
        [(8, 4)],
        P(None, "d"),
        [Step(0, "reduce_scatter", ("m",), 16)],
    ),
    "all_gather": (
        lambda x: all_gather(x, "m", 0),
        [(8, 4)],
        P("m", "d"),
        [Step(0, "all_gather", ("m",), 16)],
    ),
    "all_gather over two axes": (
        lambda x: all_gather(x, ("m", "d"), 0),
        [(8, 4)],
        P(("m", "d")),
        [Step(0, "all_gather", ("m", "d"), 32)],
    ),
    "all_gather along dim 1": (
        lambda x: all_gather(x, "m", 0, dim=1),
        [(8, 4)],
        SPLIT,
        [Step(0, "all_gather", ("m",), 16)],
    ),
    "all_to_all": (
        lambda x: all_to_all(x, "m", 0),
        [(16, 8)],
        P("m", "d"),
        [Step(0, "all_to_all", ("m",), 16)],
    ),
    "all_to_all over two axes": (
        lambda x: all_to_all(x, ("d", "m"), 0),
        [(16, 8)],
        P(("d", "m")),
        [Step(0, "all_to_all", ("d", "m"), 16)],
    ),
    "ppermute": (
        lambda x: permute(x, "d", 0),
        [(8, 4)],
        SPLIT,
        [Step(0, "collective_permute", ("d",), 4)],
    ),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", SINGLE)
def test_each_kind_is_found_and_matches(name, dtype):
    fn, shapes, spec, steps = SINGLE[name]
    hlo = compile_hlo(fn, *shapes, in_specs=(spec,) * len(shapes), dtype=dtype)
    result = reconcile(steps, hlo, MESH_AXES)
    assert result.ok, str(result)
    result.check()
    assert sorted(step.index for match in result.matched for step in match.steps) == [
        step.index for step in steps
    ]


def test_merged_steps_are_one_match():
    fn, shapes, spec, steps = SINGLE["two psums, merged"]
    hlo = compile_hlo(fn, *shapes, in_specs=(spec,) * 2)
    (match,) = reconcile(steps, hlo, MESH_AXES).matched
    assert match.steps == tuple(steps)
    (found,) = match.collectives
    assert (found.step_ids, found.elements) == ((0, 1), 20)


def loop(x, length, unroll=1):
    return lax.scan(
        lambda c, _: (jnp.sin(all_reduce(c, "m", 0)), None), x, None, length=length, unroll=unroll
    )[0]


def nested_loop(x):
    return lax.scan(lambda c, _: (loop(c, 3), None), x, None, length=5)[0]


def while_loop(x):
    return lax.while_loop(
        lambda c: all_reduce(jnp.sum(c), ("d", "m"), 1) < 100.0,
        lambda c: all_reduce(c, "m", 0) + 1.0,
        x,
    )


def branches(x):
    return lax.cond(
        jnp.sum(all_reduce(x, "d", 0)) > 0,
        lambda x: all_reduce(x, "m", 1),
        lambda x: permute(x * 3, "m", 2),
        x,
    )


def rematerialized(x):
    layer = jax.checkpoint(lambda x: jnp.sin(all_reduce(jnp.sin(x), "m", 0)))
    return jax.vjp(layer, x)[0]


NESTED = {
    "scan": (lambda x: loop(x, 5), [Step(0, "all_reduce", ("m",), 4, 5)]),
    "nested scan": (nested_loop, [Step(0, "all_reduce", ("m",), 4, 15)]),
    "scan of length 1": (lambda x: loop(x, 1), [Step(0, "all_reduce", ("m",), 4, 1)]),
    "while, body and condition": (
        while_loop,
        [Step(0, "all_reduce", ("m",), 4, None), Step(1, "all_reduce", ("d", "m"), 1, None)],
    ),
    "cond": (
        branches,
        [
            Step(0, "all_reduce", ("d",), 4),
            Step(1, "all_reduce", ("m",), 4),
            Step(2, "collective_permute", ("m",), 4),
        ],
    ),
    "jit and remat": (jax.jit(rematerialized), [Step(0, "all_reduce", ("m",), 4)]),
}


@pytest.mark.parametrize("name", NESTED)
def test_loops_and_branches(name):
    fn, steps = NESTED[name]
    result = reconcile(steps, compile_hlo(fn, (8, 4), in_specs=(SPLIT,)), MESH_AXES)
    assert result.ok, str(result)
    assert [match.note for match in result.matched] == [""] * len(steps)


def test_unrolled_loop_matches():
    hlo = compile_hlo(lambda x: loop(x, 7, unroll=3), (8, 4), in_specs=(SPLIT,))
    (match,) = reconcile([Step(0, "all_reduce", ("m",), 4, 7)], hlo, MESH_AXES).matched
    assert sorted(found.trip_count for found in match.collectives) == [1, 2, 2, 2]
    assert match.note == "a loop around it is unrolled"


def test_collective_moved_out_of_a_loop_matches():
    def invariant(x, w):
        def body(c, _):
            return jnp.sin(c + all_reduce(w, "m", 0)), None

        return lax.scan(body, x, None, length=5)[0]

    hlo = compile_hlo(invariant, (8, 4), (8, 4), in_specs=(SPLIT, SPLIT))
    (match,) = reconcile([Step(0, "all_reduce", ("m",), 4, 5)], hlo, MESH_AXES).matched
    assert match.note == "moved out of a loop: 4 elements in all runs instead of 20"


def test_more_runs_than_planned_are_a_mismatch():
    hlo = compile_hlo(lambda x: loop(x, 5), (8, 4), in_specs=(SPLIT,))
    result = reconcile([Step(0, "all_reduce", ("m",), 4)], hlo, MESH_AXES)
    (mismatch,) = result.mismatched
    assert mismatch.reasons == ("planned 4 elements in all runs, found 20",)


REMOVED = {
    "unused": lambda x: (all_reduce(x, "m", 0), all_reduce(x * 2, "m", 1))[0],
    "done by an earlier step": lambda x: all_reduce(x, "m", 0) + jnp.sin(all_reduce(x, "m", 1)),
    "of a constant": lambda x: all_reduce(x, "m", 0) + all_reduce(jnp.ones((4, 1)), "m", 1),
}


@pytest.mark.parametrize("name", REMOVED)
def test_step_that_xla_removes_is_missing(name):
    hlo = compile_hlo(REMOVED[name], (8, 4), in_specs=(SPLIT,))
    steps = [Step(0, "all_reduce", ("m",), 4), Step(1, "all_reduce", ("m",), 4)]
    result = reconcile(steps, hlo, MESH_AXES)
    assert [match.steps for match in result.matched] == [(steps[0],)]
    assert [each.step for each in result.missing] == [steps[1]]


def test_collective_without_step_id_is_hidden():
    hlo = compile_hlo(lambda x: lax.psum(x, "m"), (8, 4), in_specs=(SPLIT,))
    result = reconcile([], hlo, MESH_AXES)
    assert not result.ok
    assert [each.collective.axes for each in result.hidden] == [("m",)]


def test_axes_of_size_one_are_ignored():
    mesh_axes = {"d": 2, "one": 1, "m": 4}

    def fn(x):
        return lax.psum(all_reduce(x, ("one", "m"), 0), "one")

    hlo = compile_hlo(fn, (8, 4), in_specs=(SPLIT,), mesh_axes=mesh_axes)
    steps = [Step(0, "all_reduce", ("one", "m"), 4)]
    assert reconcile(steps, hlo, mesh_axes).ok


def test_ids_are_positions_in_the_mesh_not_devices():
    hlo = compile_hlo(
        lambda x: permute(all_reduce(x, "d", 0), "m", 1),
        (8, 4),
        in_specs=(SPLIT,),
        devices=[4, 2, 0, 6, 1, 3, 5, 7],
    )
    steps = [Step(0, "all_reduce", ("d",), 4), Step(1, "collective_permute", ("m",), 4)]
    assert reconcile(steps, hlo, MESH_AXES).ok


def test_three_mesh_axes():
    mesh_axes = {"a": 2, "b": 2, "c": 2}
    hlo = compile_hlo(
        lambda x: all_reduce(x, ("c", "a"), 0), (8, 4), in_specs=(P("a", "b"),), mesh_axes=mesh_axes
    )
    assert reconcile([Step(0, "all_reduce", ("a", "c"), 8)], hlo, mesh_axes).ok


def test_message_names_every_failure():
    def fn(x):
        x = lax.ppermute(all_reduce(x, "d", 0), "m", [(0, 1), (1, 0)])
        return all_gather(all_reduce(jnp.sin(x), "m", 1), "d", 9)

    hlo = compile_hlo(fn, (8, 4), in_specs=(SPLIT,))
    steps = [
        Step(0, "all_reduce", ("d",), 4),
        Step(1, "reduce_scatter", ("d", "m"), 5, 3),
        Step(2, "all_to_all", ("m",), 1, None),
    ]
    by_kind = {found.kind: found for found in parse_collectives(hlo, MESH_AXES)}
    first, second = (
        found.name for found in parse_collectives(hlo, MESH_AXES) if found.kind == "all_reduce"
    )
    permute_name = by_kind["collective_permute"].name
    gather_name = by_kind["all_gather"].name
    main = by_kind["all_gather"].computation
    with pytest.raises(VerificationError) as caught:
        reconcile(steps, hlo, MESH_AXES).check()
    assert str(caught.value).splitlines() == [
        "The optimized HLO does not run the plan: 1 missing, 2 hidden, 1 mismatched, 1 matched.",
        "  missing: step 2 (AllToAll over 'm', 1 element, in a loop) is in no instruction of the"
        " optimized HLO; XLA removed it because its result is unused, an earlier step does the"
        " same, or its operand is a constant",
        f"  hidden: CollectivePermute over 'm', f32, 4 elements ({permute_name} in {main})"
        " has no step id",
        f"  hidden: AllGather over 'd', f32, 8 elements ({gather_name} in {main})"
        " carries step id 9, which the plan does not have",
        f"  mismatched: step 1 (ReduceScatter over 'd' and 'm', 5 elements, 3 times):"
        f" {second} in {main}: planned ReduceScatter, found AllReduce;"
        " planned over 'd' and 'm', found over 'm'; planned 5 elements, found 4",
        f"  matched: step 0 (AllReduce over 'd', 4 elements): {first} in {main}",
    ]


def test_message_when_all_match():
    fn, shapes, spec, steps = SINGLE["two psums, merged"]
    result = reconcile(steps, compile_hlo(fn, *shapes, in_specs=(spec,) * 2), MESH_AXES)
    (found,) = result.matched[0].collectives
    assert str(result).splitlines() == [
        "The optimized HLO runs the plan: 2 steps as 1 collective.",
        "  matched: step 0 (AllReduce over 'd', 4 elements) + step 1 (AllReduce over 'd',"
        f" 16 elements): {found.name} in {found.computation}",
    ]


def parse_one(instruction: str, mesh_axes: dict[str, int] = MESH_AXES) -> HloCollective | None:
    text = f"HloModule m\n\nENTRY %main (p: f32[4]) -> f32[4] {{\n  {instruction}\n}}\n"
    found = parse_collectives(text, mesh_axes)
    assert len(found) < 2
    return found[0] if found else None


GROUPS = {
    "{{0,1,2,3},{4,5,6,7}}": ("m",),
    "{{0,4},{1,5},{2,6},{3,7}}": ("d",),
    "{{7,6,5,4,3,2,1,0}}": ("d", "m"),
    "{}": ("d", "m"),
    "{{0,1},{2,3},{4,5},{6,7}}": (),
    "[2,4]<=[8]": ("m",),
    "[4,2]<=[2,4]T(1,0)": ("d",),
    "[1,8]<=[8]": ("d", "m"),
    "[4,2]<=[8]": (),
    "mesh['d'=2,'m'=4] {'m'}": ("m",),
    "mesh['d'=2,'m'=4] {'m','d'}": ("d", "m"),
    "mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_1'}": ("m",),
    "mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}": ("d",),
    "mesh['x'=8] {'x':(1)2}": ("d",),
    "mesh['x'=8] {'x':(2)4}": ("m",),
    "mesh['x'=8] {'x':(1)2,'x':(2)4}": ("d", "m"),
    "mesh['d'=2,'m'=4] {'m':(1)2}": (),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_replica_group_formats(groups):
    found = parse_one(f"%ar = f32[4]{{0}} all-reduce(%p), replica_groups={groups}, to_apply=%add")
    assert found is not None
    assert found.axes == GROUPS[groups]


@pytest.mark.parametrize(
    "groups", ["{{0},{1},{2},{3},{4},{5},{6},{7}}", "[8,1]<=[8]", "mesh['d'=2,'m'=4] {}"]
)
def test_groups_of_one_device_are_ignored(groups):
    assert parse_one(f"%ar = f32[4]{{0}} all-reduce(%p), replica_groups={groups}") is None


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", ("d",)),
        ("{{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}", ("m",)),
        ("{{0,0},{1,1},{3,6}}", ("d", "m")),
        ("{{0,9}}", ()),
    ],
)
def test_permute_axes(pairs, axes):
    found = parse_one(f"%cp = f32[4]{{0}} collective-permute(%p), source_target_pairs={pairs}")
    assert found is not None
    assert found.axes == axes


def test_permute_to_itself_is_ignored():
    pairs = "{{0,0},{1,1}}"
    assert parse_one(f"%cp = f32[4] collective-permute(%p), source_target_pairs={pairs}") is None


TAIL = 'replica_groups={{0,1,2,3},{4,5,6,7}}, frontend_attributes={spmd_step="3"}'
ASYNC = {
    "all-reduce-start": (f"f32[4]{{0}} all-reduce-start(%p), {TAIL}", 4, "f32"),
    "merged all-reduce-start": (
        f"(f32[4]{{0}}, f32[2,3]{{1,0}}) all-reduce-start(%p, %q), {TAIL}",
        10,
        "f32",
    ),
    "all-gather-start": (
        f"(bf16[4]{{0:T(256)(2,1)}}, bf16[16]{{0:T(256)(2,1)S(1)}}) all-gather-start(%p), {TAIL}",
        16,
        "bf16",
    ),
    "merged all-gather-start": (
        "((f32[4]{0}, f32[2,3]{1,0}), (f32[16]{0}, /*index=1*/f32[8,3]{1,0}))"
        f" all-gather-start(%p, %q), {TAIL}",
        40,
        "f32",
    ),
    "reduce-scatter-start": (
        f"((f32[16]{{0}}), f32[4]{{0}}) reduce-scatter-start(%p), {TAIL}",
        16,
        "f32",
    ),
    "all-to-all-start": (
        "((s8[4]{0}, s8[4]{0}), (s8[4]{0}, s8[4]{0}), u32[]) all-to-all-start(%p, %q),"
        f" {TAIL}",
        8,
        "s8",
    ),
    "collective-permute-start": (
        "(f8e4m3fn[4]{0}, f8e4m3fn[4]{0}, u32[], u32[]) collective-permute-start(%p),"
        ' source_target_pairs={{0,1}}, frontend_attributes={spmd_step="3"}',
        4,
        "f8e4m3fn",
    ),
    "ragged-all-to-all": (
        f"f32[9,2]{{1,0}} ragged-all-to-all(%p, %q, %a, %b, %c, %d), {TAIL}",
        18,
        "f32",
    ),
    "collective-broadcast": (f"pred[4]{{0}} collective-broadcast(%p), {TAIL}", 4, "pred"),
}


@pytest.mark.parametrize("name", ASYNC)
def test_shapes_of_asynchronous_and_rare_instructions(name):
    text, elements, dtype = ASYNC[name]
    found = parse_one(f"ROOT %c.1 = {text}")
    assert found is not None
    assert (found.elements, found.dtype, found.step_ids, found.name) == (
        elements,
        dtype,
        (3,),
        "%c.1",
    )


def test_done_halves_are_not_counted():
    assert parse_one("%d = f32[4]{0} all-reduce-done(%s)") is None
    assert parse_one("%d = f32[4]{0} collective-permute-done(%s)") is None


def test_step_ids_fall_back_to_the_name_scope():
    groups = "replica_groups=[1,8]<=[8]"
    found = parse_one(
        f"%ar = f32[4] all-reduce(%p), {groups},"
        ' metadata={op_name="jit(f)/shard_map/(spmd_step12/psum:spmd_step3/psum)"}'
    )
    assert found is not None
    assert found.step_ids == (3, 12)
    merged = parse_one(
        f'%ar = f32[4] all-reduce(%p), {groups}, frontend_attributes={{a="b",spmd_step="2,0,1"}}'
    )
    assert merged is not None
    assert merged.step_ids == (0, 1, 2)


CALLS = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: f32[4]) -> f32[1] {
  ROOT %rs = f32[1]{0} reduce-scatter(%p), replica_groups=[2,4]<=[8], to_apply=%add
}

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %start = ((f32[4]), f32[1], s32[]) async-start(%p), calls=%wrapped
  %done = f32[1] async-done(%start), calls=%wrapped
  %twice = f32[4] call(%p), to_apply=%helper
  ROOT %again = f32[4] call(%twice), to_apply=%helper
}

%helper (p: f32[4]) -> f32[4] {
  ROOT %ar = f32[4]{0} all-reduce(%p), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
}

%unknown (t: f32[4]) -> f32[4] {
  ROOT %cp = f32[4]{0} collective-permute(%p), source_target_pairs={{0,1}}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]) while(%t), condition=%c, body=%body, config={"known_trip_count":{"n":"7"}}
  %u = f32[4] while(%t), condition=%c, body=%unknown
  ROOT %ag = f32[4]{0} all-gather(%p), replica_groups={}, dimensions={0}
}
"""


def test_runs_follow_calls_and_loops():
    found = {each.kind: each for each in parse_collectives(CALLS, MESH_AXES)}
    assert {kind: each.trip_count for kind, each in found.items()} == {
        "reduce_scatter": 7,
        "all_reduce": 14,
        "collective_permute": None,
        "all_gather": 1,
    }
    assert found["reduce_scatter"].elements == 4
    assert found["all_reduce"].computation == "helper"


def test_groups_that_are_no_mesh_axes_are_a_mismatch():
    text = "ENTRY %main {\n  ROOT %a = f32[4] all-reduce(%p), replica_groups=[4,2]<=[8]"
    text += ', frontend_attributes={spmd_step="0"}\n}\n'
    (mismatch,) = reconcile([Step(0, "all_reduce", ("m",), 4)], text, MESH_AXES).mismatched
    assert mismatch.reasons == (
        "planned over 'm', found over groups of devices that are no mesh axes",
    )
