"""Run by test_kda_context with 8 CPU devices: KDA and MLA with rows and positions split over devices.

Each case prints its name when it holds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from k3jax import kda_context
from k3jax.mla import attend
from k3jax.state import DecodeBatch, PrefillBatch
from pallas_kernels.kda_prefill import kda_prefill
from pallas_kernels.short_conv import short_conv
from sharding import DECODE, PREFILL, Layout, Strategy, make_mesh
from tests.ops import kda_oracle, mla_oracle

H, K, V, TAPS, LAYERS, LAYER, SLOTS, N, M = 2, 16, 24, 4, 2, 1, 6, 4, 6
SLOT_OF_SEQUENCE = np.array([4, 2, 5, 1], np.int32)
OVER_SEQ = Layout(make_mesh({"seq": 8}), PREFILL)
TOLERANCE = {"atol": 1e-4, "rtol": 0}


@functools.cache
def split_kda(layout, lower_bound):
    """The scan on a mesh; the arguments are those of one device."""

    def local(*arguments):
        *arguments, positions = arguments
        return tuple(kda_context.kda_prefill(
            *arguments, lower_bound=lower_bound, snapshot_positions=positions, axes=layout.beyond("tokens", "sequences")
        ))

    rows, pool, block = ("tokens", "kda_heads", "_"), ("_", "slots", "kda_heads", "_", "_"), ("sequences",)
    inputs = (rows, rows, rows, rows, rows[:2], ("kda_heads",), ("kda_heads", "_"), pool, (), *[block] * 4)
    return jax.jit(layout.local(local, inputs, (rows, pool, ("snapshots", "kda_heads", "_", "_"))))


@functools.cache
def split_conv(layout):
    def local(*arguments):
        *arguments, positions = arguments
        return tuple(kda_context.short_conv(
            *arguments, snapshot_positions=positions, axes=layout.beyond("tokens", "sequences")
        ))

    rows, pool = ("tokens", "_", "kda_heads", "_"), ("_", "slots", "_", "kda_heads", "_", "_")
    inputs = (rows, ("_", "kda_heads", "_", "_"), pool, (), *[("sequences",)] * 4)
    return jax.jit(layout.local(local, inputs, (rows, pool, ("snapshots", "_", "kda_heads", "_", "_"))))


whole_kda = jax.jit(lambda *arguments: kda_prefill(
    *arguments[:-1], lower_bound=-5.0, snapshot_positions=arguments[-1]
))
whole_conv = jax.jit(lambda *arguments: short_conv(*arguments[:-1], snapshot_positions=arguments[-1]))


def packing(lengths, has_state, positions=()):
    """Layer, slots, has_initial_state, cu_seqlens and snapshot positions."""
    lengths = np.array(lengths)
    return (
        np.int32(LAYER),
        np.where(lengths > 0, SLOT_OF_SEQUENCE, 0).astype(np.int32),
        np.array(has_state, bool),
        np.cumsum([0, *lengths]).astype(np.int32),
        np.array([*positions, *[-1] * (M - len(positions))], np.int32),
    )


def kda_case(rng, tokens, used, **kinds):
    """Inputs of the scan with padding that must not matter, and a pool whose unused slots must not matter."""
    inputs = kda_oracle.prefill_inputs(rng, tokens, H, K, V, **kinds)
    for name in ("q", "k", "v", "gate", "beta"):
        inputs[name][used:] = np.nan
    pool = rng.normal(size=(LAYERS, SLOTS, H, V, K)).astype(np.float32)
    pool[:, 3] = np.nan
    return inputs, pool


def expected_kda(inputs, pool, lengths, has_state, positions, lower_bound):
    """Output, pool and snapshots in float64, token by token."""
    out, snapshots, start = np.zeros(inputs["v"].shape), np.zeros((M, H, V, K)), 0
    pool = pool.astype(np.float64)
    for length, slot, has in zip(lengths, SLOT_OF_SEQUENCE, has_state):
        stop = start + length
        tokens = {name: inputs[name][start:stop] for name in ("q", "k", "v", "gate", "beta")}
        initial = pool[LAYER, slot] if has else np.zeros((H, V, K))
        out[start:stop], states = kda_oracle.kda(
            **tokens, A_log=inputs["A_log"], dt_bias=inputs["dt_bias"], state=initial, lower_bound=lower_bound
        )
        if length:
            pool[LAYER, slot] = states[-1]
        for m, position in enumerate(positions):
            if start < position <= stop:
                snapshots[m] = states[position - start]
        start = stop
    return out, pool, snapshots


def check_kda(rng, tokens, lengths, has_state, positions, **kinds):
    inputs, pool = kda_case(rng, tokens, sum(lengths), **kinds)
    arguments = (*inputs.values(), pool, *packing(lengths, has_state, positions))
    got, one_device = split_kda(OVER_SEQ, -5.0)(*arguments), whole_kda(*arguments)
    expected = expected_kda(inputs, pool, lengths, has_state, positions, -5.0)
    for actual, other, exact in zip(got, one_device, expected):
        np.testing.assert_allclose(actual, exact, **TOLERANCE)
        np.testing.assert_allclose(actual, other, **TOLERANCE)


@st.composite
def cuts(draw, tokens, multiple=1):
    """Lengths of N packed sequences that begin at multiples of so many rows."""
    edges = sorted(draw(st.lists(st.integers(0, tokens // multiple), min_size=N - 1, max_size=N - 1)))
    starts = [0, *(multiple * edge for edge in edges)]
    ends = [*starts[1:], draw(st.integers(starts[-1], tokens))]
    return [end - start for start, end in zip(starts, ends)]


STATES = st.tuples(*[st.booleans()] * N)
SEEDS = st.integers(0, 2**16)


@settings(deadline=None, max_examples=12, database=None, derandomize=True)
@given(lengths=cuts(512), has_state=STATES, keys=st.sampled_from(kda_oracle.KEYS),
       gate=st.sampled_from(sorted(kda_oracle.GATES)), seed=SEEDS)
@example(lengths=[500, 0, 0, 0], has_state=[True] * N, keys="random", gate="near_zero", seed=0)
@example(lengths=[64, 128, 0, 320], has_state=[False, True] * 2, keys="random", gate="mixed", seed=1)
@example(lengths=[1, 127, 1, 383], has_state=[True] * N, keys="identical", gate="near_zero", seed=2)
@example(lengths=[0, 0, 0, 0], has_state=[True] * N, keys="random", gate="mixed", seed=3)
def kda_with_cuts_anywhere(lengths, has_state, keys, gate, seed):
    ends = [int(end) for end, length in zip(np.cumsum(lengths), lengths) if length]
    check_kda(np.random.default_rng(seed), 512, lengths, has_state, ends, keys=keys, gate=gate)


@settings(deadline=None, max_examples=10, database=None, derandomize=True)
@given(lengths=cuts(512, 64), has_state=STATES, seed=SEEDS)
@example(lengths=[512, 0, 0, 0], has_state=[True] * N, seed=0)
def kda_snapshots_at_multiples_of_64(lengths, has_state, seed):
    rng, starts = np.random.default_rng(seed), np.cumsum([0, *lengths])
    there_are = [position for start, end in zip(starts, starts[1:]) for position in range(start + 64, end + 1, 64)]
    positions = rng.permutation(there_are)[:M]
    kda_context.validate(starts.astype(np.int32), np.array(positions, np.int32), 64, 8)
    check_kda(rng, 512, lengths, has_state, positions, gate="near_zero")


@settings(deadline=None, max_examples=10, database=None, derandomize=True)
@given(lengths=cuts(80), has_state=STATES, seed=SEEDS)
def kda_with_ten_rows_a_device(lengths, has_state, seed):
    """With the unbounded decay of Kimi-Linear."""
    inputs, pool = kda_case(np.random.default_rng(seed), 80, sum(lengths))
    arguments = (*inputs.values(), pool, *packing(lengths, has_state)[:-1], np.zeros(0, np.int32))
    got = split_kda(OVER_SEQ, None)(*arguments)
    for actual, exact in zip(got[:2], expected_kda(inputs, pool, lengths, has_state, [], None)):
        np.testing.assert_allclose(actual, exact, **TOLERANCE)


def no_nan_crosses_sequences():
    """A sequence that has gone wrong changes no bit of another one, wherever the cuts lie."""
    rng, lengths, has_state = np.random.default_rng(5), [100, 120, 30, 230], [True] * N
    inputs, pool = kda_case(rng, 512, sum(lengths))
    where = packing(lengths, has_state, np.cumsum(lengths))
    good = split_kda(OVER_SEQ, -5.0)(*inputs.values(), pool, *where)
    broken = {name: value.copy() for name, value in inputs.items()}
    broken["v"][130:140] = np.nan
    bad = split_kda(OVER_SEQ, -5.0)(*broken.values(), pool, *where)
    others = np.r_[0:100, 220:512]
    np.testing.assert_array_equal(np.asarray(bad[0])[others], np.asarray(good[0])[others])
    assert np.isnan(np.asarray(bad[0])[130:220]).all()
    np.testing.assert_array_equal(np.isnan(bad[1][LAYER]).any((1, 2, 3)), [False, False, True, True, False, False])
    np.testing.assert_array_equal(np.asarray(bad[2])[[0, 2, 3]], np.asarray(good[2])[[0, 2, 3]])


@settings(deadline=None, max_examples=12, database=None, derandomize=True)
@given(lengths=cuts(24) | cuts(512), has_state=STATES, seed=SEEDS)
@example(lengths=[4, 3, 1, 14], has_state=[True] * N, seed=0)
@example(lengths=[2, 1, 2, 19], has_state=[True, True, True, False], seed=1)
def convolution_with_cuts_anywhere(lengths, has_state, seed):
    """Also with as few rows on a device as the convolution reaches back."""
    rng, tokens = np.random.default_rng(seed), 24 if sum(lengths) <= 24 else 512
    x = rng.normal(size=(tokens, 3, H, K)).astype(np.float32)
    x[sum(lengths):] = np.nan
    weight = rng.normal(size=(3, H, K, TAPS)).astype(np.float32)
    pool = rng.normal(size=(LAYERS, SLOTS, 3, H, K, TAPS - 1)).astype(np.float32)
    pool[:, 3] = np.nan
    ends = np.cumsum(lengths)
    positions = [int(end) for end, length in zip(ends, lengths) if length]
    arguments = (x, weight, pool, *packing(lengths, has_state, positions))
    got = split_conv(OVER_SEQ)(*arguments)
    for actual, other in zip(got, whole_conv(*arguments)):
        np.testing.assert_allclose(actual, other, atol=1e-6, rtol=0)
    expected = pool.copy()
    for end, length, slot, has in zip(ends, lengths, SLOT_OF_SEQUENCE, has_state):
        if length:
            tail = pool[LAYER, slot] if has else np.zeros((3, H, K, TAPS - 1))
            out, expected[LAYER, slot] = kda_oracle.conv(x[end - length:end], weight, tail)
            np.testing.assert_allclose(got[0][end - length:end], out, atol=1e-5)
    np.testing.assert_array_equal(got[1], expected)


def blocks_and_heads_on_the_same_mesh():
    """data 2 x seq 2 x tensor 2: each half of the mesh has sequences, slots and snapshots of its own."""
    layout, rng = Layout(make_mesh({"data": 2, "seq": 2, "tensor": 2}), PREFILL), np.random.default_rng(6)
    cases = [([70, 0, 26, 20], [True, False, True, True]), ([128, 0, 0, 0], [False] * N)]
    snapshots = [[70, 96], [64, 128]]
    parts = []
    for (lengths, has_state), positions in zip(cases, snapshots):
        inputs, pool = kda_case(rng, 128, sum(lengths))
        shared = {name: parts[0][0][name] for name in ("A_log", "dt_bias")} if parts else {}
        parts.append((inputs | shared, pool, packing(lengths, has_state, positions)))
    inputs = {name: np.concatenate([part[0][name] for part in parts]) for name in ("q", "k", "v", "gate", "beta")}
    where = [np.concatenate(arrays) for arrays in zip(*[part[2][1:] for part in parts])]
    pool = np.concatenate([part[1] for part in parts], axis=1)
    shared = (parts[0][0]["A_log"], parts[0][0]["dt_bias"])
    got = split_kda(layout, -5.0)(*inputs.values(), *shared, pool, np.int32(LAYER), *where)
    expected = [
        expected_kda(part[0], part[1], *case, positions, -5.0) for part, case, positions in zip(parts, cases, snapshots)
    ]
    for actual, exact, axis in zip(got, zip(*expected), (0, 1, 0)):
        np.testing.assert_allclose(actual, np.concatenate(exact, axis), **TOLERANCE)


def bfloat16_is_rounded_once():
    lengths, has_state = [80, 0, 0, 0], [True] * N
    inputs, pool = kda_case(np.random.default_rng(7), 80, 80)
    low = {name: value.astype(jnp.bfloat16) if name in ("q", "k", "v", "gate", "beta") else value
           for name, value in inputs.items()}
    arguments = (*low.values(), pool, *packing(lengths, has_state)[:-1], np.zeros(0, np.int32))
    got = split_kda(OVER_SEQ, -5.0)(*arguments)
    low = {name: value.astype(np.float32) for name, value in low.items()}
    exact = expected_kda(low, pool, lengths, has_state, [], -5.0)
    assert got[0].dtype == jnp.bfloat16
    np.testing.assert_allclose(got[0].astype(np.float32), exact[0], rtol=2**-8, atol=1e-4)


def check_mla(layout, batch, oracle_batch):
    """Attention with pages split over seq, against the float64 definition."""
    q, latent, kv_b_proj, pages, layer = oracle_batch[:5]
    run = jax.jit(functools.partial(attend, layout=layout))
    out, pages = run(q, latent, kv_b_proj, pages, layer, batch)
    expected_out, expected_pages, _ = mla_oracle.oracle(oracle_batch)
    np.testing.assert_allclose(out, expected_out, atol=3e-6, rtol=1e-5)
    np.testing.assert_array_equal(pages, expected_pages)


def mla_prefill_with_rows_over_seq(layout=OVER_SEQ):
    case = mla_oracle.make_batch(0, [0, 7, 16], [9, 0, 21], 2)
    none = np.zeros(3, np.int32)
    check_mla(layout, PrefillBatch(case.cu_seqlens, none, case.context_lens, case.page_table, none), case)


def mla_decode_with_heads_over_seq():
    case = mla_oracle.make_batch(1, contexts=[0, 7, 8, 31], lengths=[1] * 4)
    batch = DecodeBatch(np.arange(1, 5, dtype=np.int32), case.context_lens, case.page_table)
    check_mla(Layout(make_mesh({"seq": 2}), DECODE), batch, case)
    # Rows and heads of a decode step stay where they are under the other table.
    check_mla(Layout(make_mesh({"seq": 4, "tensor": 2}), PREFILL), batch, case)


def mistakes():
    def message(function, *arguments):
        try:
            function(*arguments)
        except ValueError as error:
            return str(error)
        raise AssertionError("nothing was raised")

    validate = kda_context.validate
    cu_seqlens = np.array([0, 40, 200], np.int32)
    validate(cu_seqlens, np.array([40, -1, 64, 128, 192, 200], np.int32), 64, 4)
    assert "a snapshot 40 rows into device 1 is neither" in message(
        validate, cu_seqlens, np.array([168], np.int32), 128, 2
    )
    assert "96 rows on a device, expected a multiple of 64 for snapshots" in message(
        validate, cu_seqlens, np.array([200], np.int32), 96, 4
    )
    where = packing([10, 0, 0, 0], [False] * N)
    x, weight = np.zeros((16, 3, H, K), np.float32), np.zeros((3, H, K, TAPS), np.float32)
    pool = np.zeros((LAYERS, SLOTS, 3, H, K, TAPS - 1), np.float32)
    assert "2 rows on a device, expected at least 3" in message(split_conv(OVER_SEQ), x, weight, pool, *where)
    inputs, pool = kda_case(np.random.default_rng(0), 80, 10)
    assert "10 rows on a device, expected a multiple of 64" in message(
        split_kda(OVER_SEQ, -5.0), *inputs.values(), pool, *where
    )
    lonely = Layout(OVER_SEQ.mesh, Strategy("lonely", {**PREFILL.table, "page_tokens": ()}))
    assert "strategy 'lonely' splits MLA's rows or heads over mesh axis 'seq'" in message(
        mla_prefill_with_rows_over_seq, lonely
    )


CASES = (
    kda_with_cuts_anywhere, kda_snapshots_at_multiples_of_64, kda_with_ten_rows_a_device, no_nan_crosses_sequences,
    convolution_with_cuts_anywhere, blocks_and_heads_on_the_same_mesh, bfloat16_is_rounded_once,
    mla_prefill_with_rows_over_seq, mla_decode_with_heads_over_seq, mistakes,
)

if __name__ == "__main__":
    for case in CASES:
        case()
        print(case.__name__, flush=True)
    print(len(CASES), "cases hold")
