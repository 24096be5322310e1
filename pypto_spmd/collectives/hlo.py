"""Read the collectives out of optimized HLO text.

Every instruction that moves data between devices becomes one `HloCollective`, wherever it stands:
in loops, branches, called computations, in asynchronous pairs, or merged with others.
Device ids in replica groups are positions in the mesh, so no device is needed to read them.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pypto_spmd.collectives.tagging import STEP_ATTRIBUTE

Groups = tuple[tuple[int, ...], ...]

_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "collective_broadcast",
    "ragged-all-to-all": "ragged_all_to_all",
}

_COMMENT = re.compile(r"/\*.*?\*/")
_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*(?=\S)")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(
    r"\b(body|condition|to_apply|calls|true_computation|false_computation|branch_computations"
    r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIP_COUNT = re.compile(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)')
_STEPS = re.compile(rf'\b{STEP_ATTRIBUTE}="([\d,\s]+)"')
_STEP_SCOPE = re.compile(rf"\b{STEP_ATTRIBUTE}(\d+)\b")
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')

_GROUP_LISTS = re.compile(r"replica_groups=\{(\{[^=]*?\})\}")
_GROUP_IOTA = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_GROUP_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\(([^{]*)\))?\s*\{([^}]*)\}"
)
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH_AXIS = re.compile(r"['\"]([^'\"]*)['\"](?:=(\d+)|:\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\s*\d+\},?\s*)*)\}")


@dataclass(frozen=True, slots=True)
class HloCollective:
    """One instruction of the optimized HLO that moves data between devices.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute",
            "collective_broadcast" or "ragged_all_to_all".
        step_ids: the plan steps that it carries out; several when XLA merged them.
        axes: the mesh axes, in mesh order, that it communicates over; empty when its groups of
            devices are not those of any mesh axes.
        elements: elements, per device, of the larger of operand and result (the operand of a
            ReduceScatter, else the result), all members of a merged instruction together.
        dtype: the HLO element type of the first member, "f32" for one.
        trip_count: how often one call of the program runs it, counting each branch of a
            conditional as taken; None inside a loop whose trip count XLA does not know.
        computation: the name of the HLO computation that it stands in.
        line: its line of HLO text.
    """

    kind: str
    step_ids: tuple[int, ...]
    axes: tuple[str, ...]
    elements: int
    dtype: str
    trip_count: int | None
    computation: str
    line: str

    @property
    def name(self) -> str:
        """The name of the HLO instruction, "%all-reduce.1" for one."""
        return self.line.removeprefix("ROOT ").split(" = ")[0]


@dataclass(slots=True)
class _Computation:
    """What a computation holds, and how often each of its callers' runs enters it."""

    collectives: list[HloCollective] = field(default_factory=list)
    called_from: list[tuple[str, int | None]] = field(default_factory=list)


def parse_collectives(hlo_text: str, mesh_axes: Mapping[str, int]) -> tuple[HloCollective, ...]:
    """Find every collective in optimized HLO, in the order of the text.

    Collectives whose groups hold one device each move nothing and are left out.

    Args:
        hlo_text: optimized HLO, as `jax.stages.Compiled.as_text()` gives it.
        mesh_axes: the size of each mesh axis, in mesh order.

    Returns:
        The collectives of all computations.
    """
    computations: dict[str, _Computation] = {}
    entry = current = ""
    axes_of_groups = _axes_lookup(mesh_axes)
    for raw_line in hlo_text.splitlines():
        line = _COMMENT.sub("", raw_line)
        if header := _COMPUTATION.match(line):
            current = header[2]
            computations.setdefault(current, _Computation())
            entry = current if header[1] else entry
            continue
        if not current or not (start := _INSTRUCTION.match(line)):
            continue
        shape, rest = _split_shape(line[start.end() :])
        if not (opcode_match := _OPCODE.match(rest)):
            continue
        opcode = opcode_match[1]
        kind = _KINDS.get(opcode.removesuffix("-start"))
        if kind is None:
            for callee, runs in _callees(opcode, rest):
                target = computations.setdefault(callee, _Computation())
                target.called_from.append((current, runs))
            continue
        axes, group_size = (
            _permute_axes(rest, mesh_axes) if kind == "collective_permute" else axes_of_groups(rest)
        )
        if group_size == 1:
            continue
        moved = _moved_shape(kind, shape, is_start=opcode.endswith("-start"))
        scale = group_size if kind == "reduce_scatter" else 1
        computations[current].collectives.append(
            HloCollective(
                kind=kind,
                step_ids=_step_ids(line),
                axes=axes,
                elements=scale * _count_elements(moved),
                dtype=arrays[0][0] if (arrays := _ARRAY.findall(moved)) else "",
                trip_count=None,
                computation=current,
                line=line.strip(),
            )
        )
    return _with_trip_counts(computations, entry)


