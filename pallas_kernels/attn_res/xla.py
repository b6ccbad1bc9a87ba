"""The mix in plain XLA: two passes over the sources, first the scores, then the weighted sum."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attn_res.reference import add_rounded, finish

# Elements of a source from which on skipping the unfilled blocks saves more than the branch costs.
BRANCH_ELEMENTS = 1 << 20


def attn_res(blocks, num_blocks, prefix, delta, norm_weight, proj_weight, *, eps, output_norm_weight=None,
             branch_elements: int = BRANCH_ELEMENTS):
    """See `api.attn_res`; returns the pair (out, prefix).

    A prefill's blocks are large: one branch for each number of filled blocks reads just those. A decode step's are
    small next to the latency of a branch: all are read and the unfilled ones masked.
    """
    if delta is not None:
        prefix = add_rounded(prefix, delta)
    weight = norm_weight.astype(jnp.float32) * proj_weight.astype(jnp.float32)
    if prefix.size >= branch_elements:
        branches = [functools.partial(_mix_first, number=number, eps=eps) for number in range(blocks.shape[0] + 1)]
        mix = jax.lax.switch(num_blocks, branches, blocks, prefix, weight)
    else:
        mix = _mix(blocks, jnp.arange(blocks.shape[0]) < num_blocks, prefix, weight, eps)
    return finish(mix, eps, output_norm_weight, prefix.dtype), prefix


def _mix_first(blocks, prefix, weight, *, number: int, eps: float):
    """The mix of the first `number` blocks and the prefix."""
    return _mix(blocks[:number], jnp.ones(number, bool), prefix, weight, eps)


def _mix(blocks, present, prefix, weight, eps):
    """[T, D] float32 mix of the blocks [n, T, D] that are `present` [n], and the prefix [T, D]."""

    def scores(sources):
        sources = sources.astype(jnp.float32)
        return jnp.sum(sources * weight, axis=-1) * jax.lax.rsqrt(jnp.mean(jnp.square(sources), axis=-1) + eps)

    block_scores = jnp.where(present[:, None], scores(blocks), -jnp.inf)
    probabilities = jax.nn.softmax(jnp.concatenate([block_scores, scores(prefix)[None]]), axis=0)
    mix = probabilities[-1][:, None] * prefix.astype(jnp.float32)
    # Unrolled, since XLA on CPUs would store the products of all blocks before it adds them.
    for i, block in enumerate(blocks):
        mix += jnp.where(present[i], probabilities[i][:, None] * block.astype(jnp.float32), 0)
    return mix
