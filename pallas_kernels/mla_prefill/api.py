"""`mla_prefill`: causal multi-head latent attention over packed prompts."""

import jax
import jax.numpy as jnp

from pallas_kernels import checks, dispatch, mla_pages, tiles
from pallas_kernels.mla_prefill import reference, xla
from pallas_kernels.page_part import PagePart

OP = "mla_prefill"
IMPLEMENTATIONS = {"xla": xla.mla_prefill, "reference": reference.mla_prefill}


def mla_prefill(
    q: jax.Array,
    latent: jax.Array,
    kv_b_proj: jax.Array,
    pages: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    cu_seqlens: jax.Array,
    *,
    part: PagePart | None = None,
    backend: str | None = None,
) -> mla_pages.MlaOutput:
    """Stores the new tokens' latents in their pages, then attends from every token to its sequence up to itself.

    Keys and values are expanded per head from the latents; the `Dr` shared key channels are not rotated. Scores are
    scaled by (Dn + Dr)**-0.5, softmax is float32, probabilities are rounded to the activation dtype. Kimi K3 technical
    report 2.1.2; shapes in docs/design.md. float32 or bfloat16, the same for the first four arguments.

    Args:
      q: [T, H, Dn + Dr], packed.
      latent: [T, R + Dr], the normed latent and the raw shared key of the same tokens.
      kv_b_proj: [L, H, Dn + V, R], stacked over the MLA layers.
      pages: [L, P, page_size, R + Dr] in q's dtype or float32; donate it for an update in place. Page 0 is the dummy.
      layer: int32 scalar, which layer of `kv_b_proj` and `pages`.
      page_table: [N, max_pages] int32, pages of each sequence in order.
      context_lens: [N] int32, tokens in the pages before this call.
      cu_seqlens: [N + 1] int32; rows from `cu_seqlens[-1]` on are padding.
      part: of every page that `pages` holds, where devices share them; None = whole pages. `page_size` is then that of
        the share. Every device gets the same other arguments.
      backend: implementation to use; None chooses by platform.

    Returns:
      `out` [T, H, V] in the dtype of `q`, zero for padding and for tokens without a page; the updated `pages`; `lse`,
      None without `part` (see `MlaOutput`).

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: the named backend cannot take the case.
    """
    arguments = tuple(map(jnp.asarray, (q, latent, kv_b_proj, pages, layer, page_table, context_lens, cu_seqlens)))
    _require(*arguments, part)
    checks.guard(OP, lambda: _checks(*arguments, part))
    return dispatch.run(OP, IMPLEMENTATIONS, backend, *arguments, part=part)


def validate(q, latent, kv_b_proj, pages, layer, page_table, context_lens, cu_seqlens, *, part=None) -> None:
    """Raises ValueError with the first condition on the arguments' shapes, dtypes or values that does not hold."""
    arguments = tuple(map(jnp.asarray, (q, latent, kv_b_proj, pages, layer, page_table, context_lens, cu_seqlens)))
    _require(*arguments, part)
    checks.enforce(OP, _checks(*arguments, part))


def _require(q, latent, kv_b_proj, pages, layer, page_table, context_lens, cu_seqlens, part) -> None:
    sizes = checks.bind_shapes(
        OP,
        q=(q, "T H D"),
        latent=(latent, "T C"),
        kv_b_proj=(kv_b_proj, "L H W R"),
        pages=(pages, "L P page C"),
        layer=(layer, ""),
        page_table=(page_table, "N max_pages"),
        context_lens=(context_lens, "N"),
    )
    checks.bind_shapes(OP, cu_seqlens=(cu_seqlens, str(sizes["N"] + 1)))
    mla_pages.require_consistent(OP, q, latent, kv_b_proj, pages, page_table, context_lens, part)
    checks.require_dtype(OP, "cu_seqlens", cu_seqlens, jnp.int32)


def _checks(q, latent, kv_b_proj, pages, layer, page_table, context_lens, cu_seqlens, part) -> list[checks.Check]:
    num_tokens = q.shape[0]
    sequence, real = tiles.sequence_of_rows(cu_seqlens, num_tokens)
    position = mla_pages.prefill_positions(sequence, context_lens, cu_seqlens, num_tokens)
    return [
        *checks.cu_seqlens_checks(cu_seqlens, num_tokens),
        *mla_pages.page_checks(
            pages, page_table, context_lens, jnp.diff(cu_seqlens), sequence, position, written=real, part=part
        ),
    ]
