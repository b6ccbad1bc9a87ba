"""The sampler against sorting in float64, transformers' processors, and what draws must not depend on."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

import k3jax
from k3jax.sampling import SamplingParams
from k3jax.sampling.sampler import (
    GENERATED,
    IN_PROMPT,
    Sample,
    SamplingBatch,
    _gumbel,
    filter_logits,
    mark_generated,
    penalise,
    sample,
    seen_in_prompt,
)
from tests.golden import decode_batch, new_state, prefill_batch, tiny_model, vectors

PLAIN = SamplingParams(top_p=1.0)
jitted = jax.jit(sample, static_argnames="num_logprobs")


def draw(logits, params, *, seeds=None, seen=None, positions=None, num_logprobs=None) -> Sample:
    """`sample` on NumPy arrays; seeds from 0 on, nothing seen and position 0 unless told otherwise."""
    logits = np.asarray(logits, np.float32)
    rows = len(logits)
    return jax.device_get(jitted(
        logits, SamplingBatch.pack(params, range(rows) if seeds is None else seeds),
        np.zeros(logits.shape, np.uint8) if seen is None else seen,
        np.zeros(rows, np.int32) if positions is None else np.asarray(positions, np.int32),
        num_logprobs=num_logprobs,
    ))


def oracle(logits, params: SamplingParams, seen) -> tuple[np.ndarray, float]:
    """Probabilities of one row, [V] float64, and how near to its target the decision of top-p was."""
    factor, presence = np.float32(params.repetition_penalty), np.float32(params.presence_penalty)
    x = np.asarray(logits, np.float64)
    x = np.where(seen != 0, np.where(x > 0, x / factor, x * factor), x)
    x = x - np.where(seen & GENERATED, presence, 0)
    if params.temperature == 0:
        return np.eye(len(x))[x.argmax()], 1.0
    if 0 < params.top_k < len(x):
        x = np.where(x < np.sort(x)[-params.top_k], -np.inf, x)
    weights = np.exp((x - x.max()) / np.float32(params.temperature))
    weights /= weights.sum()
    margin = 1.0
    if params.top_p < 1:
        descending = np.sort(weights)[::-1]
        sums, target = descending.cumsum(), np.float32(params.top_p)
        margin = np.abs(sums - target).min()
        last = descending[(sums >= target).argmax()]
        weights = np.where(weights >= last, weights, 0)
    weights = np.where(weights >= np.float32(params.min_p) * weights.max(), weights, 0)
    return weights / weights.sum(), margin


def probabilities(logits, params, seen) -> np.ndarray:
    """What the sampler draws from, [B, V]: its own penalties and filters, then a softmax in float64."""
    batch = SamplingBatch.pack(params, [0] * len(params))
    filtered = jax.jit(filter_logits)(penalise(jnp.asarray(logits, jnp.float32), batch, seen), batch)
    weights = np.exp(np.asarray(filtered, np.float64))
    return weights / weights.sum(axis=-1, keepdims=True)


rows_of_settings = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]), presence_penalty=st.sampled_from([0.0, 0.7, -1.5]),
    temperature=st.sampled_from([1.0, 0.3, 2.5]), top_k=st.sampled_from([0, 1, 3, 5, 12, 500]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1]), min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
)


@settings(deadline=None, max_examples=200)
@given(
    # A coarse grid, so that many logits are equal.
    logits=st.lists(st.integers(-12, 12), min_size=12, max_size=12), params=rows_of_settings,
    seen=st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_filters_agree_with_sorting(logits, params, seen):
    logits, seen = np.array(logits) / 4, np.array(seen, np.uint8)
    expected, margin = oracle(logits, params, seen)
    assume(margin > 1e-6)
    actual = probabilities(logits[None], [params], seen[None])[0]
    assert np.array_equal(actual > 0, expected > 0)
    np.testing.assert_allclose(actual, expected, rtol=3e-6)


def test_processors_of_transformers():
    with np.load(pathlib.Path(__file__).parent / "data" / "sampling" / "transformers.npz") as file:
        data = dict(file)
    logits, processed = data["logits"].astype(np.float32), data["processed"]
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    params = [SamplingParams(**dict(zip(names, row))) for row in zip(*(data[name].tolist() for name in names))]
    seen = np.stack([seen_in_prompt(row, logits.shape[1]) for row in data["input_ids"]])
    actual = probabilities(logits, params, seen)
    assert np.array_equal(actual > 0, np.isfinite(processed))
    expected = np.exp(processed.astype(np.float64) - processed.max(axis=1, keepdims=True))
    np.testing.assert_allclose(actual, expected / expected.sum(axis=1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
def test_thresholds_are_exact_in_a_large_vocabulary(rounded):
    logits = np.random.default_rng(1).normal(scale=3, size=(4, 163_840)).astype(np.float32)
    if rounded:
        logits = np.asarray(jnp.asarray(logits, jnp.bfloat16), np.float32)
    params = [
        dataclasses.replace(PLAIN, top_k=1), dataclasses.replace(PLAIN, top_k=50_000),
        SamplingParams(top_p=0.95), SamplingParams(top_k=1000, top_p=0.3, temperature=0.8),
    ]
    actual = probabilities(logits, params, np.zeros(logits.shape, np.uint8))
    for row, settings_of_row in enumerate(params):
        kept, values = actual[row] > 0, logits[row].astype(np.float64)
        candidates = np.ones_like(kept)
        if settings_of_row.top_k:
            candidates = values >= np.sort(values)[-settings_of_row.top_k]
        if settings_of_row.top_p == 1:
            assert np.array_equal(kept, candidates)
            continue
        weights = np.where(candidates, np.exp((values - values.max()) / settings_of_row.temperature), 0)
        weights /= weights.sum()
        last = values[kept].min()
        assert np.array_equal(kept, candidates & (values >= last)), "the best, down to some logit"
        # Sums of so many float32 numbers are good to this.
        assert weights[kept].sum() >= settings_of_row.top_p - 1e-5
        assert weights[values > last].sum() < settings_of_row.top_p + 1e-5


def test_filters_of_one_row_leave_the_others_alone():
    params = [PLAIN, SamplingParams(), dataclasses.replace(PLAIN, top_k=1), dataclasses.replace(PLAIN, min_p=0.1)]
    kept = probabilities(np.tile([0, -30.0], (4, 1)), params, np.zeros((4, 2), np.uint8)) > 0
    assert kept.tolist() == [[True, True], [True, False], [True, False], [True, False]]


@pytest.mark.parametrize("start", [1.0, -1.0])
def test_neighbouring_numbers_are_told_apart(start):
    values = np.float32(start).view(np.int32) + np.arange(40, dtype=np.int32)
    logits = np.tile(values.view(np.float32), (40, 1))
    params = [dataclasses.replace(PLAIN, top_k=1 + row) for row in range(40)]
    kept = probabilities(logits, params, np.zeros(logits.shape, np.uint8)) > 0
    expected = np.argsort(np.argsort(-logits[0]))[None] < np.arange(1, 41)[:, None]
    assert np.array_equal(kept, expected)


@pytest.mark.parametrize("many", ["seeds", "positions"])
def test_draws_follow_the_probabilities(many):
    logits = np.random.default_rng(2).normal(scale=1.5, size=12)
    seen = np.array([0, 1, 2, 3] * 3, np.uint8)
    draws, numbers = 20_000, np.arange(20_000)
    for params in (
        PLAIN, SamplingParams(temperature=0.7, top_k=8, top_p=0.9, repetition_penalty=1.4, presence_penalty=0.5),
    ):
        expected, _ = oracle(logits, params, seen)
        tokens = draw(
            np.tile(logits, (draws, 1)), [params] * draws, seen=np.tile(seen, (draws, 1)),
            seeds=numbers if many == "seeds" else [7] * draws, positions=numbers * (many == "positions"),
        ).token_ids
        counts = np.bincount(tokens, minlength=12)
        possible = expected > 0
        assert counts[~possible].sum() == 0
        statistic = ((counts - draws * expected)[possible] ** 2 / (draws * expected[possible])).sum()
        assert 1e-3 < chi2.sf(statistic, possible.sum() - 1) < 1 - 1e-3


def threefry(key, counter) -> np.ndarray:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011), for a key of two words and counters [2, N]."""
    x0, x1 = (np.asarray(word, np.uint32) for word in counter)
    keys = [np.uint32(key[0]), np.uint32(key[1])]
    keys.append(keys[0] ^ keys[1] ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for turn in range(5):
        for shift in ((13, 15, 26, 6), (17, 29, 16, 24))[turn % 2]:
            x0 = x0 + x1
            x1 = x0 ^ (x1 << np.uint32(shift) | x1 >> np.uint32(32 - shift))
        x0 = x0 + keys[(turn + 1) % 3]
        x1 = x1 + keys[(turn + 2) % 3] + np.uint32(turn + 1)
    return np.stack([x0, x1])


def test_noise_is_what_the_paper_defines():
    known = (((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
             ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)))
    for key, counter, words in known:
        assert threefry(key, np.array(counter)[:, None])[:, 0].tolist() == list(words)
    rows, vocab = 16, 163_840
    batch = SamplingBatch.pack([PLAIN] * rows, [2**40 + 5] * rows)
    positions = np.arange(1_000_000, 1_000_000 + rows, dtype=np.int32)
    actual = np.asarray(_gumbel(jnp.asarray(batch.seed), jnp.asarray(positions), vocab)).ravel()
    high, low = threefry((2**8, 5), [np.repeat(positions, vocab), np.tile(np.arange(vocab), rows)])
    uniform = (high.astype(np.float64) + (low.astype(np.float64) + 0.5) * 2.0**-32) * 2.0**-32
    expected = -np.log(-np.log1p(-np.minimum(uniform, 1 - 2.0**-24)))
    assert high.min() < 5000, "the low word counts somewhere"
    # The words near their end are rounded, which only the small values feel.
    np.testing.assert_allclose(actual[expected > -2], expected[expected > -2], rtol=0, atol=2e-5)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.05)
    shorter = np.asarray(_gumbel(jnp.asarray(batch.seed), jnp.asarray(positions), 100))
    np.testing.assert_array_equal(shorter, actual.reshape(rows, vocab)[:, :100])


