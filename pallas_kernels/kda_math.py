"""The mathematics that the KDA ops share: pure functions of arrays in float32, named after the technical report.

What works element by element is apart from the sums over a head, so that GPU kernels, where such a sum is a scalar, use
the same functions.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.lax import Precision

L2_NORM_EPS = 1e-6


def l2_normalize(x: jax.Array) -> jax.Array:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis, in float32; a zero row stays zero."""
    x = x.astype(jnp.float32)
    return x * l2_scale(jnp.sum(x * x, axis=-1, keepdims=True))


def l2_scale(square_sum: jax.Array) -> jax.Array:
    """What to multiply a vector by, given its sum of squares."""
    return jax.lax.rsqrt(square_sum + L2_NORM_EPS)


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
    return log_decay(raw.astype(jnp.float32) + dt_bias, jnp.exp(A_log)[:, None], lower_bound)


def log_decay(logits: jax.Array, rate: jax.Array, lower_bound: float | None,
              softplus: Callable[[jax.Array], jax.Array] = jax.nn.softplus) -> jax.Array:
    """`decay_gate` element by element, of `raw + dt_bias` and `exp(A_log)`."""
    if lower_bound is None:
        return -rate * softplus(logits)
    return lower_bound * jax.nn.sigmoid(rate * logits)


def gated_rms_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`RMSNorm(x) * weight * sigmoid(gate)` over the last axis, in float32: norm first, then the gate."""
    x = x.astype(jnp.float32)
    return rms_gate(x, jnp.mean(x * x, axis=-1, keepdims=True), gate, weight, eps)


def rms_gate(x: jax.Array, mean_square: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`gated_rms_norm` element by element, given the mean square of float32 `x`."""
    normed = x * jax.lax.rsqrt(mean_square + eps)
    return normed * weight.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))


def conv_silu(taps: Sequence[jax.Array], weights: Sequence[jax.Array]) -> jax.Array:
    """SiLU of a depthwise convolution whose inputs are already lined up.

    Args:
      taps: W arrays [..., C], oldest first, the current token last.
      weights: W arrays [C], or one array [W, C]; C may stand for several axes.

    Returns:
      [..., C] float32.
    """
    total = taps[0].astype(jnp.float32) * weights[0].astype(jnp.float32)
    for index, tap in enumerate(taps[1:], start=1):
        total += tap.astype(jnp.float32) * weights[index].astype(jnp.float32)
    return jax.nn.silu(total)


def delta_rule(read_q: jax.Array, read_k: jax.Array, q_dot_k: jax.Array, v: jax.Array,
               beta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A head's output and what k adds to its state, from products with the decayed state before the token.

    Args:
      read_q, read_k: [..., V] decayed state times q and k.
      q_dot_k: `<q, k>`.
      v: [..., V].
      beta: strength of the update, after its sigmoid.

    Returns:
      ([..., V] output, [..., V] update r of `S' = a S + k r^T`).
    """
    update = beta * (v - read_k)
    return read_q + q_dot_k * update, update


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
