"""Gated multi-head latent attention without positions (K3 technical report, section 2.1.2)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.layers import project, rms_norm
from k3jax.modules import DeclaredModule
from k3jax.state import Batch, DecodeBatch, DecodeState
from k3jax.weights import Weight, linear, norm, stacked
from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.mla_prefill import mla_prefill
from pallas_kernels.page_part import PagePart
from sharding import Layout

LATENT_NORM_EPS = 1e-6
"""The reference code builds both latent norms without an epsilon, and this is its default."""


class MultiHeadLatentAttention(DeclaredModule):
    """All MLA layers."""

    @classmethod
    def weights(cls, config: K3Config) -> Mapping[str, Weight]:
        hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        if config.q_lora_rank:
            rank = config.q_lora_rank
            query = {
                "q_a_proj": linear("self_attn.q_a_proj.weight", (rank, hidden), ("rank", "embed"), config, outputs=1),
                "q_a_norm": norm("self_attn.q_a_layernorm.weight", rank, "rank"),
                "q_b_proj": linear(
                    "self_attn.q_b_proj.weight", (heads, key, rank), ("mla_heads", "key_dim", "rank"), config, outputs=2
                ),
            }
        else:
            query = {
                "q_proj": linear(
                    "self_attn.q_proj.weight", (heads, key, hidden), ("mla_heads", "key_dim", "embed"), config,
                    outputs=2,
                )
            }
        gate = {}
        if config.mla_use_output_gate:
            gate["g_proj"] = linear(
                "self_attn.g_proj.weight", (heads, value, hidden), ("mla_heads", "value_dim", "embed"), config,
                outputs=2,
            )
        return stacked(config.layers_of("mla"), {
            **query,
            "kv_a_proj": linear(
                "self_attn.kv_a_proj_with_mqa.weight", (config.mla_latent_size, hidden), ("latent", "embed"), config,
                outputs=1,
            ),
            "kv_a_norm": norm("self_attn.kv_a_layernorm.weight", latent, "latent"),
            "kv_b_proj": linear(
                "self_attn.kv_b_proj.weight", (heads, config.qk_nope_head_dim + value, latent),
                ("mla_kv_heads", "key_value_dim", "latent"), config, outputs=2,
            ),
            **gate,
            "o_proj": linear(
                "self_attn.o_proj.weight", (hidden, heads * value), ("embed", "mla_channels"), config, outputs=1
            ),
        })

    def __call__(self, x: jax.Array, layer: jax.Array, state: DecodeState,
                 batch: Batch) -> tuple[jax.Array, DecodeState]:
        """One layer.

        Args:
          x: [T, D] normed input.
          layer: int32 scalar, index among the MLA layers.
          state, batch: see `k3jax.state`.

        Returns:
          [T, D] output and the new state.
        """
        heads, pages = attend(
            self._query(x, layer), self._latent(x, layer), self.params["kv_b_proj"], state.mla_pages, layer, batch,
            self.layout,
        )
        if self.config.mla_use_output_gate:
            gate = project(x, *self.layer_params(layer, "g_proj"))
            gate = jax.nn.sigmoid(gate.astype(jnp.float32))
            heads = (heads.astype(jnp.float32) * gate).astype(x.dtype)
        out = project(heads.reshape(x.shape[0], -1), *self.layer_params(layer, "o_proj"))
        return out, state.replace(mla_pages=pages)

    def _query(self, x: jax.Array, layer: jax.Array) -> jax.Array:
        """[T, H, Dn + Dr], straight from the hidden state or through the normed query latent."""
        if not self.config.q_lora_rank:
            return project(x, *self.layer_params(layer, "q_proj"))
        q_a, q_norm, q_b = self.layer_params(layer, "q_a_proj", "q_a_norm", "q_b_proj")
        return project(rms_norm(project(x, q_a), q_norm, LATENT_NORM_EPS), q_b)

    def _latent(self, x: jax.Array, layer: jax.Array) -> jax.Array:
        """[T, R + Dr] what is cached: the normed latent and the shared key, which is neither normed nor rotated."""
        kv_a, kv_norm = self.layer_params(layer, "kv_a_proj", "kv_a_norm")
        both = project(x, kv_a)
        latent, key = jnp.split(both, [self.config.kv_lora_rank], axis=-1)
        return jnp.concatenate([rms_norm(latent, kv_norm, LATENT_NORM_EPS), key], axis=-1)


def attend(query: jax.Array, latent: jax.Array, kv_b_proj: jax.Array, pages: jax.Array, layer: jax.Array, batch: Batch,
           layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Stores the tokens' latents and attends to their sequences.

    Devices that split the pages each attend to their own keys, with the queries of all rows and heads that read them.
    So queries are gathered before, and of the merged result each device keeps its own rows and heads.

    Args:
      query: [T, H, Dn + Dr].
      latent: [T, R + Dr].
      kv_b_proj: [L, H, Dn + V, R].
      pages: [L, P, page size, R + Dr].
      layer, batch: as for the layer.
      layout: how all these lie on devices.

    Returns:
      [T, H, V] and the new pages.

    Raises:
      ValueError: the strategy splits rows or heads over a mesh axis that does not split the keys.
    """
    rows = batch.row_axis
    op, lengths = (mla_decode, ()) if isinstance(batch, DecodeBatch) else (mla_prefill, (batch.cu_seqlens,))
    more_rows, more_heads = layout.beyond(rows, "sequences"), layout.beyond("mla_heads", "mla_kv_heads")
    keys = layout.over("page_tokens")
    if lonely := set(more_rows + more_heads).difference(keys):
        raise ValueError(
            f"strategy {layout.strategy.name!r} splits MLA's rows or heads over mesh axis {min(lonely)!r}; expected "
            "page_tokens to be split over it too"
        )

    def local(query, latent, *arguments):
        query = layout.gather(layout.gather(query, more_rows, 0), more_heads, 1)
        latent = layout.gather(latent, more_rows, 0)
        if not keys:
            return op(query, latent, *arguments)[:2]
        part = PagePart(layout.index("page_tokens"), layout.parts("page_tokens"))
        out, pages, lse = op(query, latent, *arguments, part=part)
        return merge_parts(out, lse, layout, more_rows, more_heads).astype(query.dtype), pages

    heads, pool, of_sequences = (rows, "mla_heads", "width"), DecodeState.axes().mla_pages, ("sequences",)
    run = layout.local(
        local,
        (heads, (rows, "latent"), ("layers", "mla_kv_heads", "width", "latent"), pool, (), (*of_sequences, "table"),
         of_sequences, *[of_sequences] * len(lengths)),
        (heads, pool),
    )
    return run(query, latent, kv_b_proj, pages, layer, batch.page_table, batch.context_lens, *lengths)


def merge_parts(out: jax.Array, lse: jax.Array, layout: Layout, rows: tuple[str, ...],
                heads: tuple[str, ...]) -> jax.Array:
    """Attention over all keys out of that over each device's keys, as a softmax over their log-sum-exps.

    Args:
      out: [rows, H, V] float32, zero without keys.
      lse: [rows, H] float32, -inf without keys.
      layout: which devices share the keys.
      rows, heads: mesh axes over which the result is split.

    Returns:
      [rows / devices of `rows`, H / devices of `heads`, V] float32; zero where nobody has keys.
    """
    keys = layout.over("page_tokens")
    lses = layout.gather(lse[None], keys, 0)
    whole = jax.nn.logsumexp(lses, axis=0)
    weight = jnp.exp(lse - jnp.where(whole > -jnp.inf, whole, 0))
    rest = tuple(axis for axis in keys if axis not in rows + heads)
    out = layout.sum_scatter(layout.sum_scatter(weight[..., None] * out, rows, 0), heads, 1)
    return layout.sum(out, rest)
