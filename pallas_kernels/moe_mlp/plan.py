"""Groups (token, expert) pairs by expert, so that a tile of rows meets one expert's weights once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.tiles import Tiles, first_tiles, tile_sequences


class Plan(NamedTuple):
    """The P = T * k pairs ordered by expert, pairs without a local expert last.

    Attributes:
      token: [P] int32, the token of each ordered pair.
      position: [T, k] int32, where each pair went.
      local: [T, k] bool, whether the pair's expert is in the banks.
      tiles: `sequence` is the index of an expert in the banks, rows are ordered pairs; ascending.
      num_tiles: int32 scalar, tiles in use.
    """

    token: jax.Array
    position: jax.Array
    local: jax.Array
    tiles: Tiles
    num_tiles: jax.Array


def rows_per_tile(num_pairs: int, num_experts: int) -> int:
    """Rows in a tile: 1 for a mean of at most 2 rows an expert, else the power of two above the mean, 8 .. 128.

    A product of one row costs less than half of one with 8.
    """
    if num_pairs <= 2 * num_experts:
        return 1
    mean = -(-num_pairs // num_experts)
    return min(max(1 << (mean - 1).bit_length(), 8), 128)


def plan_tiles(expert_ids: jax.Array, first_expert: jax.Array | int, num_experts: int, tile: int) -> Plan:
    """Orders pairs by expert, stably, and cuts each expert's run into tiles.

    Args:
      expert_ids: [T, k] int32; ids outside the banks are allowed.
      first_expert: id of the banks' first expert.
      num_experts: experts in the banks.
      tile: rows in a tile.
    """
    num_pairs = expert_ids.size
    index = expert_ids - first_expert
    local = (index >= 0) & (index < num_experts)
    group = jnp.where(local, index, num_experts).reshape(-1)
    order = jnp.argsort(group, stable=True).astype(jnp.int32)
    position = jnp.zeros((num_pairs,), jnp.int32).at[order].set(jnp.arange(num_pairs, dtype=jnp.int32))
    offsets = jnp.searchsorted(group[order], jnp.arange(num_experts + 1, dtype=jnp.int32)).astype(jnp.int32)
    return Plan(
        token=order // expert_ids.shape[1],
        position=position.reshape(expert_ids.shape),
        local=local,
        tiles=tile_sequences(offsets, num_pairs, tile),
        num_tiles=first_tiles(offsets, tile)[-1],
    )
