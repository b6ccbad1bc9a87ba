"""Deterministic mode, through the real server, in bfloat16: an answer's bits depend on neither cache nor company."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.client import Sampling
from tests.checkpoints import TINY
from tests.serving.engine_harness import before_rounds, check_idle, expected_hit, gather, on_engine_thread, prompt
from tests.serving.service import Call, Heard, ask, ask_all, serving
from tests.serving.test_service_hits import conversations

COMPILED_IN = {"deterministic": True, "prefill_tokens": 256}
DRAWN, GREEDY = Sampling(seed=1, logprobs=0), Sampling(temperature=0.0, logprobs=0)


@pytest.fixture(scope="module", params=TINY)
def running(request):
    """With and without a cache; the same programs."""
    options = {"dtype": "bfloat16", "compiled_in": COMPILED_IN}
    with serving(request.param, **options) as cached, serving(request.param, cache=False, **options) as uncached:
        yield cached, uncached


@pytest.fixture
def services(running):
    running[0].client.reset_cache()
    yield running
    for service in running:
        check_idle(service.engine)


def bits(answer: Heard) -> tuple:
    return answer.ids, answer.scores.tobytes()


@pytest.mark.parametrize("seed", range(3))
def test_bits_do_not_depend_on_cache_or_company(services, seed):
    """N3, N4: prompts that go on from, fork off and repeat one another; stops lie off the grid of prefill steps."""
    cached, uncached = services
    rng = np.random.default_rng(seed)
    prompts = conversations(rng)
    samplings = [GREEDY if rng.random() < 0.5 else DRAWN for _ in prompts]
    alone = [bits(ask(uncached, ids, sampling=sampling, new=12)) for ids, sampling in zip(prompts, samplings)]
    hits = 0
    for _ in range(2):
        order = rng.permutation(len(prompts))
        calls = {n: Call(cached, prompts[n], sampling=samplings[n], new=12) for n in order}
        for number, call in calls.items():
            answer = call.answer()
            hits += answer.cached
            assert bits(answer) == alone[number]
    assert hits > 1000


def test_a_hit_off_the_grid_is_bitwise_the_cold_answer(services):
    cached, _ = services
    for length in (200, 300, 420, 600):
        ids = prompt(length, seed=length)
        cold, warm = (ask(cached, ids, sampling=DRAWN, new=40) for _ in range(2))
        assert (cold.cached, warm.cached) == (0, expected_hit(length))
        assert bits(warm) == bits(cold)


def test_a_stop_that_only_a_warm_run_has_changes_no_bit(services):
    """N5, asc#16451: a junction, and more declared positions than a step can keep states."""
    cached, uncached = services
    shared = prompt(600, seed=1)
    prompts = [np.concatenate([shared[:cut], prompt(150, seed=n)]) for n, cut in enumerate((600, 450, 460, 390))]
    alone = [bits(ask(uncached, ids, new=12)) for ids in prompts]
    for declared, hits in (([], [0, 0, 384, 384]), (range(128, 600, 128), [0, 384, 384, 384])):
        cached.client.reset_cache()
        answers = [ask(cached, prompts[0], new=12, cache_breakpoints=declared)]
        answers += [ask(cached, ids, new=12) for ids in prompts[1:]]
        assert [answer.cached for answer in answers] == hits
        assert list(map(bits, answers)) == alone
    assert cached.client.cache_stats().junctions >= 1


def test_the_same_state_bit_for_bit_wherever_it_was_resumed(services):
    """N2: what is published at the end, after a hit at any boundary."""
    cached, _ = services
    ids = prompt(700, seed=2)
    expected = None
    for units in range(6):
        salt = str(units)
        if units:
            ask(cached, ids[: units * 128 + 1], new=1, cache_salt=salt)
        beside = Call(cached, prompt(100 + units, seed=units), new=3)
        assert ask(cached, ids, new=1, cache_salt=salt).cached == units * 128
        beside.answer()
        if units == 5:
            break  # nothing new was published: the prompt's last boundary is where it began
        key = cached.engine._keys.of(ids, salt)[4]
        snapshot = on_engine_thread(cached.engine, lambda core: core.cache.device.residents[key].snapshot)
        states = [np.asarray(array).tobytes() for array in jax.tree.leaves(snapshot)]
        expected = expected or states
        assert states == expected


def test_states_are_float32_whatever_the_activations_are(services):
    """N7."""

    def dtypes(core):
        kept = [resident.snapshot.kda_state.dtype for resident in core.cache.device.residents.values()]
        return {core._state.model.kda_state.dtype, *kept}

    ask(services[0], prompt(300))
    assert services[0].engine.lm.dtype == jnp.bfloat16
    assert on_engine_thread(services[0].engine, dtypes) == {jnp.dtype("float32")}


def test_whoever_runs_has_room_for_the_whole_answer(services):
    """A preempted request goes on from a prefill of its answer, which rounds otherwise: so nobody is preempted."""
    cached, uncached = services
    prompts = [prompt(100 + 20 * n, seed=n) for n in range(5)]
    alone = [bits(ask(uncached, ids, new=150)) for ids in prompts]
    with serving(cached.name, dtype="bfloat16", compiled_in=COMPILED_IN, pages=7) as small:
        with before_rounds(small.engine, gather(small.engine, lambda core: len(core.by_id) == 5)):
            answers = ask_all(small, prompts, new=150)
        assert list(map(bits, answers)) == alone
        assert small.engine.stats().preemptions == 0
