"""Every public KDA op lowers for every platform, from a machine without it."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.kda_decode import kda_decode
from pallas_kernels.kda_prefill import kda_prefill
from pallas_kernels.short_conv import short_conv

T, N, H, K, L, S, M = 130, 2, 2, 128, 3, 5, 2


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def cases(activation):
    act = functools.partial(shape, dtype=activation)
    integers = functools.partial(shape, dtype=jnp.int32)
    packing = {"layer": integers(), "slots": integers(N), "has_initial_state": shape(N, dtype=jnp.bool_),
               "cu_seqlens": integers(N + 1), "snapshot_positions": integers(M)}
    gate = {"A_log": shape(H), "dt_bias": shape(H, K)}
    prefill = {"q": act(T, H, K), "k": act(T, H, K), "v": act(T, H, K), "gate": act(T, H, K), "beta": act(T, H),
               "state_pool": shape(L, S, H, K, K)} | gate | packing
    decode = {"qkv": act(N, 3, H, K), "gate": act(N, H, K), "beta": act(N, H), "output_gate": act(N, H, K),
              "conv_weight": shape(3, H, K, 4), "norm_weight": shape(K), "conv_pool": act(L, S, 3, H, K, 3),
              "state_pool": shape(L, S, H, K, K), "layer": integers(), "slots": integers(N)} | gate
    conv = {"x": act(T, 3, H, K), "weight": shape(3, H, K, 4), "conv_pool": act(L, S, 3, H, K, 3)} | packing
    return {
        "short_conv": (short_conv, conv),
        "kda_prefill-bounded": (functools.partial(kda_prefill, lower_bound=-5.0), prefill),
        "kda_prefill-softplus": (functools.partial(kda_prefill, lower_bound=None), prefill),
        "kda_decode-bounded": (functools.partial(kda_decode, lower_bound=-5.0, norm_eps=1e-5), decode),
        "kda_decode-softplus": (functools.partial(kda_decode, lower_bound=None, norm_eps=1e-5), decode),
    }


@pytest.mark.parametrize("activation", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
@pytest.mark.parametrize("case", sorted(cases(jnp.float32)))
def test_lowers(case, platform, activation):
    op, arguments = cases(activation)[case]
    exported = jax.export.export(jax.jit(op), platforms=[platform])(**arguments)
    assert exported.platforms == (platform,)
    out, *rest = exported.out_avals
    assert out.dtype == activation and all(aval.dtype in (jnp.float32, activation) for aval in rest)
