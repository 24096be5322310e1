"""Rules against the truth: every labelling that a rule calls legal is run on shards.

For each equation of a traced function, on one axis and on two, every combination of legal choices is
enumerated, the operands are cut (or made partial) by their labels, the rule's `bind` runs on the shards
under `shard_map`, and what comes out is put together by the results' labels and compared with the whole.
All combinations of an equation run in one program. The collectives in that program must be those that
the rule states. The other way round, `incomplete` finds labellings that the rule does not call legal but
that would have been right.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pypto_spmd.collectives.rules import has_rule
from pypto_spmd.mesh import DeviceMesh
from pypto_spmd.testing.applications import applications
from pypto_spmd.testing.legal_labels import check_legal
from pypto_spmd.testing.missing_labels import find_missing
from pypto_spmd.testing.random_data import draw


@dataclass(frozen=True, slots=True)
class RuleReport:
    """What the truth test of a function's equations found.

    Args:
        checked: how many legal labellings were run.
        wrong: those that gave a wrong result, failed, or communicated otherwise than the rule states.
        incomplete: labellings that the rule does not allow although they are right, and primitives
            without a rule.
        advice: what to change in the rules.
    """

    checked: int
    wrong: tuple[str, ...]
    incomplete: tuple[str, ...]
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.checked} labellings checked, {len(self.wrong)} wrong."]
        lines += [f"  wrong: {text}" for text in self.wrong]
        lines += [f"  incomplete: {text}" for text in self.incomplete]
        lines += [f"  Fix: {text}" for text in self.advice]
        return "\n".join(lines)

    def check(self, *, complete: bool = False) -> None:
        """Raises an error that tells what was found, if there is anything.

        Args:
            complete: whether incomplete rules are an error too.

        Raises:
            AssertionError: if a rule is wrong.
        """
        if self.wrong or (complete and self.incomplete):
            raise AssertionError(str(self))


def check_rule(
    function: Callable[..., Any],
    *args: Any,
    mesh_shapes: Sequence[tuple[int, ...]] = ((2, 4),),
    primitives: Collection[str] = (),
    most_nested: int | None = None,
    incomplete: bool = False,
    seed: int = 0,
) -> RuleReport:
    """Checks the rules of all equations of a function against the truth.

    Every labelling of operands and results that a rule allows is run on shards and compared with the
    whole. So a rule of one's own, made by `register_rule`, is tested by one line:
    `check_rule(rms_norm, x, scale).check()`.

    Args:
        function: what to trace; calls inside it (jit, custom derivatives) are looked into.
        *args: arrays that show the primitive's behaviour, or `ShapeDtypeStruct`s to draw random ones.
            Equal sizes, sorted indices and the like let wrong rules pass; dims that no axis divides
            are not split at all.
        mesh_shapes: meshes of CPU devices to check on; devices are simulated if need be. A mesh of two
            axes checks each of them alone too.
        primitives: names of the primitives to check; by default all.
        most_nested: how many combinations in which several axes do something are run for each equation,
            drawn at random; all by default.
        incomplete: whether to look for missing labellings too (slow).
        seed: of the random data.

    Returns:
        What was found; `wrong` is empty if the rules are right.

    Raises:
        ShardingError: if a rule does not fit the arrays.
    """
    random = np.random.default_rng(seed)
    largest = max((prod(shape) for shape in mesh_shapes), default=1)
    _ = DeviceMesh.simulate((largest,), ("all",)).devices  # before any array starts the backend
    flat, tree = jax.tree.flatten(args)
    arrays = [
        draw(random, a) if isinstance(a, jax.ShapeDtypeStruct) else jnp.asarray(a) for a in flat
    ]
    traced = jax.make_jaxpr(lambda *leaves: function(*jax.tree.unflatten(tree, leaves)))(*arrays)
    checked, wrong, missing, advice = 0, [], [], []
    for application in applications(traced.jaxpr, traced.consts, arrays):
        if primitives and application.primitive.name not in primitives:
            continue
        if not has_rule(application.primitive.name):
            missing.append(f"{application.primitive.name} has no rule")
        wrong += application.misfits()
        for shape in mesh_shapes:
            count, found = check_legal(application, shape, most_nested, random)
            checked += count
            for case, text, failed in found:
                wrong.append(text)
                advice += [] if case.is_nested else case.advice(application.rule, failed)
        if incomplete:
            missing += find_missing(application, random)
    once = lambda texts: tuple(dict.fromkeys(texts))  # noqa: E731
    return RuleReport(checked, once(wrong), once(missing), once(advice))
