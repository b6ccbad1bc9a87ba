"""The mix by its definition, every source in one float32 array."""

import jax
import jax.numpy as jnp

from pallas_kernels.rounding import round_to


def attn_res(blocks, num_blocks, prefix, delta, norm_weight, proj_weight, *, eps, output_norm_weight=None):
    """See `api.attn_res`; returns the pair (out, prefix)."""
    if delta is not None:
        prefix = add_rounded(prefix, delta)
    probabilities = source_weights(blocks, num_blocks, prefix, norm_weight, proj_weight, eps=eps)
    sources, _ = _sources(blocks, num_blocks, prefix)
    mix = jnp.sum(probabilities[..., None] * sources, axis=0)
    return finish(mix, eps, output_norm_weight, prefix.dtype), prefix


def source_weights(blocks, num_blocks, prefix, norm_weight, proj_weight, *, eps) -> jax.Array:
    """[n_max + 1, T] float32 softmax weights of the blocks (0 where unfilled) and of the prefix, delta included."""
    sources, present = _sources(blocks, num_blocks, prefix)
    weight = norm_weight.astype(jnp.float32) * proj_weight.astype(jnp.float32)
    scores = jnp.sum(rms_normed(sources, eps) * weight, axis=-1)
    return jax.nn.softmax(jnp.where(present, scores, -jnp.inf), axis=0)


def _sources(blocks, num_blocks, prefix) -> tuple[jax.Array, jax.Array]:
    """([n_max + 1, T, D] float32 blocks and prefix, zeros where unfilled; [n_max + 1, 1] which are filled)."""
    present = jnp.append(jnp.arange(blocks.shape[0]) < num_blocks, True)[:, None]
    sources = jnp.concatenate([blocks, prefix[None]])
    return jnp.where(present[..., None], sources, 0).astype(jnp.float32), present


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
