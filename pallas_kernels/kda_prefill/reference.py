"""KDA prefill as its definition: one token after the other."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import kda_math, stacks
from pallas_kernels.tiles import sequence_of_rows


class KdaPrefillOutput(NamedTuple):
    """Result of `kda_prefill`.

    Attributes:
      out: [T, H, V] in v's dtype; zero for padding rows.
      state_pool: [L, S, H, V, K] float32, the used slots replaced.
      snapshots: [M, H, V, K] float32; zero where unused.
    """

    out: jax.Array
    state_pool: jax.Array
    snapshots: jax.Array


def recurrence_step(state, q, k, v, log_decay, beta):
    """One token of one sequence (Kimi K3 report, section 2.1.1).

    Args:
      state: [H, V, K] float32.
      q, k: [H, K] normalised; q scaled.
      v: [H, V].
      log_decay: [H, K].
      beta: [H].

    Returns:
      (out [H, V], state): the output reads the updated state.
    """
    state = state * jnp.exp(log_decay)[:, None, :]
    error = v - kda_math.matmul("hvk,hk->hv", state, k)
    state = state + beta[:, None, None] * error[:, :, None] * k[:, None, :]
    return kda_math.matmul("hvk,hk->hv", state, q), state


def kda_prefill(q, k, v, gate, beta, A_log, dt_bias, state_pool, layer, slots, has_initial_state, cu_seqlens, *,
                lower_bound, snapshot_positions):
    """See `pallas_kernels.kda_prefill.api.kda_prefill`."""
    num_tokens, key_width = q.shape[0], q.shape[-1]
    q = kda_math.l2_normalize(q) * key_width**-0.5
    k = kda_math.l2_normalize(k)
    log_decay = kda_math.decay_gate(gate, A_log, dt_bias, lower_bound)
    beta = jax.nn.sigmoid(beta.astype(jnp.float32))
    states = jnp.where(has_initial_state[:, None, None, None], stacks.read(state_pool, layer, slots), 0)
    snapshots = jnp.zeros((snapshot_positions.shape[0], *states.shape[1:]), jnp.float32)
    sequences, valid = sequence_of_rows(cu_seqlens, num_tokens)

    def step(carry, token):
        states, snapshots = carry
        position, sequence, is_valid, *inputs = token
        out, state = recurrence_step(states[sequence], *inputs)
        states = jnp.where(is_valid, states.at[sequence].set(state), states)
        wanted = is_valid & (snapshot_positions == position + 1)
        snapshots = jnp.where(wanted[:, None, None, None], state, snapshots)
        return (states, snapshots), jnp.where(is_valid, out, 0)

    tokens = (jnp.arange(num_tokens), sequences, valid, q, k, v.astype(jnp.float32), log_decay, beta)
    (states, snapshots), out = jax.lax.scan(step, (states, snapshots), tokens)
    used = (jnp.diff(cu_seqlens) > 0) & (slots > 0)
    return KdaPrefillOutput(
        out.astype(v.dtype), stacks.write(state_pool, layer, (slots,), states, used), snapshots
    )
