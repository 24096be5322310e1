"""Legs on local arrays: every redistribution gives the whole's blocks, with the planned collectives."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from pypto_spmd.collectives.hlo import parse_collectives
from pypto_spmd.collectives.legs import place, run_leg
from pypto_spmd.collectives.reconcile import reconcile
from pypto_spmd.sharding.layout import Layout, P, R, S
from pypto_spmd.sharding.redistribute import Leg, redistribute

MESHES = {"2x4": {"a": 2, "b": 4}, "2x2x2": {"a": 2, "b": 2, "c": 2}, "1x8": {"a": 1, "b": 8}}


@dataclass(frozen=True)
class Step:
    """A planned step, as `reconcile` asks for it."""

    index: int
    kind: str
    axes: tuple[str, ...]
    elements: int
    repeat: int | None = 1


def mesh_of(sizes: Mapping[str, int]) -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(tuple(sizes.values())), tuple(sizes))


def layouts(rank: int, sizes: Mapping[str, int], ops: Sequence[str]) -> Iterator[Layout]:
    """All layouts of a tensor of `rank`, every nesting order included."""
    found = set()
    for order in itertools.permutations(sizes):
        labels = [R, *(S(d) for d in range(rank)), *(P(op) for op in ops)]
        for chosen in itertools.product(labels, repeat=len(sizes)):
            layout = Layout.replicated(rank)
            for axis, label in zip(order, chosen, strict=True):
                layout = layout.with_label(axis, label)
            found.add(layout)
    yield from sorted(found, key=str)


def parts(x, layout: Layout, sizes: Mapping[str, int]):
    """This device's part of `x`, where what is partial differs from device to device."""
    x = place(x, Layout(layout.dims), sizes)
    for axis, op in layout.partial:
        index, last = lax.axis_index(axis), sizes[axis] - 1
        if op == "sum":
            others = last * (last + 1) // 2
            x = jnp.where(
                index == last, x - jnp.asarray(others, x.dtype), (index + 1).astype(x.dtype)
            )
        elif op == "prod":
            x = jnp.where(index == last, x / 2**last, jnp.asarray(2, x.dtype))
        elif op in ("max", "min"):
            x = jnp.where(index == last, x, x - 3 if op == "max" else x + 3)
        else:
            x = (x & (index == last)) if op == "or" else (x | (index != last))
    return x


REDUCE = {
    "sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min, "or": np.any, "and": np.all
}  # fmt: skip


def check(local, whole, layout: Layout, sizes: Mapping[str, int]) -> None:
    """Holds what all devices hold, stacked in mesh order, against the blocks of the whole."""
    local = np.asarray(local).reshape(*sizes.values(), *local.shape[1:])
    for position, (axis, _) in enumerate(sizes.items()):
        for partial, op in layout.partial:
            if partial == axis:
                reduced = REDUCE[op](local, axis=position, keepdims=True)
                local = np.broadcast_to(reduced, local.shape)
    for coordinates in itertools.product(*(range(n) for n in sizes.values())):
        at = dict(zip(sizes, coordinates, strict=True))
        block = whole
        for dim, axes in enumerate(layout.dims):
            for axis in axes:
                block = np.split(block, sizes[axis], axis=dim)[at[axis]]
        np.testing.assert_array_equal(local[coordinates], block, err_msg=f"{layout} at {at}")


