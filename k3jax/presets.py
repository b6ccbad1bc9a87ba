"""Architectures by name."""

from k3jax.config import AttentionKind, K3Config
from k3jax.errors import UserError


def _every_fourth_mla(count: int) -> tuple[AttentionKind, ...]:
    """Three KDA layers, then one MLA layer; the last layer is MLA in any case."""
    return tuple("mla" if layer % 4 == 3 or layer == count - 1 else "kda" for layer in range(count))


KIMI_K3 = K3Config(
    vocab_size=163840,
    hidden_size=7168,
    layer_types=_every_fourth_mla(93),
    intermediate_size=33792,
    hidden_act="situ",
    activation_situ_beta=4.0,
    activation_situ_linear_beta=25.0,
    num_attention_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    mla_use_output_gate=True,
    kda_num_heads=96,
    kda_head_dim=128,
    gate_lower_bound=-5.0,
    use_full_rank_gate=True,
    num_experts=896,
    num_experts_per_token=16,
    num_shared_experts=2,
    moe_intermediate_size=3072,
    routed_expert_hidden_size=3584,
    latent_moe_use_norm=True,
    first_k_dense_replace=1,
    attn_res_block_size=12,
    expert_format="mxfp4",
    max_position_embeddings=1_048_576,
    bos_token_id=163584,
    eos_token_id=163586,
    pad_token_id=163839,
    tensor_prefix="language_model.",
    a_log_padding=128,
)

KIMI_LINEAR_48B = K3Config(
    vocab_size=163840,
    hidden_size=2304,
    layer_types=_every_fourth_mla(27),
    intermediate_size=9216,
    hidden_act="silu",
    num_attention_heads=32,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kda_num_heads=32,
    kda_head_dim=128,
    num_experts=256,
    num_experts_per_token=8,
    num_shared_experts=1,
    moe_intermediate_size=1024,
    first_k_dense_replace=1,
    routed_scaling_factor=2.446,
    max_position_embeddings=1_048_576,
    bos_token_id=163584,
    eos_token_id=163586,
    pad_token_id=163839,
)

# Kimi K3 in small, with a byte-level vocabulary: every part of the architecture is there, and it runs anywhere.
DEMO = K3Config(
    vocab_size=512,
    hidden_size=128,
    layer_types=_every_fourth_mla(13),
    intermediate_size=256,
    hidden_act="situ",
    activation_situ_beta=4.0,
    activation_situ_linear_beta=25.0,
    num_attention_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    mla_use_output_gate=True,
    kda_num_heads=4,
    kda_head_dim=32,
    gate_lower_bound=-5.0,
    use_full_rank_gate=True,
    num_experts=16,
    num_experts_per_token=4,
    num_shared_experts=2,
    moe_intermediate_size=64,
    routed_expert_hidden_size=64,
    latent_moe_use_norm=True,
    first_k_dense_replace=1,
    attn_res_block_size=4,
    expert_format="mxfp4",
    max_position_embeddings=4096,
    bos_token_id=256,
    eos_token_id=258,
    pad_token_id=511,
    tensor_prefix="language_model.",
    a_log_padding=128,
)

PRESETS = {"kimi-k3": KIMI_K3, "kimi-linear-48b": KIMI_LINEAR_48B, "demo": DEMO}


def preset(name: str) -> K3Config:
    """The architecture called `kimi-k3`, `kimi-linear-48b` or `demo`.

    Raises:
      UserError: there is no such preset.
    """
    if name not in PRESETS:
        raise UserError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
