"""Packed sequences as tiles of a fixed number of rows; a tile never straddles two sequences."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """Where each tile of a static list lies; all arrays are int32 [num_tiles].

    Attributes:
      sequence: index of the sequence, 0 for unused tiles.
      index: number of the tile inside its sequence.
      row0: first packed row.
      rows: rows in use; 0 for unused tiles, which come last.
    """

    sequence: jax.Array
    index: jax.Array
    row0: jax.Array
    rows: jax.Array


def max_tiles(num_tokens: int, num_sequences: int, tile: int) -> int:
    """Most tiles that `num_tokens` packed rows in `num_sequences` sequences can need."""
    return (num_tokens + num_sequences * (tile - 1)) // tile


def first_tiles(cu_seqlens: jax.Array, tile: int) -> jax.Array:
    """[N + 1] int32: the number of tiles before each sequence."""
    counts = -(-jnp.diff(cu_seqlens) // tile)
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])


def tile_sequences(cu_seqlens: jax.Array, num_tokens: int, tile: int) -> Tiles:
    """Tiles of `tile` rows over packed sequences.

    Args:
      cu_seqlens: [N + 1] int32.
      num_tokens: static number of packed rows, padding included.
      tile: rows in a tile.
    """
    num_sequences = cu_seqlens.shape[0] - 1
    starts = first_tiles(cu_seqlens, tile)
    number = jnp.arange(max_tiles(num_tokens, num_sequences, tile), dtype=jnp.int32)
    used = number < starts[-1]
    sequence = jnp.where(used, jnp.searchsorted(starts, number, side="right").astype(jnp.int32) - 1, 0)
    index = jnp.where(used, number - starts[sequence], 0)
    row0 = jnp.where(used, cu_seqlens[sequence] + index * tile, 0)
    rows = jnp.where(used, jnp.minimum(cu_seqlens[sequence + 1] - row0, tile), 0)
    return Tiles(sequence, index, row0, rows)


def gather_tiles(x: jax.Array, tiles: Tiles, tile: int) -> jax.Array:
    """[T, ...] -> [num_tiles, tile, ...]; rows beyond a tile's own are zero."""
    row = jnp.arange(tile, dtype=jnp.int32)
    valid = row[None] < tiles.rows[:, None]
    gathered = x[jnp.where(valid, tiles.row0[:, None] + row[None], 0)]
    return jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 1)), gathered, 0)


def sequence_of_rows(cu_seqlens: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """([T] int32 sequence, [T] bool) of each packed row; padding rows get sequence 0 and False."""
    row = jnp.arange(num_tokens, dtype=jnp.int32)
    valid = row < cu_seqlens[-1]
    sequence = jnp.searchsorted(cu_seqlens, row, side="right").astype(jnp.int32) - 1
    return jnp.where(valid, sequence, 0), valid


def scatter_tiles(tiled: jax.Array, cu_seqlens: jax.Array, num_tokens: int) -> jax.Array:
    """[num_tiles, tile, ...] -> [T, ...], the inverse of `gather_tiles`; padding rows are zero."""
    tile = tiled.shape[1]
    sequence, valid = sequence_of_rows(cu_seqlens, num_tokens)
    offset = jnp.arange(num_tokens, dtype=jnp.int32) - cu_seqlens[sequence]
    source = jnp.where(valid, first_tiles(cu_seqlens, tile)[sequence] * tile + offset, 0)
    rows = tiled.reshape(-1, *tiled.shape[2:])[source]
    return jnp.where(valid.reshape(valid.shape + (1,) * (rows.ndim - 1)), rows, 0)
