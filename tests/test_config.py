"""K3Config: what is read, what is refused, and that the presets are the published models."""

import copy
import json
import warnings

import jax.numpy as jnp
import pytest

from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.model import K3ForCausalLM
from k3jax.presets import DEMO, KIMI_K3, KIMI_LINEAR_48B, preset
from k3jax.weights import count_parameters
from tests.golden import DATA, TINY


def raw(name: str) -> dict:
    return json.loads((DATA / name / "config.json").read_text())


def text(values: dict) -> dict:
    return values.get("text_config", values)


@pytest.mark.parametrize(
    "config, parameters", [(KIMI_K3, 2_779_484_476_000), (KIMI_LINEAR_48B, 49_122_681_728)], ids=["k3", "linear"]
)
def test_parameter_counts_are_the_published_ones(config, parameters):
    tree = K3ForCausalLM.weights(config)
    assert count_parameters(tree) == parameters


def test_declaration_is_what_init_makes():
    import jax

    from k3jax.state import DecodeState
    from tests.golden import prefill_batch

    for config in (DEMO, KIMI_K3, KIMI_LINEAR_48B):
        model = K3ForCausalLM(config, jnp.bfloat16)
        state = jax.eval_shape(lambda config=config: DecodeState.create(
            config, num_slots=2, num_pages=2, dtype=jnp.bfloat16, page_size=16
        ))
        made = jax.eval_shape(
            model.init, jax.random.key(0), jax.ShapeDtypeStruct((8,), jnp.int32), state, prefill_batch([8])
        )
        assert made["params"] == K3ForCausalLM.abstract_params(config, jnp.bfloat16)


def test_reads_both_layouts():
    k3, linear = (K3Config.from_file(DATA / name / "config.json") for name in TINY)
    assert (k3.hidden_act, k3.expert_format, k3.gate_lower_bound, k3.eos_token_id) == ("situ", "mxfp4", -5.0, 258)
    assert k3.layers_of("mla") == (3, 7, 11, 13) and k3.attn_res_block_size == 4 and k3.use_full_rank_gate
    assert (linear.hidden_act, linear.expert_format, linear.gate_lower_bound) == ("silu", "dense", None)
    assert linear.layers_of("mla") == (3, 7, 8) and linear.routed_scaling_factor == 2.446
    assert k3.layers_of("dense") == linear.layers_of("dense") == (0,)


