"""What only tells the compiler something: values pass as they are."""

from collections.abc import Mapping
from typing import Any

from pypto_spmd.collectives.rules.elementwise import elementwise
from pypto_spmd.collectives.rules.factor import Rule
from pypto_spmd.collectives.rules.moving import moves
from pypto_spmd.collectives.rules.registry import Aval, rule


@rule("layout_constraint", "with_memory_space_constraint", "xla_metadata_value")
def _annotated(params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]) -> Rule:
    return elementwise(ins, outs, moves({0}, ins[0].dtype))


@rule("platform_index")
def _platform_index(
    params: Mapping[str, Any], ins: tuple[Aval, ...], outs: tuple[Aval, ...]
) -> Rule:
    # Which of the branches of `lax.platform_dependent` is compiled: the same on all devices.
    return Rule((), ((),), reason="one number, the same on all devices")