def _with_trip_counts(
    computations: Mapping[str, _Computation], entry: str
) -> tuple[HloCollective, ...]:
    counts: dict[str, int | None] = {entry: 1}

    def count(name: str) -> int | None:
        if name not in counts:
            callers = computations[name].called_from
            products = [_times(count(caller), runs) for caller, runs in callers]
            known = [product for product in products if product is not None]
            # A computation that nothing calls is reached in a way unknown to us.
            counts[name] = sum(known) if products and len(known) == len(products) else None
        return counts[name]

    return tuple(
        replace(found, trip_count=count(name))
        for name, computation in computations.items()
        for found in computation.collectives
    )


def _times(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left * right


def _callees(opcode: str, attributes: str) -> list[tuple[str, int | None]]:
    """The computations that an instruction calls, and how often one run of it runs each."""
    if opcode in ("async-update", "async-done"):
        return []
    runs: int | None = 1
    if opcode == "while":
        trips = _TRIP_COUNT.search(attributes)
        runs = int(trips[1]) if trips else None
    return [
        (name.strip().lstrip("%"), runs)
        for _, names in _CALLED.findall(attributes)
        for name in names.strip("{}").split(",")
        if name.strip()
    ]


def _split_shape(text: str) -> tuple[str, str]:
    """Split "shape opcode(...)" after the shape, which may be a tuple."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: position + 1], text[position + 1 :]
    return text, ""


def _tuple_members(shape: str) -> list[str]:
    """The members of a tuple shape; the shape itself when it is no tuple."""
    if not shape.startswith("("):
        return [shape]
    members, depth, begin = [], 0, 1
    for position, character in enumerate(shape[:-1]):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 1:
            members.append(shape[begin:position])
            begin = position + 1
    return [*(member.strip() for member in members), shape[begin:-1].strip()]


def _moved_shape(kind: str, shape: str, *, is_start: bool) -> str:
    """The result shape of a collective, also of the first half of an asynchronous pair.

    The first half yields (operands, results, contexts...), except for AllReduce: its results.
    """
    if is_start and kind != "all_reduce":
        members = _tuple_members(shape)
        return members[1] if len(members) > 1 else members[0]
    return shape


def _count_elements(shape: str) -> int:
    return sum(
        math.prod(int(size.strip("<=")) for size in sizes.split(",") if size)
        for _, sizes in _ARRAY.findall(shape)
    )


def _step_ids(line: str) -> tuple[int, ...]:
    if attribute := _STEPS.search(line):
        numbers = attribute[1].split(",")
    else:
        op_name = _OP_NAME.search(line)
        numbers = _STEP_SCOPE.findall(op_name[1]) if op_name else []
    return tuple(sorted({int(number) for number in numbers}))


def _axes_lookup(
    mesh_axes: Mapping[str, int],
) -> Callable[[str], tuple[tuple[str, ...], int]]:
    """A function from an instruction's attributes to its mesh axes and its group size."""
    names = [name for name, size in mesh_axes.items() if size > 1]
    known: dict[Groups, tuple[str, ...]] = {}
    positions = np.arange(math.prod(mesh_axes.values())).reshape(tuple(mesh_axes.values()))
    for length in range(1, len(names) + 1):
        for axes in itertools.combinations(names, length):
            dims = [dim for dim, name in enumerate(mesh_axes) if name in axes]
            known[_canonical(_groups_along(positions, dims))] = axes
    found: dict[str, tuple[tuple[str, ...], int]] = {}

    def lookup(attributes: str) -> tuple[tuple[str, ...], int]:
        text = _groups_text(attributes)
        if text not in found:
            groups = _read_groups(text, positions)
            size = max(len(group) for group in groups)
            found[text] = (known.get(_canonical(groups), ()), size)
        return found[text]

    return lookup


def _groups_along(positions: np.ndarray, dims: list[int]) -> Groups:
    """The groups of devices that differ only in their place along some dims of the mesh."""
    rest = [dim for dim in range(positions.ndim) if dim not in dims]
    size = math.prod(positions.shape[dim] for dim in dims)
    return tuple(map(tuple, positions.transpose(*rest, *dims).reshape(-1, size).tolist()))


def _canonical(groups: Groups) -> Groups:
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _groups_text(attributes: str) -> str:
    for pattern in (_GROUP_LISTS, _GROUP_IOTA, _GROUP_MESH):
        if match := pattern.search(attributes):
            return match[0]
    return ""


def _read_groups(text: str, positions: np.ndarray) -> Groups:
    """Read replica groups: lists, iota or mesh notation; no groups stand for one of all devices."""
    if match := _GROUP_MESH.match(text):
        return _read_mesh_groups(match[1], match[2], match[3])
    if match := _GROUP_IOTA.match(text):
        return tuple(map(tuple, _read_iota(match[1]).tolist()))
    if match := _GROUP_LISTS.match(text):
        groups = re.findall(r"\{([\d,\s]*)\}", match[1])
        return tuple(tuple(map(int, group.split(","))) for group in groups)
    return (tuple(positions.ravel().tolist()),)


def _read_iota(text: str) -> np.ndarray:
    """Read "[2,4]<=[4,2]T(1,0)": count up in the second shape, transpose, take the first shape."""
    match = _IOTA.match(text)
    assert match, text
    shape, source, order = (
        [int(number) for number in part.split(",")] if part else [] for part in match.groups()
    )
    ids = np.arange(math.prod(shape)).reshape(source or shape)
    ids = ids.transpose(order) if order else ids
    return ids.reshape(shape) if source else ids


def _read_mesh_groups(axes: str, device_ids: str | None, group_axes: str) -> Groups:
    """Read "mesh['d'=4,'m'=2], device_ids=([2,4]T(1,0)) {'d','m':(1)2}".

    An axis 'm':(p)s is a part of axis m: seen as (p, s, rest), its middle.
    """
    sizes = {name: int(size) for name, size, _, _ in _MESH_AXIS.findall(axes)}
    taken: dict[str, list[tuple[int, int]]] = {}
    for name, _, before, size in _MESH_AXIS.findall(group_axes):
        part = (int(before), int(size)) if size else (1, sizes[name])
        taken.setdefault(name, []).append(part)
    shape, dims = [], []
    for name, size in sizes.items():
        done = 1
        for before, part in sorted(taken.get(name, [])):
            shape += [before // done, part]
            dims.append(len(shape) - 1)
            done = before * part
        shape.append(size // done)
    if device_ids is None:
        ids = np.arange(math.prod(shape))
    elif device_ids.startswith("["):
        ids = _read_iota(device_ids)
    else:
        ids = np.array([int(number) for number in device_ids.split(",")])
    return _groups_along(ids.reshape(shape), dims)


def _permute_axes(attributes: str, mesh_axes: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """The mesh axes along which some device sends, and 2, or 1 where every device keeps its own."""
    match = _PAIRS.search(attributes)
    numbers = [int(number) for number in re.findall(r"\d+", match[1])] if match else []
    pairs = [(a, b) for a, b in zip(numbers[::2], numbers[1::2], strict=True) if a != b]
    if not pairs:
        return (), 1
    shape = tuple(mesh_axes.values())
    if max(map(max, pairs)) >= math.prod(shape):
        return (), 2
    sources, targets = (np.array(np.unravel_index(ids, shape)) for ids in zip(*pairs, strict=True))
    moved = (sources != targets).any(axis=1)
    return tuple(name for name, moves in zip(mesh_axes, moved, strict=True) if moves), 2
