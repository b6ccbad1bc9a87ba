"""Engines for tests: tiny models, programs compiled once a process, an oracle, and the checks that end every test."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import itertools
import queue
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.sampling import SamplingParams
from serving.engine import engine as engine_module
from serving.engine.config import EngineConfig
from serving.engine.core import Core
from serving.engine.engine import Engine
from serving.engine.plan import Plan
from serving.engine.programs import Programs
from serving.engine.request import Accepted, Done, Request, Tokens
from tests.golden import new_state, prefill_batch, tiny_model

UNIT = 128
GREEDY = SamplingParams(temperature=0)
SETTINGS = {"max_batch": 4, "prefill_tokens": 128, "num_pages": 60, "context": 1024, "cache_bytes": 50_000_000}
SECONDS = 60.0
"""Most time of an event, and of a command."""
_numbers = itertools.count()


class CheckedCore(Core):
    """Recounts its books after every round: a leak is found where it happens.

    Attributes:
      before_round: called with (core, now).
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.before_round = lambda core, now: None

    def dispatch(self, now: float) -> None:
        self.before_round(self, now)
        super().dispatch(now)
        self.cache.check()
        owners = {slot: sequence for slot, sequence in enumerate(self.slots.sequences) if sequence}
        assert owners == {sequence.admission.slot: sequence for sequence in self.by_id.values() if sequence.admission}
        assert {sequence.admission for sequence in owners.values()} == self.cache.admissions.keys()
        for slot, sequence in owners.items():
            pages = sequence.admission.pages
            assert self.slots.pages[slot, : len(pages)].tolist() == pages
            assert not self.slots.decoding[slot] or self.slots.context[slot] <= len(pages) * UNIT
        rounds = {step.since for step in self._in_flight}
        assert len(rounds) <= 2, "more than two rounds are in flight"


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
        patch.setattr(engine_module, "Core", CheckedCore)
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

    def is_over(self) -> bool:
        """Whether all events were taken."""
        return self._queue.empty()

    def answer(self) -> Answer:
        """Waits for the end, and checks the order of events."""
        events = []
        while not events or not isinstance(events[-1], Done):
            events.append(self._queue.get(timeout=SECONDS))
        assert self.is_over() and [isinstance(event, Accepted) for event in events[:-1]].count(True) <= 1
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

    assert engine.ready.wait(SECONDS) and engine.state == "serving", engine.failure
    with engine._door:
        engine._command(command)
    return outcome.result(SECONDS)


@contextlib.contextmanager
def before_rounds(engine: Engine, action):
    """`action(core, now)` runs on the engine's thread before each round."""

    def install(action):
        return on_engine_thread(engine, lambda core: vars(core).update(before_round=action))

    install(action)
    try:
        yield
    finally:
        install(lambda core, now: None)


def gather(engine: Engine, *conditions):
    """An action for `before_rounds`: the first round begins when the first `condition(core)` holds, and so on."""
    left = list(conditions)

    def action(core, now):
        end = time.monotonic() + SECONDS
        while left and not left[0](core):
            assert time.monotonic() < end, "they did not come"
            time.sleep(0.001)
            engine._take_commands(now)
        del left[:1]

    return action


def is_there(core: Core, name: str) -> bool:
    """Whether a request that its client calls so has not ended."""
    return any(key.startswith(f"{name}#") for key in core.by_id)


class Wrapped:
    """Programs of which some are others; `change(programs)` returns {name: method}."""

    def __init__(self, programs, change):
        self._programs = programs
        self.__dict__.update(change(programs))

    def __getattr__(self, name):
        return getattr(self._programs, name)


@contextlib.contextmanager
def changed_programs(engine: Engine, change):
    """The engine runs other programs."""

    def install(core):
        whole, core._programs = core._programs, Wrapped(core._programs, change)
        return whole

    whole = on_engine_thread(engine, install)
    try:
        yield
    finally:
        on_engine_thread(engine, lambda core: vars(core).update(_programs=whole))


@jax.jit
def _filled(state, slots, pages, value):
    """The state with `value` in these slots and pages (masks), and the most misleading integers beside."""

    def fill(pool, mask, axis, value):
        return jnp.where(jnp.expand_dims(mask, [n for n in range(pool.ndim) if n != axis]), value, pool)

    model = state.model
    owned = slots.at[0].set(False)  # nobody ever gives a page to the dummy slot
    return state.replace(
        model=model.replace(
            kda_state=fill(model.kda_state, slots, 1, value), conv_tail=fill(model.conv_tail, slots, 1, value),
            mla_pages=fill(model.mla_pages, pages, 1, value),
        ),
        page_table=fill(state.page_table, owned, 0, pages.argmin()),
        seen=fill(state.seen, slots, 0, 255).astype(state.seen.dtype),
        last_token=fill(state.last_token, slots, 0, 511),
    )


def poison(core: Core, value: float) -> None:
    """Fills all slots and pages that nobody owns, the dummies too."""
    state, cache = core._state, core.cache
    slots, pages = np.zeros(state.last_token.shape, bool), np.zeros(state.model.mla_pages.shape[1], bool)
    slots[[0, *cache.slots.free]] = pages[[0, *cache.device.pool.free]] = True
    core._state = _filled(state, slots, pages, value)


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


def experts_tie(name: str, ids, margin: float = 1e-6) -> bool:
    """Whether somewhere the last expert that is chosen is ahead of the next one by so little that rounding decides."""
    lm, tokens = tiny_model(name), np.zeros(ORACLE_ROWS, np.int32)
    tokens[: len(ids)] = ids
    output = lm.model.apply(
        {"params": lm.params}, jnp.asarray(tokens), new_state(lm, slots=2, pages=66),
        prefill_batch([len(ids)], max_pages=64), jnp.zeros(1, jnp.int32), capture=True,
    )
    assert lm.config.num_expert_group == 1
    scores = np.asarray(output.intermediates["router_scores"] + lm.params["moe"]["router_bias"][:, None])
    best = -np.sort(-scores[:, : len(ids)], axis=-1)
    chosen = lm.config.num_experts_per_token
    return bool((best[..., chosen - 1] - best[..., chosen]).min() < margin)


def greedy_gap(name: str, ids, answer: Answer) -> float:
    """By how much a chosen token's logit misses the highest one after the tokens before it, at most."""
    logits = oracle(name, [*ids, *answer.ids], len(answer.ids))
    return float((logits.max(axis=1) - logits[np.arange(len(answer.ids)), answer.ids]).max())


def check_greedy(name: str, ids, answer: Answer, tolerance: float = 1e-3) -> None:
    """Each token is the most likely one; a tie within the tolerance may go either way."""
    assert answer.ids and greedy_gap(name, ids, answer) < tolerance
