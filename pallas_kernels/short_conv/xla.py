"""The short convolution as shifted sums over all packed rows; only the first rows of a sequence need its tail."""

import jax.numpy as jnp

from pallas_kernels import kda_math
from pallas_kernels.short_conv.reference import ShortConvOutput, finish, initial_tails, inputs_before
from pallas_kernels.tiles import sequence_of_rows


def short_conv(x, weight, conv_pool, layer, slots, has_initial_state, cu_seqlens, *,
               snapshot_positions) -> ShortConvOutput:
    """See `pallas_kernels.short_conv.api.short_conv`."""
    num_tokens, width = x.shape[0], weight.shape[-1] - 1
    weights = jnp.moveaxis(weight, -1, 0)
    tails = initial_tails(conv_pool, layer, slots, has_initial_state, x.dtype)
    _, valid = sequence_of_rows(cu_seqlens, num_tokens)
    padded = jnp.pad(x, ((width, 0), (0, 0), (0, 0), (0, 0)))
    out = kda_math.conv_silu([padded[start:start + num_tokens] for start in range(width + 1)], weights)
    out = jnp.where(valid[:, None, None, None], out, 0).astype(x.dtype)

    num_sequences = slots.shape[0]
    sequence = jnp.arange(num_sequences)[:, None]
    taps = [
        inputs_before(x, tails, cu_seqlens, sequence, jnp.arange(width) + start) for start in range(-width, 1)
    ]
    heads = kda_math.conv_silu(taps, weights).astype(x.dtype)
    row = cu_seqlens[:-1, None] + jnp.arange(width)
    row = jnp.where(row < cu_seqlens[1:, None], row, num_tokens)
    out = out.at[row].set(heads, mode="drop")
    return finish(out, x, tails, conv_pool, layer, slots, cu_seqlens, snapshot_positions)
