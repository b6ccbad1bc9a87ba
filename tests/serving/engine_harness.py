"""Engines for tests: tiny models, programs compiled once a process, an oracle, and the checks that end every test."""

import concurrent.futures
import copy
import dataclasses
import functools
import itertools
import queue

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.sampling import SamplingParams
from serving.engine import engine as engine_module
from serving.engine.config import EngineConfig
from serving.engine.engine import Engine
from serving.engine.plan import Plan
from serving.engine.programs import Programs
from serving.engine.request import Accepted, Done, Request, Tokens
from tests.golden import new_state, prefill_batch, tiny_model

UNIT = 128
GREEDY = SamplingParams(temperature=0)
SETTINGS = {"max_batch": 4, "prefill_tokens": 128, "num_pages": 60, "context": 1024, "cache_bytes": 50_000_000}
_numbers = itertools.count()


@functools.cache
def programs(name: str, dtype: str, **compiled_in) -> Programs:
    """Compiled once for each model and shape."""
    lm, config = tiny_model(name, dtype), EngineConfig(**SETTINGS | compiled_in)
    state = Plan.of(lm, config).create_state(lm)
    compiled = Programs(lm, config, state, lambda: False)
    compiled.warm_up(state)
    return compiled


def start(name: str, *, dtype: str = "float32", slots: int = 4, pages: int = 60, lm=None, compiled_in=None,
          **settings) -> Engine:
    """A running engine; of the pools, whose sizes are compiled in, it may use so many slots and pages.

    `compiled_in` are settings that its programs depend on, `settings` others.
    """
    lm, compiled_in = lm or tiny_model(name, dtype), compiled_in or {}
    engine = Engine(lm, EngineConfig(**SETTINGS | compiled_in | settings))
    cache = dataclasses.replace(engine.plan.cache, num_slots=slots + 1, num_pages=pages + 1)
    engine.plan = dataclasses.replace(engine.plan, cache=cache, context=min(1024, pages * UNIT))
    compiled = copy.copy(programs(name, dtype, **compiled_in))
    compiled.lm = lm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "Programs", lambda *_: compiled)
        engine.start()
        assert engine.ready.wait(60) and engine.state == "serving", engine.failure
    return engine


@dataclasses.dataclass
class Answer:
    """All events of a request."""

    events: list

    @property
    def cached(self) -> int:
        return self.events[0].cached_tokens

    @property
    def ids(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Tokens) for token in event.ids]

    @property
    def logprobs(self) -> np.ndarray:
        return np.array([one.logprob for event in self.events if isinstance(event, Tokens) for one in event.logprobs])

    @property
    def done(self) -> Done:
        return self.events[-1]


class Stream:
    """A request that was sent; `on_event` is called with (number, event) on the engine's thread."""

    def __init__(self, engine: Engine, ids, *, sampling=GREEDY, new=6, id=None, on_event=None, **fields):
        self.id = id or f"request {next(_numbers)}"
        self._queue, self._count = queue.Queue(), itertools.count()
        self._on_event = on_event
        engine.submit(
            Request(id=self.id, token_ids=ids, sampling=sampling, max_new_tokens=new, **fields), self._sink
        )

    def _sink(self, event) -> None:
        self._queue.put(event)
        if self._on_event:
            self._on_event(next(self._count), event)

    def answer(self) -> Answer:
        """Waits for the end, and checks the order of events."""
        events = []
        while not events or not isinstance(events[-1], Done):
            events.append(self._queue.get(timeout=60))
        assert self._queue.empty() and [isinstance(event, Accepted) for event in events[:-1]].count(True) <= 1
        assert len(events) == 1 or isinstance(events[0], Accepted)
        answer = Answer(events)
        assert answer.done.usage.completion_tokens == len(answer.ids)
        return answer


def ask(engine: Engine, ids, **options) -> Answer:
    """Sends a request and waits for its end."""
    return Stream(engine, ids, **options).answer()


def prompt(length: int, seed: int = 0) -> np.ndarray:
    """Random tokens; those of one seed begin alike."""
    return np.random.default_rng(seed).integers(0, 500, 2000)[:length].astype(np.int32)


def expected_hit(length: int) -> int:
    """Of a prompt that came before: up to its last token, in whole units."""
    return (length - 1) // UNIT * UNIT


def on_engine_thread(engine: Engine, function):
    """Runs `function(core)` between two steps; returns, or raises, what it does."""
    outcome: concurrent.futures.Future = concurrent.futures.Future()

    def command(now: float) -> None:
        try:
            outcome.set_result(function(engine._core))
        except BaseException as error:
            outcome.set_exception(error)

    with engine._door:
        engine._command(command)
    return outcome.result(60)


def check_idle(engine: Engine) -> None:
    """Nothing is in flight and nothing has leaked."""

    def check(core) -> None:
        assert not core.by_id and not core.waiting and not core._prefilling and core.num_running == 0
        assert not core.slots.decoding.any() and core.slots.sequences == [None] * len(core.slots.sequences)
        cache = core.cache
        cache.check()
        assert len(cache.device.pool.free) + cache.device.pages.size == cache.config.num_pages - 1
        assert cache.device.pages.num_locked == 0 and not cache.pending and not cache.admissions

    on_engine_thread(engine, check)


ORACLE_ROWS = 1024


@functools.cache
def _forward(name: str):
    return jax.jit(tiny_model(name).model.apply)


def oracle(name: str, ids, count: int) -> np.ndarray:
    """[count, V] logits before each of the last `count` tokens, from one call over all of them: no cache, no steps."""
    lm, tokens = tiny_model(name), np.zeros(ORACLE_ROWS, np.int32)
    tokens[: len(ids)] = ids
    rows = np.full(300, 0)
    rows[:count] = np.arange(len(ids) - count - 1, len(ids) - 1)
    output = _forward(name)(
        {"params": lm.params}, jnp.asarray(tokens), new_state(lm, slots=2, pages=66),
        prefill_batch([len(ids)], max_pages=64), jnp.asarray(rows),
    )
    return np.asarray(output.logits[:count], np.float64)


def greedy_gap(name: str, ids, answer: Answer) -> float:
    """By how much a chosen token's logit misses the highest one after the tokens before it, at most."""
    logits = oracle(name, [*ids, *answer.ids], len(answer.ids))
    return float((logits.max(axis=1) - logits[np.arange(len(answer.ids)), answer.ids]).max())


def check_greedy(name: str, ids, answer: Answer, tolerance: float = 1e-3) -> None:
    """Each token is the most likely one; a tie within the tolerance may go either way."""
    assert answer.ids and greedy_gap(name, ids, answer) < tolerance
