"""MLA where every page is split over devices: merged parts are the whole, against the float64 definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import mla_decode as decode_package
from pallas_kernels import mla_prefill as prefill_package
from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.mla_decode import reference as decode_reference
from pallas_kernels.mla_decode import xla as decode_xla
from pallas_kernels.mla_prefill import mla_prefill
from pallas_kernels.mla_prefill import reference as prefill_reference
from pallas_kernels.mla_prefill import xla as prefill_xla
from pallas_kernels.page_part import PagePart
from tests.ops.mla_oracle import HEADS, MAX_PAGES, NOPE, NUM_PAGES, PAGE, RANK, ROPE, VALUE, make_batch, oracle

TOKENS, SEQUENCES = 32, 3
# Tiles smaller than the sequences, so that several of each kind take part.
OPS = {
    ("prefill", "xla"): jax.jit(functools.partial(prefill_xla.mla_prefill, query_tile=8, key_tile=16)),
    ("prefill", "reference"): jax.jit(prefill_reference.mla_prefill),
    ("decode", "xla"): jax.jit(functools.partial(decode_xla.mla_decode, key_tile=16)),
    ("decode", "reference"): jax.jit(decode_reference.mla_decode),
}


def run_parts(op, batch, parts):
    """Outputs of all parts, each with its own share of every page."""
    arguments = batch if op[0] == "prefill" else batch[:-1]
    size = batch.pages.shape[2] // parts
    shares = [batch.pages[:, :, index * size : (index + 1) * size] for index in range(parts)]
    return [
        OPS[op](*arguments[:3], share, *arguments[4:], part=PagePart(jnp.int32(index), parts))
        for index, share in enumerate(shares)
    ]


def merge(outputs):
    """(out, lse) in float64: log-sum-exps add up like the keys that they stand for."""
    outs, lses = (np.array([getattr(output, name) for output in outputs], np.float64) for name in ("out", "lse"))
    lse = np.logaddexp.reduce(lses)
    weights = np.exp(lses - np.where(np.isfinite(lse), lse, 0))
    return np.sum(weights[..., None] * outs, axis=0), lse


def keys_in_part(batch, index, parts):
    """[rows] how many keys each token finds in a part, counted one by one; 0 for padding."""
    page_size = batch.pages.shape[2]
    counts = np.zeros(len(batch.q), int)
    for n, context in enumerate(batch.context_lens):
        for row in range(batch.cu_seqlens[n], batch.cu_seqlens[n + 1]):
            seen = range(context + row - batch.cu_seqlens[n] + 1)
            counts[row] = sum(position % page_size // (page_size // parts) == index for position in seen)
    return counts


def check(op, batch, parts):
    outputs = run_parts(op, batch, parts)
    expected_out, expected_pages, expected_lse = oracle(batch)
    out, lse = merge(outputs)
    np.testing.assert_allclose(out, expected_out, atol=3e-6, rtol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=3e-6, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([output.pages for output in outputs], axis=2), expected_pages)
    for index, output in enumerate(outputs):
        empty = keys_in_part(batch, index, parts) == 0
        np.testing.assert_array_equal(np.isneginf(output.lse), np.broadcast_to(empty[:, None], output.lse.shape))
        assert not np.asarray(output.out)[empty].any()


def lengths_of(draw):
    lengths = []
    for _ in range(SEQUENCES):
        lengths.append(draw(st.integers(0, TOKENS - sum(lengths))))
    return lengths


@st.composite
def batches(draw, op, page_size=PAGE):
    """Prompts of any length, or rows of one token, on contexts of any length that fits."""
    lengths = lengths_of(draw) if op == "prefill" else [1] * SEQUENCES
    room = [min(MAX_PAGES, NUM_PAGES // SEQUENCES - 1) * page_size - length for length in lengths]
    contexts = [draw(st.sampled_from([0, page_size - 1, page_size]) | st.integers(0, most)) for most in room]
    contexts = [min(context, most) for context, most in zip(contexts, room)]
    return make_batch(
        draw(st.integers(0, 2**16)), contexts, lengths, TOKENS - sum(lengths) if op == "prefill" else 0, page_size
    )


@pytest.mark.parametrize(
    "op, parts", [(op, parts) for op in OPS for parts in (1, 2, 4, 8) if op[1] == "xla" or parts == 4],
    ids=lambda value: value if isinstance(value, int) else "-".join(value),
)
@given(data=st.data())
@settings(deadline=None, max_examples=8)
def test_merged_parts_equal_the_definition(op, parts, data):
    check(op, data.draw(batches(op[0])), parts)


@pytest.mark.parametrize("op", [("prefill", "xla"), ("decode", "xla")], ids="-".join)
@given(data=st.data())
@settings(deadline=None, max_examples=5)
def test_pages_of_128_tokens(op, data):
    check(op, data.draw(batches(op[0], 128)), 8)


@pytest.mark.parametrize("op", OPS, ids="-".join)
def test_short_sequences_leave_most_parts_empty(op):
    lengths, padding = ([2, 0, 1], TOKENS - 3) if op[0] == "prefill" else ([1] * SEQUENCES, 0)
    batch = make_batch(0, [0, 3, 0], lengths, padding)
    assert sum(not keys_in_part(batch, index, 8).any() for index in range(8)) >= 4
    check(op, batch, 8)


@pytest.mark.parametrize("op", OPS, ids="-".join)
def test_rows_without_a_page_see_nothing_in_any_part(op):
    batch = make_batch(1, [8, 16, 11], [1] * SEQUENCES, TOKENS - SEQUENCES if op[0] == "prefill" else 0)
    batch.page_table[1, 2] = 0
    before = batch.pages[:, 0].copy()
    outputs = run_parts(op, batch, 4)
    out, lse = merge(outputs)
    assert np.isneginf(lse[1]).all() and not out[1].any()
    assert np.isfinite(lse[[0, 2]]).all()
    np.testing.assert_array_equal(np.concatenate([output.pages[:, 0] for output in outputs], axis=1), before)


@pytest.mark.parametrize("op", [("prefill", "xla"), ("decode", "xla")], ids="-".join)
def test_bfloat16_parts_stay_near_float64(op):
    lengths, padding = ([20, 7, 5], 0) if op[0] == "prefill" else ([1] * SEQUENCES, 0)
    batch = make_batch(2, [0, 8, 39], lengths, padding)
    low = batch._replace(**{
        name: getattr(batch, name).astype(jnp.bfloat16) for name in ("q", "latent", "kv_b_proj", "pages")
    })  # fmt: skip
    outputs = run_parts(op, low, 4)
    assert all(output.out.dtype == output.lse.dtype == jnp.float32 for output in outputs)
    exact = low._replace(**{
        name: getattr(low, name).astype(np.float32) for name in ("q", "latent", "kv_b_proj", "pages")
    })  # fmt: skip
    expected, _, _ = oracle(exact)
    error = merge(outputs)[0] - expected
    assert np.sqrt(np.mean(error**2) / np.mean(expected**2)) < 6e-3


def test_validate_counts_whole_pages_and_knows_the_parts():
    batch = make_batch(3, [3, 10], [9, 4])
    share = batch._replace(pages=batch.pages[:, :, :4])
    prefill_package.validate(*share, part=PagePart(jnp.int32(1), 2))
    with pytest.raises(ValueError, match="has room for 24; give it more pages"):
        prefill_package.validate(*share._replace(context_lens=np.array([16, 10], np.int32)))
    with pytest.raises(ValueError, match="part 2 does not exist, expected 0 .. 1"):
        prefill_package.validate(*share, part=PagePart(jnp.int32(2), 2))
    step = make_batch(4, [3, 44], [1, 1])
    step = step._replace(pages=step.pages[:, :, :4])[:-1]
    decode_package.validate(*step, part=PagePart(jnp.int32(0), 2))
    with pytest.raises(ValueError, match="mla_decode: part is one of 0 parts, expected at least 1"):
        mla_decode(*step, part=PagePart(jnp.int32(0), 0))


def test_parts_lower_for_every_platform():
    rows, size = 16, 32
    pages = (2, 9, size, RANK + ROPE)
    floats = [(rows, HEADS, NOPE + ROPE), (rows, RANK + ROPE), (2, HEADS, NOPE + VALUE, RANK), pages]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in floats]
    shapes += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (rows, 8), (rows,), (rows + 1,), ())]

    def prefill(*arguments):
        return mla_prefill(*arguments[:-1], part=PagePart(arguments[-1], 4))

    def decode(*arguments):
        return mla_decode(*arguments[:-2], part=PagePart(arguments[-1], 4))

    for op in (prefill, decode):
        exported = jax.export.export(jax.jit(op), platforms=["cpu", "cuda", "rocm", "tpu"])(*shapes)
        assert [aval.shape for aval in exported.out_avals] == [(rows, HEADS, VALUE), pages, (rows, HEADS)]
