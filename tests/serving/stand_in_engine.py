"""An engine without a model, for what a real one does too seldom or too slowly; the same calls as `Engine`."""

import collections
import concurrent.futures
import threading
import time

from k3jax.generation import TokenLogprobs
from serving.engine.config import EngineConfig
from serving.engine.request import Accepted, Done, NotServing, QueueFull, Timings, Tokens, Usage
from serving.engine.stats import Counters, EngineStats


class StandInEngine:
    """Answers with a script of token ids, one a step and request, over and over.

    Args:
      script: the tokens.
      step_seconds: least time of a step.
    """

    def __init__(self, script=b"abc", step_seconds=0.0, **config):
        self.config = EngineConfig(**config)
        self.script, self.step_seconds = tuple(script), step_seconds
        self.ready, self.state, self.heartbeat, self.failure = threading.Event(), "starting", time.monotonic(), None
        self.requests, self.finished = {}, collections.Counter()
        self.paused = threading.Event()
        self.cpu_seconds, self.tokens = 0.0, 0
        self._lock, self._thread = threading.Lock(), threading.Thread(target=self._run, daemon=True)

    def start(self):
        self.state = "serving"
        self.ready.set()
        self._thread.start()

    def submit(self, request, sink):
        if self.state != "serving":
            raise NotServing(f"the engine is {self.state}")
        with self._lock:
            if len(self.requests) >= self.config.max_batch + self.config.max_waiting:
                raise QueueFull(f"{self.config.max_waiting} requests wait already")
            self.requests[request.id] = [request, sink, 0, "new"]

    def abort(self, request_id):
        with self._lock:
            if request_id in self.requests:
                self.requests[request_id][3] = "abort"

    def fail(self, message):
        """What an exception in a step does."""
        with self._lock:
            for entry in self.requests.values():
                entry[3] = message

    def drain(self, timeout):
        self.state = "draining"
        end = time.monotonic() + timeout
        while self.requests and time.monotonic() < end:
            time.sleep(0.005)
        for request_id in list(self.requests):
            self.abort(request_id)
        while self.requests:
            time.sleep(0.005)

    def stop(self):
        self.state = "stopped"
        self._thread.join()

    def reset_cache(self):
        self.finished["reset"] += 1
        done = concurrent.futures.Future()
        done.set_result(None)
        return done

    def stats(self):
        running = min(len(self.requests), self.config.max_batch)
        return EngineStats(
            state=self.state, running=running, waiting=len(self.requests) - running, context=1 << 20,
            match_unit=128, pages=8, free_pages=8, cached_pages=0, idle_pages=0, page_bytes=1, snapshot_bytes=1,
            snapshots=0, cache_bytes_used=0, cache_bytes=8, policy="None", lost=0, compiles_total=0,
            **vars(Counters(generated_tokens=self.tokens, finished=collections.Counter(self.finished))),
        )

    def _run(self):
        while self.state != "stopped":
            start = time.monotonic()
            self.heartbeat = start
            if not self.paused.is_set():
                with self._lock:
                    for request_id in list(self.requests)[: self.config.max_batch]:
                        if self._step(self.requests[request_id], start):
                            del self.requests[request_id]
            self.cpu_seconds = time.thread_time()
            time.sleep(max(self.step_seconds - (time.monotonic() - start), 0.0005))

    def _step(self, entry, now):
        request, sink, count, state = entry
        if state == "new":
            entry[3] = None
            sink(Accepted(0, len(request.token_ids)))
            return False
        message = None if state in (None, "abort") else state
        reason = "abort" if state == "abort" else "error" if message else None
        if reason is None and request.deadline is not None and now > request.deadline:
            reason = "deadline"
        token = None
        if reason is None:
            token = self.script[count % len(self.script)]
            top = tuple((token, -0.5) for _ in range(request.sampling.logprobs or 0))
            sink(Tokens((token,), None if request.sampling.logprobs is None else (TokenLogprobs(-0.5, top),)))
            entry[2] = count = count + 1
            self.tokens += 1
            reason = (
                "stop" if token in request.stop_token_ids else "length" if count >= request.max_new_tokens else None
            )
        if reason is None:
            return False
        self.finished[reason] += 1
        sink(Done(reason, token if reason == "stop" else None, Usage(len(request.token_ids), 0, count),
                  Timings(0.0, 0.0, 0.0), message))
        return True
