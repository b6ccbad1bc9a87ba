"""Random weights: the declared layout, the same values whatever the mesh and the depth, and no large temporaries."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.checkpoint import random_params
from k3jax.checkpoint.hash_random import random_key
from k3jax.model import K3ForCausalLM
from k3jax.presets import preset

CONFIG = preset("demo").first_layers(6)


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, jnp.bfloat16, seed=7)


def same(a, b) -> bool:
    return bool(jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), a, b)))


def test_layout(params):
    def declared(actual, expected):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)

    jax.tree.map(declared, params, K3ForCausalLM.abstract_params(CONFIG, jnp.bfloat16))


def test_seed_decides(params):
    assert same(random_params(CONFIG, jnp.bfloat16, seed=7), params)
    other = random_params(CONFIG, jnp.bfloat16, seed=8)
    assert not same(other["kda"]["qkv_proj"], params["kda"]["qkv_proj"])


def test_layers_do_not_depend_on_the_depth(params):
    shallow = random_params(CONFIG.first_layers(3), jnp.bfloat16, seed=7)
    for group in ("kda", "moe", "dense_mlp", "layer_inputs"):
        for name, stack in shallow[group].items():
            assert same(stack, params[group][name][: len(stack)]), name


def test_no_two_parts_are_equal(params):
    """Neither layers, nor weights of the same shape, nor the matrices within a stack."""
    packed = np.asarray(params["moe"]["experts_gate_up_packed"])
    matrices = packed.reshape(-1, packed.shape[-2] * packed.shape[-1])
    assert len(np.unique(matrices, axis=0)) == len(matrices)
    assert not same(params["embeddings"]["embed_tokens"], params["embeddings"]["lm_head"])


def test_distributions(params):
    qkv = np.asarray(params["kda"]["qkv_proj"], np.float64)
    assert abs(qkv.std() - 0.02) < 2e-4 and abs(qkv.mean()) < 2e-4
    counts = np.bincount(np.asarray(params["moe"]["experts_gate_up_packed"]).ravel(), minlength=256)
    chi_squared = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert 150 < chi_squared < 380, "255 degrees of freedom"
    assert np.asarray(params["kda"]["A_log"]).std() > 0.1
    assert np.all(np.asarray(params["output"]["norm"], np.float32) == 1)


def test_generator_has_no_visible_structure():
    """Bits are balanced, and rows, columns and keys are uncorrelated."""
    key = random_key(0)
    values = np.asarray(jax.random.normal(key, (256, 4096)))
    others = np.asarray(jax.random.normal(jax.random.fold_in(key, 1), (256, 4096)))
    for a, b in ((values[:-1], values[1:]), (values[:, :-1], values[:, 1:]), (values, others)):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5e-3
    bits = np.unpackbits(np.asarray(jax.random.bits(key, (1000, 1000), jnp.uint8))[..., None], axis=-1)
    assert np.abs(bits.mean((0, 1)) - 0.5).max() < 2e-3
    split = jax.random.split(key, 5)
    assert len({int(jax.random.bits(part)) for part in split}) == 5


def test_on_8_devices_like_on_one():
    script = pathlib.Path(__file__).parent / "sharded_random_weights.py"
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(script.parents[1]),
    }
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["values:", "ok", "temporaries:", "ok"]
