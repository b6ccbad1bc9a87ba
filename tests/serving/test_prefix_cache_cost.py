"""Costs against the declared weights, and against numbers worked out elsewhere for Kimi K3."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.model import K3ForCausalLM
from k3jax.presets import KIMI_K3, PRESETS
from k3jax.state import DecodeState
from k3jax.weights import leaves
from serving.prefix_cache import CostModel


def parameters_of_one_token(config):
    """All weights but the tables and the experts that a token does not visit, counted from their declarations."""
    total = 0
    for path, weight in leaves(K3ForCausalLM.weights(config)):
        count = math.prod(weight.shape) * weight.parameters_per_element
        if path[-1].startswith("experts_"):
            count = count * config.num_experts_per_token // config.num_experts
        total += 0 if "vocab" in weight.axes else count
    return total


@pytest.mark.parametrize("name", PRESETS)
def test_flops_follow_the_declared_weights(name):
    config = PRESETS[name]
    kda = len(config.layers_of("kda")) * 7 * config.kda_num_heads * config.kda_head_dim**2
    # Norms and convolutions are in the declarations, and do not count.
    expected = 2 * parameters_of_one_token(config) + kda
    tolerance = 0.03 if name == "demo" else 1e-3
    assert CostModel.for_model(config).flops_per_token == pytest.approx(expected, rel=tolerance)


def test_kimi_k3_in_numbers():
    cost = CostModel.for_model(KIMI_K3)
    assert cost.snapshot_bytes == 449_372_160 and cost.token_bytes == 27_648
    assert cost.flops_per_token / 2 == pytest.approx(103.0e9, rel=0.005)
    assert cost.attention_flops == 24 * 2 * 96 * (192 + 128)


@pytest.mark.parametrize("name", ["demo", "kimi-linear-48b"])
def test_bytes_are_those_of_the_pools(name):
    config = PRESETS[name]
    pools = DecodeState.create(config.first_layers(4), num_slots=2, num_pages=2, dtype=jnp.bfloat16)
    cost = CostModel.for_model(config.first_layers(4))
    assert cost.snapshot_bytes == (pools.kda_state.nbytes + pools.conv_tail.nbytes) // 2
    assert cost.token_bytes == pools.mla_pages.nbytes // (2 * pools.mla_pages.shape[2])


def test_flops_add_up_token_by_token():
    cost = CostModel(flops_per_token=10.0, attention_flops=4.0, snapshot_bytes=1, token_bytes=1)
    # The token after t others sees t and, on average, half of itself.
    assert cost.flops(5) == sum(10 + 4 * (t + 0.5) for t in range(5))
    np.testing.assert_array_equal(cost.flops(np.array([0, 5])), [0, cost.flops(5)])
