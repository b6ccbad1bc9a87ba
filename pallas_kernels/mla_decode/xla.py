"""MLA decode in plain XLA: the absorbed form over tiles of pages, with an online softmax."""

import jax
import jax.numpy as jnp

from pallas_kernels import mla_pages
from pallas_kernels.page_part import page_tokens


def mla_decode(
    q, latent, kv_b_proj, pages, layer, page_table, context_lens, *, part=None, key_tile: int = 256
) -> mla_pages.MlaOutput:
    """See `api.mla_decode`; about `key_tile` positions of every row are in flight at a time."""
    num_rows, num_heads, _ = q.shape
    dims = mla_pages.Dims.of(q, kv_b_proj, pages)

    rows = jnp.arange(num_rows, dtype=jnp.int32)
    page = mla_pages.locate(page_table, rows, context_lens, page_tokens(pages, part))
    pages = mla_pages.write_latents(pages, layer, latent, page, context_lens, part)
    end = jnp.where(page > 0, context_lens + 1, 0)
    if part:
        end = part.count_before(end, pages.shape[2])

    key_up, value_up = mla_pages.split_kv_b_proj(kv_b_proj, layer, dims)
    absorbed = mla_pages.einsum("bhn,hnr->bhr", q[..., : dims.nope], key_up).astype(q.dtype)
    queries = jnp.concatenate([absorbed, q[..., dims.nope :]], axis=-1)
    cache = mla_pages.PagedKeys.tiled(pages, layer, page_table, key_tile, q.dtype)

    def add_keys(number, softmax):
        cached, _, readable = cache.read(number, end)
        scores = mla_pages.einsum("bhc,bkc->bhk", queries, cached) * dims.scale
        return softmax.add(
            jnp.where(readable[:, None], scores, -jnp.inf),
            lambda probability: mla_pages.einsum(
                "bhk,bkr->bhr", probability.astype(q.dtype), cached[..., : dims.latent]
            ),
        )

    empty = mla_pages.OnlineSoftmax.empty(num_rows, num_heads, dims.latent)
    softmax = jax.lax.fori_loop(0, jnp.max(cache.num_tiles(end)), add_keys, empty)
    context = softmax.result().astype(q.dtype)
    out = mla_pages.einsum("bhr,hvr->bhv", context, value_up)
    if part:
        return mla_pages.MlaOutput(out, pages, softmax.log_sum_exp())
    return mla_pages.MlaOutput(out.astype(q.dtype), pages, None)
