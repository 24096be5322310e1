"""Fourier transforms of split dims, in slabs and pencils."""

import jax.numpy as jnp
import numpy as np
import pytest

from pypto_spmd import DeviceMesh, PartitionSpec, spmd
from pypto_spmd.testing import assert_spmd_equal, check_rule

P = PartitionSpec
RANDOM = np.random.default_rng(0)
REAL = RANDOM.standard_normal((8, 8, 16), dtype=np.float32)
COMPLEX = (REAL + 1j * REAL[::-1]).astype(np.complex64)
ODD = COMPLEX[:, :3, :5]

TRANSFORMS = {
    "one dim": (jnp.fft.fft, COMPLEX[0]),
    "no other dim": (jnp.fft.fft, COMPLEX[0, 0]),
    "no other dim, long": (jnp.fft.fft, COMPLEX.reshape(-1)[:192]),
    "no other dim, inverse": (jnp.fft.ifft, COMPLEX.reshape(-1)[:320]),
    "other dims of one row": (jnp.fft.fft, COMPLEX.reshape(1, 1, -1)[..., :128]),
    "other dims of one row, first": (
        lambda x: jnp.fft.fft2(x, axes=(0, 1)),
        COMPLEX.reshape(-1, 1, 2)[:64],
    ),
    "two dims and a batch": (jnp.fft.fft2, COMPLEX),
    "three dims": (jnp.fft.fftn, COMPLEX),
    "inverse": (jnp.fft.ifftn, COMPLEX),
    "first dim": (lambda x: jnp.fft.fft(x, axis=0), COMPLEX),
    "real": (jnp.fft.rfftn, REAL),
    "real, one dim": (jnp.fft.rfft, REAL),
    "real, back": (lambda x: jnp.fft.irfftn(x, s=(8, 8, 30)), COMPLEX),
    "other dims that nothing divides": (jnp.fft.fftn, ODD),
}


@pytest.mark.parametrize(
    ("function", "array"), [(f, a) for f, a in TRANSFORMS.values()], ids=TRANSFORMS
)
def test_transforms(function, array):
    report = check_rule(function, array, primitives=["fft"], most_nested=12)
    report.check()
    assert report.checked > 3


def test_64_bits():
    import jax

    with jax.enable_x64(True):
        array = REAL.astype(np.float64)
        check_rule(jnp.fft.rfftn, array, primitives=["fft"], most_nested=4).check()
        check_rule(jnp.fft.fft, array.reshape(-1) * 1j, primitives=["fft"], most_nested=4).check()


def test_a_slab():
    mesh = DeviceMesh.simulate((8,), ("x",))
    call = spmd(jnp.fft.fft2, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"))
    array = COMPLEX[0].repeat(8, 0)
    plan = call.plan(array)
    plan.assert_counts(all_to_all=2)
    assert plan.wire_bytes == 2 * 7 * array.nbytes // 64
    assert_spmd_equal(call, array)
    call.verify(array)


def test_a_vector():
    mesh = DeviceMesh.simulate((8,), ("x",))
    array = COMPLEX.reshape(-1)
    call = spmd(jnp.fft.fft, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"))
    plan = call.plan(array)
    plan.assert_counts(all_to_all=3)
    assert plan.wire_bytes == 3 * 7 * array.nbytes // 64
    assert_spmd_equal(call, array)
    call.verify(array)


def test_pencils():
    mesh = DeviceMesh.simulate((2, 4), ("x", "y"))
    split = P("x", "y")
    call = spmd(jnp.fft.fftn, mesh=mesh, in_shardings=split, out_shardings=split)
    call.plan(COMPLEX).assert_counts(all_to_all=4)
    assert_spmd_equal(call, COMPLEX)
    call.verify(COMPLEX)


def test_batches_need_no_communication():
    mesh = DeviceMesh.simulate((2, 4), ("x", "y"))
    call = spmd(jnp.fft.fft2, mesh=mesh, in_shardings=P(("x", "y")), out_shardings=P(("x", "y")))
    call.plan(COMPLEX).assert_counts()
    assert_spmd_equal(call, COMPLEX)
