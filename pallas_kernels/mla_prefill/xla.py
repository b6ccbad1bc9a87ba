"""MLA prefill in plain XLA: query tiles against key tiles of whole pages, with an online softmax."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, mla_pages, tiles
from pallas_kernels.page_part import page_tokens


def mla_prefill(
    q,
    latent,
    kv_b_proj,
    pages,
    layer,
    page_table,
    context_lens,
    cu_seqlens,
    *,
    part=None,
    query_tile: int | None = None,
    key_tile: int | None = None,
) -> mla_pages.MlaOutput:
    """See `api.mla_prefill`; `query_tile` rows by about `key_tile` positions are in flight at a time."""
    num_tokens, num_heads, _ = q.shape
    dims = mla_pages.Dims.of(q, kv_b_proj, pages)
    query_tile = query_tile or _query_tile(num_tokens, cu_seqlens.shape[0] - 1)
    key_tile = key_tile or _key_tile(num_heads * query_tile)

    sequence, real = tiles.sequence_of_rows(cu_seqlens, num_tokens)
    position = mla_pages.prefill_positions(sequence, context_lens, cu_seqlens, num_tokens)
    page = jnp.where(real, mla_pages.locate(page_table, sequence, position, page_tokens(pages, part)), 0)
    pages = mla_pages.write_latents(pages, layer, latent, page, position, part)

    key_up, value_up = mla_pages.split_kv_b_proj(kv_b_proj, layer, dims)
    cache = mla_pages.PagedKeys.tiled(pages, layer, page_table, key_tile, q.dtype)
    query_tiles = tiles.tile_sequences(cu_seqlens, num_tokens, query_tile)
    padded_q = jnp.pad(q, ((0, query_tile), (0, 0), (0, 0)))

    def attend(number, carry):
        out, lse = carry
        sequence, index, row0, rows = (field[number] for field in query_tiles)
        queries = jax.lax.dynamic_slice_in_dim(padded_q, row0, query_tile)
        first = context_lens[sequence] + index * query_tile
        query_position = first + jnp.arange(query_tile, dtype=jnp.int32)
        keys_of = cache._replace(page_table=cache.page_table[sequence])
        end = first + rows
        if part:
            # Keys are numbered as they lie here, and both bounds with them.
            query_position = part.count_before(query_position + 1, pages.shape[2]) - 1
            end = part.count_before(end, pages.shape[2])

        def add_keys(number, softmax):
            cached, key_position, readable = keys_of.read(number, end)
            content, shared_key = cached[:, : dims.latent], cached[:, dims.latent :]
            keys = mla_pages.einsum("kr,hnr->hkn", content, key_up).astype(q.dtype)
            values = mla_pages.einsum("kr,hvr->hkv", content, value_up).astype(q.dtype)
            keys = jnp.concatenate([keys, jnp.broadcast_to(shared_key, (num_heads, *shared_key.shape))], axis=-1)
            scores = mla_pages.einsum("qhd,hkd->hqk", queries, keys) * dims.scale
            seen = readable & (key_position <= query_position[:, None])
            return softmax.add(
                jnp.where(seen, scores, -jnp.inf),
                lambda probability: mla_pages.einsum("hqk,hkv->hqv", probability.astype(q.dtype), values),
            )

        empty = mla_pages.OnlineSoftmax.empty(num_heads, query_tile, dims.value)
        softmax = jax.lax.fori_loop(0, keys_of.num_tiles(end), add_keys, empty)
        attended = jnp.swapaxes(softmax.result(), 0, 1).astype(out.dtype)
        # Rows beyond the tile's own belong to later tiles, which overwrite them.
        out = jax.lax.dynamic_update_slice_in_dim(out, attended, row0, axis=0)
        if part:
            lse = jax.lax.dynamic_update_slice_in_dim(lse, softmax.log_sum_exp().T, row0, axis=0)
        return out, lse

    rows = num_tokens + query_tile
    out = jnp.zeros((rows, num_heads, dims.value), jnp.float32 if part else q.dtype)
    lse = jnp.zeros((rows, num_heads), jnp.float32) if part else None
    out, lse = jax.lax.fori_loop(0, tiles.first_tiles(cu_seqlens, query_tile)[-1], attend, (out, lse))
    if part:
        lse = jnp.where((page > 0)[:, None], lse[:num_tokens], -jnp.inf)
    return mla_pages.MlaOutput(jnp.where((page > 0)[:, None, None], out[:num_tokens], 0), pages, lse)


def _query_tile(num_tokens: int, num_sequences: int) -> int:
    """Rows of a query tile: a power of two from 128 to 512 near the mean length, but no more than the tokens need."""
    mean, most = (max(1, 1 << (size - 1).bit_length()) for size in (num_tokens // num_sequences, num_tokens))
    return min(max(mean, 128), most, 512)


def _key_tile(rows: int) -> int:
    """Positions of a key tile beside so many rows of scores.

    A CPU wants tiles that its caches hold. Elsewhere each turn of the loop costs several launches, and the limit is
    memory: 64 MiB of scores.
    """
    return 256 if dispatch.current_platform() == "cpu" else min(max(2**24 // rows, 256), 4096)
