"""The mathematics that the KDA ops share: pure functions of arrays in float32, named after the technical report."""

import jax
import jax.numpy as jnp
from jax.lax import Precision

L2_NORM_EPS = 1e-6


def l2_normalize(x: jax.Array) -> jax.Array:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis, in float32; a zero row stays zero."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_NORM_EPS)


def decay_gate(raw: jax.Array, A_log: jax.Array, dt_bias: jax.Array, lower_bound: float | None) -> jax.Array:
    """Log decay `g` of each key channel (Kimi K3 report, eq. 5; Kimi Linear report for the unbounded form).

    Args:
      raw: [..., H, K] decay logits, any float dtype.
      A_log: [H] float32.
      dt_bias: [H, K] float32.
      lower_bound: `g = lower_bound * sigmoid(exp(A_log) (raw + dt_bias))`; None for
        `g = -exp(A_log) softplus(raw + dt_bias)`.

    Returns:
      [..., H, K] float32, at most 0.
    """
    logits = raw.astype(jnp.float32) + dt_bias
    rate = jnp.exp(A_log)[:, None]
    if lower_bound is None:
        return -rate * jax.nn.softplus(logits)
    return lower_bound * jax.nn.sigmoid(rate * logits)


def gated_rms_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`RMSNorm(x) * weight * sigmoid(gate)` over the last axis, in float32: norm first, then the gate."""
    x = x.astype(jnp.float32)
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed * weight.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))


def conv_silu(taps: list[jax.Array], weight: jax.Array) -> jax.Array:
    """SiLU of a depthwise convolution whose inputs are already lined up.

    Args:
      taps: W arrays [..., C], oldest first, the current token last.
      weight: [C, W]; C may stand for several axes.

    Returns:
      [..., C] float32.
    """
    weight = weight.astype(jnp.float32)
    total = taps[0].astype(jnp.float32) * weight[..., 0]
    for index, tap in enumerate(taps[1:], start=1):
        total += tap.astype(jnp.float32) * weight[..., index]
    return jax.nn.silu(total)


def matmul(equation: str, *operands: jax.Array) -> jax.Array:
    """Einsum of float32 operands in true float32 on every platform."""
    return jnp.einsum(equation, *operands, precision=Precision.HIGHEST, preferred_element_type=jnp.float32)


def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """Inverse of `I + lower` by block doubling.

    The inverse of a 2x2 block matrix from its inverted halves stays bounded where powers of `lower` (a Neumann
    series) lose all accuracy: keys that correlate, beta near 1, slow decay.

    Args:
      lower: [..., n, n] float32, strictly lower triangular; n a power of two.
    """
    size = lower.shape[-1]
    if size == 1:
        return jnp.ones_like(lower)
    half = size // 2
    halves = jnp.stack([lower[..., :half, :half], lower[..., half:, half:]])
    top, bottom = unit_lower_inverse(halves)
    corner = -matmul("...ij,...jk,...kl->...il", bottom, lower[..., half:, :half], top)
    upper_rows = jnp.concatenate([top, jnp.zeros_like(top)], axis=-1)
    return jnp.concatenate([upper_rows, jnp.concatenate([corner, bottom], axis=-1)], axis=-2)
