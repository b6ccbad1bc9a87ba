"""KDA prefill against golden vectors and a float64 recurrence, and the promises its users rely on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify

from pallas_kernels.kda_prefill import kda_prefill, validate, xla
from tests.ops import kda_oracle as oracle

# One static shape for most tests, so that they share compilations. V differs from K: a transposed state cannot pass.
T, H, K, V, SLOTS, LAYERS, LAYER, SNAPSHOTS = 208, 2, 16, 24, 6, 2, 1, 6
SLOT_OF_SEQUENCE = np.array([4, 2, 5], np.int32)
LOWER_BOUNDS = [-5.0, None, -40.0]


@functools.cache
def compiled(lower_bound, backend="xla"):
    return jax.jit(functools.partial(kda_prefill, lower_bound=lower_bound, backend=backend))


@functools.cache
def compiled_tiles(lower_bound):
    @jax.jit
    def run(inputs, state, length):
        tile_inputs = xla.TileInputs(*inputs)
        tile_inputs = tile_inputs._replace(q=tile_inputs.q * inputs[0].shape[-1] ** -0.5)
        cu_seqlens = jnp.stack([jnp.int32(0), length])
        none = jnp.zeros((0,), jnp.int32)
        return xla.scan_tiles(lambda tile: tile, tile_inputs, state, cu_seqlens, none, lower_bound, jnp.float32)

    return run


def state_pool(rng, value=None):
    shape = (LAYERS, SLOTS, H, V, K)
    return np.full(shape, value, np.float32) if value is not None else rng.normal(size=shape).astype(np.float32)


def packing(lengths, has_state=True, positions=()):
    return {
        "snapshot_positions": jnp.asarray([*positions, *[-1] * (SNAPSHOTS - len(positions))], jnp.int32),
        "layer": jnp.int32(LAYER),
        "slots": jnp.asarray(np.where(np.array(lengths) > 0, SLOT_OF_SEQUENCE, 0)),
        "has_initial_state": jnp.broadcast_to(jnp.asarray(has_state), (len(lengths),)),
        "cu_seqlens": jnp.asarray(np.cumsum([0, *lengths]), jnp.int32),
    }


def check_golden(data, names, factor):
    for name in names:
        case = {key: data[f"{name}.{key}"] for key in ("q", "k", "v", "g", "beta", "S0", "o", "S")}
        length = len(case["q"])
        inputs = [np.concatenate([case[key], np.full((130 - length, *case[key].shape[1:]), np.nan, np.float32)])
                  for key in ("q", "k", "v", "g", "beta")]
        lower_bound = None if "unbounded" in name else -5.0
        out, states, _ = compiled_tiles(lower_bound)(inputs, case["S0"].swapaxes(-1, -2)[None], jnp.int32(length))
        np.testing.assert_allclose(out[:length], case["o"], atol=factor * 1e-6, err_msg=name)
        np.testing.assert_allclose(states[0], case["S"].swapaxes(-1, -2), atol=factor * 2e-6, err_msg=name)


@pytest.mark.parametrize("name", ["kda_k16", "kda_k128"])
def test_tiles_match_golden(name):
    data = oracle.golden(name)
    names = sorted({key.split(".")[0] for key in data})
    assert len(names) >= 2
    check_golden(data, names, factor=2)


@pytest.mark.parametrize("name", ["kda_k16", "kda_k128"])
def test_tiles_match_all_golden(name):
    data = oracle.full_golden(name)
    check_golden(data, sorted({key.split(".")[0] for key in data}), factor=2)


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("prefix, lower_bound", [("bounded", -5.0), ("softplus", None)])
def test_op_matches_golden(prefix, lower_bound, backend):
    data = {key.split(".")[-1]: x for key, x in oracle.golden("kda_fused").items() if key.startswith(prefix)}
    pool = np.zeros((1, 2, 2, 16, 16), np.float32)
    pool[0, 1] = data["S0"].swapaxes(-1, -2)
    result = compiled(lower_bound, backend)(
        data["q"], data["k"], data["v"], data["raw_gate"], data["beta_logits"], data["A_log"],
        data["dt_bias"].reshape(2, 16), pool, jnp.int32(0), jnp.array([1]), jnp.array([True]),
        jnp.array([0, 70], jnp.int32),
    )
    np.testing.assert_allclose(result.out, data["o"], atol=2e-6)
    np.testing.assert_allclose(result.state_pool[0, 1], data["S"].swapaxes(-1, -2), atol=4e-6)


def check_against_oracle(result, inputs, pool, lengths, has_state, lower_bound, positions, atol):
    expected_pool, expected_snapshots = pool.copy(), np.zeros((len(positions), H, V, K))
    start = 0
    for n, length in enumerate(lengths):
        stop, slot = start + length, SLOT_OF_SEQUENCE[n]
        tokens = {key: inputs[key][start:stop] for key in ("q", "k", "v", "gate", "beta")}
        initial = pool[LAYER, slot] if has_state[n] else np.zeros((H, V, K))
        out, states = oracle.kda(**tokens, A_log=inputs["A_log"], dt_bias=inputs["dt_bias"], state=initial,
                                 lower_bound=lower_bound)
        np.testing.assert_allclose(result.out[start:stop], out, atol=atol)
        if length:
            expected_pool[LAYER, slot] = states[-1]
        for m, position in enumerate(positions):
            if start < position <= stop:
                expected_snapshots[m] = states[position - start]
        start = stop
    assert not np.asarray(result.out[start:]).any()
    np.testing.assert_allclose(result.snapshots, expected_snapshots, atol=2 * atol)
    np.testing.assert_allclose(result.state_pool, expected_pool, atol=2 * atol)
    untouched = np.ones((LAYERS, SLOTS), bool)
    untouched[LAYER, SLOT_OF_SEQUENCE[np.array(lengths) > 0]] = False
    np.testing.assert_array_equal(np.asarray(result.state_pool)[untouched], pool[untouched])


@st.composite
def packed_lengths(draw):
    first = draw(st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129]) | st.integers(0, 190))
    second = draw(st.sampled_from([0, 1, 64]) | st.integers(0, T - first))
    second = min(second, T - first)
    return first, second, draw(st.integers(0, T - first - second))


@settings(deadline=None, max_examples=50)
@given(
    lengths=packed_lengths(),
    has_state=st.tuples(*[st.booleans()] * 3),
    gate=st.sampled_from(sorted(oracle.GATES)),
    keys=st.sampled_from(oracle.KEYS),
    beta=st.sampled_from(sorted(oracle.BETAS)),
    lower_bound=st.sampled_from(LOWER_BOUNDS),
    seed=st.integers(0, 2**16),
)
def test_chunks_equal_the_recurrence(lengths, has_state, gate, keys, beta, lower_bound, seed):
    rng = np.random.default_rng(seed)
    inputs = oracle.prefill_inputs(rng, T, H, K, V, gate, keys, beta)
    pool = state_pool(rng)
    starts = np.cumsum([0, *lengths])
    positions = [int(starts[n]) + 64 * (lengths[n] // 64) for n in range(3) if lengths[n] >= 64]
    positions += [int(starts[n + 1]) for n in range(3) if lengths[n]] + [-1] * 6
    positions = rng.permutation(positions[:SNAPSHOTS])
    result = compiled(lower_bound)(**inputs, **packing(lengths, has_state, positions), state_pool=pool)
    check_against_oracle(result, inputs, pool, lengths, has_state, lower_bound, positions, atol=1e-5)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_reference_equals_the_recurrence(lower_bound):
    rng = np.random.default_rng(1)
    lengths, has_state, positions = (70, 0, 100), (True, True, False), [64, -1, 170, 70, -1, 134]
    inputs, pool = oracle.prefill_inputs(rng, T, H, K, V), state_pool(rng)
    result = compiled(lower_bound, "reference")(**inputs, **packing(lengths, has_state, positions), state_pool=pool)
    check_against_oracle(result, inputs, pool, lengths, has_state, lower_bound, positions, atol=5e-6)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_one_snapshot_asked_for_twice(backend):
    rng = np.random.default_rng(2)
    inputs, pool = oracle.prefill_inputs(rng, T, H, K, V), state_pool(rng)
    where = packing((100, 0, 0), positions=[64, 100, 64, -1])
    result = compiled(-5.0, backend)(**inputs, **where, state_pool=pool)
    np.testing.assert_array_equal(result.snapshots[0], result.snapshots[2])
    np.testing.assert_array_equal(result.snapshots[1], result.state_pool[LAYER, SLOT_OF_SEQUENCE[0]])
    assert np.asarray(result.snapshots[0]).any() and not np.asarray(result.snapshots[3]).any()


@pytest.mark.parametrize("lower_bound", LOWER_BOUNDS)
@pytest.mark.parametrize("changed_from", [1, 5, 16, 40, 63, 64, 100])
def test_outputs_do_not_depend_on_later_tokens(lower_bound, changed_from):
    rng = np.random.default_rng(3)
    inputs, other = (oracle.prefill_inputs(rng, T, H, K, V) for _ in range(2))
    for key in ("q", "k", "v", "gate", "beta"):
        other[key][:changed_from] = inputs[key][:changed_from]
    other |= {"A_log": inputs["A_log"], "dt_bias": inputs["dt_bias"]}
    pool = state_pool(rng)
    first, second = (compiled(lower_bound)(**x, **packing((T, 0, 0)), state_pool=pool).out for x in (inputs, other))
    np.testing.assert_array_equal(first[:changed_from], second[:changed_from])
    assert (np.asarray(first[changed_from]) != np.asarray(second[changed_from])).any()


@pytest.mark.parametrize("lower_bound", LOWER_BOUNDS)
def test_sequences_do_not_depend_on_neighbours_or_padding(lower_bound):
    rng = np.random.default_rng(4)
    inputs, pool = oracle.prefill_inputs(rng, T, H, K, V), state_pool(rng)
    packed = compiled(lower_bound)(**inputs, **packing((50, 70, 33)), state_pool=pool)
    token_keys = ("q", "k", "v", "gate", "beta")
    alone = {key: np.full_like(inputs[key], np.nan) for key in token_keys}
    for key in token_keys:
        alone[key][:70] = inputs[key][50:120]
    alone |= {"A_log": inputs["A_log"], "dt_bias": inputs["dt_bias"]}
    where = packing((70, 0, 0)) | {"slots": jnp.array([SLOT_OF_SEQUENCE[1], 0, 0])}
    result = compiled(lower_bound)(**alone, **where, state_pool=pool)
    np.testing.assert_array_equal(result.out[:70], packed.out[50:120])
    np.testing.assert_array_equal(result.state_pool[LAYER, SLOT_OF_SEQUENCE[1]],
                                  packed.state_pool[LAYER, SLOT_OF_SEQUENCE[1]])
    assert not np.asarray(result.out[70:]).any()


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_a_poisoned_slot_does_not_leak(backend):
    rng = np.random.default_rng(5)
    inputs = oracle.prefill_inputs(rng, T, H, K, V)
    poisoned, clean = state_pool(rng, np.nan), state_pool(rng, 0.0)
    where = packing((60, 0, 3), has_state=False, positions=[60, -1, 63])
    result, expected = (compiled(-5.0, backend)(**inputs, **where, state_pool=pool) for pool in (poisoned, clean))
    np.testing.assert_array_equal(result.out, expected.out)
    np.testing.assert_array_equal(result.snapshots, expected.snapshots)
    written = SLOT_OF_SEQUENCE[[0, 2]]
    np.testing.assert_array_equal(result.state_pool[LAYER, written], expected.state_pool[LAYER, written])
    assert np.isnan(np.delete(result.state_pool[LAYER], written, axis=0)).all()


@settings(deadline=None, max_examples=25)
@given(
    length=st.integers(2, T),
    cut=st.sampled_from([64, 128, 192]) | st.integers(1, T - 1),
    lower_bound=st.sampled_from([-5.0, None]),
    seed=st.integers(0, 2**16),
)
def test_a_split_prefill_equals_one_call(length, cut, lower_bound, seed):
    """Bitwise at multiples of 64; elsewhere the tiles differ, and with them the roundings."""
    cut = min(cut, length - 1)
    rng = np.random.default_rng(seed)
    inputs, pool = oracle.prefill_inputs(rng, T, H, K, V), state_pool(rng)
    run = compiled(lower_bound)
    whole = run(**inputs, **packing((length, 0, 0)), state_pool=pool)
    first = run(**inputs, **packing((cut, 0, 0)), state_pool=pool)
    rest = {key: np.roll(x, -cut, axis=0) if len(x) == T else x for key, x in inputs.items()}
    second = run(**rest, **packing((length - cut, 0, 0)), state_pool=first.state_pool)
    out = np.concatenate([first.out[:cut], second.out[:length - cut]])
    if cut % 64 == 0:
        np.testing.assert_array_equal(out, whole.out[:length])
        np.testing.assert_array_equal(second.state_pool, whole.state_pool)
    else:
        np.testing.assert_allclose(out, whole.out[:length], atol=5e-6)
        np.testing.assert_allclose(second.state_pool, whole.state_pool, atol=1e-5)


def test_a_snapshot_is_the_final_state_of_its_prefix():
    rng = np.random.default_rng(6)
    inputs, pool = oracle.prefill_inputs(rng, T, H, K, V), state_pool(rng)
    positions = [64, 128, 192, 200]
    result = compiled(-5.0)(**inputs, **packing((200, 0, 0), positions=positions), state_pool=pool)
    for snapshot, position in zip(result.snapshots, positions):
        prefix = compiled(-5.0)(**inputs, **packing((position, 0, 0)), state_pool=pool)
        np.testing.assert_array_equal(snapshot, prefix.state_pool[LAYER, SLOT_OF_SEQUENCE[0]])


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_bfloat16_inputs_cost_one_rounding(backend):
    rng = np.random.default_rng(7)
    inputs, pool = oracle.prefill_inputs(rng, T, H, K, V), state_pool(rng)
    halves = {key: jnp.asarray(inputs[key], jnp.bfloat16) for key in ("q", "k", "v", "gate", "beta")}
    result = compiled(-5.0, backend)(**inputs | halves, **packing((150, 0, 0)), state_pool=pool)
    assert result.out.dtype == jnp.bfloat16 and result.state_pool.dtype == jnp.float32
    tokens = {key: np.asarray(x[:150], np.float64) for key, x in halves.items()}
    out, states = oracle.kda(**tokens, A_log=inputs["A_log"], dt_bias=inputs["dt_bias"],
                             state=pool[LAYER, SLOT_OF_SEQUENCE[0]], lower_bound=-5.0)
    np.testing.assert_allclose(np.asarray(result.out[:150], np.float64), out, rtol=2.0**-8, atol=1e-5)
    np.testing.assert_allclose(result.state_pool[LAYER, SLOT_OF_SEQUENCE[0]], states[-1], atol=1e-5)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gradients_match_float64_finite_differences(lower_bound):
    """Directional derivatives of two packed sequences (T = 48), one input after the other."""
    rng = np.random.default_rng(8)
    lengths, tokens = (17, 31), 48
    inputs = oracle.prefill_inputs(rng, tokens, H, K, V)
    inputs["state_pool"] = rng.normal(size=(1, 3, H, V, K)).astype(np.float32)
    weight_out, weight_state = rng.normal(size=(tokens, H, V)), rng.normal(size=(2, H, V, K))
    weight_snapshot = rng.normal(size=(H, V, K))
    slots = [2, 1]

    def loss64(x):
        total, start = 0.0, 0
        for n, length in enumerate(lengths):
            rows = slice(start, start + length)
            token_inputs = {key: x[key][rows] for key in ("q", "k", "v", "gate", "beta")}
            out, states = oracle.kda(**token_inputs, A_log=x["A_log"], dt_bias=x["dt_bias"],
                                     state=x["state_pool"][0, slots[n]], lower_bound=lower_bound)
            total += (out * weight_out[rows]).sum() + (states[-1] * weight_state[n]).sum()
            start += length
        return total + (states[-1] * weight_snapshot).sum()

    def loss(x):
        result = kda_prefill(
            **x, layer=jnp.int32(0), slots=jnp.array(slots), has_initial_state=jnp.array([True, True]),
            cu_seqlens=jnp.array([0, 17, 48]), lower_bound=lower_bound, snapshot_positions=jnp.array([-1, 48]),
        )
        states = result.state_pool[0, jnp.array(slots)]
        return (
            (result.out * weight_out.astype(np.float32)).sum()
            + (states * weight_state.astype(np.float32)).sum()
            + (result.snapshots[1] * weight_snapshot.astype(np.float32)).sum()
        )

    gradients = jax.jit(jax.grad(loss))(jax.tree.map(jnp.asarray, inputs))
    exact = {key: x.astype(np.float64) for key, x in inputs.items()}
    for key, x in exact.items():
        direction = rng.normal(size=x.shape)
        step = 1e-6
        ahead, behind = (loss64(exact | {key: x + sign * step * direction}) for sign in (1, -1))
        expected = (ahead - behind) / (2 * step)
        actual = float((np.asarray(gradients[key], np.float64) * direction).sum())
        scale = np.sqrt((np.asarray(gradients[key], np.float64) ** 2).sum())
        assert abs(actual - expected) <= 1e-5 * scale, key


def test_backward_keeps_one_state_a_tile():
    """Memory for the gradients: the tiles' states, inputs and outputs, not what happens inside tiles."""
    heads, width, tokens = 1, 64, 1024

    def loss(q, pool):
        return kda_prefill(
            q, q, q, q, q[..., 0], jnp.zeros(heads), jnp.zeros((heads, width)), pool, jnp.int32(0), jnp.array([1]),
            jnp.array([True]), jnp.array([0, tokens]), lower_bound=-5.0,
        ).out.sum()

    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    program = jax.jit(jax.grad(loss)).lower(f32((tokens, heads, width)), f32((1, 2, heads, width, width))).compile()
    per_tile = program.memory_analysis().temp_size_in_bytes / (tokens // xla.TILE)
    state, tile_input = 4 * heads * width * width, 4 * xla.TILE * heads * width
    assert per_tile <= state + 14 * tile_input


def test_the_pool_is_updated_in_place():
    layers, slots, heads, width, tokens = 8, 64, 2, 32, 128

    def all_layers(pool, x):
        def layer(pool, index):
            result = kda_prefill(
                x, x, x, x, x[..., 0], jnp.zeros(heads), jnp.zeros((heads, width)), pool, index, jnp.array([3, 5]),
                jnp.array([True, False]), jnp.array([0, 50, 128]), lower_bound=-5.0,
            )
            return result.state_pool, result.out.sum()

        return jax.lax.scan(layer, pool, jnp.arange(layers))

    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    pool = f32((layers, slots, heads, width, width))
    program = jax.jit(all_layers, donate_argnums=0).lower(pool, f32((tokens, heads, width))).compile()
    memory = program.memory_analysis()
    one_layer = 4 * slots * heads * width * width
    # The tiles themselves need memory that does not depend on the number of slots.
    more = jax.jit(all_layers, donate_argnums=0).lower(
        f32((layers, 8 * slots, heads, width, width)), f32((tokens, heads, width))
    ).compile().memory_analysis()
    assert more.temp_size_in_bytes - memory.temp_size_in_bytes < 0.1 * one_layer
    assert more.temp_size_in_bytes < 0.5 * 8 * one_layer
    assert memory.alias_size_in_bytes >= layers * one_layer


def arguments(**changes):
    rng = np.random.default_rng(9)
    inputs = jax.tree.map(jnp.asarray, oracle.prefill_inputs(rng, T, H, K, V))
    return inputs | packing((50, 70, 33)) | {"state_pool": jnp.asarray(state_pool(rng))} | changes


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"k": jnp.zeros((T, H, K + 1))}, r"k has shape \(208, 2, 17\), expected \[T=208, H=2, K=16\]"),
        ({"state_pool": jnp.zeros((LAYERS, SLOTS, H, K, V))}, r"state_pool has shape .* expected \[L, S, H=2, V=24"),
        ({"state_pool": jnp.zeros((LAYERS, SLOTS, H, V, K), jnp.bfloat16)}, "state_pool has dtype bfloat16"),
        ({"beta": jnp.zeros((T, H), jnp.int32)}, "beta has dtype int32, expected float32 or bfloat16"),
        ({"cu_seqlens": jnp.array([0, 3], jnp.int32)}, "cu_seqlens has 2 entries for 3 slots, expected 4"),
        ({"layer": jnp.float32(0)}, "layer has dtype float32, expected int32"),
        ({"lower_bound": 5.0}, "lower_bound is 5.0, expected a negative"),
        ({key: jnp.zeros((0, H, K)) for key in ("q", "k", "gate")} | {"v": jnp.zeros((0, H, V)),
                                                                      "beta": jnp.zeros((0, H))}, "axis T is empty"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    bad = {"lower_bound": -5.0} | arguments(**changes)
    with pytest.raises(ValueError, match="kda_prefill: .*" + message):
        kda_prefill(**bad)
    with pytest.raises(ValueError, match="kda_prefill: .*" + message):
        validate(**bad)


BAD_VALUES = [
    ({"cu_seqlens": jnp.array([0, 60, 50, 100], jnp.int32)}, "cu_seqlens decreases"),
    ({"cu_seqlens": jnp.array([0, 60, 100, T + 1], jnp.int32)}, f"cu_seqlens ends at {T + 1}"),
    ({"slots": jnp.array([1, SLOTS, 2], jnp.int32)}, f"slot {SLOTS} lies outside"),
    ({"slots": jnp.array([1, 2, 1], jnp.int32)}, "slot 1 belongs to two"),
    ({"slots": jnp.array([1, 0, 2], jnp.int32)}, "a sequence with tokens has slot 0"),
    ({"layer": jnp.int32(LAYERS)}, f"layer {LAYERS} lies outside"),
    ({"snapshot_positions": jnp.array([-1, 60], jnp.int32)}, "snapshot position 60"),
]


@pytest.mark.parametrize("changes, message", BAD_VALUES)
def test_validate_names_bad_values(changes, message):
    validate(**arguments(snapshot_positions=jnp.array([-1, 50, 114])), lower_bound=-5.0)
    with pytest.raises(ValueError, match="kda_prefill: " + message):
        validate(**arguments(**changes), lower_bound=-5.0)


def test_debug_mode_checks_values_inside_the_program(monkeypatch):
    monkeypatch.setenv("K3JAX_DEBUG", "1")
    run = jax.jit(checkify.checkify(functools.partial(kda_prefill, lower_bound=-5.0)))
    error, _ = run(**arguments())
    error.throw()
    for changes, message in BAD_VALUES[2:4]:
        error, _ = run(**arguments(**changes))
        with pytest.raises(checkify.JaxRuntimeError, match="kda_prefill: " + message):
            error.throw()
