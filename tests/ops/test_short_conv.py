"""The short convolution against golden vectors and a float64 loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify

from pallas_kernels.short_conv import short_conv, validate
from tests.ops import kda_oracle as oracle

T, H, K, W, SLOTS, LAYERS, LAYER = 140, 2, 6, 4, 6, 2, 1
SLOT_OF_SEQUENCE = np.array([4, 2, 5], np.int32)
BACKENDS = ["xla", "reference"]


@functools.cache
def compiled(backend="xla"):
    return jax.jit(functools.partial(short_conv, backend=backend))


def packing(lengths, has_state=True):
    return {
        "layer": jnp.int32(LAYER),
        "slots": jnp.asarray(np.where(np.array(lengths) > 0, SLOT_OF_SEQUENCE, 0)),
        "has_initial_state": jnp.broadcast_to(jnp.asarray(has_state), (len(lengths),)),
        "cu_seqlens": jnp.asarray(np.cumsum([0, *lengths]), jnp.int32),
    }


def random_inputs(rng):
    return {
        "x": rng.normal(size=(T, 3, H, K)).astype(np.float32),
        "weight": rng.normal(size=(3, H, K, W)).astype(np.float32),
        "conv_pool": rng.normal(size=(LAYERS, SLOTS, 3, H, K, W - 1)).astype(np.float32),
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_golden(backend):
    data = oracle.golden("short_conv")
    weight = np.broadcast_to(data["weight"].reshape(1, 1, 6, 4), (3, 1, 6, 4))
    tail_in = {"b": data["state_a"], "d": data["state_in_d"], "e": data["state_in_e"]}
    for case in "abcde":
        length = len(data[f"x_{case}"])
        x = np.full((11, 3, 1, 6), np.nan, np.float32)
        x[:length] = data[f"x_{case}"][:, None, None]
        pool = np.full((1, 2, 3, 1, 6, 3), np.nan, np.float32)
        if case in tail_in:
            pool[0, 1] = tail_in[case][:, 1:]
        result = compiled(backend)(
            x, weight, pool, jnp.int32(0), jnp.array([1]), jnp.array([case in tail_in]), jnp.array([0, length])
        )
        for projection in range(3):
            np.testing.assert_allclose(result.out[:length, projection, 0], data[f"y_{case}"], atol=1e-6)
            np.testing.assert_array_equal(
                result.conv_pool[0, 1, projection, 0], data[f"state_{case}"][:, 1:].astype(np.float32)
            )


def check_against_oracle(result, inputs, lengths, has_state, positions, atol):
    expected_pool = inputs["conv_pool"].copy()
    expected_snapshots = np.zeros((len(positions), 3, H, K, W - 1), np.float32)
    start = 0
    for n, length in enumerate(lengths):
        stop, slot = start + length, SLOT_OF_SEQUENCE[n]
        tail = inputs["conv_pool"][LAYER, slot] * has_state[n]
        out, new_tail = oracle.conv(inputs["x"][start:stop], inputs["weight"], tail)
        np.testing.assert_allclose(result.out[start:stop], out, atol=atol)
        if length:
            expected_pool[LAYER, slot] = new_tail
        for m, position in enumerate(positions):
            if start < position <= stop:
                expected_snapshots[m] = oracle.conv(inputs["x"][start:position], inputs["weight"], tail)[1]
        start = stop
    assert not np.asarray(result.out[start:]).any()
    np.testing.assert_array_equal(result.conv_pool, expected_pool)
    np.testing.assert_array_equal(result.snapshots, expected_snapshots)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=40)
@given(
    first=st.integers(0, 5) | st.integers(0, 64),
    second=st.integers(0, 5) | st.just(64),
    third=st.integers(0, 12),
    has_state=st.tuples(*[st.booleans()] * 3),
    seed=st.integers(0, 2**16),
)
def test_packed_sequences_equal_the_loop(backend, first, second, third, has_state, seed):
    """Outputs, tails (bitwise) and snapshots, of sequences shorter than the window too; other slots untouched."""
    rng = np.random.default_rng(seed)
    inputs, lengths = random_inputs(rng), (first, second, third)
    ends = np.cumsum(lengths)
    positions = [int(ends[n]) if lengths[n] else -1 for n in range(3)]
    positions.append(int(ends[0]) + 64 if second == 64 else -1)
    result = compiled(backend)(**inputs, **packing(lengths, has_state), snapshot_positions=jnp.array(positions))
    check_against_oracle(result, inputs, lengths, has_state, positions, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_neither_padding_nor_stale_slots_nor_later_tokens_leak(backend):
    inputs = random_inputs(np.random.default_rng(0))
    poisoned = inputs | {"x": inputs["x"].copy(), "conv_pool": np.full_like(inputs["conv_pool"], np.nan)}
    poisoned["x"][62:] = np.nan
    where = packing((2, 60, 0), has_state=False)
    result, expected = (compiled(backend)(**x, **where, snapshot_positions=jnp.array([2, 62, -1, -1]))
                        for x in (poisoned, inputs))
    np.testing.assert_array_equal(result.out, expected.out)
    np.testing.assert_array_equal(result.snapshots, expected.snapshots)
    assert np.isfinite(result.out).all() and np.isfinite(result.conv_pool[LAYER, SLOT_OF_SEQUENCE[:2]]).all()
    poisoned["x"][30:] = np.nan
    late = compiled(backend)(**poisoned, **where)
    np.testing.assert_array_equal(late.out[:30], expected.out[:30])


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 64, 99])
def test_a_split_equals_one_call_bitwise(cut):
    inputs = random_inputs(np.random.default_rng(1))
    whole = compiled()(**inputs, **packing((100, 0, 0)))
    first = compiled()(**inputs, **packing((cut, 0, 0)))
    rest = inputs | {"x": np.roll(inputs["x"], -cut, axis=0), "conv_pool": first.conv_pool}
    second = compiled()(**rest, **packing((100 - cut, 0, 0)))
    np.testing.assert_array_equal(np.concatenate([first.out[:cut], second.out[:100 - cut]]), whole.out[:100])
    np.testing.assert_array_equal(second.conv_pool, whole.conv_pool)


@pytest.mark.parametrize("pool_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_costs_one_rounding(backend, pool_dtype):
    inputs = random_inputs(np.random.default_rng(2))
    halves = inputs | {key: jnp.asarray(inputs[key], jnp.bfloat16) for key in ("x", "conv_pool")}
    halves["conv_pool"] = halves["conv_pool"].astype(pool_dtype)
    result = compiled(backend)(**halves, **packing((70, 1, 0)))
    assert result.out.dtype == jnp.bfloat16 and result.conv_pool.dtype == result.snapshots.dtype == pool_dtype
    out, tail = oracle.conv(halves["x"][:70], inputs["weight"], halves["conv_pool"][LAYER, SLOT_OF_SEQUENCE[0]])
    np.testing.assert_allclose(np.asarray(result.out[:70], np.float64), out, rtol=2.0**-8, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(result.conv_pool[LAYER, SLOT_OF_SEQUENCE[0]], np.float64), tail)


def test_the_pool_is_updated_in_place():
    """In float32: XLA's CPU backend widens bfloat16 buffers whatever the program, other platforms do not."""
    layers, slots = 8, 512

    def all_layers(pool, x, weight):
        def layer(pool, index):
            result = short_conv(x, weight, pool, index, jnp.array([3, 5]), jnp.array([True, False]),
                                jnp.array([0, 5, 16]))
            return result.conv_pool, result.out.sum()

        return jax.lax.scan(layer, pool, jnp.arange(layers))

    pool = jax.ShapeDtypeStruct((layers, slots, 3, H, K, W - 1), jnp.float32)
    x, weight = jax.ShapeDtypeStruct((16, 3, H, K), jnp.float32), jax.ShapeDtypeStruct((3, H, K, W), jnp.float32)
    memory = jax.jit(all_layers, donate_argnums=0).lower(pool, x, weight).compile().memory_analysis()
    pool_bytes = pool.size * pool.dtype.itemsize
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 0.5 * pool_bytes / layers