def mixed(rows: int) -> list[SamplingParams]:
    kinds = [
        SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=5, temperature=1.5), PLAIN,
        SamplingParams(repetition_penalty=1.2, presence_penalty=0.5), SamplingParams(min_p=0.1, top_p=0.9),
        SamplingParams(temperature=0, repetition_penalty=1.5),
    ]
    return [kinds[row % len(kinds)] for row in range(rows)]


def test_a_request_gets_the_same_token_alone_and_in_any_batch_and_row():
    random = np.random.default_rng(3)
    rows = 21
    logits = random.normal(scale=2, size=(rows, 640)).astype(np.float32)
    params, seeds = mixed(rows), random.integers(0, 2**63 - 1, rows).tolist()
    seen, positions = random.integers(0, 4, (rows, 640)).astype(np.uint8), random.integers(0, 10**6, rows)

    def tokens(which) -> dict[int, int]:
        chosen = draw(logits[which], [params[row] for row in which], seeds=[seeds[row] for row in which],
                      seen=seen[which], positions=positions[which])
        return dict(zip(which, chosen.token_ids.tolist()))

    together = tokens(list(range(rows)))
    assert tokens(random.permutation(rows).tolist()) == together
    for row in range(rows):
        assert tokens([row]) == {row: together[row]}
    assert len(set(together.values())) > rows // 2


