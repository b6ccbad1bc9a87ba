"""Writes a mid-size Kimi-Linear with random weights, in the layout that Hugging Face's transformers reads.

    python benchmarks/random_kimi_linear.py DIRECTORY [--layers 12] [--hidden-size 768]
"""

import argparse
import json
import pathlib

import jax
import jax.numpy as jnp
from safetensors.flax import save_file

from k3jax.config import K3Config
from k3jax.memory import human_bytes
from k3jax.model import K3ForCausalLM
from k3jax.weights import count_parameters, leaves


def configuration(layers: int = 12, hidden_size: int = 768) -> dict:
    """`config.json`: the proportions of Kimi-Linear-48B with fewer and narrower parts."""
    heads = hidden_size // 128
    full = [layer for layer in range(1, layers + 1) if layer % 4 == 0 or layer == layers]
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": 32768,
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": layers,
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": [layer for layer in range(1, layers + 1) if layer not in full],
            "head_dim": 128,
            "num_heads": heads,
            "short_conv_kernel_size": 4,
        },
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden_size // heads,
        "q_lora_rank": None,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "num_shared_experts": 1,
        "moe_intermediate_size": hidden_size // 2,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "first_k_dense_replace": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "use_grouped_topk": True,
        "routed_scaling_factor": 2.446,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "model_max_length": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 32704,
        "eos_token_id": 32706,
        "pad_token_id": 32767,
    }


def write(directory: pathlib.Path, config_json: dict, seed: int = 0) -> K3Config:
    """Writes config.json and one shard with the initial values that the model's weights declare."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_json, indent=2))
    config = K3Config.from_file(directory / "config.json")
    key, tensors = jax.random.key(seed), {}
    for _, weight in leaves(K3ForCausalLM.weights(config)):
        for layer in weight.layers or [None]:
            for name in weight.tensor_names(config, layer):
                key, own = jax.random.split(key)
                tensors[name] = weight.init(own, weight.source.shapes[0], weight.dtype or jnp.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=768)
    arguments = parser.parse_args()
    config = write(arguments.directory, configuration(arguments.layers, arguments.hidden_size))
    size = (arguments.directory / "model.safetensors").stat().st_size
    parameters = count_parameters(K3ForCausalLM.weights(config))
    print(f"{arguments.directory}: {parameters / 1e6:.0f} million parameters, {human_bytes(size)}")


if __name__ == "__main__":
    main()
