"""MXFP4 weights: E2M1 codes, two to a byte, with one E8M0 scale for each 32 columns.

A weight is `code * 2**(scale - 127)`. The low nibble of a byte is the even column. (OCP Microscaling Formats 1.0;
packing as in compressed-tensors.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

GROUP = 32
"""Columns that share one scale."""

# Nibble i is twice the magnitude of code i: 0, 1, 2, 3, 4, 6, 8, 12. Halves make every code an integer.
_TWICE_MAGNITUDES = 0xC8643210


class MxFp4(NamedTuple):
    """Packed weights of logical shape `[..., n]`.

    Attributes:
      packed: uint8 [..., n / 2], two codes a byte.
      scale: uint8 [..., n / 32], biased exponents; 255 is not a number.
    """

    packed: jax.Array
    scale: jax.Array


def decode_codes(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Values of E2M1 codes, elementwise and free of tables, for XLA and inside kernels.

    Args:
      codes: int32, 0 .. 15.
      scales: int32 of a shape that broadcasts with `codes`, 0 .. 254.

    Returns:
      float32. Exact for scales 2 .. 252, and then also exact in bfloat16; scales 0 and 1 give zero, and 253 and 254
      overflow to infinity where float32 does.
    """
    twice = jnp.right_shift(jnp.uint32(_TWICE_MAGNITUDES), 4 * (codes & 7).astype(jnp.uint32)) & 15
    # The float with exponent field scale - 1 is 2**(scale - 128): half the scale, for the doubled codes.
    exponent = (jnp.maximum(scales, 1) - 1) << 23
    signed_half_scale = jax.lax.bitcast_convert_type(exponent | ((codes & 8) << 28), jnp.float32)
    return twice.astype(jnp.int32).astype(jnp.float32) * signed_half_scale


def decode_halves(packed: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """The even and the odd columns, apart.

    Interleaving them costs several times the decoding itself, and a product does not need it:
    `x @ w.T == x[..., 0::2] @ even.T + x[..., 1::2] @ odd.T`.

    Args:
      packed: uint8 [..., n / 2].
      scale: uint8 [..., n / 32].
      dtype: float32 or bfloat16.

    Returns:
      Two arrays [..., n / 2] of `dtype`, with the exactness of `decode_codes`.
    """
    codes = packed.astype(jnp.int32)
    scales = jnp.repeat(scale.astype(jnp.int32), GROUP // 2, axis=-1)
    return decode_codes(codes & 15, scales).astype(dtype), decode_codes(codes >> 4, scales).astype(dtype)


def decode(packed: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[..., n] weights in `dtype`, columns in order; arguments as for `decode_halves`."""
    return jnp.stack(decode_halves(packed, scale, dtype), axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def check_scales(name: str, scale: np.ndarray) -> None:
    """Raises ValueError if a scale byte is 255, which stands for no number; for loaders.

    Args:
      name: of the tensor, for the message.
      scale: uint8, any shape.
    """
    if scale.size and scale.max() == 255:
        where = np.unravel_index(int(scale.argmax()), scale.shape)
        raise ValueError(
            f"{name}: MXFP4 scale byte at {tuple(map(int, where))} is 255 (not a number), expected 0 .. 254; "
            "the checkpoint is damaged or not MXFP4"
        )
