"""KDA decode as its definition: each row in turn, each step of the layer written out."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import kda_math, stacks
from pallas_kernels.kda_prefill.reference import recurrence_step
from pallas_kernels.rounding import round_to


class KdaDecodeOutput(NamedTuple):
    """Result of `kda_decode`.

    Attributes:
      out: [B, H, V] in qkv's dtype; zero for unused rows.
      conv_pool: [L, S, 3, H, K, W - 1], the used slots shifted by one token.
      state_pool: [L, S, H, V, K] float32, the used slots replaced.
    """

    out: jax.Array
    conv_pool: jax.Array
    state_pool: jax.Array


def kda_decode(qkv, gate, beta, output_gate, conv_weight, norm_weight, A_log, dt_bias, conv_pool, state_pool, layer,
               slots, *, lower_bound, norm_eps):
    """See `pallas_kernels.kda_decode.api.kda_decode`."""
    dtype, key_width = qkv.dtype, qkv.shape[-1]

    def step(pools, row):
        conv_pool, state_pool = pools
        qkv, gate, beta, output_gate, slot = row
        window = jnp.concatenate([stacks.read(conv_pool, layer, slot).astype(dtype), qkv[..., None]], axis=-1)
        convolved = jnp.sum(window.astype(jnp.float32) * conv_weight.astype(jnp.float32), axis=-1)
        q, k, v = round_to(jax.nn.silu(convolved), dtype)
        out, state = recurrence_step(
            stacks.read(state_pool, layer, slot),
            kda_math.l2_normalize(q) * key_width**-0.5,
            kda_math.l2_normalize(k),
            v,
            kda_math.decay_gate(gate, A_log, dt_bias, lower_bound),
            jax.nn.sigmoid(beta.astype(jnp.float32)),
        )
        out = kda_math.gated_rms_norm(round_to(out, dtype), output_gate, norm_weight, norm_eps)
        used = (slot > 0)[None]
        pools = (
            stacks.write(conv_pool, layer, (slot[None],), window[None, ..., 1:], used),
            stacks.write(state_pool, layer, (slot[None],), state[None], used),
        )
        return pools, jnp.where(used[:, None], out, 0).astype(dtype)

    (conv_pool, state_pool), out = jax.lax.scan(
        step, (conv_pool, state_pool), (qkv, gate, beta, output_gate, slots)
    )
    return KdaDecodeOutput(out, conv_pool, state_pool)
