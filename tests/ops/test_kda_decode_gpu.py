"""The Mosaic GPU kernel of KDA decode without a GPU: lowered for CUDA, interpreted, and what it refuses."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.kda_decode import kda_decode
from tests.ops import kda_oracle as oracle

ROWS, HEADS, WIDTH, TAPS, LAYERS, SLOTS, EPS = 4, 2, 128, 4, 2, 5, 1e-5
OLD = jax.__version_info__ < (0, 11)
needs_new_jax = pytest.mark.skipif(OLD, reason=f"the kernel needs JAX 0.11, this is {jax.__version__}")


def arguments(dtype=jnp.float32, pool_dtype=None, width=WIDTH, seed=0):
    """(tokens, weights, pools); NaN in the unused rows 1 and 3, in slot 0, and nowhere else."""
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

    tokens = {
        "qkv": normal(ROWS, 3, HEADS, width), "gate": normal(ROWS, HEADS, width, scale=3),
        "beta": normal(ROWS, HEADS, scale=2), "output_gate": normal(ROWS, HEADS, width, scale=2),
    }
    weights = {
        "conv_weight": normal(3, HEADS, width, TAPS), "norm_weight": normal(width), "A_log": normal(HEADS),
        "dt_bias": normal(HEADS, width),
    }
    tails = normal(LAYERS, SLOTS, 3, HEADS, width, TAPS - 1).astype(dtype).astype(pool_dtype or dtype)
    states = normal(LAYERS, SLOTS, HEADS, width, width)
    pools = {"conv_pool": tails.at[:, 0].set(jnp.nan), "state_pool": states.at[:, 0].set(jnp.nan)}
    return {name: x.at[jnp.array([1, 3])].set(jnp.nan).astype(dtype) for name, x in tokens.items()}, weights, pools


SLOTS_OF_ROWS = np.array([3, 0, 1, SLOTS], np.int32)  # the last one lies beyond the pool: unused as well


def step(tokens, weights, pools, layer, lower_bound=-5.0, backend="mosaic_gpu"):
    return kda_decode(**tokens, **weights, **pools, layer=layer, slots=jnp.asarray(SLOTS_OF_ROWS),
                      lower_bound=lower_bound, norm_eps=EPS, backend=backend)


@needs_new_jax
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize(
    "dtype, pool_dtype", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
def test_lowers_for_cuda_and_writes_the_pools_in_place(dtype, pool_dtype, lower_bound):
    def layers(tokens, weights, pools):
        def one(layer, pools):
            result = step(tokens, weights, pools, layer, lower_bound)
            return {"conv_pool": result.conv_pool, "state_pool": result.state_pool}

        return jax.lax.fori_loop(0, LAYERS, one, pools)

    lowered = jax.jit(layers, donate_argnums=2).trace(*arguments(dtype, pool_dtype)).lower(lowering_platforms=("cuda",))
    calls = [line for line in lowered.as_text().splitlines() if "custom_call" in line and "mosaic_gpu" in line]
    assert len(calls) == 1
    # Operands 8 and 9, the pools, are also outputs.
    assert all(f"operand_index = {operand}" in calls[0] for operand in (8, 9))


@needs_new_jax
def test_lowers_for_cuda_on_a_mesh_of_heads():
    tokens, weights, pools = arguments()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("heads",))
    P = jax.sharding.PartitionSpec
    by_head = {"qkv": P(None, None, "heads"), "gate": P(None, "heads"), "beta": P(None, "heads"),
               "output_gate": P(None, "heads")}
    of_weights = {"conv_weight": P(None, "heads"), "norm_weight": P(), "A_log": P("heads"), "dt_bias": P("heads")}
    of_pools = {"conv_pool": P(None, None, None, "heads"), "state_pool": P(None, None, "heads")}
    program = jax.shard_map(
        lambda *args: tuple(step(*args)), mesh=mesh, in_specs=(by_head, of_weights, of_pools, P()),
        out_specs=(P(None, "heads"), of_pools["conv_pool"], of_pools["state_pool"]), check_vma=False,
    )
    lowered = jax.jit(program).trace(tokens, weights, pools, jnp.int32(1)).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@needs_new_jax
@pytest.mark.parametrize("dtype, lower_bound", [("float32", -5.0), ("float32", None), ("bfloat16", -5.0)])
def test_the_interpreted_kernel_equals_the_layer_in_float64(dtype, lower_bound):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tokens, weights, pools = arguments(dtype)
    layer = 1
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        result = jax.jit(functools.partial(step, lower_bound=lower_bound))(tokens, weights, pools, jnp.int32(layer))
    expected = {name: np.array(pool, np.float64) for name, pool in pools.items()}
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for row, slot in enumerate(SLOTS_OF_ROWS):
        if not 0 < slot < SLOTS:
            assert not np.asarray(result.out[row], np.float32).any()
            continue
        out, tail, state = oracle.layer(
            {name: np.asarray(x[row:row + 1], np.float64) for name, x in tokens.items()}, weights,
            expected["conv_pool"][layer, slot], expected["state_pool"][layer, slot], lower_bound, EPS, jnp.dtype(dtype),
        )
        expected["conv_pool"][layer, slot], expected["state_pool"][layer, slot] = tail, state
        np.testing.assert_allclose(np.asarray(result.out[row], np.float64), out[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(np.asarray(result.conv_pool, np.float64), expected["conv_pool"])
    np.testing.assert_allclose(result.state_pool, expected["state_pool"], atol=1e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        pytest.param({}, "needs JAX 0.11", marks=pytest.mark.skipif(not OLD, reason="this JAX is new enough")),
        pytest.param({"width": 64}, "heads are 64 wide", marks=needs_new_jax),
    ],
)
def test_what_the_kernel_does_not_take_falls_through_to_xla(changes, message, monkeypatch, caplog):
    tokens, weights, pools = arguments(**changes)
    with pytest.raises(NotImplementedError, match=f"mosaic_gpu: {message}"):
        step(tokens, weights, pools, 1)
    monkeypatch.setitem(dispatch.PREFERENCE, "cpu", dispatch.PREFERENCE["gpu"])
    monkeypatch.delenv("K3JAX_KERNELS", raising=False)
    dispatch._log_once.cache_clear()
    with caplog.at_level(logging.INFO, dispatch.logger.name):
        chosen = [step(tokens, weights, pools, 1, backend=None) for _ in range(2)][1]
    assert caplog.messages == ["kda_decode: xla on cpu"]
    np.testing.assert_array_equal(chosen.out, step(tokens, weights, pools, 1, backend="xla").out)
