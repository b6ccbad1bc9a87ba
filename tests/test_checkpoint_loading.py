"""Loaded parameters equal the bytes on disk, however they are converted, stacked and spread."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import k3jax.checkpoint.loading
from k3jax.checkpoint import Repository, load_params
from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.model import K3ForCausalLM
from tests.checkpoints import TINY, copy_checkpoint, read_shards, tiny_checkpoint

MLA = {"k3-tiny": (3, 7, 11, 13), "kimi-linear-tiny": (3, 7, 8)}
DEPTH = {"k3-tiny": 14, "kimi-linear-tiny": 9}
HEADS, WIDTH = 4, 32
SCALE = "language_model.model.layers.2.block_sparse_moe.experts.5.w1.weight_scale"
A_LOG = "language_model.model.layers.1.self_attn.A_log"
NORM = "language_model.model.layers.2.input_layernorm.weight"


def load(directory, dtype=jnp.bfloat16):
    config = K3Config.from_file(directory / "config.json")
    return load_params(config, Repository.open(directory), dtype)


def expected_params(name: str, tensors: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """The parameters by a table of its own: which tensors, stacked how, seen as which shape."""
    k3 = name == "k3-tiny"
    prefix = "language_model." if k3 else ""
    every = range(DEPTH[name])
    kda = [layer for layer in every if layer not in MLA[name]]
    moe = every[1:]

    def top(tensor, *shape):
        return tensors[prefix + tensor].reshape(*shape)

    def stack(layers, tensor, *shape):
        return np.stack([tensors[f"{prefix}model.layers.{layer}.{tensor}"].reshape(*shape) for layer in layers])

    def parts(layers, names, *shape):
        return np.stack([stack(layers, tensor, *shape) for tensor in names], axis=1)

    attention = "self_attn."
    params = {
        "embeddings": {
            "embed_tokens": top("model.embed_tokens.weight", 512, 128), "lm_head": top("lm_head.weight", 512, 128)
        },
        "layer_inputs": {
            "attention_norm": stack(every, "input_layernorm.weight", 128),
            "mlp_norm": stack(every, "post_attention_layernorm.weight", 128),
        },
        "kda": {
            "qkv_proj": parts(kda, [f"{attention}{part}_proj.weight" for part in "qkv"], HEADS, WIDTH, 128),
            "qkv_conv": parts(kda, [f"{attention}{part}_conv1d.weight" for part in "qkv"], HEADS, WIDTH, 4),
            "A_log": stack(kda, attention + "A_log", -1)[:, :HEADS],
            "dt_bias": stack(kda, attention + "dt_bias", HEADS, WIDTH),
            "f_a_proj": stack(kda, attention + "f_a_proj.weight", WIDTH, 128),
            "f_b_proj": stack(kda, attention + "f_b_proj.weight", HEADS, WIDTH, WIDTH),
            "b_proj": stack(kda, attention + "b_proj.weight", HEADS, 128),
            "o_norm": stack(kda, attention + "o_norm.weight", WIDTH),
            "o_proj": stack(kda, attention + "o_proj.weight", 128, HEADS * WIDTH),
        },
        "mla": {
            "kv_a_proj": stack(MLA[name], attention + "kv_a_proj_with_mqa.weight", -1, 128),
            "kv_a_norm": stack(MLA[name], attention + "kv_a_layernorm.weight", -1),
            "kv_b_proj": stack(MLA[name], attention + "kv_b_proj.weight", HEADS, 64, -1),
            "o_proj": stack(MLA[name], attention + "o_proj.weight", 128, HEADS * 32),
        },
        "dense_mlp": {
            "gate_up": parts([0], ["mlp.gate_proj.weight", "mlp.up_proj.weight"], -1, 128),
            "down": stack([0], "mlp.down_proj.weight", 128, -1),
        },
        "moe": {
            "router": stack(moe, "block_sparse_moe.gate.weight", 16, 128),
            "router_bias": stack(moe, "block_sparse_moe.gate.e_score_correction_bias", 16),
            "shared_gate_up": parts(
                moe, [f"block_sparse_moe.shared_experts.{part}_proj.weight" for part in ("gate", "up")], -1, 128
            ),
            "shared_down": stack(moe, "block_sparse_moe.shared_experts.down_proj.weight", 128, -1),
        },
        "output": {"norm": top("model.norm.weight", 128)},
    }
    for suffix, ending in (("_packed", ".weight_packed"), ("_scale", ".weight_scale")) if k3 else (("", ".weight"),):
        gate, up, down = (
            parts(moe, [f"block_sparse_moe.experts.{expert}.{matrix}{ending}" for expert in range(16)], rows, -1)
            for matrix, rows in (("w1", 64), ("w3", 64), ("w2", 64 if k3 else 128))
        )
        params["moe"][f"experts_gate_up{suffix}"] = np.stack([gate, up], axis=2)
        params["moe"][f"experts_down{suffix}"] = down
    if k3:
        params["layer_inputs"] |= {
            f"{mix}_res_{part}": stack(every, f"{mix}_res_{part}.weight", 128)
            for mix in ("self_attention", "mlp") for part in ("norm", "proj")
        }
        params["kda"]["g_proj"] = stack(kda, attention + "g_proj.weight", HEADS, WIDTH, 128)
        params["mla"] |= {
            "q_a_proj": stack(MLA[name], attention + "q_a_proj.weight", 48, 128),
            "q_a_norm": stack(MLA[name], attention + "q_a_layernorm.weight", 48),
            "q_b_proj": stack(MLA[name], attention + "q_b_proj.weight", HEADS, 48, 48),
            "g_proj": stack(MLA[name], attention + "g_proj.weight", HEADS, 32, 128),
        }
        params["moe"] |= {
            "latent_down": stack(moe, "block_sparse_moe.routed_expert_down_proj.weight", 64, 128),
            "latent_up": stack(moe, "block_sparse_moe.routed_expert_up_proj.weight", 128, 64),
            "latent_norm": stack(moe, "block_sparse_moe.routed_expert_norm.weight", 64),
        }
        params["output"] |= {
            f"res_{part}": top(f"model.output_attn_res_{part}.weight", 128) for part in ("norm", "proj")
        }
    else:
        params["kda"] |= {
            "g_a_proj": stack(kda, attention + "g_a_proj.weight", WIDTH, 128),
            "g_b_proj": stack(kda, attention + "g_b_proj.weight", HEADS, WIDTH, WIDTH),
        }
        params["mla"]["q_proj"] = stack(MLA[name], attention + "q_proj.weight", HEADS, 48, 128)
    return params


def check(name: str, params, tensors, dtype) -> None:
    """Every leaf equals the table's, and has the declared dtype."""
    expected = expected_params(name, tensors)
    abstract = K3ForCausalLM.abstract_params(K3Config.from_file(tiny_checkpoint(name) / "config.json"), dtype)
    assert jax.tree.structure(params) == jax.tree.structure(expected) == jax.tree.structure(abstract)

    def same(actual, values, declared):
        assert (actual.shape, actual.dtype) == (declared.shape, declared.dtype)
        np.testing.assert_array_equal(np.asarray(actual, np.float64), values.astype(declared.dtype).astype(np.float64))

    jax.tree.map(same, params, expected, abstract)


