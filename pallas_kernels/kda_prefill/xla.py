"""KDA prefill in chunks: a scan over 64-token tiles, each a handful of matrix products.

Per head and tile, with G the running sum of the log decay g inside the tile, S the state before it and C its end:

    L_ij = beta_i <k_i e^(G_i - G_j), k_j>  (i > j)      A_ij = <q_i e^(G_i - G_j), k_j>  (i >= j)
    R    = beta (v - (k e^G) S)                          U    = (I + L)^-1 R
    out  = (q e^G) S + A U                               S'   = e^(G_C) S + (k e^(G_C - G))^T U

e^(-G) alone overflows, so L and A are built from 16-row blocks with the block's *first* row as reference: every
exponent is then at most 0 off the diagonal blocks, at most 15 tokens' worth of decay on them, and no row depends on
the gates of later tokens, not even by rounding.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import kda_math, stacks
from pallas_kernels.kda_math import matmul
from pallas_kernels.kda_prefill.reference import KdaPrefillOutput
from pallas_kernels.tiles import gather_tiles, scatter_tiles, tile_sequences

TILE = 64
BLOCK = 16
NUM_BLOCKS = TILE // BLOCK
# e^80 times a normalised key still fits float32 (and bfloat16).
MAX_EXPONENT = 80.0


class TileInputs(NamedTuple):
    """Processed inputs of one tile or, with a leading T instead of the tile's rows, of packed sequences.

    Attributes:
      q, k: [rows, H, K] normalised; q scaled.
      v: [rows, H, V].
      log_decay: [rows, H, K].
      beta: [rows, H].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array


class Decay(NamedTuple):
    """Decay factors inside a tile: exponentials of g summed over consecutive tokens, so that nothing cancels.

    Attributes:
      from_first: [H, block, row, K] log decay after the block's first token, up to and including the row.
      to_end: [H, block, row, K] factor of the tokens after the row, up to the block's end.
      first: [H, block, K] factor of the block's first token.
      gap: [H, NUM_BLOCKS + 1, NUM_BLOCKS + 1, K] factor of all blocks strictly between two: `gap[:, i, j + 1]` for
        the blocks after j and before i; j = -1 is the tile's start, i = NUM_BLOCKS its end.
    """

    from_first: jax.Array
    to_end: jax.Array
    first: jax.Array
    gap: jax.Array


def tile_decay(log_decay: jax.Array) -> Decay:
    """The partial products of [H, block, row, K] log decays that a tile needs."""
    row, block = jnp.arange(BLOCK), jnp.arange(NUM_BLOCKS)
    up_to_row = (row > 0) & (row <= row[:, None])
    after_row = row > row[:, None]
    from_first, to_end = _masked_sums("xrs,hbsk->xhbrk", jnp.stack([up_to_row, after_row]), log_decay)
    first = log_decay[:, :, 0]
    start, end = jnp.arange(-1, NUM_BLOCKS)[:, None], jnp.arange(NUM_BLOCKS + 1)[:, None, None]
    gap = _masked_sums("ijb,hbk->hijk", (start < block) & (block < end), first + from_first[:, :, -1])
    return Decay(from_first, jnp.exp(to_end), jnp.exp(first), jnp.exp(gap))


def _masked_sums(equation: str, mask: jax.Array, x: jax.Array) -> jax.Array:
    return matmul(equation, mask.astype(jnp.float32), x)


def decayed_products(rows: jax.Array, k: jax.Array, decay: Decay, factored: bool) -> jax.Array:
    """`<rows_i e^(G_i - G_j), k_j>` for j <= i, zero above the diagonal.

    Args:
      rows: [x, H, block, row, K], x kinds of row that meet the same keys.
      k: [H, block, row, K].
      decay: of the tile.
      factored: whether e^(-from_first) fits float32, so that the diagonal blocks may be matrix products.

    Returns:
      [x, H, TILE, TILE].
    """
    left = rows * jnp.exp(decay.from_first)
    block, row = jnp.arange(NUM_BLOCKS), jnp.arange(BLOCK)
    earlier = (block[:, None] > block)[:, :, None]
    reach = jnp.where(earlier, decay.gap[:, :-1, 1:] * decay.first[:, :, None], 0)
    right = (k * decay.to_end)[:, None] * reach[:, :, :, None]
    products = matmul("xhirk,hijsk->xhirjs", left, right)
    causal = row[:, None] >= row
    if factored:
        diagonal = matmul("xhirk,hisk->xhirs", left, k * jnp.exp(-decay.from_first))
        diagonal = jnp.where(causal, diagonal, 0)
    else:
        exponent = decay.from_first[:, :, :, None] - decay.from_first[:, :, None]
        pairs = k[:, :, None] * jnp.exp(jnp.where(causal[:, :, None], exponent, -jnp.inf))
        diagonal = matmul("xhirk,hirsk->xhirs", rows, pairs)
    same = jnp.eye(NUM_BLOCKS, dtype=bool)[:, None, :, None]
    products = jnp.where(same, diagonal[:, :, :, :, None], products)
    return products.reshape(*products.shape[:2], TILE, TILE)


