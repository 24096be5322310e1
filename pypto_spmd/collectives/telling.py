"""A plan the way a colleague would tell it."""

from collections.abc import Mapping

from pypto_spmd.collectives.plan import TITLES, CommPlan, CommStep, show_bytes, show_seconds
from pypto_spmd.errors import count_of, listed

MOST_LAYOUTS_TOLD = 12
"""Arguments and results whose layouts are told; of more, only how many lie in the same way."""


def tell(plan: CommPlan) -> str:
    """What a call communicates, why, what it costs, and how arguments and results lie."""
    mesh = " × ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    if plan.steps:
        head = (
            f"{plan.function} on {mesh} needs {count_of(len(plan.steps), 'collective')}: each device sends "
            f"{show_bytes(plan.wire_bytes)} a call, about {show_seconds(plan.seconds)}."
        )
    else:
        head = f"{plan.function} on {mesh} needs no communication."
    lines = [head]
    for step in plan.steps:
        lines += ["", *_step_lines(step)]
    lines += ["", *_layout_lines("Arguments", plan.in_layouts)]
    lines += _layout_lines("Results", plan.out_layouts)
    if plan.notes:
        lines += ["", *(f"Note: {note}." for note in plan.notes)]
    return "\n".join(lines)


def _step_lines(step: CommStep) -> list[str]:
    axes = listed([repr(axis) for axis in step.axes])
    times = ""
    if step.repeat != 1:
        known = f"{step.repeat} times" if step.repeat is not None else "once a trip of a loop"
        times = f", {known}"
    where = f" at {step.source}" if step.source else ""
    head = (
        f"{TITLES[step.kind]} of {step.tensor} over {axes} ({show_bytes(step.bytes)}{times}){where}"
    )
    return [f"{step.index}. {head}", f"   Why: {step.reason}."]


def _layout_lines(title: str, layouts: Mapping[str, str]) -> list[str]:
    if not layouts:
        return []
    if len(layouts) <= MOST_LAYOUTS_TOLD:
        return [f"{title}: " + ", ".join(f"{path} {layout}" for path, layout in layouts.items())]
    alike: dict[str, list[str]] = {}
    for path, layout in layouts.items():
        alike.setdefault(layout, []).append(path)
    lines = [f"{title}:"]
    for layout, paths in alike.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        lines.append(f"  {layout}: {paths[0]}{more}")
    return lines