def test_one_program_serves_all_settings():
    traces = []
    step = jax.jit(lambda *arguments: traces.append(1) or sample(*arguments))
    logits, seen, positions = np.zeros((7, 32), np.float32), np.zeros((7, 32), np.uint8), np.zeros(7, np.int32)
    for params in ([SamplingParams(temperature=0)] * 7, [SamplingParams()] * 7, mixed(7)):
        step(logits, SamplingBatch.pack(params, [2**62] * 7), seen, positions)
    assert len(traces) == 1


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_lowers_for_every_platform_and_sorts_nothing(platform):
    arguments = (np.zeros((7, 32), np.float32), SamplingBatch.pack(mixed(7), [1] * 7), np.zeros((7, 32), np.uint8),
                 np.zeros(7, np.int32))
    text = jitted.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" in text and "sort" not in text


@pytest.mark.parametrize("context", [
    lambda: jax.threefry_partitionable(False), lambda: jax.default_prng_impl("rbg"), lambda: jax.enable_x64(True),
], ids=["partitionable", "rbg", "x64"])
def test_settings_of_jax_change_nothing(context):
    logits = np.random.default_rng(4).normal(size=(14, 100))
    expected = draw(logits, mixed(14), num_logprobs=3)
    with context():
        actual = draw(logits, mixed(14), num_logprobs=3)
    for name, value, other in zip(Sample._fields, expected, actual):
        assert value.dtype == other.dtype, name
        np.testing.assert_array_equal(value, other)


