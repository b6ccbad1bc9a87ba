"""The short convolution as its definition: every output gathers its own inputs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import kda_math, stacks
from pallas_kernels.tiles import sequence_of_rows


class ShortConvOutput(NamedTuple):
    """Result of `short_conv`.

    Attributes:
      out: [T, 3, H, K] in x's dtype; zero for padding rows.
      conv_pool: [L, S, 3, H, K, W - 1], the used slots replaced.
      snapshots: [M, 3, H, K, W - 1] in the pool's dtype; zero where unused.
    """

    out: jax.Array
    conv_pool: jax.Array
    snapshots: jax.Array


def inputs_before(x, tails, cu_seqlens, sequence, offset):
    """Inputs at `offset` tokens into `sequence`, from its tail where that is negative.

    Args:
      x: [T, 3, H, K].
      tails: [N, 3, H, K, W - 1], oldest first.
      cu_seqlens: [N + 1] int32.
      sequence, offset: int32 of one shape.

    Returns:
      [..., 3, H, K] in x's dtype.
    """
    width = tails.shape[-1]
    inside = x[jnp.clip(cu_seqlens[sequence] + offset, 0, x.shape[0] - 1)]
    earlier = jnp.moveaxis(tails, -1, 1)[sequence, jnp.clip(width + offset, 0, width - 1)]
    return jnp.where((offset >= 0)[..., None, None, None], inside, earlier)


def tails_after(x, tails, cu_seqlens, sequence, count):
    """[n, 3, H, K, W - 1]: the last W - 1 inputs of `sequence` [n] after its first `count` [n] tokens."""
    width = tails.shape[-1]
    offset = count[:, None] + jnp.arange(-width, 0)
    return jnp.moveaxis(inputs_before(x, tails, cu_seqlens, sequence[:, None], offset), 1, -1)


def finish(out, x, tails, conv_pool, layer, slots, cu_seqlens, snapshot_positions) -> ShortConvOutput:
    """Stores the sequences' new tails and collects the snapshots."""
    lengths = jnp.diff(cu_seqlens)
    new_tails = tails_after(x, tails, cu_seqlens, jnp.arange(lengths.shape[0]), lengths)
    sequences, _ = sequence_of_rows(cu_seqlens, x.shape[0])
    wanted = snapshot_positions > 0
    sequence = sequences[jnp.where(wanted, snapshot_positions - 1, 0)]
    snapshots = tails_after(x, tails, cu_seqlens, sequence, snapshot_positions - cu_seqlens[sequence])
    return ShortConvOutput(
        out,
        stacks.write(conv_pool, layer, (slots,), new_tails, (lengths > 0) & (slots > 0)),
        jnp.where(wanted[:, None, None, None, None], snapshots, 0).astype(conv_pool.dtype),
    )


def initial_tails(conv_pool, layer, slots, has_initial_state, dtype):
    """[N, 3, H, K, W - 1] tails before the sequences, zero without an initial state."""
    tails = stacks.read(conv_pool, layer, slots).astype(dtype)
    return jnp.where(has_initial_state[:, None, None, None, None], tails, 0)


def short_conv(x, weight, conv_pool, layer, slots, has_initial_state, cu_seqlens, *, snapshot_positions):
    """See `pallas_kernels.short_conv.api.short_conv`."""
    tails = initial_tails(conv_pool, layer, slots, has_initial_state, x.dtype)
    sequence, valid = sequence_of_rows(cu_seqlens, x.shape[0])
    offset = jnp.arange(x.shape[0]) - cu_seqlens[sequence]
    taps = [
        inputs_before(x, tails, cu_seqlens, sequence, offset - shift) for shift in reversed(range(weight.shape[-1]))
    ]
    out = kda_math.conv_silu(taps, jnp.moveaxis(weight, -1, 0))
    out = jnp.where(valid[:, None, None, None], out, 0).astype(x.dtype)
    return finish(out, x, tails, conv_pool, layer, slots, cu_seqlens, snapshot_positions)
