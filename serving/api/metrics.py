"""Prometheus metrics: the names that users of vLLM know with our prefix, and those of this cache."""

import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.api.backend import Backend
from serving.api.reply import Reply
from serving.api.status import Refusal
from serving.engine.request import Event, Tokens
from serving.engine.stats import EngineStats

PREFIX = "k3jax:"

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_TOKENS = tuple(4**power for power in range(11))


class Metrics:
    """What the service measures itself, and what the engine says when asked; labels never name a request or a salt.

    Attributes:
      registry: of this service only.
    """

    def __init__(self, backend: Backend):
        self.registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        self.time_to_first_token = histogram("time_to_first_token_seconds", "From the request to its first token.")
        self.inter_token_latency = histogram("inter_token_latency_seconds", "From a token to the next.")
        self.e2e_latency = histogram("e2e_request_latency_seconds", "From the request to its end.")
        self.queue_time = histogram("request_queue_time_seconds", "In the queue.")
        self.prefill_time = histogram("request_prefill_time_seconds", "From the queue to the first token.")
        self.decode_time = histogram("request_decode_time_seconds", "From the first token to the end.")
        self.inference_time = histogram("request_inference_time_seconds", "From the queue to the end.")
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.generation_tokens = histogram("request_generation_tokens", "New tokens of a request.", _TOKENS)
        self.success = counter("request_success", "Requests answered to their end.", "finished_reason")
        self.rejections = counter("admission_rejections", "Calls that ended with a status.", "code")
        self.cancelled = counter("cancelled", "Requests whose client went away.", "phase")
        registry.register(_EngineCollector(backend))

    def request(self, arrived: float) -> "RequestMetrics":
        """Measures a request that came at this time, on the clock of `time.monotonic`."""
        return RequestMetrics(self, arrived)

    def refused(self, refusal: Refusal) -> None:
        """A call ended with a status."""
        self.rejections.labels(refusal.code.name).inc()


class RequestMetrics:
    """Measures one request."""

    def __init__(self, metrics: Metrics, arrived: float):
        self._metrics, self._arrived = metrics, arrived
        self._last: float | None = None

    def received(self, events: Iterable[Event]) -> None:
        """Events that came together: now."""
        now, tokens = time.monotonic(), sum(len(event.ids) for event in events if isinstance(event, Tokens))
        if not tokens:
            return
        if self._last is None:
            self._metrics.time_to_first_token.observe(now - self._arrived)
            self._last, tokens = now, tokens - 1
        for _ in range(tokens):
            self._metrics.inter_token_latency.observe((now - self._last) / tokens)
        self._last = now

    def finished(self, reply: Reply, outcome: str) -> None:
        """The stream ended: "stop", "length" or "abort" with a Done, "cancelled", or with a status."""
        metrics = self._metrics
        metrics.e2e_latency.observe(time.monotonic() - self._arrived)
        if outcome == "cancelled":
            phase = "waiting" if not reply.accepted else "prefill" if self._last is None else "decode"
            metrics.cancelled.labels(phase).inc()
        elif outcome in ("stop", "length", "abort"):
            metrics.success.labels(outcome).inc()
            timings = reply.done.timings
            metrics.queue_time.observe(timings.queue_s)
            metrics.prefill_time.observe(timings.prefill_s)
            metrics.decode_time.observe(timings.decode_s)
            metrics.inference_time.observe(timings.prefill_s + timings.decode_s)
            metrics.prompt_tokens.observe(reply.done.usage.prompt_tokens)
            metrics.generation_tokens.observe(reply.delivered)


class _EngineCollector(Collector):
    """Asks the engine at each scrape."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def collect(self) -> Iterator[Metric]:
        yield _gauge("serving", "Whether requests are taken.", self._backend.serving)
        if self._backend.engine:
            yield from _gauges(self._backend.engine.stats())
            yield from _counters(self._backend.engine.stats())

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are not checked against others, as there may be no engine to ask yet."""
        return ()


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("num_requests_running", "Requests that have a slot.", stats.running)
    yield _gauge("num_requests_waiting", "Requests in the queue.", stats.waiting)
    used = stats.pages - stats.free_pages - stats.cached_pages
    yield _gauge("kv_cache_usage_perc", "Share of MLA pages that requests own, 0 to 1.", used / max(stats.pages, 1))
    yield _gauge("state_snapshots", "KDA states that are kept.", stats.snapshots, tier="device")
    yield _gauge("state_bytes", "Of these states.", stats.snapshots * stats.snapshot_bytes, tier="device")
    yield _gauge("cached_pages", "MLA pages of the cache.", stats.cached_pages)
    yield _gauge("cache_used_bytes", "Snapshots, and cached pages that no request is using.", stats.cache_bytes_used)
    yield _gauge("cache_budget_bytes", "Limit of that.", stats.cache_bytes)


def _counters(stats: EngineStats) -> Iterator[Metric]:
    cache = stats.cache
    yield _counter("prefix_cache_queries", "Prompt tokens looked up.", {(): cache.prompt_tokens})
    yield _counter("prefix_cache_hits", "Of these, taken from the cache.", {(): cache.hit_tokens})
    yield _counter("almost_hit_tokens", "Pages were cached, but no state.", {(): cache.almost_hit_tokens})
    yield _counter("junctions_created", "Forks of prompts that were found.", {(): cache.junctions})
    yield _counter("snapshot_publish", "States that entered the cache.", {(): cache.published})
    yield _counter("evictions", "States dropped from the cache.", dict(cache.evicted), "tier", "kind")
    yield _counter("prompt_tokens", "Of requests that ran.", {(): stats.prompt_tokens})
    yield _counter("computed_prompt_tokens", "Of these, not taken from the cache.", {(): stats.computed_tokens})
    yield _counter("generation_tokens", "New tokens.", {(): stats.generated_tokens})
    yield _counter("num_preemptions", "Requests that had to begin again.", {(): stats.preemptions})
    yield _counter("nan_logits", "Requests whose logits were no numbers.", {(): stats.nan_requests})
    yield _counter("restarts", "Times that the engine began anew.", {(): stats.restarts})
    yield _counter("compiles", "Programs compiled.", {(): stats.compiles_total})
    steps = {("prefill",): stats.prefill_steps, ("decode",): stats.decode_steps}
    yield _counter("steps", "Steps of the engine.", steps, "kind")


def _gauge(name: str, text: str, value: float, **labels: str) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, values: dict[tuple[str, ...], float], *labels: str) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
