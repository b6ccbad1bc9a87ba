"""K3Config: everything about a model that changes its mathematics."""

import dataclasses
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from k3jax.errors import UserError
from k3jax.json_file import read_object

AttentionKind = Literal["kda", "mla"]
MlpKind = Literal["dense", "moe"]

MXFP4_GROUP = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class K3Config:
    """Architecture of Kimi K3 or Kimi-Linear, with Hugging Face's field names where they exist.

    Make one with `K3Config.from_dict` (a parsed `config.json`), `K3Config.from_file`, or `k3jax.presets.preset`.

    Attributes:
      vocab_size: rows of the embedding and of the head.
      hidden_size: width of the residual stream.
      layer_types: "kda" or "mla" for each layer.
      intermediate_size: width of the dense MLP.
      hidden_act: "situ" (K3) or "silu" (Kimi-Linear), for every MLP and expert.
      activation_situ_beta: cap of SiTU's gate branch.
      activation_situ_linear_beta: cap of SiTU's up branch; None leaves it uncapped.
      rms_norm_eps: epsilon of every norm but the two latent norms of MLA, which use 1e-6 (model reference code).
      num_attention_heads: MLA heads.
      q_lora_rank: width of the query latent; None for a direct query projection.
      kv_lora_rank: width of the cached latent.
      qk_nope_head_dim: query/key dims expanded from the latent.
      qk_rope_head_dim: query/key dims shared by all heads; never rotated.
      v_head_dim: value dims of an MLA head.
      mla_use_output_gate: multiply MLA's heads by a sigmoid gate.
      kda_num_heads: KDA heads.
      kda_head_dim: key and value width of a KDA head.
      short_conv_kernel_size: taps of the causal depthwise convolution before KDA.
      gate_lower_bound: bound of the log decay (K3: -5.0); None for the softplus decay of Kimi-Linear.
      use_full_rank_gate: KDA's output gate is one projection (K3) instead of two of rank `kda_head_dim`.
      num_experts: routed experts; 0 for a model without MoE layers.
      num_experts_per_token: experts chosen per token.
      num_shared_experts: shared experts, fused to one MLP.
      moe_intermediate_size: width of one expert.
      routed_expert_hidden_size: latent width that experts work at (K3); None for the hidden size.
      latent_moe_use_norm: RMSNorm on the latent before it is projected up.
      first_k_dense_replace: layers before this index have the dense MLP.
      moe_layer_freq: a later layer is MoE when its index is a multiple of this.
      moe_renormalize: divide the chosen scores by their sum.
      routed_scaling_factor: factor on the routing weights.
      num_expert_group: groups for group-limited routing; 1 routes over all experts.
      topk_group: groups kept.
      attn_res_block_size: layers in an AttnRes block; None for the ordinary residual stream.
      expert_format: "mxfp4" (two codes a byte and a scale per 32) or "dense".
      max_position_embeddings: longest context in tokens; no table depends on it.
      bos_token_id, eos_token_id, pad_token_id: special token ids.
      initializer_range: standard deviation of random weights.
      tensor_prefix: what precedes `model.` and `lm_head.` in the checkpoint's tensor names.
      a_log_padding: A_log lies in the checkpoint as a vector zero-padded to a multiple of this (K3: 128); None for
        `[1, 1, H, 1]`.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[AttentionKind, ...]
    intermediate_size: int
    hidden_act: Literal["situ", "silu"]
    activation_situ_beta: float = 1.0
    activation_situ_linear_beta: float | None = None
    rms_norm_eps: float = 1e-5
    num_attention_heads: int
    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_output_gate: bool = False
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = None
    use_full_rank_gate: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 1
    num_shared_experts: int = 0
    moe_intermediate_size: int = 0
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    attn_res_block_size: int | None = None
    expert_format: Literal["mxfp4", "dense"] = "dense"
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    initializer_range: float = 0.02
    tensor_prefix: str = ""
    a_log_padding: int | None = None

    def __post_init__(self):
        _check(self)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def mlp_types(self) -> tuple[MlpKind, ...]:
        """ "dense" or "moe" for each layer."""
        return tuple(
            "moe" if self.num_experts and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
            else "dense"
            for layer in range(self.num_hidden_layers)
        )

    @property
    def num_attn_res_blocks(self) -> int:
        """Blocks that have been started by the last layer; 0 without AttnRes."""
        return -(-self.num_hidden_layers // self.attn_res_block_size) if self.attn_res_block_size else 0

    @property
    def expert_hidden_size(self) -> int:
        """Width that the routed experts read and write."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def mla_latent_size(self) -> int:
        """Values an MLA layer caches per token: the latent and the shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def layers_of(self, kind: AttentionKind | MlpKind) -> tuple[int, ...]:
        """0-based indices of the layers with this attention or MLP."""
        types = self.layer_types if kind in ("kda", "mla") else self.mlp_types
        return tuple(layer for layer, type_ in enumerate(types) if type_ == kind)

    def first_layers(self, count: int) -> "K3Config":
        """The model cut after `count` layers.

        Raises:
          UserError: count is not between 1 and the number of layers.
        """
        if not 1 <= count <= self.num_hidden_layers:
            raise UserError(f"cannot take {count} layers of a model with {self.num_hidden_layers}")
        return dataclasses.replace(self, layer_types=self.layer_types[:count])

    @classmethod
    def from_file(cls, path: str | pathlib.Path) -> "K3Config":
        """Reads a Hugging Face `config.json`.

        Raises:
          UserError: the file is missing or not JSON, or see `from_dict`.
        """
        return cls.from_dict(read_object(pathlib.Path(path)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "K3Config":
        """From a parsed `config.json`: nested (K3, under `text_config`) or flat (Kimi-Linear).

        Every field that changes the mathematics is consumed, or its value refused by name. Fields nobody knows give
        one warning line.

        Raises:
          UserError: a field is missing, has an unsupported value, or contradicts another.
        """
        return _Reader(values).config()


def _check(config: K3Config) -> None:
    """Refuses values that no model can have."""

    def refuse(field: str, expected: str):
        raise UserError(f"{field} is {getattr(config, field)!r}, expected {expected}")

    for field in (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim", "kda_num_heads", "kda_head_dim", "moe_layer_freq", "max_position_embeddings",
    ):
        value = getattr(config, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            refuse(field, "a positive whole number")
    if not config.layer_types:
        refuse("layer_types", "at least one layer")
    if config.hidden_act not in ("situ", "silu"):
        refuse("hidden_act", '"situ" (Kimi K3) or "silu" (Kimi-Linear)')
    if config.hidden_act == "situ" and not config.activation_situ_beta > 0:
        refuse("activation_situ_beta", "a positive number")
    if config.activation_situ_linear_beta is not None and not config.activation_situ_linear_beta > 0:
        refuse("activation_situ_linear_beta", "a positive number or null")
    if config.short_conv_kernel_size < 2:
        refuse("short_conv_kernel_size", "at least 2")
    if config.gate_lower_bound is not None and not config.gate_lower_bound < 0:
        refuse("gate_lower_bound", "a negative number or null")
    if config.attn_res_block_size is not None and config.attn_res_block_size < 1:
        refuse("attn_res_block_size", "a positive whole number or null")
    if not config.rms_norm_eps > 0:
        refuse("rms_norm_eps", "a positive number")
    if "moe" not in config.mlp_types:
        return
    if not 1 <= config.num_experts_per_token <= config.num_experts:
        refuse("num_experts_per_token", f"between 1 and num_experts = {config.num_experts}")
    if config.moe_intermediate_size < 1:
        refuse("moe_intermediate_size", "a positive whole number")
    groups = config.num_expert_group
    if groups < 1 or config.num_experts % groups:
        refuse("num_expert_group", f"a divisor of num_experts = {config.num_experts}")
    if not 1 <= config.topk_group <= groups:
        refuse("topk_group", f"between 1 and num_expert_group = {groups}")
    if config.num_experts_per_token > config.topk_group * (config.num_experts // groups):
        refuse("num_experts_per_token", f"at most the experts of the {config.topk_group} groups kept")
    if config.expert_format == "mxfp4":
        for field in ("expert_hidden_size", "moe_intermediate_size"):
            if getattr(config, field) % MXFP4_GROUP:
                refuse(field, f"a multiple of the MXFP4 group, {MXFP4_GROUP}")


# Fields that never reach the mathematics of the text model: bookkeeping, defaults of generation, and names of things
# that the layer lists or the tensors themselves already say.
_INERT = frozenset(
    """
    _name_or_path _attn_implementation add_cross_attention architectures attention_bias attention_dropout auto_map
    bad_words_ids begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id head_dim id2label ignore_index image_placeholder is_decoder
    is_encoder_decoder label2id length_penalty max_length media_placeholder_token_id min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
    output_scores prefix problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate rope_parameters rope_scaling rope_theta sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p topk_method torch_dtype torchscript
    transformers_version typical_p use_bfloat16 use_cache use_grouped_topk vision_config text_config
    """.split()
)


class _Reader:
    """Takes fields out of a config.json one by one, so that what is left over is unknown."""

    def __init__(self, values: Mapping[str, Any]):
        text = values.get("text_config")
        if text is not None and not isinstance(text, Mapping):
            raise UserError(f"text_config is {text!r}, expected an object")
        self.nested = text is not None
        self.outer = dict(values) if self.nested else {}
        self.fields = dict(text if self.nested else values)

    def take(self, name: str, *default):
        if name in self.fields:
            return self.fields.pop(name)
        if default:
            return default[0]
        raise UserError(f"config.json has no {name}, which this model needs")

    def whole(self, name: str, *default) -> int:
        value = self.take(name, *default)
        if value is None and default:
            return default[0]
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{name} is {value!r}, expected a whole number")
        return value

    def only(self, name: str, supported: Any, why: str) -> None:
        """Consumes a field that changes the mathematics but has just one supported value."""
        value = self.take(name, supported)
        if value is not None and value != supported:
            raise UserError(f"{name} is {value!r}; only {supported!r} is supported: {why}")

    def config(self) -> K3Config:
        linear = self.take("linear_attn_config")
        if not isinstance(linear, Mapping):
            raise UserError(f"linear_attn_config is {linear!r}, expected an object")
        linear = _Reader(linear)
        heads = self.whole("num_attention_heads")
        self.only("num_key_value_heads", heads, "MLA expands one latent to all heads")
        self.only("mla_use_nope", True, "neither model rotates queries and keys")
        self.only("moe_router_activation_func", "sigmoid", "the router scores by sigmoid")
        self.only("tie_word_embeddings", False, "both models ship a head of their own")
        self.only("num_nextn_predict_layers", 0, "no multi-token-prediction layers are implemented")
        expert_format = self.expert_format()
        for name in ("tie_word_embeddings", "quantization_config"):
            self.outer.pop(name, None)
        latent = self.take("routed_expert_hidden_size", None)
        max_length = self.take("model_max_length", None)
        config = dict(
            vocab_size=self.whole("vocab_size"),
            hidden_size=self.whole("hidden_size"),
            layer_types=_layer_types(
                self.whole("num_hidden_layers"), linear.take("kda_layers"), linear.take("full_attn_layers")
            ),
            intermediate_size=self.whole("intermediate_size"),
            hidden_act=self.take("hidden_act"),
            activation_situ_beta=self.take("activation_situ_beta", 1.0),
            activation_situ_linear_beta=self.take("activation_situ_linear_beta", None),
            rms_norm_eps=self.take("rms_norm_eps"),
            num_attention_heads=heads,
            q_lora_rank=self.take("q_lora_rank", None),
            kv_lora_rank=self.whole("kv_lora_rank"),
            qk_nope_head_dim=self.whole("qk_nope_head_dim"),
            qk_rope_head_dim=self.whole("qk_rope_head_dim"),
            v_head_dim=self.whole("v_head_dim"),
            mla_use_output_gate=bool(self.take("mla_use_output_gate", False)),
            kda_num_heads=linear.whole("num_heads"),
            kda_head_dim=linear.whole("head_dim"),
            short_conv_kernel_size=linear.whole("short_conv_kernel_size"),
            gate_lower_bound=linear.take("gate_lower_bound", None),
            use_full_rank_gate=bool(linear.take("use_full_rank_gate", False)),
            num_experts=self.whole("num_experts", 0),
            num_experts_per_token=self.whole("num_experts_per_token", 1),
            num_shared_experts=self.whole("num_shared_experts", 0),
            moe_intermediate_size=self.whole("moe_intermediate_size", 0),
            routed_expert_hidden_size=latent,
            latent_moe_use_norm=bool(self.take("latent_moe_use_norm", False)) and latent is not None,
            first_k_dense_replace=self.whole("first_k_dense_replace", 0),
            moe_layer_freq=self.whole("moe_layer_freq", 1),
            moe_renormalize=bool(self.take("moe_renormalize", True)),
            routed_scaling_factor=float(self.take("routed_scaling_factor", 1.0)),
            num_expert_group=self.whole("num_expert_group", 1),
            topk_group=self.whole("topk_group", 1),
            attn_res_block_size=self.take("attn_res_block_size", None),
            expert_format=expert_format,
            max_position_embeddings=self.whole("max_position_embeddings", max_length or 1_048_576),
            initializer_range=self.take("initializer_range", 0.02),
            tensor_prefix="language_model." if self.nested else "",
            a_log_padding=128 if self.nested else None,
        )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            outer = self.outer.pop(name, None)
            inner = self.take(name, None)
            config[name] = inner if outer is None else outer
        unknown = (set(self.fields) | set(self.outer)) - _INERT
        unknown |= {f"linear_attn_config.{name}" for name in linear.fields}
        if unknown:
            names = ", ".join(sorted(unknown))
            warnings.warn(f"config.json has fields that k3jax does not know: {names}", stacklevel=4)
        return K3Config(**config)

    def expert_format(self) -> str:
        """MXFP4 or dense, from `quantization_config` (top level first, then the text model's)."""
        inner = self.take("quantization_config", None)
        quantization = self.outer.get("quantization_config", inner)
        if quantization is None:
            return "dense"
        expected = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "kv_cache_scheme": None}
        for name, value in expected.items():
            if quantization.get(name) != value:
                raise UserError(f"quantization_config.{name} is {quantization.get(name)!r}, expected {value!r}")
        for group in quantization.get("config_groups", {}).values():
            weights = group.get("weights") or {}
            wanted = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": MXFP4_GROUP, "symmetric": True}
            for name, value in wanted.items():
                if weights.get(name) != value:
                    raise UserError(
                        f"quantization_config weights.{name} is {weights.get(name)!r}, expected {value!r} (MXFP4)"
                    )
            for name in ("input_activations", "output_activations"):
                if group.get(name) is not None:
                    raise UserError(f"quantization_config {name} is {group[name]!r}, expected null")
        return "mxfp4"


def _layer_types(count: int, kda_layers: Any, full_attn_layers: Any) -> tuple[AttentionKind, ...]:
    """Layer kinds from the two 1-based lists, which must cover each layer once."""
    kinds: dict[int, AttentionKind] = {}
    for name, layers, kind in (("kda_layers", kda_layers, "kda"), ("full_attn_layers", full_attn_layers, "mla")):
        if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
            raise UserError(f"linear_attn_config.{name} is {layers!r}, expected a list of layer numbers from 1")
        for layer in layers:
            if not 1 <= layer <= count:
                raise UserError(f"linear_attn_config.{name} names layer {layer}, outside 1..{count}")
            if layer in kinds:
                raise UserError(f"linear_attn_config names layer {layer} twice; each layer must be in one list once")
            kinds[layer] = kind
    holes = [layer for layer in range(1, count + 1) if layer not in kinds]
    if holes:
        raise UserError(f"linear_attn_config leaves out layer {holes[0]}; its two lists must cover all layers")
    return tuple(kinds[layer] for layer in range(1, count + 1))