def run_pairs(pairs, whole, sizes: Mapping[str, int]):
    """Redistributes numbers of many layouts in one program; checks values and collectives."""
    planned, chains = [], []
    for source, target in pairs:
        legs = redistribute(source, target, whole.shape, whole.dtype.itemsize, sizes)
        numbers = []
        for leg in legs:
            numbers.append(-1)
            group = int(np.prod([sizes[a] for a in leg.axes]))
            # Nothing changes owner along one axis.
            moved = sum(sizes[a] > 1 for a in leg.axes) > (leg.kind == "collective_permute")
            if leg.is_collective and moved and whole.size:
                elements = leg.full_elements(whole.shape, sizes)
                elements //= group if leg.kind == "all_to_all" else 1
                numbers[-1] = len(planned)
                planned.append(Step(len(planned), leg.kind, leg.axes, elements))
        chains.append((source, target, list(zip(legs, numbers, strict=True))))

    def run(x):
        results = []
        for number, (source, _, legs) in enumerate(chains):
            # Other values in each chain, so that XLA can merge no two of them.
            local = parts(x if x.dtype == bool else x + number, source, sizes)
            for leg, step in legs:
                local = run_leg(leg, local, sizes, step)
            results.append(local[None])
        return results

    everything = PartitionSpec(tuple(sizes))
    mapped = jax.shard_map(
        run, mesh=mesh_of(sizes), in_specs=PartitionSpec(), out_specs=everything, check_vma=False
    )
    compiled = jax.jit(mapped).lower(whole).compile()
    for number, ((_, target, _), local) in enumerate(zip(chains, compiled(whole), strict=True)):
        check(local, whole if whole.dtype == bool else whole + number, target, sizes)
    reconcile(planned, compiled.as_text(), sizes).check()


def whole_of(shape: tuple[int, ...], dtype="float32") -> np.ndarray:
    """Numbers in no order, each of them once."""
    count = int(np.prod(shape))
    return np.random.default_rng(7).permutation(count).reshape(shape).astype(dtype)


def sampled(items, count: int, seed: int):
    items = list(items)
    return random.Random(seed).sample(items, min(count, len(items)))


SOME_OR_ALL = [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 5))]


@pytest.mark.parametrize("part", SOME_OR_ALL)
def test_matrices_on_two_axes(part):
    sizes = MESHES["2x4"]
    every = list(layouts(2, sizes, ["sum"]))
    run_pairs(list(itertools.product(every, every))[part::5], whole_of((16, 8)), sizes)


@pytest.mark.parametrize("seed", SOME_OR_ALL)
@pytest.mark.parametrize("shape", [(8, 16), (8, 16, 24)])
def test_on_three_axes(shape, seed):
    sizes = MESHES["2x2x2"]
    every = list(layouts(len(shape), sizes, ["sum"]))
    run_pairs(sampled(itertools.product(every, every), 60, seed), whole_of(shape), sizes)


@pytest.mark.parametrize("seed", SOME_OR_ALL)
def test_tensors_on_two_axes(seed):
    sizes = MESHES["2x4"]
    every = list(layouts(3, sizes, ["sum"]))
    run_pairs(sampled(itertools.product(every, every), 50, seed), whole_of((8, 16, 8)), sizes)


# The parts of a product are made by division, which is exact for floats only.
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("max", "float32"),
        ("max", "int32"),
        ("min", "float32"),
        ("min", "int32"),
        ("prod", "float32"),
    ],
)
def test_other_reductions(op, dtype):
    sizes = MESHES["2x4"]
    sources = [x for x in layouts(2, sizes, [op]) if x.partial]
    targets = list(layouts(2, sizes, ["sum", op]))
    pairs = sampled(itertools.product(sources, targets), 40, 3)
    run_pairs(pairs, whole_of((8, 8), dtype), sizes)


@pytest.mark.parametrize("op", ["or", "and"])
def test_truth_values(op):
    sizes = MESHES["2x4"]
    whole = np.random.default_rng(1).random((8, 16)) < 0.5
    pairs = [
        (source, target)
        for source in layouts(2, sizes, [op])
        for target in layouts(2, sizes, [op])
        if redistributable(source, target, whole.shape, sizes)
    ]
    # One program each, because XLA would merge equal ones.
    for pair in sampled(pairs, 8, 4):
        run_pairs([pair], whole, sizes)


def redistributable(source, target, shape, sizes) -> bool:
    try:
        redistribute(source, target, shape, 1, sizes)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "complex64"])
