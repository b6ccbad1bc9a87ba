"""Run by test_random_weights with 8 CPU devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.checkpoint import random_params
from k3jax.checkpoint.hash_random import random_key
from k3jax.checkpoint.random_weights import random_weight
from k3jax.model import K3ForCausalLM
from k3jax.presets import preset
from k3jax.weights import leaves, placements
from sharding import ONE_DEVICE, Layout, make_mesh

SPREAD = Layout(make_mesh({"expert": 4, "tensor": 2}))


def check_values() -> None:
    config = preset("demo").first_layers(5)
    one = random_params(config, jnp.bfloat16, seed=3)
    spread = random_params(config, jnp.bfloat16, seed=3, layout=SPREAD)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, spread)
    packed = spread["moe"]["experts_gate_up_packed"]
    assert packed.addressable_shards[0].data.shape == (4, 4, 2, 32, 32), packed.sharding


def check_temporaries() -> None:
    """At real widths, compiled but not run: what is needed beside the weights is small against one layer."""
    config = preset("kimi-k3").first_layers(3)
    weights = K3ForCausalLM.weights(dataclasses.replace(config, num_experts=64))
    for path, weight in leaves(weights):
        if path not in (("moe", "experts_gate_up_packed"), ("kda", "qkv_proj")):
            continue
        for layout in (ONE_DEVICE, SPREAD):
            program = jax.jit(
                lambda key, weight=weight: random_weight(weight, weight.dtype or jnp.bfloat16, key),
                out_shardings=placements(weights, layout)[path],
            )
            memory = program.lower(random_key(0)).compile().memory_analysis()
            layer = memory.output_size_in_bytes // weight.shape[0]
            assert memory.temp_size_in_bytes < layer / 10, (path, layout, memory)


if __name__ == "__main__":
    check_values()
    print("values: ok")
    check_temporaries()
    print("temporaries: ok")
