"""The communication plan: what will be sent, why, and what it costs, before anything is compiled."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
"""Version of the JSON form; raised when a field changes its meaning."""

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
"""The kinds of steps, as `CommPlan.counts` names them."""

TITLES = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_to_all": "AllToAll",
    "collective_permute": "CollectivePermute",
}


@dataclass(frozen=True, slots=True)
class CommStep:
    """One collective of a plan.

    Args:
        index: its number, in order of execution.
        kind: one of `KINDS`.
        axes: mesh axes over which it runs, outermost first.
        bytes: bytes of the tensor that is whole over the group of devices; for CollectivePermute the bytes
            that one device sends.
        wire_bytes: bytes that each device sends, once.
        seconds: estimated time, once, under the mesh's topology.
        repeat: how often it runs in one call; None inside a loop whose length is not known.
        op: the primitive whose operand or result it moves.
        tensor: what is moved: the path of an argument, or a description.
        source: `file.py:line` in the user's code.
        reason: why, in words.
        elements: elements, on one device, of the larger of what goes in and what comes out.
        dtype: its dtype.
        tensors: how many tensors travel together.
        recomputes: index of the step that did the same before, where this one belongs to a recomputation
            (`jax.checkpoint`); a compiler that does not keep the two apart runs one of them.
    """

    index: int
    kind: str
    axes: tuple[str, ...]
    bytes: float
    wire_bytes: float
    seconds: float
    repeat: int | None
    op: str
    tensor: str
    source: str
    reason: str
    elements: int
    dtype: str
    tensors: int = 1
    recomputes: int | None = None

    @property
    def times(self) -> int:
        """How often it is counted: once where the number of trips is not known."""
        return 1 if self.repeat is None else self.repeat

    def __str__(self) -> str:
        times = "" if self.repeat == 1 else f" x{self.repeat or '?'}"
        return (
            f"{TITLES[self.kind]}({show_bytes(self.bytes)}) over {', '.join(self.axes)}{times}: "
            f"{self.tensor}"
        )


@dataclass(frozen=True, slots=True)
class CommPlan:
    """All communication of one call of a decorated function.

    Args:
        function: name of the function.
        mesh: size of each mesh axis.
        objective: what was minimised.
        steps: the collectives, in order of execution.
        in_layouts: argument path -> layout, in the notation `[data, -]`.
        out_layouts: result path -> layout.
        notes: what else a reader should know (primitives without a rule, cheaper objectives, bounds).
        gap: by how much (relatively) the cost may exceed the least one; 0 when the plan is exact.
    """

    function: str
    mesh: Mapping[str, int]
    objective: str
    steps: tuple[CommStep, ...]
    in_layouts: Mapping[str, str] = field(default_factory=dict)
    out_layouts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    gap: float = 0.0
    explore: Callable[[str], dict[str, float]] | None = field(
        default=None, compare=False, repr=False
    )

    def counts(self) -> dict[str, int]:
        """How many steps there are of each kind; a step inside a loop counts once."""
        found: dict[str, int] = dict.fromkeys(KINDS, 0)
        for step in self.steps:
            found[step.kind] += 1
        return found

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends in one call, loops counted by their trips."""
        return sum(step.wire_bytes * step.times for step in self.steps)

    @property
    def seconds(self) -> float:
        """Estimated time that communication takes in one call, nothing overlapped."""
        return sum(step.seconds * step.times for step in self.steps)

    def assert_counts(self, **expected: int) -> None:
        """Checks the number of steps of each kind; kinds not named must not occur.

        Raises:
            AssertionError: naming the kinds that differ and the steps that are there.
            TypeError: for an unknown kind.
        """
        unknown = sorted(set(expected) - set(KINDS))
        if unknown:
            raise TypeError(
                f"unknown kind of collective: {', '.join(unknown)}; known: {', '.join(KINDS)}"
            )
        counts = self.counts()
        wrong = [
            f"{kind}: expected {expected.get(kind, 0)}, planned {count}"
            for kind, count in counts.items()
            if count != expected.get(kind, 0)
        ]
        if wrong:
            raise AssertionError(f"plan of {self.function!r}: {'; '.join(wrong)}\n{self.table()}")

    def alternatives(self, path: str) -> dict[str, float]:
        """What each other layout of one argument would cost.

        Args:
            path: the argument's path, as in `in_layouts`.

        Returns:
            For each mesh axis and label of the argument there ("data: S(0)"), the least cost of the whole
            plan under its objective, relative to the chosen layout, in bytes; the other axes stay as they
            are.

        Raises:
            KeyError: if there is no such argument.
            ValueError: if the plan was loaded from a file, and so has no program to explore.
        """
        if path not in self.in_layouts:
            raise KeyError(f"no argument {path!r}; arguments: {', '.join(self.in_layouts)}")
        if self.explore is None:
            raise ValueError(
                "a plan loaded from a file has no alternatives; plan the function again"
            )
        return self.explore(path)

    def diff(self, other: "CommPlan") -> str:
        """What changes from this plan to `other`, as text; "" if their steps are the same."""
        key = lambda s: (s.kind, s.axes, s.elements, s.repeat, s.tensor)  # noqa: E731
        mine, theirs = [key(s) for s in self.steps], [key(s) for s in other.steps]
        lines = []
        for step, k in zip(self.steps, mine, strict=True):
            if k in theirs:
                theirs.remove(k)
            else:
                lines.append(f"- {step}")
        rest = [key(s) for s in self.steps]
        for step in other.steps:
            if key(step) in rest:
                rest.remove(key(step))
            else:
                lines.append(f"+ {step}")
        if lines:
            lines.append(
                f"wire bytes per device: {show_bytes(self.wire_bytes)} -> {show_bytes(other.wire_bytes)}"
            )
        return "\n".join(lines)

    def table(self) -> str:
        """The steps as an aligned text table, with a last line of totals."""
        header = ("#", "collective", "axes", "bytes", "wire", "times", "tensor", "source", "reason")
        rows: list[tuple[str, ...]] = [header]
        for s in self.steps:
            rows.append(
                (
                    str(s.index), TITLES[s.kind], ",".join(s.axes), show_bytes(s.bytes),
                    show_bytes(s.wire_bytes), "?" if s.repeat is None else str(s.repeat), s.tensor,
                    s.source, s.reason,
                )
            )  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines.insert(1, "  ".join("-" * w for w in widths))
        if not self.steps:
            lines = ["no communication"]
        lines.append(self.summary())
        return "\n".join(lines)

    def summary(self) -> str:
        """One line: counts, bytes and time."""
        counts = (
            ", ".join(f"{n} {TITLES[k]}" for k, n in self.counts().items() if n) or "no collective"
        )
        return (
            f"{self.function}: {counts}; {show_bytes(self.wire_bytes)} sent by each device, "
            f"about {show_seconds(self.seconds)}"
        )

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """The plan as JSON text, with a schema version."""
        data: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        for name in ("function", "objective", "gap"):
            data[name] = getattr(self, name)
        data["mesh"] = dict(self.mesh)
        data["wire_bytes"], data["seconds"], data["counts"] = (
            self.wire_bytes,
            self.seconds,
            self.counts(),
        )
        data["in_layouts"], data["out_layouts"] = dict(self.in_layouts), dict(self.out_layouts)
        data["notes"] = list(self.notes)
        data["steps"] = [asdict(s) for s in self.steps]
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str) -> "CommPlan":
        """The plan that `to_json` wrote.

        Raises:
            ValueError: if the text is not a plan, or of another schema version.
        """
        try:
            data = json.loads(text)
            version = data["schema_version"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"not a communication plan: {error}") from None
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"plan has schema version {version}; this version reads {SCHEMA_VERSION}"
            )
        steps = tuple(CommStep(**{**s, "axes": tuple(s["axes"])}) for s in data["steps"])
        return CommPlan(
            data["function"], data["mesh"], data["objective"], steps, data["in_layouts"],
            data["out_layouts"], tuple(data["notes"]), data["gap"],
        )  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON to `path`."""
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> "CommPlan":
        """Reads a plan that `save` wrote."""
        return CommPlan.from_json(Path(path).read_text())


def show_bytes(count: float) -> str:
    """Bytes for people: `512B`, `1.5KB`, `256MB` (powers of 1024)."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1024 or unit == "TB":
            break
        count /= 1024
    return f"{count:.0f}{unit}" if abs(count - round(count)) < 0.05 else f"{count:.1f}{unit}"


def show_seconds(seconds: float) -> str:
    """Seconds for people: `12us`, `3.4ms`, `1.2s`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g}{unit}"
    raise AssertionError
