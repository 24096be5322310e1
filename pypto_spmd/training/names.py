"""Which layers are split how in tensor parallelism, by the names that models give them.

The two matrices of a pair, such as the query and the output of an attention, or the first and second
layer of a network, are split by columns and by rows (Shoeybi et al. 2019): what is between them stays
split, and one AllReduce follows. Layers without names of their own (`Dense_0`, `layers/0`) are paired
in order where the sizes fit. Embeddings and heads are split by vocabulary.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from pypto_spmd.sharding.leaves import Leaf

COLUMNS = re.compile(
    r"q|k|v|qkv|query|key|value|wq|wk|wv|wqkv|[qkv]_proj|qkv_proj|to_[qkv]|to_qkv|c_attn|in_proj|query_key_value"
    r"|up|gate|up_proj|gate_proj|fc1|fc_in|wi|wi_[01]|w1|w3|c_fc|lin1|linear1|dense1|intermediate"
    r"|dense_h_to_4h|mlp_in|gate_up_proj"
)
"""Layers whose outputs are split."""

ROWS = re.compile(
    r"o|out|wo|o_proj|out_proj|to_out|proj|c_proj"
    r"|down|down_proj|fc2|fc_out|w2|lin2|linear2|dense2|output|dense_4h_to_h|mlp_out"
)
"""Layers whose inputs are split, if one of the above is beside them."""

HEADS = re.compile(r"(lm_|output_|classifier_)?head|logits|unembed(ding)?|classifier|decoder_head")
"""Layers whose outputs are a vocabulary."""

_TABLE = re.compile(
    r"embedding|embeddings|embed|wte|token_embed(ding)?s?|tok_embeddings|embed_tokens"
)
_POSITION = re.compile(r"pos|wpe")
_WEIGHTS, _BIASES = frozenset({"kernel", "w", "weight"}), frozenset({"bias", "b"})
_NUMBERED = re.compile(r"(.*?)_?(\d+)")


@dataclass(frozen=True, slots=True)
class _Layer:
    """A matrix, and its bias if it has one."""

    parent: tuple[str, ...]
    name: str
    kernel: Leaf
    bias: Leaf | None = None


def conventional_specs(
    leaves: Sequence[Leaf], axes: tuple[str, ...], parts: int
) -> list[PartitionSpec]:
    """A spec for each parameter; what has no conventional name, or isn't divisible, is whole.

    Args:
        leaves: the parameters.
        axes: the mesh axes.
        parts: into how many parts they split a dim.
    """
    splits: dict[str, int] = {}
    siblings: dict[tuple[str, ...], list[_Layer]] = defaultdict(list)
    for layer in _layers(leaves):
        siblings[layer.parent].append(layer)
    for layers in siblings.values():
        for layer in layers:
            if HEADS.fullmatch(_bare(layer.name)):
                splits |= _columns(layer, len(layer.kernel.shape) - 2)
        splits |= _pairs(layers)
    for leaf in leaves:
        if _is_table(leaf):
            splits[leaf.text] = len(leaf.shape) - 2
    specs = []
    for leaf in leaves:
        dim = splits.get(leaf.text)
        if not axes or dim is None or dim >= len(leaf.shape) or leaf.shape[dim] % parts:
            specs.append(PartitionSpec())
        else:
            specs.append(PartitionSpec(*[None] * dim, axes[0] if len(axes) == 1 else axes))
    return specs


def _layers(leaves: Sequence[Leaf]) -> Iterator[_Layer]:
    """The layers that the parameters are of; an array of two dims or more may be one by itself."""
    biases = {leaf.path[:-1]: leaf for leaf in leaves if leaf.path[-1] in _BIASES}
    for leaf in leaves:
        if len(leaf.shape) < 2 or leaf.path[-1] in _BIASES:
            continue
        above = leaf.path[:-1]
        if leaf.path[-1] in _WEIGHTS and above:
            yield _Layer(above[:-1], above[-1], leaf, biases.get(above))
        else:
            yield _Layer(above, leaf.path[-1], leaf)


def _pairs(layers: Sequence[_Layer]) -> dict[str, int]:
    """The split dim of each array of the layers of one parent that are pairs, by path."""
    columns = [layer for layer in layers if COLUMNS.fullmatch(_bare(layer.name))]
    rows = [layer for layer in layers if ROWS.fullmatch(_bare(layer.name))]
    found: dict[str, int] = {}
    paired = False
    for row in rows:
        stacks = [s for column in columns if (s := _stacked(column, row)) is not None]
        if stacks:
            paired = True
            found[row.kernel.text] = min(stacks)
            for column in columns:
                if column.kernel.text not in found:
                    found |= _columns(column, min(stacks))
    return found if paired else _numbered_pairs(layers)


def _numbered_pairs(layers: Sequence[_Layer]) -> dict[str, int]:
    """Layers whose names differ by a number, two at a time."""
    by_stem: dict[str, list[tuple[int, _Layer]]] = defaultdict(list)
    for layer in layers:
        match = _NUMBERED.fullmatch(layer.name)
        if match is not None:
            by_stem[match[1]].append((int(match[2]), layer))
    found: dict[str, int] = {}
    for numbered in by_stem.values():
        row = [layer for _, layer in sorted(numbered, key=lambda pair: pair[0])]
        while len(row) > 1:
            first, second, *rest = row
            stacked = _stacked(first, second)
            if stacked is None or len(first.kernel.shape) - stacked != 2:
                row = [second, *rest]
                continue
            found |= _columns(first, stacked)
            found[second.kernel.text] = stacked
            row = rest
    return found


def _stacked(column: _Layer, row: _Layer) -> int | None:
    """How many leading dims of a pair stack layers; None if they are no pair."""
    first, second = column.kernel.shape, row.kernel.shape
    for stacked in (0, 1):
        out, into = first[stacked + 1 :], second[stacked:-1]
        if first[:stacked] == second[:stacked] and out and out == into:
            return stacked
    return None


def _columns(layer: _Layer, stacked: int) -> dict[str, int]:
    """The split dims of the arrays of a layer whose outputs are split, by path."""
    found = {layer.kernel.text: stacked + 1}
    if layer.bias is not None:
        found[layer.bias.text] = stacked
    return found


def _is_table(leaf: Leaf) -> bool:
    """Whether it is a table of embeddings, but not of positions."""
    *above, layer, last = ("", "", *leaf.path)
    name = layer if last in _WEIGHTS and layer else last
    if len(leaf.shape) not in (2, 3) or _TABLE.fullmatch(_bare(name)) is None:
        return False
    return not any(_POSITION.search(step.lower()) for step in (*above, layer, last))


def _bare(name: str) -> str:
    """A layer's name as the tables have it: lower case, without flax's number."""
    lower = name.lower()
    if COLUMNS.fullmatch(lower) or ROWS.fullmatch(lower) or HEADS.fullmatch(lower):
        return lower
    return re.sub(r"_\d+$", "", lower)