def advance_tile(state: jax.Array, tile: TileInputs, factored: bool) -> tuple[jax.Array, jax.Array]:
    """Outputs of one tile of one sequence, and the state after it.

    Args:
      state: [H, V, K] float32.
      tile: with TILE rows; unused rows have k, v, log_decay and beta zero.
      factored: see `decayed_products`.

    Returns:
      (out [TILE, H, V] float32, state).
    """
    heads = tile.q.shape[1]

    def blocks(x):
        return jnp.moveaxis(x, 1, 0).reshape(heads, NUM_BLOCKS, BLOCK, x.shape[-1])

    q, k, log_decay = blocks(tile.q), blocks(tile.k), blocks(tile.log_decay)
    v, beta = jnp.moveaxis(tile.v, 1, 0), tile.beta.T[:, :, None]
    decay = tile_decay(log_decay)
    products = decayed_products(jnp.stack([q, k]), k, decay, factored)
    attention, correction = products[0], beta * jnp.tril(products[1], -1)

    since_start = jnp.exp(decay.from_first) * (decay.first * decay.gap[:, :-1, 0])[:, :, None]
    until_end = decay.to_end * decay.gap[:, -1, 1:][:, :, None]
    read = jnp.concatenate([q * since_start, k * since_start], axis=1).reshape(heads, 2 * TILE, -1)
    from_state = matmul("hck,hvk->hcv", read, state)
    update = matmul("hij,hjv->hiv", kda_math.unit_lower_inverse(correction), beta * (v - from_state[:, TILE:]))
    out = from_state[:, :TILE] + matmul("hij,hjv->hiv", attention, update)
    written = (k * until_end).reshape(heads, TILE, -1)
    state = state * decay.gap[:, -1, 0][:, None] + matmul("hcv,hck->hvk", update, written)
    return jnp.moveaxis(out, 0, 1), state


def scan_tiles(prepare, packed, states, cu_seqlens, snapshot_positions, lower_bound, out_dtype):
    """Runs all tiles of packed sequences, in order.

    Args:
      prepare: turns one tile's slice of `packed` into `TileInputs`.
      packed: pytree of [T, ...] arrays.
      states: [N, H, V, K] float32 states before the sequences.
      cu_seqlens: [N + 1] int32.
      snapshot_positions: [M] int32.
      lower_bound: bound of the log decay, None if there is none.
      out_dtype: dtype of `out`.

    Returns:
      (out [T, H, V], states [N, H, V, K] after the sequences, snapshots [M, H, V, K]).
    """
    num_tokens = jax.tree.leaves(packed)[0].shape[0]
    num_sequences, num_snapshots = states.shape[0], snapshot_positions.shape[0]
    factored = lower_bound is not None and (BLOCK - 1) * -lower_bound <= MAX_EXPONENT
    tiles = tile_sequences(cu_seqlens, num_tokens, TILE)
    # Writes that nobody wants, those of unused tiles included, go to one more row.
    sequence_row = jnp.where(tiles.rows > 0, tiles.sequence, num_sequences)
    tile_end = jnp.where(tiles.rows > 0, tiles.row0 + tiles.rows, 0)
    snapshot_row = _first_true(tile_end[:, None] == snapshot_positions)
    states = jnp.pad(states, ((0, 1), (0, 0), (0, 0), (0, 0)))
    snapshots = jnp.zeros((num_snapshots + 1, *states.shape[1:]), jnp.float32)

    # Without this the backward pass would keep every intermediate of every tile; so it keeps one state a tile.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def run_tile(state, tile, rows):
        return advance_tile(state, _mask_rows(prepare(tile), rows), factored)

    def step(carry, tile_and_places):
        states, snapshots = carry
        tile, rows, sequence_row, snapshot_row = tile_and_places
        out, state = run_tile(states[sequence_row], tile, rows)
        states = states.at[sequence_row].set(state)
        snapshots = snapshots.at[snapshot_row].set(state)
        return (states, snapshots), out.astype(out_dtype)

    tiled = jax.tree.map(lambda x: gather_tiles(x, tiles, TILE), packed)
    (states, snapshots), out = jax.lax.scan(step, (states, snapshots), (tiled, tiles.rows, sequence_row, snapshot_row))
    # A tile writes one row, so a position asked for twice is copied from its first row.
    snapshots = snapshots[_first_true(snapshot_positions[:, None] == snapshot_positions)]
    return scatter_tiles(out, cu_seqlens, num_tokens), states[:-1], snapshots


def _first_true(mask: jax.Array) -> jax.Array:
    """Index of the first true element along the last axis, or that axis's size."""
    size = mask.shape[-1]
    return jnp.min(jnp.where(mask, jnp.arange(size), size), axis=-1, initial=size)


def _mask_rows(tile: TileInputs, rows: jax.Array) -> TileInputs:
    """Makes the rows from `rows` on neutral: no decay, no update."""
    valid = jnp.arange(TILE) < rows
    return tile._replace(
        log_decay=jnp.where(valid[:, None, None], tile.log_decay, 0), beta=jnp.where(valid[:, None], tile.beta, 0)
    )


def kda_prefill(q, k, v, gate, beta, A_log, dt_bias, state_pool, layer, slots, has_initial_state, cu_seqlens, *,
                lower_bound, snapshot_positions):
    """See `pallas_kernels.kda_prefill.api.kda_prefill`."""

    def prepare(tile):
        q, k, v, gate, beta = tile
        return TileInputs(
            kda_math.l2_normalize(q) * q.shape[-1] ** -0.5,
            kda_math.l2_normalize(k),
            v.astype(jnp.float32),
            kda_math.decay_gate(gate, A_log, dt_bias, lower_bound),
            jax.nn.sigmoid(beta.astype(jnp.float32)),
        )

    states = jnp.where(has_initial_state[:, None, None, None], stacks.read(state_pool, layer, slots), 0)
    out, states, snapshots = scan_tiles(
        prepare, (q, k, v, gate, beta), states, cu_seqlens, snapshot_positions, lower_bound, v.dtype
    )
    used = (jnp.diff(cu_seqlens) > 0) & (slots > 0)
    return KdaPrefillOutput(out, stacks.write(state_pool, layer, (slots,), states, used), snapshots)
