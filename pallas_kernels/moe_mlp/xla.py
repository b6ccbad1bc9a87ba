"""Experts by tiles of rows: a loop over the tiles in use reads one expert's weights at a time from the whole stack.

There is no capacity and no dropped pair. MXFP4 weights are decoded inside the loop, so neither a bank nor a layer of it
is ever copied.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.moe_mlp.plan import plan_tiles, rows_per_tile
from pallas_kernels.mxfp4 import MxFp4, decode_halves

# Weights handled at once on a CPU.
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
    return jax.lax.platform_dependent(x, bank, layer, expert, cpu=_linear_cpu, tpu=_linear_tpu, default=_linear_at_once)


def _linear_cpu(x, bank, layer, expert):
    """A few rows of the matrix at a time, so that decoded ones stay in the cache."""
    num_rows = jax.tree.leaves(bank)[0].shape[2]
    return _linear_in_blocks(x, bank, layer, expert, -(-num_rows * x.shape[1] // _CPU_BLOCK))


def _linear_tpu(x, bank, layer, expert):
    """The two forms, found by trial, for which XLA does not first change the layout of the whole stack."""
    if isinstance(bank, MxFp4):
        return _linear_at_once(x, bank, layer, expert, lambda half: with_layout_constraint(half, Layout((0, 1))))
    return _linear_in_blocks(x, bank, layer, expert, 2)


def _linear_at_once(x, bank, layer, expert, place=lambda half: half):
    """The whole matrix; `place` gets each decoded half of MXFP4 columns."""
    num_rows = jax.tree.leaves(bank)[0].shape[2]
    weight = jax.tree.map(lambda stack: _matrix_rows(stack, layer, expert, 0, num_rows), bank)
    return _product(x, weight, _dot, place)


def _linear_in_blocks(x, bank, layer, expert, num_blocks):
    """A loop over blocks of rows."""
    num_rows = jax.tree.leaves(bank)[0].shape[2]
    block = -(-num_rows // num_blocks)
    # In this form XLA on CPUs reads a single row's dense weights straight from the stack, without copying the slice.
    dense_dot = functools.partial(jnp.matmul, precision=_precision(x), preferred_element_type=jnp.float32)

    def run_block(b, out):
        row0 = jnp.minimum(b * block, num_rows - block)
        # Ties the stack to expert and block, so that nothing done to it can move out of a loop; see stacks.py.
        stacks, *place = jax.lax.optimization_barrier((bank, expert, row0))
        weight = jax.tree.map(lambda stack: _matrix_rows(stack, layer, *place, block), stacks)
        product = _product(x, weight, lambda x, weight: dense_dot(x, weight.T))
        return jax.lax.dynamic_update_slice(out, product, (0, place[1]))

    out = jnp.zeros((x.shape[0], num_rows), jnp.float32)
    return jax.lax.fori_loop(0, -(-num_rows // block), run_block, out)


def _product(x, weight, dense_dot, place=lambda half: half):
    """[m, K] times [n, K] -> [m, n] float32; MXFP4 as two products, of even and of odd columns."""
    if not isinstance(weight, MxFp4):
        return dense_dot(x, weight)
    even, odd = (place(half) for half in decode_halves(*weight, x.dtype))
    # XLA for GPUs aborts when it fuses the strided slice into some products.
    x_even, x_odd = jax.lax.optimization_barrier((x[:, 0::2], x[:, 1::2]))
    return _dot(x_even, even) + _dot(x_odd, odd)


def _matrix_rows(stack: jax.Array, layer: jax.Array, expert: jax.Array, row0: jax.Array, rows: int) -> jax.Array:
    """[L, E, N, K] -> [rows, K] of one matrix."""
    return jax.lax.dynamic_slice(stack, (layer, expert, row0, 0), (1, 1, rows, stack.shape[3]))[0, 0]


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[m, K] times [n, K] -> [m, n] float32; unlike `x @ weight.T` it never makes XLA decode into a transposed copy."""
    return jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), precision=_precision(x), preferred_element_type=jnp.float32
    )


def _precision(x: jax.Array) -> jax.lax.Precision:
    """True float32 for float32 operands."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
