"""A decode step by its definition: packed sequences of one token each."""

import jax.numpy as jnp

from pallas_kernels import mla_pages
from pallas_kernels.mla_prefill import reference


def mla_decode(q, latent, kv_b_proj, pages, layer, page_table, context_lens, *, part=None) -> mla_pages.MlaOutput:
    """See `api.mla_decode`."""
    cu_seqlens = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)
    return reference.mla_prefill(q, latent, kv_b_proj, pages, layer, page_table, context_lens, cu_seqlens, part=part)
