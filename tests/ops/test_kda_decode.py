"""KDA decode against a float64 layer, against prefill, and the promises its users rely on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify

from pallas_kernels import kda_math
from pallas_kernels.kda_decode import kda_decode, validate
from pallas_kernels.kda_prefill import kda_prefill
from pallas_kernels.short_conv import short_conv
from tests.ops import kda_oracle as oracle

B, H, K, W, SLOTS, LAYERS, LAYER, EPS = 3, 2, 16, 4, 7, 2, 1, 1e-5
BACKENDS = ["xla", "reference"]
LOWER_BOUNDS = [-5.0, None]


@functools.cache
def compiled(lower_bound, backend="xla"):
    return jax.jit(functools.partial(kda_decode, lower_bound=lower_bound, norm_eps=EPS, backend=backend))


def weights(rng):
    return {
        "conv_weight": rng.normal(size=(3, H, K, W)).astype(np.float32),
        "norm_weight": rng.normal(size=K).astype(np.float32),
        "A_log": rng.uniform(-0.5, 1.0, H).astype(np.float32),
        "dt_bias": rng.normal(size=(H, K)).astype(np.float32),
    }


def pools(rng):
    return {
        "conv_pool": rng.normal(size=(LAYERS, SLOTS, 3, H, K, W - 1)).astype(np.float32),
        "state_pool": rng.normal(size=(LAYERS, SLOTS, H, K, K)).astype(np.float32),
    }


def tokens(rng, count, gate_scale=3.0):
    return {
        "qkv": rng.normal(size=(count, 3, H, K)).astype(np.float32),
        "gate": (gate_scale * rng.normal(size=(count, H, K))).astype(np.float32),
        "beta": (2 * rng.normal(size=(count, H))).astype(np.float32),
        "output_gate": (2 * rng.normal(size=(count, H, K))).astype(np.float32),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=25)
@given(
    slots=st.permutations(range(1, SLOTS)).map(lambda order: order[:B]),
    used=st.tuples(*[st.booleans()] * B),
    lower_bound=st.sampled_from(LOWER_BOUNDS),
    gate_scale=st.sampled_from([0.0, 3.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_a_step_equals_the_layer_in_float64(backend, slots, used, lower_bound, gate_scale, seed):
    """Outputs, conv tails (bitwise) and states; unused rows are zero and other slots untouched bitwise."""
    rng = np.random.default_rng(seed)
    token, weight, pool = tokens(rng, B, gate_scale), weights(rng), pools(rng)
    slots = np.where(used, slots, 0).astype(np.int32)
    result = compiled(lower_bound, backend)(**token, **weight, **pool, layer=jnp.int32(LAYER), slots=slots)
    expected_tails, expected_states = pool["conv_pool"].copy(), pool["state_pool"].copy()
    for row, slot in enumerate(slots):
        if slot == 0:
            assert not np.asarray(result.out[row]).any()
            continue
        out, tail, state = oracle.layer(
            {key: x[row:row + 1] for key, x in token.items()}, weight, pool["conv_pool"][LAYER, slot],
            pool["state_pool"][LAYER, slot], lower_bound, EPS,
        )
        np.testing.assert_allclose(result.out[row], out[0], atol=1e-5)
        expected_tails[LAYER, slot], expected_states[LAYER, slot] = tail, state
    np.testing.assert_array_equal(result.conv_pool, expected_tails)
    np.testing.assert_allclose(result.state_pool, expected_states, atol=1e-5)
    untouched = np.ones((LAYERS, SLOTS), bool)
    untouched[LAYER, slots[slots > 0]] = False
    np.testing.assert_array_equal(np.asarray(result.state_pool)[untouched], pool["state_pool"][untouched])


@pytest.mark.parametrize("backend", BACKENDS)
def test_unused_rows_and_the_dummy_slot_may_hold_anything(backend):
    rng = np.random.default_rng(0)
    token, weight, pool = tokens(rng, B), weights(rng), pools(rng)
    slots = jnp.array([0, 3, 0], jnp.int32)
    expected = compiled(-5.0, backend)(**token, **weight, **pool, layer=jnp.int32(LAYER), slots=slots)
    for x in token.values():
        x[[0, 2]] = np.nan
    for x in pool.values():
        x[:, 0] = np.nan
    result = compiled(-5.0, backend)(**token, **weight, **pool, layer=jnp.int32(LAYER), slots=slots)
    np.testing.assert_array_equal(result.out, expected.out)
    for name in ("conv_pool", "state_pool"):
        np.testing.assert_array_equal(getattr(result, name)[:, 1:], getattr(expected, name)[:, 1:])
        assert np.isnan(getattr(result, name)[:, 0]).all()


def test_rows_do_not_depend_on_each_other():
    rng = np.random.default_rng(1)
    token, weight, pool = tokens(rng, B), weights(rng), pools(rng)
    run = functools.partial(compiled(-5.0), **weight, **pool, layer=jnp.int32(LAYER))
    together = run(**token, slots=jnp.array([5, 2, 4]))
    changed = {key: x.copy() for key, x in token.items()}
    for x in changed.values():
        x[[0, 2]] = np.nan
    alone = run(**changed, slots=jnp.array([0, 2, 0]))
    np.testing.assert_array_equal(alone.out[1], together.out[1])
    np.testing.assert_array_equal(alone.state_pool[LAYER, 2], together.state_pool[LAYER, 2])


@functools.cache
def compiled_prefill(lower_bound):
    """The layer's prefill path, as the model composes it."""
    @jax.jit
    def run(token, weight, conv_pool, state_pool, slots, has_initial_state, cu_seqlens):
        places = (jnp.int32(LAYER), slots, has_initial_state, cu_seqlens)
        conv = short_conv(token["qkv"], weight["conv_weight"], conv_pool, *places)
        q, k, v = jnp.moveaxis(conv.out, 1, 0)
        kda = kda_prefill(q, k, v, token["gate"], token["beta"], weight["A_log"], weight["dt_bias"], state_pool,
                          *places, lower_bound=lower_bound)
        out = kda_math.gated_rms_norm(kda.out, token["output_gate"], weight["norm_weight"], EPS)
        return out.astype(token["qkv"].dtype), conv.conv_pool, kda.state_pool

    return run


