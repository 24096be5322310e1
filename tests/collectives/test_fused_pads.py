"""Windows and convolutions that pad and cut by themselves what the program pads and cuts around them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pypto_spmd import DeviceMesh, PartitionSpec, spmd
from pypto_spmd.testing import assert_spmd_equal

MESH = DeviceMesh.simulate((2, 4), ("data", "model"))
SPLIT, WHOLE = PartitionSpec("data", "model"), PartitionSpec()
IMAGES = jnp.asarray(np.random.default_rng(0).standard_normal((4, 16, 16, 8), np.float32))
KERNEL = jnp.asarray(np.random.default_rng(1).standard_normal((3, 3, 8, 8), np.float32))


def conv(x: Any, w: Any) -> Any:
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return lax.conv_general_dilated(
        x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def pool(size: int, stride: int, reduce: Any = lax.add, init: float = 0.0) -> Callable[..., Any]:
    return lambda x: lax.reduce_window(
        x, init, reduce, (1, size, size, 1), (1, stride, stride, 1), "SAME"
    )


def padded_max_pool(x: Any) -> Any:
    x = jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0)), constant_values=-jnp.inf)
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1, 1), (1, 1, 1, 1), "VALID")


def gradient(function: Callable[..., Any], count: int = 1) -> Callable[..., Any]:
    argnums = 0 if count == 1 else tuple(range(count))
    return jax.grad(lambda *args: (function(*args) ** 2).sum(), argnums=argnums)


CASES: dict[str, tuple[Callable[..., Any], Any, Any, tuple[Any, ...], dict[str, int]]] = {
    "padded conv": (conv, [SPLIT, WHOLE], SPLIT, (IMAGES, KERNEL), {"collective_permute": 2}),
    "gradients of padded conv": (
        gradient(conv, 2),
        [SPLIT, WHOLE],
        (SPLIT, WHOLE),
        (IMAGES, KERNEL),
        {"collective_permute": 4, "all_reduce": 1},
    ),
    "padded max pool": (padded_max_pool, SPLIT, SPLIT, (IMAGES,), {"collective_permute": 2}),
    "gradient of average pool": (gradient(pool(2, 2)), SPLIT, SPLIT, (IMAGES,), {}),
    "gradient of overlapping average pool": (
        gradient(pool(3, 2)),
        SPLIT,
        SPLIT,
        (IMAGES,),
        {"collective_permute": 2},
    ),
    "gradient of running sum": (
        gradient(pool(3, 1)),
        SPLIT,
        SPLIT,
        (IMAGES,),
        {"collective_permute": 4},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_only_a_halo_moves(name: str):
    function, ins, outs, arguments, counts = CASES[name]
    decorated = spmd(function, mesh=MESH, in_shardings=ins, out_shardings=outs)
    decorated.plan(*arguments).assert_counts(**counts)
    assert_spmd_equal(decorated, *arguments)
    decorated.verify(*arguments)


def test_what_is_cut_and_read_elsewhere_is_made_once():
    def function(x, w):
        y = lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y[:, 1:-1], y.sum()

    decorated = spmd(
        function, mesh=MESH, in_shardings=[SPLIT, WHOLE], out_shardings=PartitionSpec()
    )
    assert str(decorated.lower(IMAGES, KERNEL).as_text()).count("stablehlo.convolution") == 1
    assert_spmd_equal(decorated, IMAGES, KERNEL)