def test_gradients_match_float64_finite_differences():
    rng = np.random.default_rng(3)
    inputs = random_inputs(rng)
    cotangent = rng.normal(size=(48, 3, H, K))

    def loss64(x):
        tail = x["conv_pool"][LAYER, SLOT_OF_SEQUENCE[0]]
        return (oracle.conv(x["x"][:48], x["weight"], tail)[0] * cotangent).sum()

    def loss(x):
        return (short_conv(**x, **packing((48, 0, 0))).out[:48] * cotangent.astype(np.float32)).sum()

    gradients = jax.jit(jax.grad(loss))(jax.tree.map(jnp.asarray, inputs))
    exact = {key: x.astype(np.float64) for key, x in inputs.items()}
    for key, x in exact.items():
        direction = rng.normal(size=x.shape)
        ahead, behind = (loss64(exact | {key: x + sign * 1e-6 * direction}) for sign in (1, -1))
        gradient = np.asarray(gradients[key], np.float64)
        assert abs((gradient * direction).sum() - (ahead - behind) / 2e-6) <= 1e-5 * np.sqrt((gradient**2).sum()), key


def arguments(**changes):
    inputs = jax.tree.map(jnp.asarray, random_inputs(np.random.default_rng(4)))
    return inputs | packing((50, 70, 3)) | changes


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"x": jnp.zeros((T, 2, H, K))}, r"x has shape \(140, 2, 2, 6\), expected \[T, 3, H, K\]"),
        ({"weight": jnp.zeros((3, H, K, 3))}, "conv_pool keeps 3 inputs for 3 taps, expected 2"),
        ({"conv_pool": jnp.zeros((LAYERS, SLOTS, 3, H, K, 3), jnp.bfloat16)}, "conv_pool has dtype bfloat16, expected"),
        ({"has_initial_state": jnp.ones(3)}, "has_initial_state has dtype float32, expected bool"),
        ({"slots": jnp.array([1, 1, 2], jnp.int32)}, "slot 1 belongs to two"),
        ({"snapshot_positions": jnp.array([64, 121], jnp.int32)}, "snapshot position 64"),
    ],
)
def test_validate_names_bad_arguments(changes, message):
    validate(**arguments(snapshot_positions=jnp.array([-1, 50, 114])))
    with pytest.raises(ValueError, match="short_conv: .*" + message):
        validate(**arguments(**changes))


def test_debug_mode_checks_values_inside_the_program(monkeypatch):
    monkeypatch.setenv("K3JAX_DEBUG", "1")
    run = jax.jit(checkify.checkify(short_conv))
    error, _ = run(**arguments())
    error.throw()
    error, _ = run(**arguments(slots=jnp.array([1, 1, 2], jnp.int32)))
    with pytest.raises(checkify.JaxRuntimeError, match="short_conv: slot 1 belongs to two"):
        error.throw()