@pytest.mark.parametrize("name", TINY)
def test_known_fields_give_no_warning_and_unknown_ones_a_single_line(name):
    values = raw(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        K3Config.from_dict(values)
    text(values)["brand_new"] = 1
    text(values)["linear_attn_config"]["another"] = 2
    with pytest.warns(UserWarning) as record:
        K3Config.from_dict(values)
    (message,) = [str(item.message) for item in record]
    assert "brand_new" in message and "linear_attn_config.another" in message and "\n" not in message


def test_every_field_that_changes_the_mathematics_arrives():
    """Changing a field of the file changes the configuration: none is silently dropped."""
    base = K3Config.from_dict(raw("k3-tiny"))
    changes = dict(
        vocab_size=520, hidden_size=160, intermediate_size=512, hidden_act="silu", activation_situ_beta=3.0,
        activation_situ_linear_beta=None, rms_norm_eps=1e-4, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, mla_use_output_gate=False, num_experts=8, num_experts_per_token=2,
        num_shared_experts=1, moe_intermediate_size=96, routed_expert_hidden_size=32, latent_moe_use_norm=False,
        first_k_dense_replace=2, moe_layer_freq=2, moe_renormalize=False, routed_scaling_factor=2.0, num_expert_group=2,
        attn_res_block_size=3, max_position_embeddings=100,
    )
    for field, value in changes.items():
        values = raw("k3-tiny")
        values["text_config"][field] = value
        assert K3Config.from_dict(values) != base, field
    for field, value in dict(num_heads=8, head_dim=16, short_conv_kernel_size=3, gate_lower_bound=None,
                             use_full_rank_gate=False).items():
        values = raw("k3-tiny")
        values["text_config"]["linear_attn_config"][field] = value
        assert K3Config.from_dict(values) != base, field


@pytest.mark.parametrize("field, value, says", [
    ("hidden_act", "gelu", "hidden_act"),
    ("num_experts_per_token", 17, "num_experts_per_token"),
    ("num_key_value_heads", 2, "num_key_value_heads"),
    ("mla_use_nope", False, "mla_use_nope"),
    ("moe_router_activation_func", "softmax", "moe_router_activation_func"),
    ("tie_word_embeddings", True, "tie_word_embeddings"),
    ("num_nextn_predict_layers", 1, "num_nextn_predict_layers"),
    ("hidden_size", -1, "hidden_size"),
    ("hidden_size", "big", "hidden_size"),
    ("num_expert_group", 3, "num_expert_group"),
    ("attn_res_block_size", 0, "attn_res_block_size"),
    ("num_hidden_layers", 13, "outside 1..13"),
    ("num_hidden_layers", 15, "leaves out layer 15"),
    ("moe_intermediate_size", 80, "moe_intermediate_size"),
    ("linear_attn_config", None, "linear_attn_config"),
    ("rms_norm_eps", 0, "rms_norm_eps"),
])
def test_refuses_by_name(field, value, says):
    values = raw("k3-tiny")
    values["text_config"][field] = value
    with pytest.raises(UserError) as error:
        K3Config.from_dict(values)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("lists, says", [
    (dict(kda_layers=[1, 2, 3, 4]), "layer 4 twice"),
    (dict(full_attn_layers=[8, 12, 14]), "leaves out layer 4"),
    (dict(full_attn_layers=[0, 4, 8, 12, 14]), "outside 1..14"),
    (dict(kda_layers="1,2"), "kda_layers"),
    (dict(gate_lower_bound=5.0), "gate_lower_bound"),
])
def test_refuses_bad_linear_attention(lists, says):
    values = raw("k3-tiny")
    values["text_config"]["linear_attn_config"] |= lists
    with pytest.raises(UserError, match=says):
        K3Config.from_dict(values)


@pytest.mark.parametrize("path, value, says", [
    (("quant_method",), "gptq", "quant_method"),
    (("format",), "nvfp4-pack-quantized", "format"),
    (("kv_cache_scheme",), {"num_bits": 8}, "kv_cache_scheme"),
    (("config_groups", "group_0", "weights", "group_size"), 16, "group_size"),
    (("config_groups", "group_0", "weights", "num_bits"), 8, "num_bits"),
    (("config_groups", "group_0", "input_activations"), {"num_bits": 8}, "input_activations"),
])
def test_refuses_other_quantisation(path, value, says):
    values = copy.deepcopy(raw("k3-tiny"))
    target = values["text_config"]["quantization_config"]
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(UserError, match=says):
        K3Config.from_dict(values)


def test_quantisation_is_found_at_the_top_level_too():
    values = raw("k3-tiny")
    values["quantization_config"] = values["text_config"].pop("quantization_config")
    assert K3Config.from_dict(values).expert_format == "mxfp4"


def test_files_that_are_no_configuration(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        K3Config.from_file(tmp_path / "config.json")
    path = tmp_path / "config.json"
    for content, says in (("{", "is not JSON"), ("[]", "expected a JSON object"), ("{}", "linear_attn_config")):
        path.write_text(content)
        with pytest.raises(UserError, match=says):
            K3Config.from_file(path)


def test_presets_by_name_and_cut_models():
    assert preset("kimi-k3") is KIMI_K3
    with pytest.raises(UserError, match="kimi-linear-48b"):
        preset("kimi-k4")
    cut = KIMI_K3.first_layers(5)
    assert cut.layer_types == ("kda", "kda", "kda", "mla", "kda") and cut.mlp_types[0] == "dense"
    for count in (0, 94):
        with pytest.raises(UserError, match=str(count)):
            KIMI_K3.first_layers(count)