@settings(deadline=None, max_examples=8)
@given(
    length=st.integers(0, 90), steps=st.integers(1, 12), lower_bound=st.sampled_from(LOWER_BOUNDS),
    seed=st.integers(0, 2**16),
)
def test_prefill_then_decode_equals_one_prefill(length, steps, lower_bound, seed):
    rng = np.random.default_rng(seed)
    token, weight, pool = tokens(rng, 104), weights(rng), pools(rng)
    prefill = compiled_prefill(lower_bound)
    slots, fresh = jnp.array([3]), jnp.array([False])
    whole, whole_tails, whole_states = prefill(
        token, weight, pool["conv_pool"], pool["state_pool"], slots, fresh, jnp.array([0, length + steps])
    )
    if length:
        _, tails, states = prefill(
            token, weight, pool["conv_pool"], pool["state_pool"], slots, fresh, jnp.array([0, length])
        )
    else:
        tails, states = (pool[name].copy() for name in ("conv_pool", "state_pool"))
        tails[LAYER, 3] = states[LAYER, 3] = 0
    for step in range(length, length + steps):
        row = {key: np.concatenate([x[:1], x[step:step + 1], x[:1]]) for key, x in token.items()}
        out, tails, states = compiled(lower_bound)(
            **row, **weight, conv_pool=tails, state_pool=states, layer=jnp.int32(LAYER), slots=jnp.array([0, 3, 0])
        )
        np.testing.assert_allclose(out[1], whole[step], atol=2e-5)
    np.testing.assert_array_equal(tails, whole_tails)
    np.testing.assert_allclose(states, whole_states, atol=1e-5)


