"""`k3jax.generate`: seeds, penalties, where it stops and what it reports."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.sampling import SamplingParams
from k3jax.sampling.defaults import GenerationDefaults
from tests.golden import tiny_model, vectors

NEW = 40
GREEDY = SamplingParams(temperature=0)


@functools.cache
def demo():
    return k3jax.load("demo", dtype="float32")


def generate(sampling=None, *, lm=None, prompt="hello", max_new_tokens=NEW, ignore_eos=True, **options):
    return k3jax.generate(
        lm or demo(), prompt, sampling, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, **options
    )


def test_a_seed_gives_the_same_tokens_again_and_a_fresh_one_is_reported():
    first, other = generate(SamplingParams(seed=3)), generate(SamplingParams(seed=4))
    assert first.token_ids == generate(SamplingParams(seed=3)).token_ids != other.token_ids
    assert first.seed == 3 and first.finish_reason == "length" and first.stop_reason is None
    fresh = generate(SamplingParams())
    assert fresh.seed != generate(SamplingParams()).seed
    assert generate(SamplingParams(seed=fresh.seed)).token_ids == fresh.token_ids


def test_greedy_draws_nothing():
    greedy = generate(dataclasses.replace(GREEDY, seed=1))
    assert greedy.seed is None and greedy.token_ids == generate(GREEDY).token_ids
    assert generate(SamplingParams(top_k=1, seed=5)).token_ids == greedy.token_ids


def test_the_models_defaults_hold_where_nothing_else_is_said():
    lm = dataclasses.replace(demo(), defaults=GenerationDefaults(GREEDY, (generate(GREEDY).token_ids[4],)))
    result = generate(lm=lm, ignore_eos=False)
    assert result.seed is None and result.token_ids == generate(GREEDY).token_ids[:5]
    assert result.stop_reason == result.token_ids[-1] and result.finish_reason == "stop"
    assert generate(lm=lm, ignore_eos=True).finish_reason == "length"
    assert generate(SamplingParams(seed=0), lm=lm).seed == 0


def test_penalties_follow_the_prompt_and_the_new_tokens():
    prompt = list(range(60))
    plain = generate(GREEDY, prompt=prompt).token_ids
    assert min(plain) < 60 and len(set(plain)) < NEW
    present = generate(dataclasses.replace(GREEDY, presence_penalty=2), prompt=prompt).token_ids
    assert min(present) < 60 and len(set(present)) == NEW
    repeated = generate(dataclasses.replace(GREEDY, repetition_penalty=100), prompt=prompt).token_ids
    assert min(repeated) >= 60 and len(set(repeated)) == NEW


def test_stop_tokens_of_the_request():
    whole = generate(GREEDY)
    text_tokens = [number for number, token in enumerate(whole.token_ids) if token < 128]
    end = text_tokens[-1]
    for ignore_eos in (True, False):
        stopped = generate(dataclasses.replace(GREEDY, stop_token_ids=[whole.token_ids[end]]), ignore_eos=ignore_eos)
        assert stopped.token_ids == whole.token_ids[: end + 1]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", whole.token_ids[end])
        assert whole.text.startswith(stopped.text) and len(stopped.text) < len(whole.text)
        assert stopped.usage == {"prompt_tokens": 5, "completion_tokens": end + 1, "total_tokens": end + 6}


def test_stop_strings_end_the_text_and_the_generation():
    whole = generate(GREEDY)
    # Two neighbouring letters of the text, which two tokens or more have brought.
    start = next(n for n in range(3, len(whole.text)) if "\ufffd" not in whole.text[n : n + 2])
    stop, pieces = whole.text[start : start + 2], []
    result = generate(dataclasses.replace(GREEDY, stop=["never", stop]), on_text=pieces.append)
    assert result.text == "".join(pieces) == whole.text[: whole.text.index(stop)]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    assert result.token_ids == whole.token_ids[: len(result.token_ids)] and len(result.token_ids) < NEW
    assert result.usage["completion_tokens"] == len(result.token_ids)


def test_text_held_back_for_a_stop_string_comes_in_the_end():
    whole, pieces = generate(GREEDY), []
    result = generate(dataclasses.replace(GREEDY, stop=[whole.text[-1] + "!"]), on_text=pieces.append)
    assert result.text == "".join(pieces) == whole.text and result.finish_reason == "length"


def test_log_probabilities_of_the_golden_logits():
    lm, golden = tiny_model("kimi-linear-tiny"), vectors("kimi-linear-tiny", "decode")
    prompt, steps = golden["prompt_ids"].tolist(), 5
    sampling = SamplingParams(temperature=0, logprobs=3, repetition_penalty=1.0001)
    result = generate(sampling, lm=lm, prompt=prompt, max_new_tokens=steps)
    assert result.token_ids == tuple(golden["tokens"][:steps].tolist()) and result.text is None
    logits = golden["step_logits_fp64"][:steps].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert len(result.logprobs) == steps
    for token, own, row in zip(result.token_ids, result.logprobs, expected):
        assert own.logprob == pytest.approx(row[token], abs=2e-4)
        assert [token for token, _ in own.top] == np.argsort(-row)[:3].tolist()
        assert [logprob for _, logprob in own.top] == pytest.approx(np.sort(row)[:-4:-1], abs=2e-4)
    assert generate(GREEDY).logprobs is None


def test_a_model_that_gives_no_numbers_is_an_error():
    params = jax.tree.map(lambda leaf: leaf, demo().params)
    params["embeddings"]["lm_head"] = jnp.full_like(params["embeddings"]["lm_head"], jnp.nan)
    for sampling in (GREEDY, SamplingParams()):
        with pytest.raises(k3jax.UserError, match="the model gave no numbers for new token 1: its weights are damaged"):
            generate(sampling, lm=dataclasses.replace(demo(), params=params))


def test_settings_that_the_model_cannot_follow():
    with pytest.raises(k3jax.UserError, match="stop token id 512 is outside the vocabulary, 0..511"):
        generate(SamplingParams(stop_token_ids=[3, 512]))
    with pytest.raises(k3jax.UserError, match="has no tokenizer files .* not at strings"):
        generate(SamplingParams(stop=["x"]), lm=dataclasses.replace(demo(), tokenizer=None))


def test_progress_of_a_long_prompt(capsys, monkeypatch):
    monkeypatch.setattr("k3jax.progress.QUIET_SECONDS", 0)
    monkeypatch.setattr("k3jax.progress.LINE_SECONDS", 0)
    generate(GREEDY, prompt=[1] * 120, max_new_tokens=1, chunk=64, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("compiling")
    first, second, end = (line.split(",")[0] for line in lines if line.startswith("reading the prompt: "))
    assert first.endswith(" 64 tokens of 120 tokens") and second.endswith(" 120 tokens of 120 tokens")
    assert " 120 tokens in " in end
    generate(GREEDY, prompt=[1] * 120, max_new_tokens=1, chunk=64)
    assert capsys.readouterr().err == ""
