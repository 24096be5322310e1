"""User mistakes: what is wrong, the numbers behind it, and the fix, all faults in one error.

Code that checks something collects :class:`Fault` values; the public boundary raises them together
with :func:`raise_faults`, so that a person mends a program once and not once per mistake.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

MOST_FAULTS_SHOWN = 10
MOST_DIVISORS_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, in three sentences.

    Args:
        what: What was found, with its numbers: ``"argument 'x' has shape f32[10,4]."``
        why: Why that can't be.
        fix: What to do instead, without the word "Fix".
    """

    what: str
    why: str
    fix: str

    def lines(self) -> tuple[str, ...]:
        """The sentences, one a line, as they stand in the message."""
        return (self.what, self.why, f"Fix: {self.fix}")


class ShardingError(ValueError):
    """A layout, mesh or program that can't be, told with its numbers and the fix.

    Args:
        message: The whole text.
        faults: What the text is made of, for tools that want it in parts.
    """

    def __init__(self, message: str, faults: Iterable[Fault] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)


def spmd_function(name: str) -> str:
    """How a decorated function is called at the start of a message."""
    return f"@spmd function '{name}'"


def compose(subject: str, faults: Sequence[Fault]) -> str:
    """Puts the message together: one fault follows the subject, several are numbered below it.

    Args:
        subject: What the faults are about, such as ``"DeviceMesh"`` or ``spmd_function("step")``.
        faults: At least one; after the first ten only their number is told.
    """
    if len(faults) == 1:
        first, *rest = faults[0].lines()
        return "\n".join([f"{subject}: {first}", *(f"  {line}" for line in rest)])
    text = [f"{subject}: {len(faults)} things are wrong."]
    for number, fault in enumerate(faults[:MOST_FAULTS_SHOWN], start=1):
        first, *rest = fault.lines()
        mark = f"  {number}. "
        text += [mark + first, *(" " * len(mark) + line for line in rest)]
    if len(faults) > MOST_FAULTS_SHOWN:
        text.append(f"  ... and {len(faults) - MOST_FAULTS_SHOWN} more.")
    return "\n".join(text)


def raise_faults(subject: str, faults: Sequence[Fault]) -> None:
    """Raises all faults in one error; does nothing when there are none.

    Args:
        subject: What the faults are about, such as ``"DeviceMesh"`` or ``spmd_function("step")``.
        faults: What was found; the same fault found twice is told once.

    Raises:
        ShardingError: If there is a fault.
    """
    once = tuple(dict.fromkeys(faults))
    if once:
        raise ShardingError(compose(subject, once), once)


def refuse(subject: str, what: str, why: str, fix: str) -> NoReturn:
    """Raises one fault at once, where nothing after it could be checked."""
    fault = Fault(what, why, fix)
    raise ShardingError(compose(subject, [fault]), [fault])


def count_of(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: ``1 entry``, ``2 entries``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def listed(words: Sequence[str], last: str = "and") -> str:
    """Words as a sentence lists them: ``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def quoted(path: str) -> str:
    """A name in quotes; a path that holds quotes itself stays as it is."""
    return path if "'" in path else f"'{path}'"


def shape_text(shape: Sequence[int], dtype: Any) -> str:
    """A shape as JAX writes it: ``f32[10,4]``."""
    name = str(getattr(dtype, "name", None) or np.dtype(dtype).name)
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("complex", "c")):
        if name.startswith(long):
            name = short + name[len(long) :]
            break
    else:
        if name.startswith("int"):
            name = "i" + name[len("int") :]
    return f"{name}[{','.join(map(str, shape))}]"


def divisors_near(size: int, wanted: int) -> tuple[int, ...]:
    """The divisors of a dim's size in ascending order; of many, those nearest to what was wanted."""
    small = [d for d in range(1, int(size**0.5) + 1) if size % d == 0]
    every = sorted({*small, *(size // d for d in small)})
    nearest = sorted(every, key=lambda d: (max(d, wanted) / min(d, wanted), d))
    return tuple(sorted(nearest[:MOST_DIVISORS_SHOWN]))


def divisibility_fix(
    dim: int, size: int, parts: int, axes: int, whole: str, option: str = ""
) -> str:
    """The three ways out when a dim isn't divisible by the number of its shards.

    Args:
        dim: Which dim.
        size: Its size.
        parts: How many shards it was to have: the product of its mesh axes' sizes.
        axes: How many mesh axes that product is of.
        whole: The spec that leaves the dim whole, as text.
        option: What has the dim padded, as a person writes it; "" if nothing does.
    """
    padded = -(-size // parts) * parts
    sizes = listed([str(d) for d in divisors_near(size, parts)], "or")
    other = f"an axis of size {sizes}" if axes == 1 else f"axes whose sizes multiply to {sizes}"
    pad = f"let {option} pad" if option else "pad"
    return f"{pad} dim {dim} to {padded}, use {other}, or leave the dim whole: {whole}."
