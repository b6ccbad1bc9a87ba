"""The dry run: every tensor is used once, and whatever does not fit is named."""

import json
import math
import shutil

import numpy as np
import pytest

from k3jax.checkpoint import Repository, plan_loading
from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.model import K3ForCausalLM
from k3jax.presets import KIMI_K3
from tests.checkpoints import TINY, copy_checkpoint, read_shards, tiny_checkpoint, write_index, write_raw_shard

EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3.w2"
NORM = "language_model.model.layers.2.input_layernorm.weight"


def plan(directory):
    config = K3Config.from_file(directory / "config.json")
    return plan_loading(K3ForCausalLM.weights(config), config, Repository.open(directory))


def used_names(loading_plan) -> list[str]:
    return [tensor.name for weight in loading_plan.weights for layer in weight.layers for tensor in layer]


@pytest.mark.parametrize("name", TINY)
def test_golden_checkpoints_are_used_completely(name):
    index = json.loads((tiny_checkpoint(name) / "model.safetensors.index.json").read_text())
    loading_plan = plan(tiny_checkpoint(name))
    assert sorted(used_names(loading_plan)) == sorted(index["weight_map"])
    assert loading_plan.total_bytes == index["metadata"]["total_size"]
    assert loading_plan.skipped == ()


def test_vision_is_skipped(tmp_path):
    extra = {"vision_tower.patch.weight": np.zeros(3, np.float32), "mm_projector.x": np.zeros(2, np.float16)}
    loading_plan = plan(copy_checkpoint("k3-tiny", tmp_path, extra))
    assert sorted(loading_plan.skipped) == sorted(extra)
    assert not set(extra) & set(used_names(loading_plan))


@pytest.mark.parametrize(
    ("changes", "expected"),
    {
        "missing": ({NORM: None}, [NORM, "no tensor", "[128]", "BF16"]),
        "missing scale": ({f"{EXPERT}.weight_scale": None}, [f"{EXPERT}.weight_scale", "U8"]),
        "shape": ({NORM: np.zeros(127, np.float32)}, [NORM, "[127]", "[128]"]),
        "transposed": ({f"{EXPERT}.weight_packed": np.zeros((32, 64), np.uint8)}, [EXPERT, "[32, 64]", "[64, 32]"]),
        "dtype": ({NORM: np.zeros(128, np.int64)}, [NORM, "I64", "BF16 or F32 or F16"]),
        "codes as floats": ({f"{EXPERT}.weight_packed": np.zeros((64, 32), np.float32)}, [EXPERT, "F32", "U8"]),
        "floats as codes": ({NORM: np.zeros(128, np.uint8)}, [NORM, "U8", "BF16 or F32 or F16"]),
        "unknown": ({"language_model.extra": np.zeros(1, np.float32)}, ["language_model.extra", "no place"]),
    }.values(),
)
def test_what_does_not_fit_is_named(tmp_path, changes, expected):
    with pytest.raises(UserError) as error:
        plan(copy_checkpoint("k3-tiny", tmp_path, changes))
    message = str(error.value)
    assert "\n" not in message and all(part in message for part in expected), message


def test_checkpoint_of_a_deeper_model(tmp_path):
    config = K3Config.from_file(tiny_checkpoint("k3-tiny") / "config.json")
    repository, weights = Repository.open(tiny_checkpoint("k3-tiny")), K3ForCausalLM.weights(config.first_layers(13))
    with pytest.raises(UserError, match=r"layers\.13\..* has no place"):
        plan_loading(weights, config, repository)


def test_full_kimi_k3(tmp_path):
    """The whole public layout as holes in sparse files; the table is the published one, not this code's."""
    write_kimi_k3(tmp_path)
    repository = Repository.open(tmp_path)
    shutil.rmtree(tmp_path)
    loading_plan = plan_loading(K3ForCausalLM.weights(KIMI_K3), KIMI_K3, repository)
    names = used_names(loading_plan)
    assert len(names) == len(set(names)) == 497_220 - 168
    assert len(loading_plan.skipped) == 168
    assert len({tensor.file for weight in loading_plan.weights for layer in weight.layers for tensor in layer}) == 94
    skipped_bytes = sum(repository.tensors[name].nbytes for name in loading_plan.skipped)
    assert loading_plan.total_bytes + skipped_bytes == 1_560_860_324_864


BYTES = {"BF16": 2, "F32": 4, "U8": 1}
D = 7168


