"""AllReduce by multiplication, the one reduction that JAX has no function for.

A gather and a local product would move n times the bytes that the plan says, so the reduction is a
primitive of its own that lowers to one StableHLO AllReduce.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import batching, mlir

product_p = Primitive("all_reduce_product")


def all_reduce_product(x: Any, axes: Sequence[str]) -> Any:
    """The elementwise product of `x` over mesh axes, inside `shard_map`.

    Args:
        x: a local array of numbers.
        axes: the mesh axes.
    """
    return product_p.bind(x, axes=tuple(axes))


@product_p.def_abstract_eval
def _abstract(x: Any, *, axes: tuple[str, ...]) -> Any:
    return x


def _lower(ctx: Any, x: Any, *, axes: tuple[str, ...]) -> list[Any]:
    shape = ctx.module_context.axis_context.mesh.shape
    positions = np.arange(np.prod(list(shape.values()))).reshape(tuple(shape.values()))
    dims = [dim for dim, name in enumerate(shape) if name in axes]
    rest = [dim for dim in range(positions.ndim) if dim not in dims]
    size = int(np.prod([positions.shape[dim] for dim in dims]))
    groups = np.ascontiguousarray(positions.transpose(*rest, *dims).reshape(-1, size), np.int64)
    reduce = stablehlo.AllReduceOp(
        [x.type],
        [x],
        replica_groups=mlir.dense_int_elements(groups),
        channel_handle=stablehlo.ChannelHandle.get(1, mlir.DEVICE_TO_DEVICE_TYPE),
        use_global_device_ids=True,
    )
    scalar = ir.RankedTensorType.get([], ir.RankedTensorType(x.type).element_type)
    block = reduce.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        stablehlo.return_([stablehlo.multiply(*block.arguments)])
    return [reduce.results[0]]


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, axes: tuple[str, ...]) -> Any:
    return product_p.bind(operands[0], axes=axes), dims[0]


mlir.register_lowering(product_p, _lower)
batching.primitive_batchers[product_p] = _batch
