"""The engine itself: its events, faults and ends. What it answers is tested through the server: `test_service_*.py`."""

import time

import numpy as np
import pytest

import k3jax
from k3jax.sampling import SamplingParams
from serving.engine.config import EngineConfig
from serving.engine.engine import Engine
from serving.engine.request import Accepted, NotServing, Tokens
from tests.golden import tiny_model
from tests.serving.engine_harness import (
    GREEDY,
    UNIT,
    Stream,
    Wrapped,
    ask,
    check_greedy,
    check_idle,
    on_engine_thread,
    oracle,
    prompt,
    start,
)

MODEL = "kimi-linear-tiny"
MIXED = (
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_k=40, min_p=0.02),
    SamplingParams(seed=3, repetition_penalty=1.3, presence_penalty=0.5, top_p=0.8),
    SamplingParams(temperature=0, repetition_penalty=2.0),
)


@pytest.fixture(scope="module")
def shared_engine():
    engine = start(MODEL)
    yield engine
    engine.stop()


@pytest.fixture
def engine(shared_engine):
    """Empty, and shared by most tests."""
    shared_engine.reset_cache()
    yield shared_engine
    check_idle(shared_engine)


@pytest.fixture
def own_engine():
    """Starts engines with settings of their own."""
    started = []

    def begin(**settings):
        started.append(start(MODEL, **settings))
        return started[-1]

    yield begin
    for engine in started:
        if engine.state == "serving":
            check_idle(engine)
        engine.stop()


def same(answer, expected):
    assert answer.ids == expected.ids and answer.done.finish_reason == expected.done.finish_reason == "length"


@pytest.mark.parametrize("sampling", MIXED)
def test_tokens_are_those_of_generate(engine, sampling):
    ids = prompt(150)
    expected = k3jax.generate(
        tiny_model(MODEL), ids.tolist(), sampling, max_new_tokens=20, ignore_eos=True, chunk=128
    ).token_ids
    for hit in (0, UNIT):
        answer = ask(engine, ids, sampling=sampling, new=20)
        assert answer.ids == list(expected) and answer.cached == hit


def test_mixed_settings_in_a_batch_change_nothing(engine):
    requests = [(prompt(100 + 50 * n, seed=n), sampling) for n, sampling in enumerate(MIXED * 2)]
    alone = [ask(engine, ids, sampling=sampling, new=30) for ids, sampling in requests]
    engine.reset_cache()
    together = [
        stream.answer() for stream in [Stream(engine, ids, sampling=sampling, new=30) for ids, sampling in requests]
    ]
    for one, other in zip(together, alone):
        same(one, other)


def test_log_probabilities_for_those_who_ask(engine):
    ids = prompt(40)
    streams = [
        Stream(engine, ids, sampling=SamplingParams(seed=1, temperature=0.5, logprobs=count)) for count in (None, 0, 3)
    ]
    plain, none, three = (stream.answer() for stream in streams)
    assert all(event.logprobs is None for event in plain.events if isinstance(event, Tokens))
    assert plain.ids == none.ids == three.ids
    logits = oracle(MODEL, [*ids, *three.ids], 6)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for answer, count in ((none, 0), (three, 3)):
        found = [event.logprobs[0] for event in answer.events if isinstance(event, Tokens)]
        assert [one.logprob for one in found] == pytest.approx(expected[range(6), three.ids], abs=2e-4)
        for one, row in zip(found, expected):
            assert [token for token, _ in one.top] == np.argsort(-row)[:count].tolist()
            assert [value for _, value in one.top] == pytest.approx(np.sort(row)[::-1][:count], abs=2e-4)


def test_stop_tokens(engine):
    whole = ask(engine, prompt(30), new=20)
    stop = whole.ids[7]
    end = whole.ids.index(stop) + 1
    stopped = ask(engine, prompt(30), new=20, stop_token_ids=frozenset({stop, 511, 510}))
    assert stopped.ids == whole.ids[:end]
    assert (stopped.done.finish_reason, stopped.done.stop_token) == ("stop", stop)
    assert ask(engine, prompt(30), new=1).ids == whole.ids[:1]