def test_dtypes(dtype):
    sizes = MESHES["2x4"]
    every = list(layouts(2, sizes, ["sum"]))
    # Whole numbers that bfloat16 holds exactly, the number of the chain added.
    whole = whole_of((8, 8), jnp.dtype(dtype))
    run_pairs(sampled(itertools.product(every, every), 24, 5), whole, sizes)


def test_axes_of_size_one_and_empty_tensors_emit_nothing():
    sizes = MESHES["1x8"]
    every = list(layouts(2, sizes, ["sum"]))
    pairs = sampled(itertools.product(every, every), 40, 6)
    run_pairs(pairs, whole_of((8, 16)), sizes)
    run_pairs(pairs, np.zeros((0, 8), np.float32), MESHES["2x4"])


def mapped(run, sizes, in_specs, out_specs):
    mesh = mesh_of(sizes)
    return jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", ["max", "min"])
def test_a_nan_on_any_device_is_the_result(op, dtype):
    sizes = MESHES["2x4"]
    x = np.array([[1, -2, np.inf, -np.inf, 0.0, -0.0]] * 8, jnp.dtype(dtype))
    x[:, 1] = np.arange(8) - 4
    x[3, 2] = np.nan
    x[0, 3] = -np.nan
    x[7, 0] = np.nan
    leg = Leg("all_reduce", ("a", "b"), Layout(((),), (("a", op), ("b", op))), Layout(((),)), op=op)
    run = mapped(
        lambda x: run_leg(leg, x[0], sizes), sizes, PartitionSpec(("a", "b")), PartitionSpec()
    )
    reduce = jnp.max if op == "max" else jnp.min
    # NumPy knows no NaN of bfloat16.
    want, got = (np.asarray(y, np.float32) for y in (reduce(x, axis=0), run(x)))
    np.testing.assert_array_equal(got, want)


def test_random_keys_are_gathered_and_sliced():
    sizes = MESHES["2x4"]
    keys = jax.random.split(jax.random.key(3), 8)
    split, whole = Layout((("b", "a"),)), Layout(((),))

    def run(keys):
        for source, target in ((whole, split), (split, whole)):
            for leg in redistribute(source, target, (8,), 8, sizes):
                keys = run_leg(leg, keys, sizes, 0)
        return keys

    out = mapped(run, sizes, PartitionSpec(), PartitionSpec())(keys)
    assert out.dtype == keys.dtype
    assert bool(jnp.all(jax.random.key_data(out) == jax.random.key_data(keys)))


def test_an_axis_trades_places_with_a_replicated_one():
    sizes = MESHES["2x2x2"]
    leg = Leg("collective_permute", ("a", "c"), Layout((("a", "b"),)), Layout((("c", "b"),)))
    whole = whole_of((8,))

    def run(x):
        return run_leg(leg, place(x, leg.source, sizes), sizes, 0)[None]

    compiled = mapped(run, sizes, PartitionSpec(), PartitionSpec(("a", "b", "c"))).lower(whole)
    compiled = compiled.compile()
    check(compiled(whole), whole, leg.target, sizes)
    (found,) = parse_collectives(compiled.as_text(), sizes)
    assert (found.kind, found.axes, found.elements) == ("collective_permute", ("a", "c"), 2)


def test_one_reduce_scatter_to_two_dims():
    sizes = MESHES["2x4"]
    source = Layout(((), ()), (("a", "sum"), ("b", "sum")))
    leg = Leg("reduce_scatter", ("b", "a"), source, Layout((("a",), ("b",))), (1, 0), op="sum")
    whole = whole_of((4, 8))

    def run(x):
        return run_leg(leg, parts(x, source, sizes), sizes, 5)

    compiled = mapped(run, sizes, PartitionSpec(), PartitionSpec("a", "b")).lower(whole).compile()
    np.testing.assert_array_equal(compiled(whole), whole)
    (found,) = parse_collectives(compiled.as_text(), sizes)
    assert (found.kind, found.axes, found.elements) == ("reduce_scatter", ("a", "b"), 32)
    assert found.step_ids == (5,)
