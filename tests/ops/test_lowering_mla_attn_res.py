"""The MLA and AttnRes ops lower for every platform, from any machine."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attn_res import attn_res
from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.mla_prefill import mla_prefill

PLATFORMS = ["cpu", "cuda", "rocm", "tpu"]
DTYPES = [jnp.float32, jnp.bfloat16]
TOKENS, HEADS, NOPE, ROPE, VALUE, RANK, WIDTH = 256, 4, 128, 64, 128, 512, 256


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def mla_shapes(rows: int, sequences: int, dtype) -> list[jax.ShapeDtypeStruct]:
    floats = [(rows, HEADS, NOPE + ROPE), (rows, RANK + ROPE), (2, HEADS, NOPE + VALUE, RANK), (2, 9, 128, RANK + ROPE)]
    return [
        *(jax.ShapeDtypeStruct(shape, dtype) for shape in floats),
        integers(),
        integers(sequences, 8),
        integers(sequences),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_mla_lowers(platform, dtype):
    prefill = jax.export.export(jax.jit(mla_prefill), platforms=[platform])(*mla_shapes(TOKENS, 3, dtype), integers(4))
    decode = jax.export.export(jax.jit(mla_decode), platforms=[platform])(*mla_shapes(16, 16, dtype))
    assert prefill.out_avals[0].shape == (TOKENS, HEADS, VALUE)
    assert decode.out_avals[0].shape == (16, HEADS, VALUE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_attn_res_lowers(platform, dtype):
    tokens = jax.ShapeDtypeStruct((TOKENS, WIDTH), dtype)
    weight = jax.ShapeDtypeStruct((WIDTH,), dtype)
    blocks = jax.ShapeDtypeStruct((8, TOKENS, WIDTH), dtype)
    op = jax.jit(functools.partial(attn_res, eps=1e-5))
    exported = jax.export.export(op, platforms=[platform])(
        blocks, integers(), tokens, tokens, weight, weight, output_norm_weight=weight
    )
    assert [aval.shape for aval in exported.out_avals] == [(TOKENS, WIDTH), (TOKENS, WIDTH)]
