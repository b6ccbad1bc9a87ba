"""The decode step never copies an expert bank or a pool, and its program does not grow with depth."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest

from k3jax.model import K3ForCausalLM
from k3jax.presets import DEMO
from k3jax.state import DecodeBatch, DecodeState, pool_dtype
from k3jax.weights import leaves

WIDE = dataclasses.replace(
    DEMO, num_experts=256, moe_intermediate_size=256, routed_expert_hidden_size=256, max_position_embeddings=65536
)
FORMATS = {
    "mxfp4": (WIDE, jnp.bfloat16),
    "dense-bfloat16": (dataclasses.replace(WIDE, expert_format="dense"), jnp.bfloat16),
    "dense-float32": (dataclasses.replace(WIDE, expert_format="dense"), jnp.float32),
}


def lowered_decode(config, dtype, *, rows=2, slots=3, pages=17):
    """The jitted decode step on shapes alone."""
    model = K3ForCausalLM(config, dtype)
    state = jax.eval_shape(
        functools.partial(DecodeState.create, config, num_slots=slots, num_pages=pages, dtype=pool_dtype(dtype))
    )
    ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
    batch = DecodeBatch(slots=ids, context_lens=ids, page_table=jax.ShapeDtypeStruct((rows, 8), jnp.int32))
    step = jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs), donate_argnums=2)
    return step.lower(K3ForCausalLM.abstract_params(config, dtype), ids, state, batch)


def bank_bytes(config, dtype) -> int:
    """Bytes of one layer's routed experts."""
    return sum(
        math.prod(weight.shape[1:]) * jnp.dtype(weight.dtype or dtype).itemsize
        for path, weight in leaves(K3ForCausalLM.weights(config)) if path[-1].startswith("experts")
    )


@pytest.mark.parametrize("config, dtype", FORMATS.values(), ids=FORMATS)
def test_decode_makes_no_copy_of_a_bank(config, dtype):
    analysis = lowered_decode(config, dtype).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < bank_bytes(config, dtype) / 8


def test_decode_makes_no_copy_of_a_pool():
    slots, pages = 512, 2049
    analysis = lowered_decode(DEMO, jnp.bfloat16, slots=slots, pages=pages).compile().memory_analysis()
    state = jax.eval_shape(functools.partial(
        DecodeState.create, DEMO, num_slots=slots, num_pages=pages, dtype=pool_dtype(jnp.bfloat16)
    ))
    smallest_share = min(math.prod(pool.shape[1:]) * pool.dtype.itemsize for pool in jax.tree.leaves(state))
    assert analysis.temp_size_in_bytes < smallest_share
    assert analysis.alias_size_in_bytes >= sum(
        math.prod(pool.shape) * pool.dtype.itemsize for pool in jax.tree.leaves(state)
    )


def test_program_does_not_grow_with_depth():
    def text_size(layers: int) -> int:
        types = tuple("mla" if layer % 4 == 3 or layer == layers - 1 else "kda" for layer in range(layers))
        config = dataclasses.replace(DEMO, layer_types=types, attn_res_block_size=12)
        return len(lowered_decode(config, jnp.float32).as_text())

    # What grows is the number of AttnRes sources, from 3 to 9.
    assert text_size(93) < 1.15 * text_size(13)