def kimi_k3_layer(layer: int) -> dict[str, tuple[str, list[int]]]:
    """Tensors of one layer, without prefix."""
    tensors = {
        "input_layernorm.weight": ("BF16", [D]), "post_attention_layernorm.weight": ("BF16", [D]),
        "self_attention_res_norm.weight": ("BF16", [D]), "self_attention_res_proj.weight": ("BF16", [1, D]),
        "mlp_res_norm.weight": ("BF16", [D]), "mlp_res_proj.weight": ("BF16", [1, D]),
    }
    if layer % 4 == 3 or layer == 92:
        attention = {
            "q_a_proj.weight": ("BF16", [1536, D]), "q_a_layernorm.weight": ("BF16", [1536]),
            "q_b_proj.weight": ("BF16", [18432, 1536]), "kv_a_proj_with_mqa.weight": ("BF16", [576, D]),
            "kv_a_layernorm.weight": ("BF16", [512]), "kv_b_proj.weight": ("BF16", [24576, 512]),
            "g_proj.weight": ("BF16", [12288, D]), "o_proj.weight": ("BF16", [D, 12288]),
        }
    else:
        attention = {
            **{f"{name}_proj.weight": ("BF16", [12288, D]) for name in "qkvg"},
            **{f"{name}_conv1d.weight": ("F32", [12288, 1, 4]) for name in "qkv"},
            "o_proj.weight": ("BF16", [D, 12288]), "f_a_proj.weight": ("BF16", [128, D]),
            "f_b_proj.weight": ("BF16", [12288, 128]), "b_proj.weight": ("BF16", [96, D]), "A_log": ("F32", [128]),
            "dt_bias": ("F32", [12288]), "o_norm.weight": ("F32", [128]),
        }
    tensors |= {f"self_attn.{name}": entry for name, entry in attention.items()}
    if layer == 0:
        return tensors | {
            "mlp.gate_proj.weight": ("BF16", [33792, D]), "mlp.up_proj.weight": ("BF16", [33792, D]),
            "mlp.down_proj.weight": ("BF16", [D, 33792]),
        }
    moe = {
        "gate.weight": ("BF16", [896, D]), "gate.e_score_correction_bias": ("F32", [896]),
        "routed_expert_down_proj.weight": ("BF16", [3584, D]), "routed_expert_up_proj.weight": ("BF16", [D, 3584]),
        "routed_expert_norm.weight": ("BF16", [3584]), "shared_experts.gate_proj.weight": ("BF16", [6144, D]),
        "shared_experts.up_proj.weight": ("BF16", [6144, D]), "shared_experts.down_proj.weight": ("BF16", [D, 6144]),
    }
    for expert in range(896):
        for matrix, rows, columns in (("w1", 3072, 3584), ("w3", 3072, 3584), ("w2", 3584, 3072)):
            moe[f"experts.{expert}.{matrix}.weight_packed"] = ("U8", [rows, columns // 2])
            moe[f"experts.{expert}.{matrix}.weight_scale"] = ("U8", [rows, columns // 32])
    return tensors | {f"block_sparse_moe.{name}": entry for name, entry in moe.items()}


def write_kimi_k3(directory) -> None:
    """96 sparse shards: layer l in shard l + 1, the top in shard 94, vision in shards 95 and 96."""
    shards = [
        {f"language_model.model.layers.{layer}.{name}": entry for name, entry in kimi_k3_layer(layer).items()}
        for layer in range(93)
    ]
    top = {"model.embed_tokens.weight": [163840, D], "model.norm.weight": [D], "model.output_attn_res_norm.weight": [D],
           "model.output_attn_res_proj.weight": [1, D], "lm_head.weight": [163840, D]}
    shards.append({f"language_model.{name}": ("BF16", shape) for name, shape in top.items()})
    # The published total tells how large vision is, and the names of its parts do not matter.
    vision = [f"vision_tower.part{number}.weight" for number in range(165)]
    projector = [f"mm_projector.part{number}.weight" for number in range(3)]
    text_bytes = sum(math.prod(shape) * BYTES[dtype] for shard in shards for dtype, shape in shard.values())
    rest = (1_560_860_324_864 - text_bytes) // 2 - 167
    shards.append({name: ("BF16", [1]) for name in vision[1:]})
    shards.append({name: ("BF16", [1]) for name in projector} | {vision[0]: ("BF16", [rest])})
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file, header, offset = f"model-{number:05}-of-000096.safetensors", {}, 0
        for name, (dtype, shape) in shard.items():
            end = offset + math.prod(shape) * BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            weight_map[name], offset = file, end
        write_raw_shard(directory / file, header, size=offset)
    assert len(weight_map) == 497_220
    write_index(directory, weight_map)
    (directory / "config.json").write_text("{}")


def test_helper_reads_what_it_writes(tmp_path):
    """The tests of this file stand on it."""
    copy_checkpoint("k3-tiny", tmp_path, {})
    original = read_shards(tiny_checkpoint("k3-tiny"))
    assert {name: array.tobytes() for name, array in read_shards(tmp_path).items()} == {
        name: array.tobytes() for name, array in original.items()
    }
