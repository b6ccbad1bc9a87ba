"""MLA prefill and decode against published vectors, a float64 oracle, and each other."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.mla_decode import reference as decode_reference
from pallas_kernels.mla_decode import xla as decode_xla
from pallas_kernels.mla_prefill import mla_prefill
from pallas_kernels.mla_prefill import reference as prefill_reference
from pallas_kernels.mla_prefill import xla as prefill_xla
from pallas_kernels.page_part import PagePart
from tests.ops.mla_oracle import (
    HEADS,
    LAYER,
    MAX_PAGES,
    NOPE,
    NUM_PAGES,
    PAGE,
    RANK,
    ROPE,
    VALUE,
    decode_arguments,
    make_batch,
    oracle,
)

DATA = pathlib.Path(__file__).parents[1] / "data" / "ops"

# Tiles smaller than the sequences, so that several of each kind take part.
tiled_prefill = jax.jit(functools.partial(prefill_xla.mla_prefill, query_tile=8, key_tile=16))
tiled_decode = jax.jit(functools.partial(decode_xla.mla_decode, key_tile=16))
PREFILLS = {
    "tiled": tiled_prefill,
    "default": jax.jit(mla_prefill),
    "reference": jax.jit(prefill_reference.mla_prefill),
}
DECODES = {
    "tiled": tiled_decode,
    "default": jax.jit(mla_decode),
    "reference": jax.jit(decode_reference.mla_decode),
}
RAGGED = {
    "one_sequence": ([0], [29], 3),
    "with_context": ([13], [20], 0),
    "packed": ([0, 7, 16, 0, 33], [9, 0, 21, 1, 8], 5),
    "page_edges": ([8, 16, 15], [8, 1, 17], 2),
}


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("implementation", PREFILLS)
def test_prefill_matches_float64_definition(implementation, case):
    batch = make_batch(0, *RAGGED[case])
    out, pages, _ = PREFILLS[implementation](*batch)
    expected_out, expected_pages, _ = oracle(batch)
    np.testing.assert_allclose(out, expected_out, atol=2e-6, rtol=1e-5)
    np.testing.assert_array_equal(pages, expected_pages)


@pytest.mark.parametrize("implementation", DECODES)
def test_decode_matches_float64_definition(implementation):
    batch = make_batch(1, contexts=[0, 7, 8, 31, 40], lengths=[1] * 5)
    out, pages, _ = DECODES[implementation](*decode_arguments(batch))
    expected_out, expected_pages, _ = oracle(batch)
    np.testing.assert_allclose(out, expected_out, atol=2e-6, rtol=1e-5)
    np.testing.assert_array_equal(pages, expected_pages)


@pytest.mark.parametrize("implementation", DECODES)
def test_unused_decode_rows_are_zero_and_write_nothing(implementation):
    batch = make_batch(2, contexts=[5, 16, 11], lengths=[1] * 3)
    batch.page_table[1, 2] = 0
    out, pages, _ = DECODES[implementation](*decode_arguments(batch))
    np.testing.assert_array_equal(out[1], 0)
    assert np.all(np.asarray(out)[[0, 2]] != 0)
    expected = batch.pages.copy()
    for row, position in ((0, 5), (2, 11)):
        expected[LAYER, batch.page_table[row, position // PAGE], position % PAGE] = batch.latent[row]
    np.testing.assert_array_equal(pages, expected)


@pytest.mark.parametrize("implementation", PREFILLS)
def test_prefill_rows_without_a_page_are_zero_and_write_nothing(implementation):
    batch = make_batch(3, contexts=[0, 0], lengths=[10, 6])
    batch.page_table[0, 1] = 0
    out, pages, _ = PREFILLS[implementation](*batch)
    np.testing.assert_array_equal(out[8:10], 0)
    assert np.all(np.asarray(out)[10:] != 0)
    np.testing.assert_array_equal(pages[:, 0], batch.pages[:, 0])


@pytest.mark.parametrize("name", ["mla_k3", "mla_kimi_linear"])
@pytest.mark.parametrize("implementation", ["prefill", "decode"])
def test_golden_layer(name, implementation):
    golden = np.load(DATA / f"{name}.npz")
    weight = {key: golden[f"w.{key}.weight"] for key in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")}
    heads, nope, rope, value, rank = (
        int(golden[key])
        for key in ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    x = golden["x"]
    num_tokens = x.shape[0]

    def rms_norm(y, scale):
        return y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + golden["latent_norm_eps"]) * scale

    if name == "mla_k3":
        q = rms_norm(x @ golden["w.q_a_proj.weight"].T, golden["w.q_a_layernorm.weight"])
        q = q @ golden["w.q_b_proj.weight"].T
    else:
        q = x @ golden["w.q_proj.weight"].T
    projected = x @ weight["kv_a_proj_with_mqa"].T
    latent = np.concatenate([rms_norm(projected[:, :rank], weight["kv_a_layernorm"]), projected[:, rank:]], axis=1)
    np.testing.assert_allclose(latent[:, :rank], golden["latent"], atol=2e-6)

    q = q.reshape(num_tokens, heads, nope + rope).astype(np.float32)
    latent = latent.astype(np.float32)
    kv_b_proj = weight["kv_b_proj"].reshape(1, heads, nope + value, rank)
    pages = jnp.zeros((1, 4, 4, rank + rope), jnp.float32)
    page_table = np.array([[2, 1, 3]], np.int32)
    zero = np.zeros(1, np.int32)
    if implementation == "prefill":
        out, pages, _ = mla_prefill(
            q, latent, kv_b_proj, pages, jnp.int32(0), page_table, zero, np.array([0, num_tokens], np.int32)
        )
    else:
        rows = []
        step = jax.jit(mla_decode)
        for t in range(num_tokens):
            row, pages, _ = step(q[t : t + 1], latent[t : t + 1], kv_b_proj, pages, jnp.int32(0), page_table, zero + t)
            rows.append(row)
        out = np.concatenate(rows)
    attended = np.asarray(out).reshape(num_tokens, heads * value)
    if name == "mla_k3":
        attended = attended / (1 + np.exp(-(x @ golden["w.g_proj.weight"].T)))
    np.testing.assert_allclose(attended @ weight["o_proj"].T, golden["out"], atol=5e-6)
    cached = np.concatenate(pages[0, page_table[0]])[:num_tokens, :rank]
    np.testing.assert_allclose(cached, golden["latent"], atol=2e-6)


TOKENS = 32


@given(seed=st.integers(0, 2**16), cuts=st.lists(st.integers(0, TOKENS), max_size=3), decoded=st.integers(0, 4))
@settings(deadline=None, max_examples=20)
def test_prefill_equals_any_split_followed_by_decode(seed, cuts, decoded):
    batch = make_batch(seed, contexts=[0], lengths=[TOKENS])
    whole, whole_pages, _ = tiled_prefill(*batch)
    last = TOKENS - decoded
    edges = sorted({0, last, *(min(cut, last) for cut in cuts)})
    pages, rows = batch.pages, []
    for start, end in zip(edges, edges[1:]):
        piece = batch._replace(
            q=np.roll(batch.q, -start, axis=0),
            latent=np.roll(batch.latent, -start, axis=0),
            pages=pages,
            context_lens=np.array([start], np.int32),
            cu_seqlens=np.array([0, end - start], np.int32),
        )
        out, pages, _ = tiled_prefill(*piece)
        np.testing.assert_array_equal(out[end - start :], 0)
        rows.append(out[: end - start])
    for t in range(last, TOKENS):
        out, pages, _ = tiled_decode(
            batch.q[t : t + 1], batch.latent[t : t + 1], batch.kv_b_proj, pages, batch.layer, batch.page_table,
            np.array([t], np.int32),
        )  # fmt: skip
        rows.append(out)
    np.testing.assert_allclose(np.concatenate(rows), whole, atol=2e-6, rtol=1e-5)
    np.testing.assert_array_equal(pages, whole_pages)


@given(seed=st.integers(0, 2**16), contexts=st.lists(st.integers(0, 47), min_size=3, max_size=3))
@settings(deadline=None, max_examples=20)
def test_absorbed_decode_equals_expanded_attention(seed, contexts):
    batch = make_batch(seed, contexts, lengths=[1] * 3)
    absorbed, _, _ = tiled_decode(*decode_arguments(batch))
    expanded, _, _ = PREFILLS["reference"](*batch)
    np.testing.assert_allclose(absorbed, expanded, atol=2e-6, rtol=1e-5)


@given(first_changed=st.integers(1, 20), seed=st.integers(0, 2**16))
@settings(deadline=None, max_examples=15)
def test_later_tokens_neighbours_and_padding_change_no_bit(first_changed, seed):
    batch = make_batch(seed, contexts=[5, 11], lengths=[21, 7], padding=4)
    other = make_batch(seed + 1, contexts=[5, 11], lengths=[21, 7], padding=4)
    changed = batch._replace(
        q=np.concatenate([batch.q[:first_changed], other.q[first_changed:]]),
        latent=np.concatenate([batch.latent[:first_changed], other.latent[first_changed:]]),
        pages=batch.pages.copy(),
    )
    changed.pages[:, changed.page_table[1]] = other.pages[:, other.page_table[1]]
    out, _, _ = tiled_prefill(*batch)
    changed_out, _, _ = tiled_prefill(*changed)
    np.testing.assert_array_equal(changed_out[:first_changed], out[:first_changed])
    assert np.any(np.asarray(changed_out)[first_changed:28] != np.asarray(out)[first_changed:28])


def test_neighbouring_rows_change_no_bit_of_decode():
    batch = make_batch(4, contexts=[17, 40, 3], lengths=[1] * 3)
    out, _, _ = tiled_decode(*decode_arguments(batch))
    short = batch._replace(q=batch.q.copy(), context_lens=np.array([17, 2, 3], np.int32))
    short.q[1] *= 3
    changed, _, _ = tiled_decode(*decode_arguments(short))
    np.testing.assert_array_equal(np.asarray(changed)[[0, 2]], np.asarray(out)[[0, 2]])
    assert np.all(np.asarray(changed)[1] != np.asarray(out)[1])


def test_physical_page_order_changes_nothing():
    batch = make_batch(5, contexts=[9, 0], lengths=[14, 18])
    rename = np.concatenate([[0], np.random.default_rng(0).permutation(np.arange(1, NUM_PAGES))])
    moved = batch._replace(pages=np.empty_like(batch.pages), page_table=rename[batch.page_table].astype(np.int32))
    moved.pages[:, rename] = batch.pages
    out, pages, _ = tiled_prefill(*batch)
    moved_out, moved_pages, _ = tiled_prefill(*moved)
    np.testing.assert_array_equal(moved_out, out)
    np.testing.assert_array_equal(np.asarray(moved_pages)[:, rename], pages)


@pytest.mark.parametrize("pool_dtype", [jnp.bfloat16, jnp.float32])
def test_bfloat16_stays_near_float64(pool_dtype):
    def rounded(x):
        return x.astype(jnp.bfloat16)

    prompt = make_batch(6, contexts=[0, 19], lengths=[26, 5])
    step = make_batch(7, contexts=[0, 8, 39], lengths=[1] * 3)
    for batch, op, count in ((prompt, tiled_prefill, 8), (step, tiled_decode, 7)):
        low = batch._replace(**{name: rounded(getattr(batch, name)) for name in ("q", "latent", "kv_b_proj", "pages")})
        out, pages, _ = op(*low._replace(pages=low.pages.astype(pool_dtype))[:count])
        exact = low._replace(**{
            name: np.asarray(getattr(low, name), np.float32) for name in ("q", "latent", "kv_b_proj", "pages")
        })  # fmt: skip
        expected_out, expected_pages, _ = oracle(exact)
        assert out.dtype == jnp.bfloat16 and pages.dtype == pool_dtype
        error = np.asarray(out, np.float64) - expected_out
        assert np.sqrt(np.mean(error**2) / np.mean(expected_out**2)) < 6e-3
        np.testing.assert_array_equal(np.asarray(pages, np.float32), expected_pages)


@pytest.mark.parametrize("dtype, parts", [(jnp.float32, None), (jnp.bfloat16, None), (jnp.bfloat16, 2)])
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_pool_is_updated_in_place_inside_a_layer_scan(op, dtype, parts):
    rows, sequences, layers, num_pages = 8, 8, 3, 4096

    def step(pages, q, latent, kv_b_proj, page_table, context_lens, cu_seqlens, index):
        part = PagePart(index, parts) if parts else None

        def body(pages, layer):
            arguments = (q, latent, kv_b_proj, pages, layer, page_table, context_lens)
            if op == "prefill":
                out, pages, _ = mla_prefill(*arguments, cu_seqlens, part=part)
            else:
                out, pages, _ = mla_decode(*arguments, part=part)
            return pages, out

        return jax.lax.scan(body, pages, jnp.arange(layers))

    def integers(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def floats(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    compiled = (
        jax.jit(step, donate_argnums=0)
        .lower(
            # On CPUs pools are float32, whatever the activations are.
            jax.ShapeDtypeStruct((layers, num_pages, PAGE, RANK + ROPE), jnp.float32),
            floats(rows, HEADS, NOPE + ROPE),
            floats(rows, RANK + ROPE),
            floats(layers, HEADS, NOPE + VALUE, RANK),
            integers(sequences, MAX_PAGES),
            integers(sequences),
            integers(sequences + 1),
            integers(),
        )
        .compile()
    )
    layer_share = num_pages * PAGE * (RANK + ROPE) * 4
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < layer_share / 4
    assert memory.alias_size_in_bytes == layers * layer_share
