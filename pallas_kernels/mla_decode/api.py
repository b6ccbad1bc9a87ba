"""`mla_decode`: multi-head latent attention for one new token a sequence."""

import jax
import jax.numpy as jnp

from pallas_kernels import checks, dispatch, mla_pages
from pallas_kernels.mla_decode import reference, xla
from pallas_kernels.page_part import PagePart, page_tokens

OP = "mla_decode"
IMPLEMENTATIONS = {"xla": xla.mla_decode, "reference": reference.mla_decode}


def mla_decode(
    q: jax.Array,
    latent: jax.Array,
    kv_b_proj: jax.Array,
    pages: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    *,
    part: PagePart | None = None,
    backend: str | None = None,
) -> mla_pages.MlaOutput:
    """Stores each row's latent at position `context_lens[row]`, then attends to that row's sequence in latent space.

    The absorbed form of `mla_prefill`: the key up-projection moves to the query, the value up-projection to the result,
    so that all heads read the same latents. Kimi K3 technical report 2.1.2; shapes in docs/design.md. float32 or
    bfloat16, the same for the first four arguments.

    Args:
      q: [B, H, Dn + Dr], one token a row.
      latent: [B, R + Dr], the normed latent and the raw shared key of the same tokens.
      kv_b_proj: [L, H, Dn + V, R], stacked over the MLA layers.
      pages: [L, P, page_size, R + Dr] in q's dtype or float32; donate it for an update in place. Page 0 is the dummy.
      layer: int32 scalar, which layer of `kv_b_proj` and `pages`.
      page_table: [B, max_pages] int32. A row whose page for the new token is 0 is unused.
      context_lens: [B] int32, tokens in the pages before this call.
      part: of every page that `pages` holds, where devices share them; None = whole pages. `page_size` is then that of
        the share. Every device gets the same other arguments.
      backend: implementation to use; None chooses by platform.

    Returns:
      `out` [B, H, V] in the dtype of `q`, zero for unused rows; the updated `pages`; `lse`,
      None without `part` (see `MlaOutput`).

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: the named backend cannot take the case.
    """
    arguments = tuple(map(jnp.asarray, (q, latent, kv_b_proj, pages, layer, page_table, context_lens)))
    _require(*arguments, part)
    checks.guard(OP, lambda: _checks(*arguments, part))
    return dispatch.run(OP, IMPLEMENTATIONS, backend, *arguments, part=part)


def validate(q, latent, kv_b_proj, pages, layer, page_table, context_lens, *, part=None) -> None:
    """Raises ValueError with the first condition on the arguments' shapes, dtypes or values that does not hold."""
    arguments = tuple(map(jnp.asarray, (q, latent, kv_b_proj, pages, layer, page_table, context_lens)))
    _require(*arguments, part)
    checks.enforce(OP, _checks(*arguments, part))


def _require(q, latent, kv_b_proj, pages, layer, page_table, context_lens, part) -> None:
    checks.bind_shapes(
        OP,
        q=(q, "B H D"),
        latent=(latent, "B C"),
        kv_b_proj=(kv_b_proj, "L H W R"),
        pages=(pages, "L P page C"),
        layer=(layer, ""),
        page_table=(page_table, "B max_pages"),
        context_lens=(context_lens, "B"),
    )
    mla_pages.require_consistent(OP, q, latent, kv_b_proj, pages, page_table, context_lens, part)


def _checks(q, latent, kv_b_proj, pages, layer, page_table, context_lens, part) -> list[checks.Check]:
    rows = jnp.arange(page_table.shape[0], dtype=jnp.int32)
    page_size = page_tokens(pages, part)
    full = context_lens >= page_table.shape[1] * page_size
    used = full | (mla_pages.locate(page_table, rows, context_lens, page_size) > 0)
    return mla_pages.page_checks(
        pages, page_table, context_lens, used.astype(jnp.int32), rows, context_lens, written=used, part=part
    )
