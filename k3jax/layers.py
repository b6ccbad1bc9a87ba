"""The two small functions that every layer uses: a projection and RMSNorm."""

from typing import Any

import jax
import jax.numpy as jnp


def project(equation: str, x: jax.Array, weight: jax.Array, dtype: Any = None) -> jax.Array:
    """`einsum` of activations and a weight, accumulated in float32.

    Float32 operands are multiplied in true float32 on every platform.

    Args:
      equation: of the two operands.
      x: activations.
      weight: in x's dtype.
      dtype: of the result; None rounds to x's.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=jnp.float32)
    return out.astype(dtype or x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis with the two roundings of the reference code (`KimiRMSNorm`).

    Args:
      x: [..., D].
      weight: [D].
      eps: added to the mean square.

    Returns:
      [..., D] in x's dtype: statistics in float32, rounded after normalising and again after the weight.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed.astype(x.dtype) * weight.astype(x.dtype)).astype(x.dtype)
