"""The definition of the op: every expert sees every token, and weights select. Dense banks are differentiable."""

import jax
import jax.numpy as jnp

from pallas_kernels.mxfp4 import MxFp4, decode


def moe_mlp(x, expert_ids, expert_weights, gate_up, down, layer, *, activation, first_expert):
    """As `api.moe_mlp`, at the cost of all experts."""

    def add_expert(total, expert):
        index, gate_up_weight, down_weight = expert
        gate = _linear(x, jax.tree.map(lambda leaf: leaf[0], gate_up_weight))
        up = _linear(x, jax.tree.map(lambda leaf: leaf[1], gate_up_weight))
        out = _linear(activation(gate, up).astype(x.dtype), down_weight)
        chosen = expert_ids == index + first_expert
        weight = jnp.where(chosen, expert_weights, 0.0).sum(axis=1, keepdims=True)
        return total + jnp.where(chosen.any(axis=1, keepdims=True), weight * out, 0.0), None

    gate_up, down = jax.tree.map(lambda leaf: leaf[layer], (gate_up, down))
    indices = jnp.arange(jax.tree.leaves(down)[0].shape[0], dtype=jnp.int32)
    return jax.lax.scan(add_expert, jnp.zeros(x.shape, jnp.float32), (indices, gate_up, down))[0]


def _linear(x: jax.Array, weight: jax.Array | MxFp4) -> jax.Array:
    """x @ weight.T in float32."""
    if isinstance(weight, MxFp4):
        weight = decode(*weight, x.dtype)
    return jnp.matmul(x, weight.T, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
