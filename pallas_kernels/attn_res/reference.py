"""The mix by its definition, every source in one float32 array."""

import jax
import jax.numpy as jnp

from pallas_kernels.rounding import round_to


def attn_res(blocks, num_blocks, prefix, delta, norm_weight, proj_weight, *, eps, output_norm_weight=None):
    """See `api.attn_res`; returns the pair (out, prefix)."""
    if delta is not None:
        prefix = add_rounded(prefix, delta)
    present = jnp.append(jnp.arange(blocks.shape[0]) < num_blocks, True)[:, None]
    sources = jnp.concatenate([blocks, prefix[None]])
    sources = jnp.where(present[..., None], sources, 0).astype(jnp.float32)
    weight = norm_weight.astype(jnp.float32) * proj_weight.astype(jnp.float32)
    scores = jnp.sum(rms_normed(sources, eps) * weight, axis=-1)
    probabilities = jax.nn.softmax(jnp.where(present, scores, -jnp.inf), axis=0)
    mix = jnp.sum(probabilities[..., None] * sources, axis=0)
    return finish(mix, eps, output_norm_weight, prefix.dtype), prefix


def add_rounded(prefix: jax.Array, delta: jax.Array) -> jax.Array:
    """The sum in the activation dtype, also where XLA, allowed excess precision, would go on with it unrounded."""
    return round_to(prefix.astype(jnp.float32) + delta.astype(jnp.float32), prefix.dtype).astype(prefix.dtype)


def rms_normed(x: jax.Array, eps: float) -> jax.Array:
    """Float32 RMSNorm over the last axis, without a weight."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def finish(mix: jax.Array, eps: float, weight: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """The float32 mix in the activation dtype or, with a weight, its RMSNorm.

    The norm reads the mix unrounded, as fused kernels do, and rounds like the published model: after normalising, and
    after the weight.
    """
    if weight is None:
        return mix.astype(dtype)
    return round_to(rms_normed(mix, eps), dtype).astype(dtype) * weight.astype(dtype)
