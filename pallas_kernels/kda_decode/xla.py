"""KDA decode for all rows at once, with one read of the state.

With a the decay, ka = k a and qa = q a, the step needs only products with the *old* state S:

    r = beta (v - S^T ka)        out = S^T qa + <q, k> r        S' = a S + k r^T
"""

import jax
import jax.numpy as jnp

from pallas_kernels import kda_math, stacks
from pallas_kernels.kda_decode.reference import KdaDecodeOutput
from pallas_kernels.rounding import round_to


def kda_decode(qkv, gate, beta, output_gate, conv_weight, norm_weight, A_log, dt_bias, conv_pool, state_pool, layer,
               slots, *, lower_bound, norm_eps) -> KdaDecodeOutput:
    """See `pallas_kernels.kda_decode.api.kda_decode`."""
    dtype, used = qkv.dtype, slots > 0
    tails = stacks.read(conv_pool, layer, slots).astype(dtype)
    taps = [tails[..., index] for index in range(tails.shape[-1])] + [qkv]
    convolved = round_to(kda_math.conv_silu(taps, jnp.moveaxis(conv_weight, -1, 0)), dtype)
    q = kda_math.l2_normalize(convolved[:, 0]) * qkv.shape[-1] ** -0.5
    k, v = kda_math.l2_normalize(convolved[:, 1]), convolved[:, 2]
    decay = jnp.exp(kda_math.decay_gate(gate, A_log, dt_bias, lower_bound))
    beta = jax.nn.sigmoid(beta.astype(jnp.float32))

    states = stacks.read(state_pool, layer, slots)
    read = kda_math.matmul("bhvk,xbhk->xbhv", states, jnp.stack([q * decay, k * decay]))
    q_dot_k = jnp.sum(q * k, axis=-1, keepdims=True)
    out, update = kda_math.delta_rule(read[0], read[1], q_dot_k, v, beta[..., None])
    states = states * decay[:, :, None] + update[..., None] * k[:, :, None]

    out = kda_math.gated_rms_norm(round_to(out, dtype), output_gate, norm_weight, norm_eps)
    return KdaDecodeOutput(
        jnp.where(used[:, None, None], out, 0).astype(dtype),
        stacks.write(conv_pool, layer, (slots,), jnp.stack(taps[1:], axis=-1), used),
        stacks.write(state_pool, layer, (slots,), states, used),
    )
