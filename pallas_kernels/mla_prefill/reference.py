"""MLA by its definition: every key and value of a sequence expanded, one masked softmax."""

import jax
import jax.numpy as jnp

from pallas_kernels import mla_pages, tiles


def mla_prefill(q, latent, kv_b_proj, pages, layer, page_table, context_lens, cu_seqlens) -> mla_pages.MlaOutput:
    """See `api.mla_prefill`; needs memory for tokens x heads x capacity."""
    num_tokens, page_size = q.shape[0], pages.shape[2]
    dims = mla_pages.Dims.of(q, kv_b_proj, pages)
    sequence, real = tiles.sequence_of_rows(cu_seqlens, num_tokens)
    position = mla_pages.prefill_positions(sequence, context_lens, cu_seqlens, num_tokens)
    page = jnp.where(real, mla_pages.locate(page_table, sequence, position, page_size), 0)
    pages = mla_pages.write_latents(pages, layer, latent, page, position % page_size)
    key_up, value_up = mla_pages.split_kv_b_proj(kv_b_proj, layer, dims)

    def attend(query, position, row_pages):
        """[H, Dn + Dr] -> [H, V] of one token; `row_pages` [max_pages] are those of its sequence."""
        cached = pages[layer, row_pages].reshape(-1, pages.shape[-1]).astype(q.dtype)
        seen = (jnp.arange(cached.shape[0]) <= position) & jnp.repeat(row_pages > 0, page_size)
        cached = jnp.where(seen[:, None], cached, 0)
        content, shared_key = cached[:, : dims.latent], cached[:, dims.latent :]
        keys = mla_pages.einsum("sr,hnr->hsn", content, key_up).astype(q.dtype)
        values = mla_pages.einsum("sr,hvr->hsv", content, value_up).astype(q.dtype)
        scores = mla_pages.einsum("hn,hsn->hs", query[:, : dims.nope], keys)
        scores += mla_pages.einsum("hd,sd->hs", query[:, dims.nope :], shared_key)
        probabilities = jax.nn.softmax(jnp.where(seen, scores * dims.scale, -jnp.inf), axis=-1)
        return mla_pages.einsum("hs,hsv->hv", probabilities.astype(q.dtype), values).astype(q.dtype)

    out = jax.vmap(attend)(q, position, page_table[sequence])
    return mla_pages.MlaOutput(jnp.where((page > 0)[:, None, None], out, 0), pages)
