"""The op lowers for every platform, and neither a bank nor a layer of it is copied in a loop over layers."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.activations import Situ
from pallas_kernels.moe_mlp import moe_mlp
from pallas_kernels.mxfp4 import MxFp4

L, E, D, INNER, K = 3, 64, 128, 128, 4
KINDS = ["mxfp4", "bfloat16", "float32"]


def program(x, ids, weights, gate_up, down):
    def step(x, layer):
        return moe_mlp(x, ids, weights, gate_up, down, layer, activation=Situ(4.0, 25.0)).astype(x.dtype), None

    return jax.lax.scan(step, x, jnp.arange(L))[0]


def arguments(kind, tokens, dtype):
    def bank(*shape):
        if kind != "mxfp4":
            return jax.ShapeDtypeStruct(shape, kind)
        return MxFp4(*(jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // n), jnp.uint8) for n in (2, 32)))

    pairs = (tokens, K)
    return (
        jax.ShapeDtypeStruct((tokens, D), dtype),
        jax.ShapeDtypeStruct(pairs, jnp.int32),
        jax.ShapeDtypeStruct(pairs, jnp.float32),
        bank(L, E, 2, INNER, D),
        bank(L, E, D, INNER),
    )


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
@pytest.mark.parametrize("kind", ["mxfp4", "bfloat16"])
def test_lowers(kind, platform):
    # On TPUs the op asks XLA for a layout, a custom call that jax.export wants to be told of.
    allowed = [jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")] if platform == "tpu" else []
    exported = jax.export.export(jax.jit(program), platforms=[platform], disabled_checks=allowed)(
        *arguments(kind, 20, jnp.bfloat16)
    )
    assert exported.platforms == (platform,)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_no_copy_of_a_bank(kind, tokens, dtype):
    args = arguments(kind, tokens, dtype)
    layer_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(args[3:])) // L
    expert_bytes = 3 * INNER * D * 4
    pair_bytes = tokens * K * D * 4
    temp_bytes = jax.jit(program).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert temp_bytes < 2 * expert_bytes + 4 * pair_bytes
    assert temp_bytes < layer_bytes / 4