def test_all_words_of_the_seed_and_the_position_count():
    logits = np.zeros((4, 5000))
    tokens = draw(logits, [PLAIN] * 4, seeds=[5, 5 + 2**32, 5 + 2**62, 5], positions=[0, 0, 0, 1]).token_ids
    assert len(set(tokens.tolist())) == 4


def test_greedy_takes_the_lowest_of_equals_after_the_penalties():
    logits, seen = np.array([[1, 3, 3, 2]] * 3), np.array([[0] * 4, [0, 1, 0, 0], [0, 2, 2, 0]], np.uint8)
    params = [SamplingParams(temperature=0), SamplingParams(temperature=0, repetition_penalty=2),
              SamplingParams(temperature=0, presence_penalty=1.5, top_k=1)]
    assert draw(logits, params, seen=seen).token_ids.tolist() == [1, 2, 3]
    assert not np.isnan(probabilities(logits, params, seen)).any()


def test_presence_counts_new_tokens_only_and_repetition_the_prompt_too():
    seen = np.stack([seen_in_prompt([0, 1, 1], 5), seen_in_prompt([4], 5)])
    seen = np.asarray(mark_generated(jnp.asarray(seen), jnp.array([1, -1])))
    assert seen.tolist() == [[IN_PROMPT, IN_PROMPT | GENERATED, 0, 0, 0], [0, 0, 0, 0, IN_PROMPT]]
    seen = np.asarray(mark_generated(jnp.asarray(seen), jnp.array([2, 2])))
    assert seen[:, 2].tolist() == [GENERATED, GENERATED]
    logits = np.array([[2.0, -2.0, 2.0, 2.0, 2.0]], np.float32)
    batch = SamplingBatch.pack([SamplingParams(repetition_penalty=2, presence_penalty=0.25)], [0])
    np.testing.assert_array_equal(penalise(logits, batch, seen[:1]), [[1, -4.25, 0.75, 2, 2]])


def test_log_probabilities_are_the_models_own():
    random = np.random.default_rng(5)
    logits = random.normal(scale=3, size=(7, 50)).astype(np.float32)
    seen = random.integers(0, 4, (7, 50)).astype(np.uint8)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    chosen = draw(logits, mixed(7), seen=seen, num_logprobs=4)
    np.testing.assert_allclose(chosen.logprobs, expected[np.arange(7), chosen.token_ids], atol=1e-5)
    assert np.array_equal(chosen.top_ids, np.argsort(-expected, axis=1)[:, :4])
    np.testing.assert_allclose(chosen.top_logprobs, -np.sort(-expected, axis=1)[:, :4], atol=1e-5)
    only = draw(logits, mixed(7), seen=seen, num_logprobs=0)
    assert only.top_ids.shape == only.top_logprobs.shape == (7, 0)
    np.testing.assert_array_equal(only.logprobs, chosen.logprobs)
    np.testing.assert_array_equal(only.token_ids, chosen.token_ids)
    assert draw(logits, mixed(7), seen=seen).logprobs is None


