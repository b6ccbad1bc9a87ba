"""The engine: one thread that owns JAX, and the doors to it."""

import collections
import concurrent.futures
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Literal

from k3jax.errors import UserError
from k3jax.language_model import LanguageModel
from k3jax.prompt import check_sampling
from k3jax.sampling import fresh_seed
from serving.engine.checks import prompt_tokens
from serving.engine.config import EngineConfig
from serving.engine.core import Core
from serving.engine.keys import PrefixKeys
from serving.engine.plan import Plan
from serving.engine.programs import Cancelled, CompileCounter, Programs
from serving.engine.request import NotServing, QueueFull, Request
from serving.engine.sequence import Sequence, Sink
from serving.engine.stats import Counters, EngineStats
from serving.engine.steps import EngineState
from serving.prefix_cache import PrefixCache

State = Literal["starting", "serving", "draining", "failed", "stopped"]

_NAP = 1.0
"""Longest sleep, in seconds: the heart beats at least so often."""
_TWICE = 60.0
"""A second failure within so many seconds is final."""

logger = logging.getLogger(__name__)


class Engine:
    """Serves many requests at once with one model.

    >>> engine = Engine(lm, EngineConfig())
    >>> engine.start()
    >>> engine.ready.wait()
    >>> engine.submit(request, sink)  # sink(Accepted), sink(Tokens) ..., sink(Done)

    Attributes:
      ready: set while the engine takes requests, or has failed: nobody waits for ever.
      state: "starting", "serving", "draining", "failed" or "stopped".
      heartbeat: when the thread began its last round, on the clock of `time.monotonic`; once a second if nothing is up.
      failure: the exception that ended it, when the state is "failed".
    """

    def __init__(self, lm: LanguageModel, config: EngineConfig):
        """Plans memory; allocates and compiles nothing yet.

        Raises:
          UserError: the model and the settings do not fit each other, or memory is short.
        """
        self.lm, self.config = lm, config
        self.plan = Plan.of(lm, config)
        self.ready = threading.Event()
        self.state: State = "starting"
        self.heartbeat = time.monotonic()
        self.failure: BaseException | None = None
        self._keys = PrefixKeys(lm, config, self.plan.cache.unit)
        self._counters = Counters()
        self._compiles: CompileCounter | None = None
        self._core: Core | None = None
        self._arrivals = itertools.count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # Guards what follows and `state`; notified of commands, and when a drained engine has nothing left.
        self._door = threading.Condition()
        self._commands: collections.deque[Callable[[float], None]] = collections.deque()
        self._ids_at_door: set[str] = set()
        self._stopping = False

    # From any thread

    def start(self) -> None:
        """Starts the thread and returns at once; when all is compiled, `ready` is set and the state is "serving"."""
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """Takes a request; thread-safe.

        `sink` is called with the events on the engine's thread. It must be quick, must not wait, must not raise.

        Raises:
          UserError: the request can never run; says why.
          QueueFull: too many wait already.
          NotServing: the engine is not "serving".
        """
        self._require_serving()
        tokens = prompt_tokens(
            request, vocab_size=self.lm.config.vocab_size, context=self.plan.context,
            num_logprobs=self.config.num_logprobs,
        )
        check_sampling(self.lm.description, request.sampling)
        sequence = Sequence(
            request, sink, tokens=tokens, keys=self._keys.of(tokens, request.salt),
            seed=fresh_seed() if request.sampling.seed is None else request.sampling.seed,
            arrival=next(self._arrivals), now=time.monotonic(),
        )
        with self._door:
            self._require_serving()
            if request.id in self._ids_at_door or request.id in self._core.by_id:
                raise UserError(f"request id {request.id!r} is in flight already; give each request its own")
            if len(self._ids_at_door) + len(self._core.waiting) >= self.config.max_waiting:
                raise QueueFull(f"{self.config.max_waiting} requests are waiting already; try again later")
            self._ids_at_door.add(request.id)
            self._command(lambda now: self._enter(sequence))

    def abort(self, request_id: str) -> None:
        """Ends a request with `Done("abort")` before the next step; nothing happens when there is no such request."""
        with self._door:
            self._command(lambda now: self._core.abort(request_id, now))

    def reset_cache(self) -> concurrent.futures.Future[None]:
        """Forgets all prefixes before the next step; thread-safe. Running requests go on and publish nothing more.

        The result comes when that is done.
        """
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def reset(now: float) -> None:
            self._core.reset_cache(now)
            done.set_result(None)

        with self._door:
            if self.state in ("failed", "stopped"):  # there is nothing to forget
                done.set_result(None)
            else:
                self._command(reset)
        return done

    def drain(self, timeout: float) -> None:
        """Refuses new requests, waits for those in flight, at most `timeout` seconds, and aborts what is left."""
        with self._door:
            if self.state in ("starting", "serving"):
                self.state = "draining"
            self._command(lambda now: None)
            if not self._door.wait_for(self._is_empty, timeout):
                self._command(lambda now: self._core.abort_all(now))
                self._door.wait_for(self._is_empty)

    def stop(self) -> None:
        """Aborts what is in flight and ends the thread; more than once is once.

        While it starts, this waits for programs that are being compiled just now.
        """
        with self._door:
            self._stopping = True
            self._door.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def stats(self) -> EngineStats:
        """Where it stands; thread-safe."""
        core, cache_config = self._core, self.plan.cache
        cache = core.cache if core else PrefixCache(cache_config)
        tier = cache.device
        return EngineStats(
            state=self.state,
            running=core.num_running if core else 0,
            waiting=len(self._ids_at_door) + (len(core.waiting) if core else 0),
            context=self.plan.context,
            match_unit=cache_config.unit,
            pages=cache_config.num_pages - 1,
            free_pages=len(tier.pool.free),
            cached_pages=tier.pages.size,
            idle_pages=tier.pages.num_idle,
            page_bytes=cache_config.page_bytes,
            snapshot_bytes=cache_config.snapshot_bytes,
            snapshots=len(tier.residents),
            cache_bytes_used=tier.bytes_used,
            cache_bytes=tier.budget,
            policy=type(cache.policy).__name__,
            lost=core.lost if core else 0,
            compiles_total=self._compiles.total if self._compiles else 0,
            **vars(self._counters.copy()),
        )

    def _require_serving(self) -> None:
        if self.state != "serving":
            raise NotServing(f"the engine is {self.state}, not serving")

    def _command(self, command: Callable[[float], None]) -> None:
        """For the engine's thread, before its next step; call it with the door held."""
        self._commands.append(command)
        self._door.notify_all()

    def _is_empty(self) -> bool:
        """Whether nothing is in flight, or never will be again; call it with the door held."""
        if self.state in ("failed", "stopped") or not self._thread.is_alive():
            return True
        return self._core is not None and not self._core.by_id and not self._commands

    # On the engine's thread

    def _run(self) -> None:
        try:
            self._compiles = CompileCounter()
            state = self.plan.create_state(self.lm)
            programs = Programs(self.lm, self.config, state, lambda: self._stopping)
            state = programs.warm_up(state)
            self._serve_until_stopped(programs, state)
        except Cancelled:
            self._end("stopped", None)
        except Exception as error:
            logger.exception("the engine failed")
            self._end("failed", error)
        else:
            self._end("stopped", None)

    def _serve_until_stopped(self, programs: Programs, state: EngineState) -> None:
        """Serves; begins anew after an exception, once a minute at most."""
        waiting: list[Sequence] = []
        failed_at = -math.inf
        while True:
            self._core = Core(
                self.lm, self.config, self.plan, programs, self._keys, self._counters, state, waiting
            )
            state = None  # the core's alone: it is donated to the first step
            self._open()
            try:
                self._serve()
                return
            except Exception as error:
                if time.monotonic() - failed_at < _TWICE:
                    raise
                failed_at = time.monotonic()
                logger.exception("the engine begins anew")
                waiting = self._close(f"the engine failed: {type(error).__name__}: {error}")
            state = self.plan.create_state(self.lm)

    def _open(self) -> None:
        with self._door:
            self.heartbeat = time.monotonic()  # to compile may have taken minutes
            if self.state == "starting":
                self.state = "serving"
                self.ready.set()

    def _close(self, message: str) -> list[Sequence]:
        """Ends the requests that run; returns those that wait. The core is gone, and with it pools and cache."""
        with self._door:
            if self.state == "serving":
                self.state = "starting"
                self.ready.clear()
        core = self._core
        core.end_all("error", time.monotonic(), message, waiting=False)
        self._counters.restarts += 1
        return core.waiting

    def _serve(self) -> None:
        """Round after round."""
        core = self._core
        while True:
            self._wait_for_work()
            now = self.heartbeat = time.monotonic()
            if self._take_commands(now):
                return
            core.dispatch(now)
            while core.wait():
                # Before tokens are passed on: an abort that came meanwhile stops them.
                if self._take_commands(now := time.monotonic()):
                    return
                core.deliver(now)
            if not core.by_id:
                core.count_lost()
                with self._door:
                    self._door.notify_all()

    def _wait_for_work(self) -> None:
        with self._door:
            if self._commands or self._stopping or not self._core.idle:
                return
            deadline = self._core.next_deadline
            nap = _NAP if deadline is None else min(_NAP, deadline - time.monotonic())
            self._door.wait(max(nap, 0))

    def _take_commands(self, now: float) -> bool:
        """Does what other threads asked for; returns whether it is time to stop."""
        while True:
            with self._door:
                if self._stopping or not self._commands:
                    return self._stopping
                command = self._commands.popleft()
            command(now)

    def _enter(self, sequence: Sequence) -> None:
        self._core.submit(sequence)
        self._ids_at_door.discard(sequence.request.id)

    def _end(self, state: State, error: Exception | None) -> None:
        """The last thing that the thread does."""
        with self._door:
            self.state, self.failure = state, error
            commands, self._commands = self._commands, collections.deque()
            self.ready.set() if error else self.ready.clear()
            self._door.notify_all()
        if self._core:
            for command in commands:
                command(time.monotonic())
            self._core.end_all("error" if error else "abort", time.monotonic(), error and f"the engine failed: {error}")