def test_nothing_comes_after_the_end(own_engine):
    """A stop token is seen when the next step runs already; what it computes is nobody's."""
    single = own_engine(slots=1)
    whole = ask(single, prompt(30), new=20)
    stream = Stream(single, prompt(30), new=500, stop_token_ids=frozenset({whole.ids[3]}))
    answer = stream.answer()
    ask(single, prompt(40))
    assert stream.is_over() and answer.done.finish_reason == "stop"


# Commands


@pytest.mark.parametrize("number", range(4))
def test_abort_from_the_sink_at_any_event(engine, number):
    def abort(count, event):
        if count == number:
            engine.abort("me")

    answer = ask(engine, prompt(300, seed=8), new=50, id="me", on_event=abort)
    assert answer.done.finish_reason == "abort" and len(answer.ids) <= number + 1


def test_a_sink_that_fails_harms_nobody_else(engine, caplog):
    def fail(count, event):
        if count == 2:
            raise OSError("the client is gone")

    failing = Stream(engine, prompt(64), new=200, on_event=fail)
    check_greedy(MODEL, prompt(90), ask(engine, prompt(90)))
    assert failing.answer().done.finish_reason == "abort" and "the client is gone" in caplog.text


def test_priorities_and_the_order_of_arrival(own_engine):
    single, order = own_engine(slots=1), []
    names = [("first", 0), ("low", -1), ("normal", 0), ("high", 5), ("normal too", 0)]
    streams = [
        Stream(single, prompt(400), id=name, priority=priority,
               on_event=lambda _, event, name=name: isinstance(event, Accepted) and order.append(name))
        for name, priority in names
    ]
    for stream in streams:
        stream.answer()
    assert order[-1] == "low" and order.index("normal") < order.index("normal too")
    assert order.index("high") <= 1 and set(order) == {name for name, _ in names}


def test_reset_while_busy(engine):
    ids = prompt(500, seed=12)
    expected = ask(engine, ids, salt="alone")
    for number in range(3):
        stream = Stream(engine, ids, on_event=lambda count, _, number=number: count == number and engine.reset_cache())
        same(stream.answer(), expected)
        # It published nothing after the reset, and what it had published before is gone.
        assert [ask(engine, ids).cached for _ in range(2)] == [0, 384]


# Bad requests and faults


def test_requests_that_can_never_run(engine):
    cases = [
        ([], {}, "the prompt is empty"),
        ([1, 512], {}, "token id 512 is outside the vocabulary, 0..511"),
        ([-1], {}, "token id -1 is outside the vocabulary"),
        ([1.5], {}, "token_ids are float64"),
        ([1], {"new": 0}, "max_new_tokens is 0, expected at least 1"),
        ([1], {"new": 10**12}, "beyond the context of 1024"),
        ([1], {"stop_token_ids": frozenset({512})}, "stop token id 512 is outside"),
        ([1], {"breakpoints": (2,)}, "breakpoint 2 does not lie in the prompt of 1 tokens"),
        ([1], {"sampling": SamplingParams(logprobs=6)}, "logprobs is 6, and this engine .* num_logprobs 5"),
    ]
    for ids, options, message in cases:
        with pytest.raises(k3jax.UserError, match=message):
            Stream(engine, ids, **options)
    stream = Stream(engine, prompt(100), id="twice", new=100)
    with pytest.raises(k3jax.UserError, match="request id 'twice' is in flight already"):
        Stream(engine, prompt(100), id="twice")
    stream.answer()
    ask(engine, prompt(100), id="twice")


def test_deadlines_in_the_queue_and_running(own_engine):
    small = own_engine(slots=1)
    now = time.monotonic()
    running = Stream(small, prompt(100), new=900, deadline=now + 0.5)
    queued = Stream(small, prompt(100, seed=1), new=900, deadline=now + 0.2)
    late = Stream(small, prompt(100, seed=2), deadline=now - 1)
    patient = Stream(small, prompt(100, seed=3), deadline=now + 60)
    for stream in (queued, late):
        answer = stream.answer()
        assert answer.done.finish_reason == "deadline" and len(answer.events) == 1
        assert answer.done.timings.prefill_s == answer.done.timings.decode_s == 0
    answer = running.answer()
    assert answer.done.finish_reason == "deadline" and 0 < len(answer.ids) < 900
    assert patient.answer().done.finish_reason == "length"


def break_decode(core):
    """The next decode step fails, and all after it."""

    def decode(state, rows):
        raise RuntimeError("the device is lost")

    core._programs = Wrapped(core._programs, lambda _: {"decode": decode})


