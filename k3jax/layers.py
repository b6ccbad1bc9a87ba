"""The two small functions that every layer uses: a projection and RMSNorm."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def project(x: jax.Array, weight: jax.Array, *, parts: bool = False, dtype: Any = None) -> jax.Array:
    """A linear layer, accumulated in float32.

    Float32 operands are multiplied in true float32 on every platform.

    Args:
      x: [T, in] activations.
      weight: [*out, in] in x's dtype; the outputs may have several axes, such as heads and their width.
      parts: whether axis 0 of the weight counts separate matrices, such as q, k and v.
      dtype: of the result; None rounds to x's.

    Returns:
      [T, *out].
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = functools.partial(jnp.matmul, precision=precision, preferred_element_type=jnp.float32)

    def at_once(x, weight):
        dimensions = (((1,), (weight.ndim - 1,)), ((), ()))
        return jax.lax.dot_general(x, weight, dimensions, precision, preferred_element_type=jnp.float32)

    def by_matrices(x, weight):
        # In this form XLA's CPU backend reads weights where they lie; in others it first makes a copy, transposed or in
        # float32. Parts stay apart because a mesh that splits heads could not split their merged axes.
        if parts:
            return jnp.stack([by_rows(x, part) for part in weight], axis=1)
        return by_rows(x, weight)

    def by_rows(x, weight):
        rows = weight.reshape(-1, weight.shape[-1])
        return product(x, rows.T).reshape(x.shape[0], *weight.shape[:-1])

    out = jax.lax.platform_dependent(x, weight, cpu=by_matrices, default=at_once)
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
