"""Regions: code that a person wrote for the part of one device, and what its specs fix.

On the mesh axes of a region its operands and results lie as the specs say, and its body works on local
values: nothing inside is split or partial there, and nothing is planned. On the other axes the body is
serial code like any other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pypto_spmd.sharding.layout import Layout


@dataclass(frozen=True, slots=True)
class Region:
    """What a `shard_map` fixes.

    Args:
        axes: the mesh axes for which its body is written, in mesh order.
        inputs: for each operand how it lies on these axes.
        outputs: the same for each result.
        mesh: the mesh that it names: JAX's own, with or without devices.
    """

    axes: tuple[str, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    mesh: Any

    @staticmethod
    def of(
        params: Mapping[str, Any], input_ranks: Sequence[int], output_ranks: Sequence[int]
    ) -> "Region":
        """The region of a `shard_map` with these params, its operands and results having these ranks."""
        layouts = lambda specs, ranks: tuple(map(Layout.from_spec, specs, ranks))  # noqa: E731
        return Region(
            tuple(a for a in params["mesh"].axis_names if a in params["newly_manual_axes"]),
            layouts(params["in_specs"], input_ranks),
            layouts(params["out_specs"], output_ranks),
            params["mesh"],
        )
