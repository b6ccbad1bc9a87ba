"""The mix by its definition, every source in one float32 array."""

import jax
import jax.numpy as jnp


def attn_res(blocks, num_blocks, prefix, delta, norm_weight, proj_weight, *, eps, output_norm_weight=None):
    """See `api.attn_res`; returns the pair (out, prefix)."""
    if delta is not None:
        prefix = rounded(prefix.astype(jnp.float32) + delta.astype(jnp.float32), prefix.dtype)
    present = jnp.append(jnp.arange(blocks.shape[0]) < num_blocks, True)[:, None]
    sources = jnp.concatenate([blocks, prefix[None]])
    sources = jnp.where(present[..., None], sources, 0).astype(jnp.float32)
    weight = norm_weight.astype(jnp.float32) * proj_weight.astype(jnp.float32)
    scores = jnp.sum(rms_normed(sources, eps) * weight, axis=-1)
    probabilities = jax.nn.softmax(jnp.where(present, scores, -jnp.inf), axis=0)
    mix = rounded(jnp.sum(probabilities[..., None] * sources, axis=0), prefix.dtype)
    return output_normed(mix, eps, output_norm_weight), prefix


def rms_normed(x: jax.Array, eps: float) -> jax.Array:
    """Float32 RMSNorm over the last axis, without a weight."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def output_normed(mix: jax.Array, eps: float, weight: jax.Array | None) -> jax.Array:
    """RMSNorm with the roundings of the published model: after normalising, and after the weight."""
    if weight is None:
        return mix
    return rounded(rms_normed(mix, eps), mix.dtype) * weight.astype(mix.dtype)


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Cast of float32 values that also counts where XLA, allowed excess precision, would drop a cast there and back."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)
