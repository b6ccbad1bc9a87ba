"""Experts by tiles of rows: a loop over the tiles in use reads one expert's weights at a time from the whole stack.

There is no capacity and no dropped pair. MXFP4 weights are decoded inside the loop, so neither a bank nor a layer of it
is ever copied.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.moe_mlp.plan import plan_tiles, rows_per_tile
from pallas_kernels.mxfp4 import MxFp4, decode_halves

# Weights handled at once on a CPU, so that decoded ones stay in its cache. Accelerators take a matrix whole.
_CPU_BLOCK = 1 << 20


def moe_mlp(x, expert_ids, expert_weights, gate_up, down, layer, *, activation, first_expert):
    """As `api.moe_mlp`; sums in a fixed order, so results repeat bit by bit."""
    if not expert_ids.size:
        return jnp.zeros(x.shape, jnp.float32)
    gate_up = jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape[:2], -1, leaf.shape[-1]), gate_up)
    num_experts = jax.tree.leaves(down)[0].shape[1]
    tile = rows_per_tile(expert_ids.size, num_experts)
    plan = plan_tiles(expert_ids, first_expert, num_experts, tile)
    # A tile may reach beyond its expert's rows: the next tile overwrites them, and the padding takes the last one's.
    token = jnp.pad(plan.token, (0, tile))

    def run_tile(i, outputs):
        expert, row0 = plan.tiles.sequence[i], plan.tiles.row0[i]
        rows = x[jax.lax.dynamic_slice(token, (row0,), (tile,))]
        gate, up = jnp.split(_linear(rows, gate_up, layer, expert), 2, axis=1)
        out = _linear(activation(gate, up).astype(x.dtype), down, layer, expert)
        return jax.lax.dynamic_update_slice(outputs, out, (row0, 0))

    outputs = jnp.zeros((expert_ids.size + tile, x.shape[1]), jnp.float32)
    outputs = jax.lax.fori_loop(0, plan.num_tiles, run_tile, outputs)

    total = jnp.zeros(x.shape, jnp.float32)
    for j in range(expert_ids.shape[1]):
        out = expert_weights[:, j, None] * outputs[plan.position[:, j]]
        total += jnp.where(plan.local[:, j, None], out, 0.0)
    return total


def _linear(x: jax.Array, bank: jax.Array | MxFp4, layer: jax.Array, expert: jax.Array) -> jax.Array:
    """[m, K] rows times the [N, K] matrix of one expert -> [m, N] float32."""
    num_rows = jax.tree.leaves(bank)[0].shape[2]
    block = _block_rows(num_rows, x.shape[1])
    multiply = _mxfp4_product if isinstance(bank, MxFp4) else _dense_product

    def run_block(b, out):
        row0 = jnp.minimum(b * block, num_rows - block)
        weight = jax.tree.map(lambda stack: _matrix_rows(stack, layer, expert, row0, block), bank)
        return jax.lax.dynamic_update_slice(out, multiply(x, weight), (0, row0))

    out = jnp.zeros((x.shape[0], num_rows), jnp.float32)
    return jax.lax.fori_loop(0, -(-num_rows // block), run_block, out)


def _matrix_rows(stack: jax.Array, layer: jax.Array, expert: jax.Array, row0: jax.Array, rows: int) -> jax.Array:
    """[L, E, N, K] -> [rows, K] of one matrix."""
    if jax.default_backend() == "cpu":
        # Keeps the conversion of bfloat16 stacks out of the way, see stacks.py, for a part that starts at a row.
        stack, expert, row0 = jax.lax.optimization_barrier((stack, expert, row0))
    return jax.lax.dynamic_slice(stack, (layer, expert, row0, 0), (1, 1, rows, stack.shape[3]))[0, 0]


def _dense_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[m, K] times [n, K] -> [m, n] float32."""
    # In this form XLA on CPUs reads a single row's weights straight from the stack, without copying the slice.
    return jnp.matmul(x, weight.T, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _mxfp4_product(x: jax.Array, weight: MxFp4) -> jax.Array:
    """[m, K] times packed [n, K] -> [m, n] float32."""

    # And in that form it would decode into a transposed copy, at three times the cost.
    def dot(x, weight):
        return jax.lax.dot_general(
            x,
            weight,
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    even, odd = decode_halves(*weight, x.dtype)
    return dot(x[:, 0::2], even) + dot(x[:, 1::2], odd)


def _block_rows(num_rows: int, num_columns: int) -> int:
    """Rows of a matrix to handle at once, in blocks of nearly equal size."""
    if jax.default_backend() != "cpu":
        return num_rows
    blocks = -(-num_rows * num_columns // _CPU_BLOCK)
    return -(-num_rows // blocks)
