"""Deterministic mode: the bits of an answer depend on neither cache nor company, in bfloat16 too."""

import numpy as np
import pytest

from k3jax.sampling import SamplingParams
from tests.serving.engine_harness import Stream, ask, check_idle, expected_hit, prompt, start

MODEL = "k3-tiny"
COMPILED_IN = {"deterministic": True, "prefill_tokens": 256}


@pytest.fixture(scope="module")
def engines():
    """With and without a cache; the same programs."""
    both = [start(MODEL, dtype="bfloat16", compiled_in=COMPILED_IN, cache=cache) for cache in (True, False)]
    yield both
    for engine in both:
        check_idle(engine)
        engine.stop()


def conversations(rng) -> list[np.ndarray]:
    """Prompts that go on from, fork off and repeat one another; stops lie off the grid of prefill steps."""
    prompts = [prompt(int(length), seed=number) for number, length in enumerate(rng.integers(1, 500, 4))]
    for _ in range(12):
        base = prompts[rng.integers(len(prompts))]
        keep = base[: rng.integers(1, len(base) + 1)]
        prompts.append(np.concatenate([keep, prompt(int(rng.integers(0, 250)), seed=int(rng.integers(99)))])[:700])
    return prompts


def bits(answer) -> tuple:
    return answer.ids, answer.logprobs.tobytes()


@pytest.mark.parametrize("seed", range(3))
def test_bits_do_not_depend_on_cache_or_company(engines, seed):
    cached, uncached = engines
    cached.reset_cache()
    rng = np.random.default_rng(seed)
    prompts = conversations(rng)
    samplings = [
        SamplingParams(temperature=0, logprobs=0) if rng.random() < 0.5 else SamplingParams(seed=seed, logprobs=0)
        for _ in prompts
    ]
    alone = [bits(ask(uncached, ids, sampling=sampling, new=12)) for ids, sampling in zip(prompts, samplings)]
    hits = 0
    for _ in range(2):
        order = rng.permutation(len(prompts))
        streams = {n: Stream(cached, prompts[n], sampling=samplings[n], new=12) for n in order}
        for number, stream in streams.items():
            answer = stream.answer()
            hits += answer.cached
            assert bits(answer) == alone[number]
    assert hits > 1000


def test_a_hit_off_the_grid_is_bitwise_the_cold_answer(engines):
    cached, _ = engines
    for length in (200, 300, 420, 600):
        ids = prompt(length, seed=length)
        cold, warm = (ask(cached, ids, sampling=SamplingParams(seed=1, logprobs=0), new=40) for _ in range(2))
        assert (cold.cached, warm.cached) == (0, expected_hit(length))
        assert bits(warm) == bits(cold)
