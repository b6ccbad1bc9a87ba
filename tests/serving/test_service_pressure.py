"""Through the real server, on both tiny checkpoints: interrupted or short of room, an answer is still the cold one."""

import dataclasses
import threading
import time

import grpc
import jax.numpy as jnp
import pytest

from serving.client import Delta, RequestError, Sampling
from serving.engine import core as core_module
from tests.checkpoints import TINY
from tests.golden import tiny_model
from tests.serving import engine_harness
from tests.serving.engine_harness import (
    UNIT,
    before_rounds,
    check_idle,
    expected_hit,
    gather,
    is_there,
    on_engine_thread,
    prompt,
)
from tests.serving.service import GREEDY, Call, ask, ask_all, check_greedy, check_same, serving, wait_for

MIXED = (
    GREEDY,
    Sampling(seed=1, logprobs=0),
    Sampling(seed=3, repetition_penalty=1.3, presence_penalty=0.5, top_p=0.8, logprobs=0),
    Sampling(temperature=0.0, repetition_penalty=2.0, logprobs=0),
    Sampling(seed=2, temperature=0.7, top_k=40, min_p=0.02, logprobs=0),
)
REPEATING = Sampling(temperature=0.0, presence_penalty=-2.0, logprobs=0)
"""What was generated is generated again, so that it matters that nobody forgets it."""


@pytest.fixture(scope="module", params=TINY)
def running(request):
    with serving(request.param) as service:
        yield service


@pytest.fixture
def service(running):
    """With an empty cache."""
    running.client.reset_cache()
    yield running
    check_idle(running.engine)


# Clients that go away


class Gate:
    """Lets a request run so many rounds; then the engine waits until it has been taken away."""

    def __init__(self, engine, name, rounds):
        self._engine, self._name, self._left = engine, name, rounds
        self.reached = threading.Event()

    def __call__(self, core, now):
        if self.reached.is_set() or not is_there(core, self._name):
            return
        self._left -= 1
        if self._left < 0:
            self.reached.set()
            end = time.monotonic() + engine_harness.SECONDS
            while is_there(core, self._name) and time.monotonic() < end:
                self._engine._take_commands(now)
                time.sleep(0.001)


@pytest.mark.parametrize("cached", [0, 256])
@pytest.mark.parametrize("rounds", range(9))
def test_cancel_in_any_phase_and_resend_at_once(service, rounds, cached):
    """vllm#56525, #46283: in the queue, with or without a state restored, after each chunk, and after some tokens."""
    ids, other = prompt(700, seed=30), prompt(200, seed=50)
    cold = ask(service, ids, new=8, cache_salt="alone")
    if cached:
        ask(service, ids[: cached + 1], new=1)
    gate = Gate(service.engine, "victim", rounds)
    with before_rounds(service.engine, gate):
        victim = Call(service, ids, new=50, request_id="victim")
        beside = Call(service, other)
        assert gate.reached.wait(engine_harness.SECONDS)
        victim.cancel()
        again = Call(service, ids, new=8)
        answer = again.answer()
    # What a round had dispatched when the client went counts: the fifth unit is the prompt's last complete one.
    assert answer.cached == (640 if cached + rounds * UNIT >= 640 else cached)
    check_same(service, ids, answer, cold)
    check_greedy(service, other, beside.answer())


def test_a_slot_is_free_within_two_steps(service):
    """atom#1562: of the moment when the engine hears of it, however long the answer was to be."""
    engine, steps = service.engine, []
    abort = engine.abort

    def heard(request_id):
        steps.append(engine.stats().decode_steps)
        abort(request_id)

    engine.abort = heard
    call = Call(service, prompt(100), new=900)
    call.hear(), call.hear()
    call.cancel()
    wait_for(lambda: steps and not engine.stats().running)
    del engine.abort
    assert engine.stats().decode_steps - steps[0] <= 2


# Preemption


def preempt_in_round(number, hits):
    """Whoever runs has to make room once, before the round of this number; `hits` gets what it begins from again."""
    rounds = []

    def action(core, now):
        running = next(filter(None, core.slots.sequences), None)
        if running is None:
            return
        rounds.append(now)
        if len(rounds) == number:
            while core._in_flight:
                core.deliver(now)
            if not running.done:
                core._preempt(running, now)
                core._may_admit = True
        elif len(rounds) == number + 1:
            hits.append(running.admission.hit_tokens)

    return action


