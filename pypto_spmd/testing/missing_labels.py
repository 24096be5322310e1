"""The labellings that a rule does not allow although they are right."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pypto_spmd.collectives.rules import Aval, choices
from pypto_spmd.errors import listed
from pypto_spmd.sharding.layout import Label, Layout, P, R, S
from pypto_spmd.testing.applications import Application
from pypto_spmd.testing.comparison import close
from pypto_spmd.testing.random_data import as_data, draw, parts_of

MOST_LABELLINGS = 300
"""How many labellings of one equation the search for missing ones tries."""


def find_missing(application: Application, random: np.random.Generator) -> list[str]:
    """Labellings on one axis of 2 that no choice of the rule has, and that are right all the same."""
    rule = application.rule
    legal = {c.operands for c in choices(rule, tuple(f.size for f in rule.factors), 2)}
    takes: dict[Any, bool] = {}
    labellings = [
        labels
        for labels in itertools.product(*(_labels(a) for a in application.ins))
        if labels not in legal and _takes(application, labels, takes)
    ][:MOST_LABELLINGS]

    @jax.jit
    def run(whole: Sequence[jax.Array], given: Sequence[Sequence[jax.Array]]) -> Any:
        shards = [
            [_bind(application, _cut(values, labels, device)) for device in range(2)]
            for labels, values in zip(labellings, given, strict=True)
        ]
        return _bind(application, whole), shards

    others = tuple(_redrawn(random, a) for a in application.operands)
    verdicts = None
    for operands in (application.operands, others):
        given = [
            [parts_of(random, value, _on_x(value, label), {"x": 2}) for value, label in pairs]
            for pairs in (zip(operands, labels, strict=True) for labels in labellings)
        ]
        whole, shards = jax.device_get(run(operands, given))
        right = [_right_labels(whole, parts) for parts in shards]
        verdicts = (
            right if verdicts is None else [a & b for a, b in zip(verdicts, right, strict=True)]
        )
    return [
        f"{application}: {_in_words('operand', labels)} would give {_in_words('result', results)}"
        for labels, found in zip(labellings, verdicts or (), strict=True)
        for results in sorted(found)
    ]


def _in_words(what: str, labels: Sequence[Label]) -> str:
    """Operands or results, and how each lies."""
    told = {"R": "whole", "P": "as a partial sum"}
    return listed(
        [
            f"{what} {i} " + told.get(label.kind, f"split along dim {label.dim}")
            for i, label in enumerate(labels)
        ]
    )


def _labels(aval: Aval) -> list[Label]:
    if aval.value is not None or not isinstance(aval.dtype, np.dtype):
        return [R]
    splits = [S(d) for d, n in enumerate(aval.shape) if n and n % 2 == 0]
    return [R, *splits, *([P("sum")] if aval.dtype != np.dtype(bool) else [])]


def _redrawn(random: np.random.Generator, value: jax.Array) -> jax.Array:
    """Other data of the same kind: floats anew, integers in another order."""
    if not isinstance(value.dtype, np.dtype):
        return value
    if value.dtype == np.dtype(bool):
        return ~value
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return draw(random, jax.ShapeDtypeStruct(value.shape, value.dtype))
    return jnp.asarray(random.permuted(np.asarray(value).ravel()).reshape(value.shape))


def _on_x(value: jax.Array, label: Label) -> Layout:
    return Layout.replicated(value.ndim).with_label("x", label)


def _takes(
    application: Application, labels: Sequence[Label], known: dict[tuple[Any, ...], bool]
) -> bool:
    """Whether the primitive takes operands of these local shapes together."""
    local = tuple(
        Layout.replicated(len(aval.shape)).with_label("x", label).local_shape(aval.shape, {"x": 2})
        for aval, label in zip(application.ins, labels, strict=True)
    )
    if local not in known:
        arguments = [
            jax.ShapeDtypeStruct(shape, a.dtype)
            for shape, a in zip(local, application.ins, strict=True)
        ]
        try:
            lowered = jax.jit(lambda *operands: _bind(application, operands)).lower(*arguments)
            known[local] = len(jax.tree.leaves(lowered.out_info)) == len(application.outs)
        except Exception:  # a primitive may refuse shapes by any error, some while it is lowered
            known[local] = False
    return known[local]


def _right_labels(
    whole: Sequence[np.ndarray], parts: Sequence[Sequence[np.ndarray]]
) -> set[tuple[Label, ...]]:
    """The labellings of the results under which the two devices' parts are right."""
    options = []
    for result, truth in enumerate(map(np.asarray, whole)):
        pieces = [np.asarray(device[result]) for device in parts]
        tells = truth.size and not np.all(truth == truth.ravel()[0])
        candidates = [R, *(S(d) for d in range(truth.ndim)), P("sum")]
        options.append([c for c in candidates if tells and _assembles(pieces, truth, c)])
    return set(itertools.product(*options))


def _bind(application: Application, operands: Sequence[jax.Array]) -> list[jax.Array]:
    results = application.primitive.bind(*operands, **application.params)
    return list(map(as_data, results if isinstance(results, list | tuple) else [results]))


def _cut(values: Sequence[jax.Array], labels: Sequence[Label], device: int) -> list[jax.Array]:
    local = []
    for value, label in zip(values, labels, strict=True):
        if label.kind == "P":
            value = value[device]
        elif label.kind == "S":
            size = value.shape[label.dim] // 2
            value = lax.slice_in_dim(value, device * size, (device + 1) * size, axis=label.dim)
        local.append(value)
    return local


def _assembles(parts: Sequence[np.ndarray], whole: np.ndarray, label: Label) -> bool:
    if label.kind == "R":
        return all(close(p, whole, whole) for p in parts)
    if label.kind == "S":
        return close(np.concatenate(parts, axis=label.dim), whole, whole)
    return whole.dtype != np.dtype(bool) and close(parts[0] + parts[1], whole, whole)
