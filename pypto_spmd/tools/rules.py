"""`pypto rules`: what is known about each primitive, as a table or as JSON.

A rule is a function of an equation. What is shown is its value at the primitive's example, whose shapes are
in the JSON.
"""

import argparse
import difflib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from pypto_spmd.errors import count_of, listed

NAME = "rules"
HELP = "show the rule of each primitive: which dims can be split, what is linear, what is exchanged"

_WIDE = 1000
"""Columns of a table that is not on a terminal."""


@dataclass(frozen=True, slots=True)
class Row:
    """One primitive.

    Args:
        primitive: its name.
        rule: the factor rule of its example, "" if it has none.
        example: the example's operands and results.
        reduced: factor -> the reduction that results wait for when it is split.
        linear: groups of operands that may be partial together, and for which reductions.
        exchanges: what the primitive exchanges itself, by factor.
        works: whether it is matrix work, which ought to be split.
        reason: why it or some of its dims stay whole, or why it has no rule; "" otherwise.
    """

    primitive: str
    rule: str
    example: str
    reduced: dict[str, str]
    linear: tuple[dict[str, Any], ...]
    exchanges: tuple[dict[str, str], ...]
    works: bool
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `pypto rules`."""
    parser.add_argument("primitives", nargs="*", metavar="NAME", help="primitives; by default all")
    parser.add_argument("--json", action="store_true", help="print JSON, one object a primitive")
    parser.epilog = (
        "In a rule, a letter is a dim that operands and results share and that can be split over devices, "
        "_ one that stays whole, and (i j) a dim made of two, the first the slower. A rule depends on an "
        "equation's shapes and options; shown is that of one example."
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the table."""
    from pypto_spmd.collectives.rules.whole import ELSEWHERE

    every = all_primitives()
    names = list(dict.fromkeys(arguments.primitives)) or every
    unknown = [name for name in names if name not in every and name not in ELSEWHERE]
    if unknown:
        for name in unknown:
            near = difflib.get_close_matches(name, every, 3)
            hint = f"; did you mean {listed(near, 'or')}?" if near else ""
            print(f"pypto rules: no primitive {name!r} is known{hint}", file=sys.stderr)
        return 1
    rows = [row_of(name) for name in names]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        _print(rows)
    return 0


def all_primitives() -> list[str]:
    """The primitives with a rule or with a reason why there is none, sorted."""
    from pypto_spmd.collectives.rules import registered
    from pypto_spmd.collectives.rules.whole import WITHOUT_RULE

    return sorted({*registered(), *WITHOUT_RULE})


def row_of(name: str) -> Row:
    """What is known about one primitive."""
    from pypto_spmd.collectives.rules import has_rule
    from pypto_spmd.collectives.rules.examples import EXAMPLES, WITHOUT_EXAMPLE
    from pypto_spmd.collectives.rules.registry import NO_RULE
    from pypto_spmd.collectives.rules.whole import ELSEWHERE, WITHOUT_RULE

    if not has_rule(name):
        return Row(name, "", "", {}, (), (), False, {**ELSEWHERE, **WITHOUT_RULE}[name])
    if name not in EXAMPLES:
        return Row(name, "", "", {}, (), (), False, WITHOUT_EXAMPLE.get(name, "a rule of the user"))
    try:
        shown = EXAMPLES[name].shown(name)
    except LookupError as error:
        return Row(name, "", "", {}, (), (), False, str(error))
    rule, letters = shown.rule, _letters(shown.rule)
    linear = tuple(
        {"operands": sorted(group.operands), "ops": list(group.ops)} for group in rule.linear
    )
    exchanges = tuple(
        {"factor": letters[i], "kind": exchange.kind, "what": exchange.what}
        for i, factor in enumerate(rule.factors)
        if letters[i] != "_"
        for exchange in factor.exchanges_for(2)
    )
    reason = rule.reason
    if reason.startswith(NO_RULE):
        reason = "each has the rule that register_rule gives it"
    return Row(
        name,
        _notation(rule, letters),
        shown.example,
        {
            letters[i]: f.reduce
            for i, f in enumerate(rule.factors)
            if f.reduce and letters[i] != "_"
        },
        linear,
        exchanges,
        rule.works,
        reason,
    )


def _letters(rule: Any) -> list[str]:
    """A letter for each factor that can be split, in the order of the notation."""
    from pypto_spmd.collectives.rules.factor import can_split

    order = [f for dims in (*rule.operands, *rule.results) for dim in dims for f in dim]
    fresh = (chr(ord("i") + n) if n < 17 else f"i{n}" for n in count())
    letters = ["_"] * len(rule.factors)
    for f in dict.fromkeys(order):
        if can_split(rule, f):
            letters[f] = next(fresh)
    return letters


def _notation(rule: Any, letters: Sequence[str]) -> str:
    def dim(factors: Sequence[int]) -> str:
        names = [letters[f] for f in factors]
        if not names or set(names) == {"_"}:
            return "_"
        return names[0] if len(names) == 1 else f"({' '.join(names)})"

    def tensors(side: Any) -> str:
        return ", ".join(" ".join(map(dim, dims)) or "()" for dims in side)

    return f"{tensors(rule.operands)} -> {tensors(rule.results)}".strip()


def _print(rows: Sequence[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("primitive", no_wrap=True)
    table.add_column("rule")
    table.add_column("reduced")
    table.add_column("linear in")
    table.add_column("exchanged, or why whole")
    for row in rows:
        table.add_row(*_cells(row))
    with console.capture() as capture:
        console.print(table)
        if len(rows) > 1:
            console.print(_summary(rows))
    print("\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n"))


def _cells(row: Row) -> Iterator[str]:
    from rich.markup import escape

    from pypto_spmd.collectives.plan import TITLES

    yield escape(row.primitive)
    yield escape(row.rule)
    yield ", ".join(f"{name} {op}" for name, op in row.reduced.items())
    yield _linear(row)
    told = Counter(f"{e['factor']}: {TITLES[e['kind']]}, {e['what']}" for e in row.exchanges)
    times = [text if n == 1 else f"{text} ({n} times)" for text, n in told.items()]
    yield escape("; ".join([*times, row.reason] if row.reason else times))


def _linear(row: Row) -> str:
    """`0 or 1` for a product, `0+1` for a sum; the reductions in parentheses if not only sums."""
    groups = ["+".join(map(str, group["operands"])) for group in row.linear]
    ops = list(dict.fromkeys(op for group in row.linear for op in group["ops"]))
    return " or ".join(groups) + (f" ({', '.join(ops)})" if ops not in ([], ["sum"]) else "")


def _summary(rows: Sequence[Row]) -> str:
    kinds = Counter("split" if _splits(row) else "whole" if row.rule else "none" for row in rows)
    return (
        f"{count_of(len(rows), 'primitive')}: {kinds['split']} can be split, {kinds['whole']} run whole, "
        f"{kinds['none']} are not a matter of rules or have no example; each with its reason."
    )


def _splits(row: Row) -> bool:
    return any(c.isalpha() for c in row.rule)