@pytest.mark.parametrize("whole_stack_bytes", [2**26, 0], ids=["stacks at once", "layer by layer"])
@pytest.mark.parametrize("name", TINY)
def test_every_bit(name, whole_stack_bytes, monkeypatch):
    monkeypatch.setattr(k3jax.checkpoint.loading, "WHOLE_STACK_BYTES", whole_stack_bytes)
    check(name, load(tiny_checkpoint(name)), read_shards(tiny_checkpoint(name)), jnp.bfloat16)


@pytest.mark.parametrize("name", TINY)
def test_as_float32(name):
    check(name, load(tiny_checkpoint(name), jnp.float32), read_shards(tiny_checkpoint(name)), jnp.float32)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["to float32", "to bfloat16"])
def test_any_float_on_disk(tmp_path, stored, dtype, monkeypatch):
    """Also the weights that always are float32, and in blocks smaller than a tensor."""
    monkeypatch.setattr("k3jax.checkpoint.reading.SCRATCH_BYTES", 3000)
    tensors = {
        name: array if array.dtype == np.uint8 else array.astype(stored)
        for name, array in read_shards(tiny_checkpoint("k3-tiny")).items()
    }
    check("k3-tiny", load(copy_checkpoint("k3-tiny", tmp_path, tensors), dtype), tensors, dtype)


@pytest.mark.parametrize("position", [HEADS, 127])
def test_a_log_must_be_zero_after_the_heads(tmp_path, position):
    values = read_shards(tiny_checkpoint("k3-tiny"))[A_LOG].copy()
    values[position] = 1e-30
    with pytest.raises(UserError, match=rf"^tensor {A_LOG} .*zero") as error:
        load(copy_checkpoint("k3-tiny", tmp_path, {A_LOG: values}))
    assert "\n" not in str(error.value)


def test_a_log_without_padding(tmp_path):
    values = read_shards(tiny_checkpoint("k3-tiny"))[A_LOG][:HEADS]
    params = load(copy_checkpoint("k3-tiny", tmp_path, {A_LOG: values}))
    np.testing.assert_array_equal(np.asarray(params["kda"]["A_log"][1]), values)


def test_scale_byte_255_is_refused(tmp_path):
    values = read_shards(tiny_checkpoint("k3-tiny"))[SCALE].copy()
    values[17, 1] = 255
    with pytest.raises(UserError, match=f"^{SCALE}.*255") as error:
        load(copy_checkpoint("k3-tiny", tmp_path, {SCALE: values}))
    assert "\n" not in str(error.value)


def test_scale_byte_0_is_accepted(tmp_path):
    values = np.zeros_like(read_shards(tiny_checkpoint("k3-tiny"))[SCALE])
    params = load(copy_checkpoint("k3-tiny", tmp_path, {SCALE: values}))
    np.testing.assert_array_equal(np.asarray(params["moe"]["experts_gate_up_scale"][1, 5, 0]), values)


def test_shard_that_shrinks_after_its_header_was_read(tmp_path):
    copy_checkpoint("k3-tiny", tmp_path, {})
    config, repository = K3Config.from_file(tmp_path / "config.json"), Repository.open(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 1_000_000)
    with pytest.raises(UserError, match=r"model\.safetensors ends before byte \d+: it was shortened"):
        load_params(config, repository, jnp.bfloat16)


def test_not_enough_memory(monkeypatch):
    monkeypatch.setattr("k3jax.memory.available_bytes", lambda device: 5_000_000)
    with pytest.raises(UserError, match=r"not enough memory for the weights: 6\.0\d MB needed on .*, 5 MB free"):
        load(tiny_checkpoint("k3-tiny"))


@pytest.mark.parametrize("name", TINY)
def test_each_process_reads_what_its_devices_hold(name):
    """On 8 CPU devices: the same values, laid out by the rules, and no byte read that no device needs."""
    script = pathlib.Path(__file__).parent / "sharded_loading.py"
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(script.parents[1]),
    }
    done = subprocess.run(
        [sys.executable, script, tiny_checkpoint(name)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2x2:", "ok", "4x1:", "ok", "1x2:", "ok", "subset:", "ok"]