@pytest.mark.parametrize("pool_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_rounds_where_prefill_does(backend, pool_dtype):
    """After the convolution and before the norm; a float64 layer with these two roundings is met to one more."""
    rng = np.random.default_rng(2)
    weight, pool = weights(rng), pools(rng)
    token = {key: jnp.asarray(x, jnp.bfloat16) for key, x in tokens(rng, B).items()}
    tails = jnp.asarray(pool["conv_pool"], jnp.bfloat16)
    slots = np.array([4, 1, 6], np.int32)
    pool["conv_pool"] = tails.astype(pool_dtype)
    result = compiled(-5.0, backend)(**token, **weight, **pool, layer=jnp.int32(LAYER), slots=slots)
    assert result.out.dtype == jnp.bfloat16 and result.conv_pool.dtype == pool_dtype
    with_roundings = without = 0.0
    for row, slot in enumerate(slots):
        args = ({key: x[row:row + 1] for key, x in token.items()}, weight, tails[LAYER, slot],
                pool["state_pool"][LAYER, slot], -5.0, EPS)
        actual = np.asarray(result.out[row], np.float64)
        for dtype in (jnp.bfloat16, np.float64):
            out, tail, state = oracle.layer(*args, dtype=dtype)
            error = np.sqrt(((actual - out[0]) ** 2).mean())
            if dtype is jnp.bfloat16:
                with_roundings += error
                np.testing.assert_array_equal(np.asarray(result.conv_pool[LAYER, slot], np.float64), tail)
                np.testing.assert_allclose(result.state_pool[LAYER, slot], state, atol=1e-5)
            else:
                without += error
    assert with_roundings < 0.75 * without


def test_the_pools_are_updated_in_place():
    layers, slots, width = 8, 256, 32

    def all_layers(conv_pool, state_pool, token, weight):
        def layer(pools, index):
            result = kda_decode(**token, **weight, conv_pool=pools[0], state_pool=pools[1], layer=index,
                                slots=jnp.array([3, 0, 5]), lower_bound=-5.0, norm_eps=EPS)
            return (result.conv_pool, result.state_pool), result.out.sum()

        return jax.lax.scan(layer, (conv_pool, state_pool), jnp.arange(layers))

    def abstract(shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    token = {"qkv": abstract((B, 3, H, width)), "gate": abstract((B, H, width)), "beta": abstract((B, H)),
             "output_gate": abstract((B, H, width))}
    weight = {"conv_weight": abstract((3, H, width, W)), "norm_weight": abstract((width,)), "A_log": abstract((H,)),
              "dt_bias": abstract((H, width))}
    conv_pool = abstract((layers, slots, 3, H, width, W - 1))
    state_pool = abstract((layers, slots, H, width, width))
    program = jax.jit(all_layers, donate_argnums=(0, 1)).lower(conv_pool, state_pool, token, weight)
    memory = program.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * (conv_pool.size + state_pool.size)
    assert memory.temp_size_in_bytes < 0.5 * 4 * conv_pool.size / layers


def arguments(**changes):
    rng = np.random.default_rng(3)
    concrete = jax.tree.map(jnp.asarray, tokens(rng, B) | weights(rng) | pools(rng))
    return concrete | {"layer": jnp.int32(0), "slots": jnp.array([1, 0, 2], jnp.int32), "lower_bound": -5.0,
                       "norm_eps": EPS} | changes


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"conv_pool": jnp.zeros((LAYERS, SLOTS, 3, H, K, 3), jnp.bfloat16)}, "conv_pool has dtype bfloat16, expected"),
        ({"output_gate": jnp.zeros((B, H, K + 1))}, r"output_gate has shape .*, expected \[B=3, H=2, K=16\]"),
        ({"slots": jnp.zeros(B + 1, jnp.int32)}, r"slots has shape \(4,\), expected \[B=3\]"),
        ({"conv_weight": jnp.zeros((3, H, K, 3))}, "conv_pool keeps 3 inputs for 3 taps, expected 2"),
        ({"lower_bound": 0.0}, "lower_bound is 0.0, expected a negative"),
        ({"slots": jnp.array([1, 2, 1], jnp.int32)}, "slot 1 belongs to two"),
        ({"slots": jnp.array([1, SLOTS, 0], jnp.int32)}, f"slot {SLOTS} lies outside"),
        ({"layer": jnp.int32(-1)}, "layer -1 lies outside"),
    ],
)
def test_validate_names_bad_arguments(changes, message):
    validate(**arguments())
    with pytest.raises(ValueError, match="kda_decode: .*" + message):
        validate(**arguments(**changes))


def test_debug_mode_checks_values_inside_the_program(monkeypatch):
    monkeypatch.setenv("K3JAX_DEBUG", "1")
    run = jax.jit(checkify.checkify(functools.partial(kda_decode, lower_bound=-5.0, norm_eps=EPS)))
    good, bad = arguments(), arguments(slots=jnp.array([1, 2, 1], jnp.int32))
    for call in (good, bad):
        del call["lower_bound"], call["norm_eps"]
    error, _ = run(**good)
    error.throw()
    error, _ = run(**bad)
    with pytest.raises(checkify.JaxRuntimeError, match="kda_decode: slot 1 belongs to two"):
        error.throw()
