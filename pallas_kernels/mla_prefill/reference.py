"""MLA by its definition: every key and value of a sequence expanded, one masked softmax."""

import jax
import jax.numpy as jnp

from pallas_kernels import mla_pages, tiles
from pallas_kernels.page_part import page_tokens


def mla_prefill(
    q, latent, kv_b_proj, pages, layer, page_table, context_lens, cu_seqlens, *, part=None
) -> mla_pages.MlaOutput:
    """See `api.mla_prefill`; needs memory for tokens x heads x capacity."""
    num_tokens, page_size = q.shape[0], pages.shape[2]
    dims = mla_pages.Dims.of(q, kv_b_proj, pages)
    sequence, real = tiles.sequence_of_rows(cu_seqlens, num_tokens)
    position = mla_pages.prefill_positions(sequence, context_lens, cu_seqlens, num_tokens)
    page = jnp.where(real, mla_pages.locate(page_table, sequence, position, page_tokens(pages, part)), 0)
    pages = mla_pages.write_latents(pages, layer, latent, page, position, part)
    key_up, value_up = mla_pages.split_kv_b_proj(kv_b_proj, layer, dims)

    # Keys are numbered as they lie here.
    last_key = part.count_before(position + 1, page_size) - 1 if part else position

    def attend(query, last_key, row_pages):
        """[H, Dn + Dr] -> scores [H, keys] and out [H, V] of one token; `row_pages` [max_pages] are its sequence's."""
        cached = pages[layer, row_pages].reshape(-1, pages.shape[-1]).astype(q.dtype)
        seen = (jnp.arange(cached.shape[0]) <= last_key) & jnp.repeat(row_pages > 0, page_size)
        cached = jnp.where(seen[:, None], cached, 0)
        content, shared_key = cached[:, : dims.latent], cached[:, dims.latent :]
        keys = mla_pages.einsum("sr,hnr->hsn", content, key_up).astype(q.dtype)
        values = mla_pages.einsum("sr,hvr->hsv", content, value_up).astype(q.dtype)
        scores = mla_pages.einsum("hn,hsn->hs", query[:, : dims.nope], keys)
        scores += mla_pages.einsum("hd,sd->hs", query[:, dims.nope :], shared_key)
        scores = jnp.where(seen, scores * dims.scale, -jnp.inf)
        probabilities = jax.nn.softmax(scores, axis=-1)
        out = mla_pages.einsum("hs,hsv->hv", probabilities.astype(q.dtype), values)
        return scores, out.astype(jnp.float32 if part else q.dtype)

    scores, out = jax.vmap(attend)(q, last_key, page_table[sequence])
    if part:
        lse = jnp.where((page > 0)[:, None], jax.nn.logsumexp(scores, axis=-1), -jnp.inf)
        return mla_pages.MlaOutput(jnp.where(lse[..., None] > -jnp.inf, out, 0), pages, lse)
    return mla_pages.MlaOutput(jnp.where((page > 0)[:, None, None], out, 0), pages, None)
