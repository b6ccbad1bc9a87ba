"""What a prefix costs to compute and to keep, from the model's shapes."""

import dataclasses

from k3jax.config import K3Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """FLOPs of prefill and bytes of state.

    Attributes:
      flops_per_token: of everything that costs the same at any depth: matrix products and the KDA recurrence.
      attention_flops: of MLA, per token and per token of context before it.
      snapshot_bytes: KDA states and convolution tails of one sequence, all layers.
      token_bytes: MLA latents of one token, all layers.
    """

    flops_per_token: float
    attention_flops: float
    snapshot_bytes: int
    token_bytes: int

    @classmethod
    def for_model(cls, config: K3Config, *, itemsize: int = 2) -> "CostModel":
        """Of a model whose activations and latents have `itemsize` bytes; KDA states are float32.

        A token passes its own experts only. The head is left out: prefill needs the last token's logits at most.
        """
        kda, mla = len(config.layers_of("kda")), len(config.layers_of("mla"))
        heads, width = config.kda_num_heads, config.kda_head_dim
        key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        conv_tail = 3 * heads * width * (config.short_conv_kernel_size - 1)
        return cls(
            flops_per_token=2 * _active_parameters(config) + kda * 7 * heads * width**2,
            attention_flops=mla * 2 * config.num_attention_heads * (key + value),
            snapshot_bytes=kda * (heads * width**2 * 4 + conv_tail * itemsize),
            token_bytes=mla * config.mla_latent_size * itemsize,
        )

    def flops(self, num_tokens):
        """FLOPs of the prefill of the first `num_tokens` tokens: a number, or an array of any shape."""
        return num_tokens * (self.flops_per_token + num_tokens * (self.attention_flops / 2))


def _active_parameters(config: K3Config) -> int:
    """Weights of the matrix products that one token takes part in, without embedding and head."""
    hidden = config.hidden_size
    heads, width = config.kda_num_heads, config.kda_head_dim
    channels = heads * width
    gate = channels * hidden if config.use_full_rank_gate else width * (hidden + channels)
    kda = 4 * channels * hidden + gate + width * (hidden + channels) + heads * hidden

    heads, value = config.num_attention_heads, config.v_head_dim
    queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    mla = config.q_lora_rank * (hidden + queries) if config.q_lora_rank else queries * hidden
    mla += config.mla_latent_size * hidden + config.kv_lora_rank * heads * (config.qk_nope_head_dim + value)
    mla += (2 if config.mla_use_output_gate else 1) * heads * value * hidden

    dense = 3 * hidden * config.intermediate_size
    expert, shared = config.num_experts_per_token, config.num_shared_experts
    moe = config.num_experts * hidden
    moe += 3 * config.moe_intermediate_size * (expert * config.expert_hidden_size + shared * hidden)
    moe += 2 * hidden * (config.routed_expert_hidden_size or 0)

    layers = {"kda": kda, "mla": mla, "dense": dense, "moe": moe}
    return sum(len(config.layers_of(kind)) * count for kind, count in layers.items())