@pytest.mark.parametrize("params", [
    SamplingParams(), PLAIN, SamplingParams(top_k=10**9, top_p=1e-30), SamplingParams(temperature=1e-42),
    SamplingParams(temperature=3e38, min_p=1.0), SamplingParams(temperature=1e-60),
    SamplingParams(temperature=0, repetition_penalty=100), SamplingParams(repetition_penalty=0.01, presence_penalty=2),
], ids=str)
def test_extreme_logits_and_settings(params):
    """One possible token is always taken, however the others are impossible."""
    logits = np.full((4, 9), -np.inf)
    logits[0, 7] = 0
    logits[1, 7], logits[1, 2] = 3e38, -3e38
    logits[2, 7], logits[2, :7] = -1e-40, -80
    logits[3, 7] = -3e36
    if params.temperature > 1e30:
        logits[2, :7] = -np.inf  # at such a temperature -80 is as likely
    assert draw(logits, [params] * 4).token_ids.tolist() == [7] * 4


def test_both_zeros_are_equal():
    tokens = draw(np.tile([0.0, -0.0, -1.0], (64, 1)), [SamplingParams(top_k=1)] * 64).token_ids
    assert set(tokens.tolist()) == {0, 1}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_usable_logits_says_so_and_leaves_the_others_alone(bad, temperature):
    logits = np.zeros((3, 6))
    logits[1, 3 if bad != -np.inf else slice(None)] = bad
    good, wrong, other = draw(logits, [SamplingParams(temperature=temperature)] * 3, num_logprobs=2).token_ids
    assert wrong == -1 and good >= 0 and other >= 0


def test_the_model_in_a_batch_and_alone_gives_the_same_tokens():
    """Three requests decoded together, between unused rows, against each alone through `k3jax.generate`."""
    lm, steps = tiny_model("kimi-linear-tiny"), 8
    prompt = vectors("kimi-linear-tiny", "len200")["input_ids"]
    prompts = [prompt[:70].tolist(), prompt[100:113].tolist(), prompt[30:80].tolist()]
    params = [
        SamplingParams(seed=11), SamplingParams(seed=2**50, temperature=1.7, top_k=30, repetition_penalty=1.3),
        SamplingParams(seed=12, presence_penalty=1.0, temperature=0.8, min_p=0.01),
    ]
    alone = [
        k3jax.generate(lm, ids, settings_of_row, max_new_tokens=steps, ignore_eos=True, chunk=64).token_ids
        for ids, settings_of_row in zip(prompts, params)
    ]

    rows = [1, None, 0, 2, None]  # the request that each row holds
    apply = functools.partial(jax.jit(lm.model.apply), {"params": lm.params})
    lengths = [len(ids) for ids in prompts]
    first = apply(jnp.array(sum(prompts, []), jnp.int32), new_state(lm, slots=4, pages=50), prefill_batch(lengths))
    unused = SamplingParams(temperature=0, seed=0)
    row_params = [unused if number is None else params[number] for number in rows]
    seen = np.stack([seen_in_prompt([] if number is None else prompts[number], 512) for number in rows])
    logits = np.stack([first.logits[number or 0] for number in rows])
    slots = np.array([0 if number is None else number + 1 for number in rows])
    context = np.array([0 if number is None else lengths[number] for number in rows])
    state, together = first.state, []
    for _ in range(steps):
        seeds = [row.seed for row in row_params]
        tokens = draw(logits, row_params, seeds=seeds, seen=seen, positions=context).token_ids
        together.append(tokens)
        seen = np.asarray(mark_generated(jnp.asarray(seen), jnp.asarray(tokens)))
        output = apply(jnp.asarray(tokens), state, decode_batch(slots, context))
        logits, state, context = np.asarray(output.logits), output.state, context + (slots > 0)
    for row, number in enumerate(rows):
        if number is not None:
            assert tuple(np.array(together)[:, row].tolist()) == alone[number]
            assert len(set(alone[number])) > 1