@pytest.mark.parametrize("sampling", [GREEDY, REPEATING, *MIXED[2:4]])
def test_preemption_before_any_step(service, sampling):
    """I13: three chunks and twelve tokens; it goes on from what it had published, with the same tokens."""
    ids = prompt(300, seed=13)
    cold = ask(service, ids, sampling=sampling, cache_salt="alone", new=12)
    for number in range(1, 14):
        hits, before = [], service.engine.stats().preemptions
        with before_rounds(service.engine, preempt_in_round(number, hits)):
            answer = ask(service, ids, sampling=sampling, cache_salt=str(number), new=12)
        assert service.engine.stats().preemptions == before + 1
        assert hits == [256 if number >= 2 else 0] and answer.cached == 0
        check_same(service, ids, answer, cold)


def test_preemption_for_want_of_pages(service):
    """Five answers that grow at once and do not fit together; asc#16315: with no more ado than pages are asked for."""
    requests = [(prompt(100 + 20 * n, seed=n), sampling) for n, sampling in enumerate(MIXED)]
    alone = [ask(service, ids, sampling=sampling, new=200) for ids, sampling in requests]
    with serving(service.name, pages=6) as small, pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_module, "_ROOM", 1)
        calls = [Call(small, ids, sampling=sampling, new=200) for ids, sampling in requests]
        for (ids, _), call, cold in zip(requests, calls, alone):
            check_same(service, ids, call.answer(), cold)
        assert 2 <= small.engine.stats().preemptions <= 10


# Short pools


@pytest.mark.parametrize("pools, lengths", [
    ({"slots": 1, "pages": 1}, (1, 60, 122, 60)),
    ({"slots": 1, "pages": 3}, (129, 300, 30, 257, 129, 300)),
    ({"slots": 4, "pages": 3}, (129, 300, 30, 257, 129, 300)),
])
def test_pools_of_one(service, pools, lengths):
    """trt#13179: those who find no room wait. Who comes again at once hits what is there, if it was not needed."""
    prompts = [prompt(length, seed=length) for length in lengths]
    cold = [ask(service, ids, cache_salt=str(n)) for n, ids in enumerate(prompts)]
    with serving(service.name, **pools) as small:
        for ids, answer, expected in zip(prompts, ask_all(small, prompts), cold):
            check_same(service, ids, answer, expected)
        for ids, expected in zip(prompts, cold):
            small.client.reset_cache()
            ask(small, ids)
            answer = ask(small, ids)
            assert answer.cached == expected_hit(len(ids))
            check_same(service, ids, answer, expected)
        over = pools["pages"] * UNIT - 5
        with pytest.raises(RequestError, match=f"{over} prompt tokens and 6 new ones are {over + 6}, beyond the"):
            ask(small, prompt(over))


def test_room_for_one_snapshot(service):
    """Prompts take turns with the one place: who finds its state there hits it, who does not computes."""
    stats = service.client.cache_stats()
    room = stats.snapshot_bytes + 3 * stats.page_bytes
    prompts = [prompt(300, seed=1), prompt(390, seed=2)]
    cold = [ask(service, ids) for ids in prompts]
    with serving(service.name, cache_bytes=room) as small:
        for ids, expected in zip(prompts * 3, cold * 3):
            first, second = ask(small, ids), ask(small, ids)
            for answer in (first, second):
                assert answer.cached in (0, expected_hit(len(ids)))
                check_same(service, ids, answer, expected)
            assert small.client.cache_stats().snapshots == 1
        small.client.reset_cache()
        assert [ask(small, prompts[0]).cached for _ in range(2)] == [0, 256]


def test_a_thousand_refusals_take_nothing(service):
    """sgl#16067: there are slots, but no pages; every round tries again, and the books balance after each."""
    ids = prompt(100, seed=3)
    with serving(service.name, pages=4) as small:

        def insist(core, now):
            for _ in range(20):
                core._may_admit = True
                core._admit(now)

        with before_rounds(small.engine, insist):
            first = Call(small, ids, new=256)
            second = Call(small, prompt(300, seed=4), new=60)
            check_greedy(service, ids, first.answer())
            assert second.answer().done.finish_reason == "length"
        stats = small.engine.stats()
        assert stats.cache.refused_attempts >= 1000 and stats.cache.admitted == 2


# Priorities


