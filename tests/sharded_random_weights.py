"""Run by test_random_weights with 8 CPU devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from k3jax.checkpoint import random_params
from k3jax.checkpoint.hash_random import random_key
from k3jax.checkpoint.random_weights import random_weight
from k3jax.checkpoint.stacks import weight_sharding
from k3jax.model import K3ForCausalLM
from k3jax.presets import preset
from k3jax.weights import leaves
from sharding import AXIS_RULES

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("expert", "tensor"))


def check_values() -> None:
    config = preset("demo").first_layers(5)
    one = random_params(config, jnp.bfloat16, seed=3)
    spread = random_params(config, jnp.bfloat16, seed=3, mesh=MESH)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, spread)
    packed = spread["moe"]["experts_gate_up_packed"]
    assert packed.addressable_shards[0].data.shape == (4, 4, 2, 32, 32), packed.sharding


def check_temporaries() -> None:
    """At real widths, compiled but not run: what is needed beside the weights is small against one layer."""
    config = preset("kimi-k3").first_layers(3)
    for path, weight in leaves(K3ForCausalLM.weights(dataclasses.replace(config, num_experts=64))):
        if path not in (("moe", "experts_gate_up_packed"), ("kda", "qkv_proj")):
            continue
        for mesh in (None, MESH):
            program = jax.jit(
                lambda key, weight=weight: random_weight(weight, weight.dtype or jnp.bfloat16, key),
                out_shardings=weight_sharding(weight, "/".join(path), mesh, AXIS_RULES),
            )
            memory = program.lower(random_key(0)).compile().memory_analysis()
            layer = memory.output_size_in_bytes // weight.shape[0]
            assert memory.temp_size_in_bytes < layer / 10, (path, mesh, memory)


if __name__ == "__main__":
    check_values()
    print("values: ok")
    check_temporaries()
    print("temporaries: ok")
