"""MXFP4 decoding against the table of every code at every scale, and against packed arrays."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mxfp4 import MxFp4, check_scales, decode, decode_codes, decode_halves

GOLDEN = np.load(Path(__file__).parents[1] / "data/ops/mxfp4.npz")
DTYPES = (jnp.float32, jnp.bfloat16)


def decoded(packed, scale, dtype):
    return np.asarray(jax.jit(decode, static_argnums=2)(packed, scale, dtype).astype(jnp.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_at_every_scale(dtype):
    codes, scales = np.arange(16, dtype=np.int32)[None], np.arange(255, dtype=np.int32)[:, None]
    values = np.asarray(jax.jit(decode_codes)(codes, scales).astype(dtype).astype(jnp.float32))
    table = GOLDEN["scale_table"]
    np.testing.assert_array_equal(values[2:253], table[2:253])
    np.testing.assert_array_equal(np.signbit(values[2:253]), np.signbit(table[2:253]))
    np.testing.assert_array_equal(values[253:], GOLDEN["scale_table_fp32"][253:])
    np.testing.assert_array_equal(values[:2], 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["random", "allbytes", "extreme"])
def test_packed_arrays(case, dtype):
    packed, scale, expected = (GOLDEN[f"{case}_{part}"] for part in ("packed", "scale", "deq"))
    bytes_ = np.repeat(scale, 32, axis=-1)
    with np.errstate(over="ignore"):
        expected = np.where(bytes_ < 2, 0.0, expected).astype(np.float32)
    np.testing.assert_array_equal(decoded(packed, scale, dtype), expected)


def test_nibble_order():
    packed = np.zeros((1, 3, 16), np.uint8)
    packed[0, :, 0] = [0x21, 0xF7, 0x9A]
    scale = np.array([[[127], [128], [126]]], np.uint8)
    expected = [[0.5, 1.0], [12.0, -12.0], [-0.5, -0.25]]
    np.testing.assert_array_equal(decoded(packed, scale, jnp.float32)[0, :, :2], expected)
    even, odd = decode_halves(packed, scale, jnp.float32)
    np.testing.assert_array_equal(np.stack([even, odd], -1)[0, :, 0], expected)


@pytest.mark.parametrize("shape", [(32,), (1, 32), (5, 3, 96), (0, 64), (2, 0, 32)])
def test_shapes(shape):
    random = np.random.default_rng(0)
    packed = random.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    scale = random.integers(100, 140, (*shape[:-1], shape[-1] // 32), dtype=np.uint8)
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(shape)
    expected = GOLDEN["code_values"][nibbles] * 2.0 ** (np.repeat(scale, 32, axis=-1).astype(int) - 127)
    np.testing.assert_array_equal(decoded(packed, scale, jnp.float32), expected)


def test_pytree():
    weight = MxFp4(np.zeros((4, 16), np.uint8), np.zeros((4, 1), np.uint8))
    assert [leaf.shape for leaf in jax.tree.leaves(jax.tree.map(lambda leaf: leaf[1], weight))] == [(16,), (1,)]


def test_check_scales():
    scale = np.full((3, 4), 254, np.uint8)
    check_scales("w", scale)
    check_scales("w", np.zeros((0, 4), np.uint8))
    scale[2, 1] = 255
    with pytest.raises(ValueError, match=r"^w: MXFP4 scale byte at \(2, 1\) is 255"):
        check_scales("w", scale)