def test_an_exception_costs_what_runs(own_engine):
    """Those who wait go on, with an empty cache."""
    broken = own_engine(slots=2)
    cold = ask(broken, prompt(100, seed=2))
    ask(broken, prompt(300))
    assert broken.stats().snapshots == 1
    on_engine_thread(broken, break_decode)
    running = [Stream(broken, prompt(100, seed=n)) for n in range(2)]
    waiting = Stream(broken, prompt(100, seed=2))
    for stream in running:
        done = stream.answer().done
        assert done.finish_reason == "error" and "RuntimeError: the device is lost" in done.message
    same(waiting.answer(), cold)
    stats = broken.stats()
    assert stats.state == "serving" and stats.restarts == 1 and stats.snapshots == 0
    assert [ask(broken, prompt(300)).cached for _ in range(2)] == [0, 256]


def test_a_second_exception_is_the_end(own_engine):
    broken = own_engine()
    for _ in range(2):
        on_engine_thread(broken, break_decode)
        assert ask(broken, prompt(100)).done.finish_reason == "error"
    broken._thread.join(5)
    assert broken.state == "failed" and isinstance(broken.failure, RuntimeError)
    with pytest.raises(NotServing, match="the engine is failed"):
        Stream(broken, prompt(5))


def test_drain_finishes_and_stop_aborts(own_engine):
    draining = own_engine()
    streams = [Stream(draining, prompt(300, seed=n), new=20) for n in range(6)]
    draining.drain(timeout=60)
    assert all(stream.answer().done.finish_reason == "length" for stream in streams)
    with pytest.raises(NotServing, match="draining"):
        Stream(draining, prompt(5))
    draining.stop()
    draining.stop()
    assert draining.state == "stopped"

    hasty = own_engine()
    streams = [Stream(hasty, prompt(300, seed=n), new=700) for n in range(6)]
    hasty.drain(timeout=0.1)
    assert all(stream.answer().done.finish_reason == "abort" for stream in streams)

    stopped = own_engine()
    streams = [Stream(stopped, prompt(300, seed=n), new=700) for n in range(6)]
    stopped.stop()
    assert all(stream.answer().done.finish_reason == "abort" for stream in streams)


def test_stopped_before_it_served():
    engine = Engine(tiny_model(MODEL), EngineConfig(max_batch=2, prefill_tokens=256))
    engine.start()
    with pytest.raises(NotServing, match="the engine is starting"):
        Stream(engine, prompt(5))
    engine.stop()
    assert engine.state == "stopped" and engine.stats().decode_steps == 0


def test_memory_is_planned():
    lm = tiny_model(MODEL)
    plan = Engine(lm, EngineConfig(max_batch=2, num_pages=7)).plan
    assert (plan.context, plan.max_pages, plan.num_pages, plan.num_slots) == (7 * UNIT, 7, 8, 3)
    plan = Engine(lm, EngineConfig(max_batch=2)).plan
    assert plan.context == 4096 and plan.num_pages == 1 + 2 * 2 * 32
    for settings, message in [
        ({"context": 1000, "num_pages": 3}, "context is 1000, but 3 pages hold 384 tokens; raise num_pages"),
        ({"cache_bytes": 1000}, "cache_bytes is 1000, expected at least 248832, a snapshot and a page"),
        ({"num_pages": 10**12}, "not enough memory for 16 slots and 1000000000000 pages"),
    ]:
        with pytest.raises(k3jax.UserError, match=message):
            Engine(lm, EngineConfig(**settings))
    for settings in ({"max_batch": 0}, {"prefill_tokens": 100}, {"num_logprobs": 21}, {"max_waiting": 0}):
        with pytest.raises(k3jax.UserError, match=f"{next(iter(settings))} is .*, expected"):
            EngineConfig(**settings)


def test_a_client_that_is_gone_when_it_is_accepted(own_engine):
    """It keeps nobody waiting."""
    single = own_engine(slots=1)

    def fail(count, event):
        raise OSError("the client is gone")

    streams = [Stream(single, prompt(20), on_event=fail if number < 3 else None) for number in range(4)]
    assert [stream.answer().done.finish_reason for stream in streams] == ["abort"] * 3 + ["length"]