def test_nobody_waits_for_a_twin_of_lower_priority(service):
    """The low one has begun, and the others would pass it: its twin, the first of all, computes by itself."""
    shared = prompt(900, seed=5)
    with serving(service.name, slots=3) as small:
        gathered = gather(small.engine, lambda core: is_there(core, "low"), lambda core: len(core.by_id) == 8)
        left = []  # requests when the high one is gone, round by round

        def watch(core, now):
            gathered(core, now)
            if len(core.by_id) == 8 or left:
                left.append(8 if is_there(core, "high") else len(core.by_id))

        with before_rounds(small.engine, watch):
            low = Call(small, shared, priority=-1, request_id="low")
            low.hear()  # it has computed a chunk
            others = [Call(small, prompt(900, seed=60 + n), new=1) for n in range(6)]
            answer = Call(small, shared, priority=1, request_id="high").answer()
            wait_for(lambda: left[-1] < 8)
        # It was the first to end. The low one had not published anything: its one stop is the prompt's end.
        assert next(number for number in left if number < 8) == 7
        assert answer.cached == 0
        check_greedy(service, shared, answer)
        for call in others:
            call.answer()
        check_same(service, shared, low.answer(), answer)


# Faults


def test_no_numbers_end_that_request_only(service):
    lm = tiny_model(service.name)
    embeddings = {**lm.params["embeddings"]}
    embeddings["embed_tokens"] = embeddings["embed_tokens"].at[505].set(jnp.nan)
    healthy = [prompt(60, seed=1), prompt(200, seed=2)]
    sick_lm = dataclasses.replace(lm, params=lm.params | {"embeddings": embeddings})
    with serving(service.name, lm=sick_lm) as sick:
        calls = [Call(sick, ids, new=30) for ids in (healthy[0], [*prompt(140), 505, 3], healthy[1])]
        with pytest.raises(RequestError, match="the model gave no numbers") as caught:
            calls[1].answer()
        assert caught.value.code is grpc.StatusCode.INTERNAL
        for ids, call in zip(healthy, (calls[0], calls[2])):
            check_greedy(service, ids, call.answer())
        # Its beginning was sound, but nobody can know that.
        assert [ask(sick, prompt(150)).cached for _ in range(2)] == [0, 128]
        check_greedy(service, prompt(150), ask(sick, prompt(150)))
        assert sick.engine.stats().nan_requests == 1


def test_a_state_that_went_wrong_is_not_handed_on(service):
    """What a request has published since is dropped with it; what others have published stays."""
    ids, other = prompt(300, seed=21), prompt(300, seed=22)
    cold = ask(service, ids, cache_salt="alone")
    ask(service, other)
    hurt = []

    def hurt_once(core, now):
        if not hurt and is_there(core, "victim") and core._prefilling and core._prefilling[0].computed == 128:
            hurt.append(core._prefilling[0].admission.slot)
            model = core._state.model
            states = model.kda_state.at[:, hurt[0]].set(jnp.nan)
            core._state = core._state.replace(model=model.replace(kda_state=states))

    with before_rounds(service.engine, hurt_once):
        victim = Call(service, ids, request_id="victim")
        with pytest.raises(RequestError, match="the model gave no numbers"):
            victim.answer()
    again = ask(service, ids)
    assert again.cached == 0 and ask(service, other).cached == 256
    check_same(service, ids, again, cold)


def test_queue_full_and_deadlines(service):
    with serving(service.name, slots=1, max_waiting=1) as small:
        first = Call(small, prompt(100), new=900)
        first.hear()
        expired = Call(small, prompt(100, seed=1), timeout=0.3)
        wait_for(lambda: small.engine.stats().waiting == 1)
        with pytest.raises(RequestError, match="1 requests are waiting already; try again later") as caught:
            ask(small, prompt(100, seed=2))
        assert (caught.value.code, caught.value.retry_after) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 1.0)
        with pytest.raises(RequestError) as caught:
            expired.answer()
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_for(lambda: small.engine.stats().waiting == 0)
        first.cancel()
        running = Call(small, prompt(100, seed=3), new=900, timeout=0.2)
        with pytest.raises(RequestError) as caught:
            running.answer()
        tokens = [token for event in running.events if isinstance(event, Delta) for token in event.token_ids]
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED and 0 < len(tokens) < 900
        check_greedy(service, prompt(60), ask(small, prompt(60)))


def test_requests_that_have_ended_are_forgotten_though_their_deadline_is_far(service):
    for _ in range(5):
        ask_all(service, [[1, 2, 3]] * 40, new=1, timeout=3600)
    assert on_engine_thread(service.engine, lambda core: len(core._deadlines)) < 150
