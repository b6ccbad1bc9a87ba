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
                ("mla_heads", "key_value_dim", "latent"), config, outputs=2,
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
        query = self._query(x, layer)
        latent = self._latent(x, layer)
        kv_b_proj = self.params["kv_b_proj"]
        if isinstance(batch, DecodeBatch):
            heads, pages = mla_decode(
                query, latent, kv_b_proj, state.mla_pages, layer, batch.page_table, batch.context_lens
            )
        else:
            heads, pages = mla_prefill(
                query, latent, kv_b_proj, state.mla_pages, layer, batch.page_table, batch.context_lens, batch.cu_seqlens
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
