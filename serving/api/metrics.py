"""Prometheus metrics: the names that users of vLLM know, with our prefix, and those of this cache."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client import Histogram as ServiceHistogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from serving.api.backend import Backend
from serving.api.status import Refusal
from serving.engine.config import EngineConfig
from serving.engine.stats import EngineStats
from serving.histogram import SECONDS, TOKENS, Histogram

PREFIX = "k3jax:"


class Metrics:
    """What the service measures itself, and what the engine says when asked; labels never name a request or a salt.

    Attributes:
      registry: of this service only.
    """

    def __init__(self, backend: Backend):
        self.registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: Sequence[float] = SECONDS) -> ServiceHistogram:
            return ServiceHistogram(PREFIX + name, text, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        self.time_to_first_token = histogram("time_to_first_token_seconds", "From the request to its first token.")
        self.inter_token_latency = histogram("inter_token_latency_seconds", "From a token to the next.")
        self.e2e_latency = histogram("e2e_request_latency_seconds", "From the request to its end, whatever that was.")
        self.queue_time = histogram("request_queue_time_seconds", "In the queue.")
        self.prefill_time = histogram("request_prefill_time_seconds", "From the queue to the first token.")
        self.decode_time = histogram("request_decode_time_seconds", "From the first token to the end.")
        self.inference_time = histogram("request_inference_time_seconds", "From the queue to the end.")
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.generation_tokens = histogram("request_generation_tokens", "New tokens of a request.", TOKENS)
        self.success = counter("request_success", "Requests answered to their end.", "finished_reason")
        self.rejections = counter("admission_rejections", "Requests refused before they were queued.", "code")
        self.cancelled = counter("cancelled", "Requests whose client went away.", "phase")
        self.call_errors = counter("call_errors", "Calls that ended with a status.", "method", "code")
        for counted, values in ((self.success, ("stop", "length", "abort")),
                                (self.cancelled, ("waiting", "prefill", "decode"))):
            for value in values:
                counted.labels(value)  # there from the start, as zeros
        ProcessCollector(registry=registry)
        registry.register(_EngineCollector(backend))

    def refused(self, method: str, refusal: Refusal) -> None:
        """A call ended with a status."""
        self.call_errors.labels(method, refusal.code.name).inc()


class _EngineCollector(Collector):
    """Asks the engine at each scrape."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def collect(self) -> Iterator[Metric]:
        engine = self._backend.engine
        yield _gauge("serving", "Whether requests are taken.", self._backend.serving)
        if engine:
            stats = engine.stats()
            yield _settings(stats, engine.config)
            yield from _gauges(stats)
            yield from _step_metrics(stats)
            yield from _cache_metrics(stats)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are not checked against others, as there may be no engine to ask yet."""
        return ()


def _settings(stats: EngineStats, config: EngineConfig) -> Metric:
    values = {
        "block_size": stats.match_unit, "num_gpu_blocks": stats.pages, "enable_prefix_caching": config.cache,
        "page_bytes": stats.page_bytes, "snapshot_bytes": stats.snapshot_bytes, "budget_bytes": stats.cache_bytes,
        "policy": stats.policy, "deterministic": config.deterministic,
    }
    return InfoMetricFamily(
        PREFIX + "cache_config", "Settings of the cache.", {name: str(value) for name, value in values.items()}
    )


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("num_requests_running", "Requests that have a slot.", stats.running)
    yield _gauge("num_requests_waiting", "Requests in the queue.", stats.waiting)
    used = stats.pages - stats.free_pages - stats.idle_pages
    yield _gauge("kv_cache_usage_perc", "Share of MLA pages that requests use, 0 to 1.", used / max(stats.pages, 1))
    yield _gauge("state_snapshots", "KDA states that are kept.", stats.snapshots, tier="device")
    yield _gauge("state_bytes", "Of these states.", stats.snapshots * stats.snapshot_bytes, tier="device")
    yield _gauge("cached_pages", "MLA pages of the cache.", stats.cached_pages)
    yield _gauge("cache_used_bytes", "Snapshots, and cached pages that no request is using.", stats.cache_bytes_used)
    yield _gauge("cache_budget_bytes", "Limit of that.", stats.cache_bytes)
    yield _gauge("slot_conservation_error", "Slots and pages lost by a fault of the engine: always 0.", stats.lost)


def _step_metrics(stats: EngineStats) -> Iterator[Metric]:
    yield _counter("prompt_tokens", "Of requests that ran.", stats.prompt_tokens)
    yield _counter("computed_prompt_tokens", "Of these, not taken from the cache.", stats.computed_tokens)
    yield _counter("generation_tokens", "New tokens.", stats.generated_tokens)
    yield _counter("num_preemptions", "Requests that had to begin again.", stats.preemptions)
    yield _counter("corrupted_requests", "Requests whose logits were no numbers.", stats.nan_requests)
    yield _counter("nan_logits", "The same, as a name of our own.", stats.nan_requests)
    yield _counter("restarts", "Times that the engine began anew after a failure.", stats.restarts)
    yield _counter("compiles", "Programs compiled: none once requests are taken.", stats.compiles_total)
    yield _histogram("iteration_tokens_total", "Tokens that a round of the engine computes.", stats.iteration_tokens)
    yield _histogram("step_seconds", "On the device and back.", stats.step_seconds, "kind")
    yield _histogram("restore_seconds", "To copy a state to a slot.", {"device": stats.restore_seconds}, "tier")


def _cache_metrics(stats: EngineStats) -> Iterator[Metric]:
    cache = stats.cache
    yield _counter("prefix_cache_queries", "Prompt tokens looked up.", cache.prompt_tokens)
    yield _counter("prefix_cache_hits", "Of these, taken from the cache.", cache.hit_tokens)
    yield _counter("state_cache_queries", "Prompts looked up; those of preempted requests again.", cache.admitted)
    yield _counter("state_cache_hits", "Of these, began from a state of the cache.", cache.hits)
    yield _counter("almost_hit_tokens", "Pages were cached, but no state.", cache.almost_hit_tokens)
    yield _counter("junctions_created", "Forks of prompts that were found.", cache.junctions)
    yield _counter("snapshot_publish", "States that entered the cache.", cache.published)
    yield _counter("snapshot_publish_aborted", "That came after a reset.", cache.refused_publications)
    yield _counter("evictions", "States dropped from the cache.", dict(cache.evicted), "tier", "kind")
    yield _histogram("kv_block_lifetime_seconds", "From publication to eviction of a state.", cache.lifetimes)
    yield _histogram("kv_block_idle_before_evict_seconds", "From its last use to eviction.", cache.idle_times)
    yield _histogram("kv_block_reuse_gap_seconds", "From a use of a state to the next.", cache.reuse_gaps)


def _gauge(name: str, text: str, value: float, **labels: str) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, values: float | dict[tuple[str, ...], float], *labels: str) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for key, value in values.items() if labels else [((), values)]:
        family.add_metric(key, value)
    return family


def _histogram(name: str, text: str, values: Histogram | dict[str, Histogram], *labels: str) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
    for key, value in values.items() if labels else [(None, values)]:
        buckets = zip(map(str, (*value.bounds, "+Inf")), itertools.accumulate(value.counts))
        family.add_metric([key] if labels else [], list(buckets), sum_value=value.sum)
    return family
