"""The engine gives everybody the answer of a cold run alone, whatever it shares, batches, aborts or preempts."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.sampling import SamplingParams
from serving.engine import core as core_module
from serving.engine.config import EngineConfig
from serving.engine.engine import Engine
from serving.engine.request import Accepted, NotServing, QueueFull, Tokens
from tests.golden import TINY, tiny_model
from tests.serving.engine_harness import (
    GREEDY,
    UNIT,
    Stream,
    ask,
    check_greedy,
    check_idle,
    expected_hit,
    on_engine_thread,
    oracle,
    prompt,
    start,
)

MODEL = "kimi-linear-tiny"
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 319, 320, 383, 384)
MIXED = (
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_k=40, min_p=0.02),
    SamplingParams(seed=3, repetition_penalty=1.3, presence_penalty=0.5, top_p=0.8),
    SamplingParams(temperature=0, repetition_penalty=2.0),
)


@pytest.fixture(scope="module")
def engines():
    running = {}

    def engine(name=MODEL):
        if name not in running:
            running[name] = start(name)
        return running[name]

    yield engine
    for engine in running.values():
        engine.stop()


@pytest.fixture
def engine(engines):
    """Empty, and shared by most tests."""
    engine = engines()
    engine.reset_cache()
    yield engine
    check_idle(engine)


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


@pytest.mark.parametrize("name", TINY)
def test_prompts_of_all_lengths_cold_and_warm(engines, name):
    """All at once, so that steps are packed; each with a prefix of its own."""
    engine = engines(name)
    engine.reset_cache()
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    cold = [stream.answer() for stream in [Stream(engine, ids) for ids in prompts]]
    warm = [stream.answer() for stream in [Stream(engine, ids) for ids in prompts]]
    for length, ids, first, second in zip(LENGTHS, prompts, cold, warm):
        check_greedy(name, ids, first)
        assert first.cached == 0 and second.cached == expected_hit(length), length
        assert second.done.usage.cached_tokens == second.cached and second.done.usage.prompt_tokens == length
        same(second, first)
    check_idle(engine)


@pytest.mark.slow
def test_every_length_up_to_three_units(engine):
    lengths = range(1, 3 * UNIT + 2)
    cold = [stream.answer() for stream in [Stream(engine, prompt(n, seed=n), new=3) for n in lengths]]
    warm = [ask(engine, prompt(n, seed=n), new=3) for n in lengths]
    for length, first, second in zip(lengths, cold, warm):
        if length % 16 == 5:
            check_greedy(MODEL, prompt(length, seed=length), first)
        # What is worth least may have gone: there is room for fewer snapshots than prompts.
        assert second.cached in (0, expected_hit(length))
        same(second, first)


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


# What prompts share


def test_twins_are_computed_once(engine):
    expected = ask(engine, prompt(300, seed=5), salt="alone")
    before = engine.stats().computed_tokens
    answers = [stream.answer() for stream in [Stream(engine, prompt(300, seed=5)) for _ in range(6)]]
    assert sorted(answer.cached for answer in answers) == [0] + [256] * 5
    assert engine.stats().computed_tokens - before == 300 + 5 * 44
    for answer in answers:
        same(answer, expected)


def test_the_third_prompt_hits_the_fork_of_the_first_two(engine):
    shared = prompt(256, seed=9)
    prompts = [np.concatenate([shared, prompt(200, seed=n)]) for n in range(3)]
    answers = [ask(engine, ids) for ids in prompts]
    assert [answer.cached for answer in answers] == [0, 0, 256]
    for ids, answer in zip(prompts, answers):
        check_greedy(MODEL, ids, answer)


def test_a_conversation_hits_the_end_of_its_last_prompt(engine):
    ids, lengths = prompt(140, seed=3), []
    for turn in range(4):
        answer = ask(engine, ids)
        check_greedy(MODEL, ids, answer)
        assert answer.cached == (expected_hit(lengths[-1]) if lengths else 0)
        lengths.append(len(ids))
        ids = np.concatenate([ids, answer.ids, prompt(90, seed=20 + turn)])


def test_declared_positions_and_salts(engine):
    shared = prompt(256, seed=4)
    first, second = (np.concatenate([shared, prompt(100, seed=n)]) for n in (1, 2))
    ask(engine, first, breakpoints=(200, 256), salt="one")
    assert ask(engine, second, salt="other").cached == 0
    assert ask(engine, second, salt="one").cached == 256


def test_one_token_off_hits_nothing(engine):
    ids = prompt(300, seed=6)
    expected = ask(engine, ids)
    changed = ids.copy()
    changed[0] += 1
    assert ask(engine, changed).cached == 0
    assert ask(engine, ids[1:]).cached == 0
    same(ask(engine, ids), expected)


def test_no_cache_no_hits(own_engine, engine):
    expected = ask(engine, prompt(300, seed=7))
    uncached = own_engine(cache=False)
    for _ in range(2):
        answer = ask(uncached, prompt(300, seed=7))
        same(answer, expected)
        assert answer.cached == 0 and uncached.stats().snapshots == 0


# Aborts


@pytest.mark.parametrize("round_number", range(9))
def test_abort_in_any_round_and_resend_at_once(engine, round_number):
    """A prompt of four chunks: the queue, each chunk, and some tokens."""
    ids = prompt(500, seed=30 + round_number)
    expected = ask(engine, ids, salt="alone")
    rounds = []

    def install(core):
        dispatch = core.dispatch

        def counting(now):
            if len(rounds) == round_number and "victim" in core.by_id:
                engine.abort("victim")
            if rounds or "victim" in core.by_id:
                rounds.append(now)
            dispatch(now)

        core.dispatch = counting

    on_engine_thread(engine, install)
    aborted = Stream(engine, ids, id="victim")
    neighbour = Stream(engine, prompt(200, seed=50))
    answer = aborted.answer()
    again = Stream(engine, ids, id="victim")
    assert answer.done.finish_reason == "abort" and len(answer.ids) < 6
    again = again.answer()
    same(again, expected)
    # The third chunk, which this round dispatches, ends with the prompt's last complete unit.
    assert again.cached == (384 if round_number >= 2 else 0)
    check_greedy(MODEL, prompt(200, seed=50), neighbour.answer())
    on_engine_thread(engine, lambda core: core.__dict__.pop("dispatch"))


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


# Short pools


def test_pools_of_one_slot_and_few_pages(own_engine, engine):
    small = own_engine(slots=1, pages=3)
    prompts = [prompt(length, seed=length) for length in (129, 300, 30, 257, 129)]
    streams = [Stream(small, ids) for ids in prompts]
    for ids, stream in zip(prompts, streams):
        same(stream.answer(), ask(engine, ids))
    with pytest.raises(k3jax.UserError, match="380 prompt tokens and 6 new ones are 386, beyond the context of 384"):
        ask(small, prompt(380))


def test_preemption_continues_with_the_same_tokens(own_engine, engine, monkeypatch):
    monkeypatch.setattr(core_module, "_ROOM", 1)
    requests = [(prompt(100 + 20 * n, seed=n), sampling) for n, sampling in enumerate(MIXED)]
    expected = [ask(engine, ids, sampling=sampling, new=200) for ids, sampling in requests]
    small = own_engine(pages=6)
    streams = [Stream(small, ids, sampling=sampling, new=200) for ids, sampling in requests]
    for stream, whole in zip(streams, expected):
        same(stream.answer(), whole)
    assert small.stats().preemptions >= 2


@pytest.mark.parametrize("sampling", MIXED[3:])
def test_preemption_in_any_round(engine, sampling):
    ids = prompt(300, seed=11)
    expected = ask(engine, ids, sampling=sampling, salt="alone", new=8)
    for round_number in range(1, 11):
        rounds = []

        def install(core, round_number=round_number, rounds=rounds):
            dispatch = core.dispatch

            def preempting(now):
                rounds.append(now)
                running = next(filter(None, core.slots.sequences), None)
                if len(rounds) > round_number and running and len(rounds) < 100:
                    rounds.extend([now] * 100)
                    while core._in_flight:
                        core.deliver(now)
                    if not running.done:
                        core._preempt(running, now)
                        core._may_admit = True
                dispatch(now)

            core.dispatch = preempting

        before = engine.stats().preemptions
        on_engine_thread(engine, install)
        same(ask(engine, ids, sampling=sampling, salt=str(round_number), new=8), expected)
        on_engine_thread(engine, lambda core: core.__dict__.pop("dispatch"))
        assert engine.stats().preemptions == before + 1


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


@pytest.mark.parametrize("value", [np.nan, 1e30])
def test_nobody_reads_what_was_in_slots_and_pages(engine, value):
    expected = [ask(engine, prompt(length, seed=length)) for length in (5, 128, 300)]
    engine.reset_cache()

    def poison(core):
        core._state = core._state.replace(
            model=jax.tree.map(lambda pool: jnp.full_like(pool, value), core._state.model)
        )

    on_engine_thread(engine, poison)
    streams = [Stream(engine, prompt(length, seed=length)) for length in (5, 128, 300)]
    for stream, one in zip(streams, expected):
        same(stream.answer(), one)
    same(ask(engine, prompt(300, seed=300)), expected[2])


def test_reset_while_busy(engine):
    ids = prompt(500, seed=12)
    expected = ask(engine, ids, salt="alone")
    for number in range(3):
        stream = Stream(engine, ids, on_event=lambda count, _, number=number: count == number and engine.reset_cache())
        same(stream.answer(), expected)
    engine.reset_cache()
    assert ask(engine, ids).cached == 0


def test_published_states_never_change(engine):
    def sums(core):
        return {
            key: [float(np.abs(np.asarray(array)).sum()) for array in jax.tree.leaves(resident.snapshot)]
            for key, resident in core.cache.device.residents.items()
        }

    kept = {}
    shared = prompt(384, seed=13)
    ask(engine, shared)
    ask(engine, prompt(257, seed=14))
    on_engine_thread(engine, lambda core: kept.update(sums(core)))
    assert len(kept) == 2 and all(value > 0 for values in kept.values() for value in values)
    compiled, steps = engine.stats().compiles_total, engine.stats().decode_steps
    streams = [Stream(engine, np.concatenate([shared, prompt(1 + n, seed=n)]), new=120) for n in range(8)]
    for stream in streams:
        stream.answer()
    after = {}
    on_engine_thread(engine, lambda core: after.update(sums(core)))
    assert {key: after[key] for key in kept} == kept
    stats = engine.stats()
    assert stats.decode_steps - steps >= 200 and stats.compiles_total == compiled


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


def test_the_queue_is_bounded(own_engine):
    small = own_engine(slots=1, max_waiting=2)
    began = threading.Event()
    streams = [Stream(small, prompt(400), new=500, on_event=lambda *_: began.set())]
    began.wait(10)
    with pytest.raises(QueueFull, match="2 requests are waiting already; try again later"):
        for _ in range(5):
            streams.append(Stream(small, prompt(400, seed=len(streams)), new=100))
    assert len(streams) == 3
    for stream in streams:
        assert stream.answer().done.finish_reason == "length"


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


def test_no_numbers_end_that_request_only(own_engine, engine):
    lm = tiny_model(MODEL)
    embeddings = {**lm.params["embeddings"]}
    embeddings["embed_tokens"] = embeddings["embed_tokens"].at[505].set(jnp.nan)
    sick = own_engine(lm=dataclasses.replace(lm, params=lm.params | {"embeddings": embeddings}))
    healthy = [prompt(60, seed=1), prompt(200, seed=2)]
    streams = [Stream(sick, ids, new=30) for ids in (healthy[0], [*prompt(40), 505, 3], healthy[1])]
    first, second, third = (stream.answer() for stream in streams)
    assert second.done.finish_reason == "error" and "gave no numbers" in second.done.message and not second.ids
    same(first, ask(engine, healthy[0], new=30))
    same(third, ask(engine, healthy[1], new=30))
    assert sick.stats().nan_requests == 1


def test_an_exception_costs_what_runs_and_a_second_one_the_engine(own_engine, engine, caplog):
    broken = own_engine(slots=2)
    ask(broken, prompt(300))
    assert broken.stats().snapshots == 1

    def break_decode(core):
        core._programs = _Broken(core._programs)

    on_engine_thread(broken, break_decode)
    running = [Stream(broken, prompt(100, seed=n)) for n in range(2)]
    waiting = Stream(broken, prompt(100, seed=2))
    for stream in running:
        done = stream.answer().done
        assert done.finish_reason == "error" and "RuntimeError: the device is lost" in done.message
    same(waiting.answer(), ask(engine, prompt(100, seed=2)))
    stats = broken.stats()
    assert stats.state == "serving" and stats.restarts == 1 and stats.snapshots == 0
    check_idle(broken)
    on_engine_thread(broken, break_decode)
    assert ask(broken, prompt(100)).done.finish_reason == "error"
    broken._thread.join(10)
    assert broken.state == "failed" and isinstance(broken.failure, RuntimeError)
    with pytest.raises(NotServing, match="the engine is failed"):
        Stream(broken, prompt(5))


class _Broken:
    """Programs whose decode steps fail."""

    def __init__(self, programs):
        self._programs = programs

    def __getattr__(self, name):
        return getattr(self._programs, name)

    def decode(self, state, rows):
        raise RuntimeError("the device is lost")


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


def test_a_client_that_is_gone_when_it_is_accepted_keeps_nobody_waiting(own_engine, caplog):
    single = own_engine(slots=1)

    def fail(count, event):
        raise OSError("the client is gone")

    streams = [Stream(single, prompt(20), on_event=fail if number < 3 else None) for number in range(4)]
    assert streams[-1].answer().done.finish_reason == "length" and "the client is gone" in caplog.text
