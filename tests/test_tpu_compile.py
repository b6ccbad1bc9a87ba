"""The real TPU compiler takes the model's steps, and copies no expert bank; no TPU is needed."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from k3jax.model import K3ForCausalLM
from k3jax.presets import DEMO
from k3jax.state import DecodeBatch, DecodeState, PrefillBatch
from tests.test_model_memory import bank_bytes

pytest.importorskip("libtpu", reason="libtpu is not installed: the TPU compiler cannot be asked")

# Widths that fill TPU tiles, as the published models have them.
ALIGNED = dataclasses.replace(
    DEMO, hidden_size=512, kda_head_dim=128, num_experts=128, moe_intermediate_size=512, routed_expert_hidden_size=512,
    kv_lora_rank=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
)
LINEAR = dataclasses.replace(
    ALIGNED, hidden_act="silu", gate_lower_bound=None, use_full_rank_gate=False, q_lora_rank=None,
    mla_use_output_gate=False, routed_expert_hidden_size=None, latent_moe_use_norm=False, attn_res_block_size=None,
    expert_format="dense",
)


def compiled(config, topology: str, kind: str):
    """The decode step of 8 rows or the prefill of 256 tokens, for one device of a topology."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sharding = SingleDeviceSharding(device)

    def place(tree):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    def ids(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    if kind == "decode":
        tokens, batch = ids(8), DecodeBatch(slots=ids(8), context_lens=ids(8), page_table=ids(8, 4))
    else:
        tokens, batch = ids(256), PrefillBatch(
            cu_seqlens=ids(3), slots=ids(2), context_lens=ids(2), page_table=ids(2, 4), snapshot_positions=ids(2)
        )
    model = K3ForCausalLM(config, jnp.bfloat16)
    state = jax.eval_shape(functools.partial(
        DecodeState.create, config, num_slots=9, num_pages=33, dtype=jnp.bfloat16
    ))
    step = jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs), donate_argnums=2)
    return step.lower(*place((K3ForCausalLM.abstract_params(config, jnp.bfloat16), tokens, state, batch))).compile()


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("config", [ALIGNED, LINEAR], ids=["k3", "kimi-linear"])
@pytest.mark.parametrize("topology", ["v6e:2x2", "tpu7x:2x2x1"])
def test_compiles_without_a_copy_of_the_experts(topology, config, kind):
    """A copy would be of all twelve MoE layers; what the compiler does keep on TPU7x is about two."""
    analysis = compiled(config, topology, kind).memory_analysis()
    banks = 3 if topology.startswith("tpu7x") else 1
    assert analysis.temp_size_in_bytes < banks * bank_bytes(config, jnp.bfloat16)
