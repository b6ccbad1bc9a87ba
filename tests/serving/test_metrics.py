"""Metrics over HTTP, as Prometheus sees them, against what clients were told; and the lines in the log."""

import contextlib
import http.client
import json
import logging
import math
import pathlib
import re
import time
import urllib.request

import jax
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serving.api import metrics
from serving.client import Accepted, Client, Delta, Done, RequestError, Sampling
from serving.engine.engine import Engine
from serving.engine.stats import Counters
from serving.histogram import SECONDS, Histogram
from serving.prefix_cache import LeastRecentlyUsed
from serving.server.command import _introduce
from serving.server.logs import JsonLines
from tests.checkpoints import tiny_checkpoint
from tests.serving import engine_harness
from tests.serving.api_server import running_server
from tests.serving.stand_in_engine import StandInEngine

MODEL = "kimi-linear-tiny"
GREEDY = Sampling(temperature=0.0)
DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "service.md"

# Of vLLM, by which dashboards know them.
KNOWN = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries",
    "prefix_cache_hits", "prompt_tokens", "generation_tokens", "num_preemptions", "request_success",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total",
    "cache_config_info", "kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds",
    "kv_block_reuse_gap_seconds", "corrupted_requests", "admission_rejections",
)


class Scrape:
    """Everything that the endpoint says."""

    def __init__(self, server):
        url = f"http://{server.metrics_address}/metrics"
        self.text = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url).read().decode()
        self.families = {family.name: family for family in text_string_to_metric_families(self.text)}
        self.samples = {
            (sample.name.removeprefix("k3jax:"), *sorted(sample.labels.items())): sample.value
            for family in self.families.values() for sample in family.samples
        }

    def __getitem__(self, key):
        return self.samples[(key,) if isinstance(key, str) else key]

    def change(self, before: "Scrape", *key) -> float:
        return self.samples[key] - before.samples.get(key, 0)

    def monotone(self) -> dict:
        """Samples that never fall."""
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in self.families.values() if family.type in ("counter", "histogram")
            for sample in family.samples if not sample.name.endswith("_created")
        }


@contextlib.contextmanager
def serving(name=MODEL, **options):
    """A server with a real engine, and a client of it."""
    engine = engine_harness.start(name, **options)
    with running_server(engine, str(tiny_checkpoint(name)), dtype="float32", metrics_port=0) as server:
        with Client(server.address) as client:
            client.wait_until_ready(10)
            yield server, client, engine


@pytest.fixture(scope="module")
def service():
    with serving() as service:
        yield service


class Asked:
    """An answer, and the seconds that a client saw."""

    def __init__(self, client, prompt, new, **options):
        start = time.monotonic()
        self.first = None
        for event in client.generate(prompt, max_new_tokens=new, ignore_eos=True, sampling=GREEDY, **options):
            if isinstance(event, Delta) and self.first is None:
                self.first = time.monotonic() - start
            if isinstance(event, Accepted):
                self.accepted = event
            if isinstance(event, Done):
                self.usage, self.timings, self.done = event.usage, event.timings, event
        self.seconds = time.monotonic() - start


def until_idle(client):
    end = time.monotonic() + 20
    while (stats := client.cache_stats()).running + stats.waiting:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_values_are_what_the_client_was_told(service):
    server, client, _ = service
    client.reset_cache()
    before, start = Scrape(server), time.monotonic()
    shared = engine_harness.prompt(300, seed=1).tolist()
    answers = []
    for number, new in enumerate((5, 8, 1, 3)):
        time.sleep(0.1)
        answers.append(Asked(client, shared + [number], new))
    uses = time.monotonic() - start
    answers += [Asked(client, engine_harness.prompt(length, seed=9), 4) for length in (1, 128, 200)]
    after, elapsed = Scrape(server), time.monotonic() - start

    def change(*key):
        return after.change(before, *key)

    def total(value):
        return sum(map(value, answers))

    prompts, cached = total(lambda one: one.usage.prompt_tokens), total(lambda one: one.usage.cached_tokens)
    new, hits = total(lambda one: one.usage.completion_tokens), total(lambda one: one.usage.cached_tokens > 0)
    assert (prompts, cached, new, hits) == (4 * 301 + 1 + 128 + 200, 3 * 256 + 0, 29, 3)

    count = len(answers)
    assert change("request_success_total", ("finished_reason", "length")) == count
    assert change("prompt_tokens_total") == change("prefix_cache_queries_total") == prompts
    assert change("request_prompt_tokens_sum") == prompts and change("request_prompt_tokens_count") == count
    assert change("prefix_cache_hits_total") == cached
    assert change("computed_prompt_tokens_total") == prompts - cached
    assert change("generation_tokens_total") == change("request_generation_tokens_sum") == new
    assert (change("state_cache_queries_total"), change("state_cache_hits_total")) == (count, hits)
    assert change("kv_block_reuse_gap_seconds_count") == hits
    assert 3 * 0.1 <= change("kv_block_reuse_gap_seconds_sum") <= uses  # they follow one another
    # A prompt's last step gives the first token, every other one takes a decode step's row.
    assert change("iteration_tokens_total_sum") == prompts - cached + new - count

    for name, field in (("queue", "queue_s"), ("prefill", "prefill_s"), ("decode", "decode_s")):
        told = total(lambda one, field=field: getattr(one.timings, field))
        assert change(f"request_{name}_time_seconds_sum") == pytest.approx(told, abs=1e-6)
        assert change(f"request_{name}_time_seconds_count") == count
    inference = total(lambda one: one.timings.prefill_s + one.timings.decode_s)
    assert change("request_inference_time_seconds_sum") == pytest.approx(inference, abs=1e-6)
    first, seconds = total(lambda one: one.first), total(lambda one: one.seconds)
    assert total(lambda one: one.timings.queue_s + one.timings.prefill_s) <= change("time_to_first_token_seconds_sum")
    assert change("time_to_first_token_seconds_sum") <= first and change("time_to_first_token_seconds_count") == count
    assert inference <= change("e2e_request_latency_seconds_sum") <= seconds
    assert change("inter_token_latency_seconds_count") == new - count
    assert change("inter_token_latency_seconds_sum") <= seconds

    steps = {kind: change("step_seconds_count", ("kind", kind)) for kind in ("prefill", "decode")}
    assert steps["decode"] == new - count and steps["prefill"] >= count
    assert change("restore_seconds_count", ("tier", "device")) == hits
    # One after the other: they cannot take longer than everything together.
    device = sum(change("step_seconds_sum", ("kind", kind)) for kind in steps)
    device += change("restore_seconds_sum", ("tier", "device"))
    assert 0 < device < elapsed

    stats = client.cache_stats()
    assert (after["num_requests_running"], after["num_requests_waiting"], after["kv_cache_usage_perc"]) == (0, 0, 0)
    assert after["state_snapshots", ("tier", "device")] == stats.snapshots
    assert after["slot_conservation_error"] == 0 and after["serving"] == 1
    (info,) = after.families["k3jax:cache_config_info"].samples
    assert info.labels == {
        "block_size": "128", "num_gpu_blocks": str(stats.pages), "enable_prefix_caching": "True",
        "page_bytes": str(stats.page_bytes), "snapshot_bytes": str(stats.snapshot_bytes),
        "budget_bytes": str(stats.budget_bytes), "policy": "LearnedReuse", "deterministic": "False",
    }


def test_sizes_are_those_of_the_arrays(service):
    _, client, engine = service
    Asked(client, engine_harness.prompt(300, seed=2), 1)

    def sizes(core):
        snapshots = {
            sum(array.nbytes for array in jax.tree.leaves(resident.snapshot))
            for resident in core.cache.device.residents.values()
        }
        pages = core._state.model.mla_pages
        return snapshots, pages.nbytes // pages.shape[1]

    stats = client.cache_stats()
    assert engine_harness.on_engine_thread(engine, sizes) == ({stats.snapshot_bytes}, stats.page_bytes)


def test_every_name_is_there_and_explained(service):
    scrape, text = Scrape(service[0]), DOCUMENT.read_text()
    names = {name.removeprefix("k3jax:") for name in scrape.families if name.startswith("k3jax:")}
    assert set(KNOWN) <= names
    rows = {name for line in text.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)", line)}
    assert {name for name in names if name not in rows and f"{name}_total" not in rows} == set()
    assert any(name.startswith("process_") for name in scrape.families)


def test_histograms_are_well_formed(service):
    scrape = Scrape(service[0])
    families = [family for family in scrape.families.values() if family.type == "histogram"]
    assert len(families) >= 15
    for family in families:
        series = {}
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
                series.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
        for labels, buckets in series.items():
            bounds, counts = zip(*buckets)
            assert list(bounds) == sorted(bounds) and bounds[-1] == math.inf and list(counts) == sorted(counts)
            assert counts[-1] == scrape.samples[(family.name.removeprefix("k3jax:") + "_count", *labels)]


def test_a_histogram_counts_as_prometheus_does():
    values = [*np.random.default_rng(0).lognormal(-3, 3, 500).tolist(), *SECONDS, 0.0]
    histogram = Histogram(SECONDS)
    for value in values:
        histogram.add(value)

    class Collector:
        def collect(self):
            yield metrics._histogram("x", "Of a test.", histogram.copy())

    registry = CollectorRegistry()
    registry.register(Collector())
    (family,) = text_string_to_metric_families(generate_latest(registry).decode())
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            assert sample.value == sum(value <= float(sample.labels["le"]) for value in values)
        elif sample.name.endswith("_sum"):
            assert sample.value == pytest.approx(math.fsum(values))
        else:
            assert sample.value == len(values)


def test_a_copy_does_not_change():
    counters = Counters()
    copy = counters.copy()
    counters.cache.lifetimes.add(1.0)
    counters.cache.evicted["device", "junction"] += 1
    counters.iteration_tokens.add(5)
    counters.step_seconds["decode"].add(0.1)
    counters.restore_seconds.add(0.1)
    counters.finished["stop"] += 1
    assert copy.finished == {} == copy.cache.evicted
    histograms = (copy.cache.lifetimes, copy.iteration_tokens, copy.step_seconds["decode"], copy.restore_seconds)
    assert [sum(histogram.counts) for histogram in histograms] == [0] * 4


def test_evictions(service):
    stats = service[1].cache_stats()
    with serving(cache_bytes=2 * (stats.snapshot_bytes + stats.page_bytes)) as (server, client, _):
        prompts = [engine_harness.prompt(129, seed=seed) for seed in range(20, 25)]
        for number, prompt in enumerate(prompts):
            Asked(client, prompt, 1)
            assert client.cache_stats().snapshots == min(number + 1, 2)
            time.sleep(0.02)
        scrape = Scrape(server)
        assert scrape["evictions_total", ("kind", "prompt end"), ("tier", "device")] == 3
        assert scrape["snapshot_publish_total"] == 5 and scrape["state_snapshots", ("tier", "device")] == 2
        lives, idle = (
            [scrape[f"kv_block_{name}_seconds_{kind}"] for kind in ("count", "sum")]
            for name in ("lifetime", "idle_before_evict")
        )
        assert lives[0] == idle[0] == 3 and 3 * 0.02 <= idle[1] <= lives[1] < 60


def test_no_label_names_a_request_or_a_salt(service):
    server, client, _ = service
    Asked(client, [1, 2, 3], 2, request_id="name-of-a-request", cache_salt="secret-salt")
    text = Scrape(server).text
    assert "name-of-a-request" not in text and "secret-salt" not in text


def test_refusals_and_cancellations(service):
    server, client, _ = service
    before = Scrape(server)
    for prompt in ([-1], []):
        with pytest.raises(RequestError):
            Asked(client, prompt, 1)
    with pytest.raises(RequestError):
        client.detokenize([1])
    with pytest.raises(Exception, match="not a valid protobuf"):
        list(client._channel.unary_stream("/k3jax.v1.Decoder/Generate")(b"\xff"))
    stream = client.generate([1, 2], max_new_tokens=900, ignore_eos=True)
    next(stream), next(stream)
    stream.close()
    with pytest.raises(RequestError):
        Asked(client, [1, 2], 900, timeout=0.05)
    end, wrong = time.monotonic() + 10, ("code", "INVALID_ARGUMENT")
    while (after := Scrape(server)).change(before, "e2e_request_latency_seconds_count") < 2:
        assert time.monotonic() < end
    assert after.change(before, "admission_rejections_total", wrong) == 2
    assert after.change(before, "call_errors_total", wrong, ("method", "Generate")) == 3
    assert after.change(before, "call_errors_total", wrong, ("method", "Detokenize")) == 1
    assert after.change(before, "cancelled_total", ("phase", "decode")) == 1
    assert after.change(before, "call_errors_total", ("code", "DEADLINE_EXCEEDED"), ("method", "Generate")) == 1
    assert after.change(before, "e2e_request_latency_seconds_count") == 2
    until_idle(client)
    assert after.change(before, "request_prompt_tokens_count") == 0


def test_pages_in_use(service):
    server, client, _ = service
    prompt = engine_harness.prompt(257, seed=3)
    Asked(client, prompt, 1)
    stream = client.generate(prompt, max_new_tokens=700, ignore_eos=True)
    next(stream), next(stream)
    usage = Scrape(server)["kv_cache_usage_perc"]
    stream.close()
    # 513 tokens at least, in 5 pages, of which it shares two with the cache; at most all that it may ever have.
    assert 5 / 60 <= usage + 1e-9 and usage <= 8 / 60 + 1e-9
    until_idle(client)
    assert Scrape(server)["kv_cache_usage_perc"] == 0


def test_what_is_lost_is_reported(caplog):
    with serving() as (server, client, engine):
        def lose_a_page(core):
            core.cache.check = lambda: None  # which would stop the engine here
            core.cache.device.pool.free.pop()

        engine_harness.on_engine_thread(engine, lose_a_page)
        Asked(client, [1, 2], 1)
        until_idle(client)
        engine_harness.on_engine_thread(engine, lambda core: None)
        assert Scrape(server)["slot_conservation_error"] == 1
        assert "1 slots and pages are lost" in caplog.text


def test_counters_never_go_back_when_the_engine_begins_anew(caplog):
    with serving() as (server, client, engine):
        prompt = engine_harness.prompt(300, seed=4)
        Asked(client, prompt, 3), Asked(client, prompt, 3)
        before = Scrape(server)
        assert before["prefix_cache_hits_total"] == 256

        def fail(*_):
            raise RuntimeError("the device is lost")

        def break_decode(core):
            core._programs = type("Broken", (), {
                "__getattr__": lambda self, name, programs=core._programs: getattr(programs, name),
                "decode": fail,
            })()

        engine_harness.on_engine_thread(engine, break_decode)
        programs = engine_harness.programs(MODEL, "float32")
        with pytest.raises(RequestError, match="the engine failed: RuntimeError: the device is lost"):
            Asked(client, prompt, 3)
        client.wait_until_ready(20)
        broken = Scrape(server)
        assert broken["restarts_total"] == 1 and broken["state_snapshots", ("tier", "device")] == 0
        engine_harness.on_engine_thread(engine, lambda core: setattr(core, "_programs", programs))
        Asked(client, prompt, 3), Asked(client, prompt, 3)
        after = Scrape(server)
        for earlier, later in ((before, broken), (broken, after)):
            now = later.monotone()
            fallen = {key: (value, now.get(key)) for key, value in earlier.monotone().items()
                      if now.get(key, -1) < value}
            assert not fallen
        assert after["prefix_cache_hits_total"] == 3 * 256  # one of the request that failed
        assert client.cache_stats().hit_tokens == 3 * 256 and client.cache_stats().admitted == 5


def lines(caplog):
    """The request lines, through the formatter that the server uses."""
    formatter = JsonLines()
    records = [json.loads(formatter.format(record)) for record in caplog.records if record.name.startswith("serving")]
    return {record["request_id"]: record for record in records if record["event"] == "request"}


def test_each_request_leaves_a_line(service, caplog):
    server, client, _ = service
    caplog.set_level(logging.INFO, "serving")
    prompt = engine_harness.prompt(300, seed=5)
    Asked(client, prompt, 2, request_id="first")
    again = Asked(client, prompt, 2, request_id="again")
    stopped = Asked(client, prompt, 9, request_id="unnamed-stop")
    with pytest.raises(RequestError) as refused:
        Asked(client, [-1], 1, request_id="refused")
    stream = client.generate([1, 2], max_new_tokens=900, ignore_eos=True, request_id="cancelled")
    next(stream), next(stream)
    stream.close()
    until_idle(client)
    stream = client.generate([1, 2], max_new_tokens=900, ignore_eos=True, request_id="aborted")
    next(stream)
    client.abort("aborted")
    *_, done = stream
    with pytest.raises(RequestError):
        Asked(client, [1, 2], 900, request_id="late", timeout=0.05)
    until_idle(client)
    end = time.monotonic() + 10
    while len(said := lines(caplog)) < 7:
        assert time.monotonic() < end
        time.sleep(0.01)

    line = said["again"]
    assert line["outcome"] == "length" and line["level"] == "info" and "detail" not in line
    assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (300, 256, 2)
    assert line["max_new_tokens"] == 2 and said["first"]["cached_tokens"] == 0
    for field in ("queue_s", "prefill_s", "decode_s"):
        assert line[field] == pytest.approx(getattr(again.timings, field), abs=1e-6)
    assert line["queue_s"] + line["prefill_s"] <= line["first_token_s"] <= again.first
    assert line["first_token_s"] <= line["total_s"] <= again.seconds
    assert said["unnamed-stop"]["completion_tokens"] == stopped.usage.completion_tokens == 9
    assert said["refused"]["outcome"] == "invalid_argument" and said["refused"]["detail"] == refused.value.message
    assert "prompt_tokens" not in said["refused"]
    assert said["cancelled"]["outcome"] == "cancelled" and said["cancelled"]["completion_tokens"] >= 1
    assert said["aborted"]["outcome"] == "abort" == done.finish_reason
    assert said["aborted"]["completion_tokens"] == done.usage.completion_tokens
    assert said["late"]["outcome"] == "deadline_exceeded" and "the deadline passed" in said["late"]["detail"]


def test_the_policy_that_is_named_is_the_one_in_use(capsys):
    with serving() as (server, _, engine):
        for expected in ("LearnedReuse", "LeastRecentlyUsed"):
            _introduce(server.backend, server.address)
            assert f"policy {expected}\n" in capsys.readouterr().err
            engine_harness.on_engine_thread(engine, lambda core: setattr(core.cache, "policy", LeastRecentlyUsed()))


@pytest.mark.parametrize("accept", [
    "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",  # Prometheus 2
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.5",  # 3
    "",
])
def test_names_do_not_depend_on_who_asks(service, accept):
    server, *_ = service
    connection = http.client.HTTPConnection("127.0.0.1", server.metrics_port, timeout=10)
    connection.request("GET", "/metrics?x=1", headers={"Accept": accept})
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert "\nk3jax:num_requests_running 0.0\n" in text and "k3jax_" not in text and "_created{" not in text
    connection.request("GET", "/")
    assert connection.getresponse().status == 404


def test_a_start_that_takes_long_is_no_stuck_engine(monkeypatch):
    opened, ages = Engine._open, []

    def open_late(self):
        self.heartbeat -= 1000
        opened(self)
        ages.append(time.monotonic() - self.heartbeat)

    monkeypatch.setattr(Engine, "_open", open_late)
    with serving():
        assert len(ages) == 1 and ages[0] < 10


def test_a_scrape_before_there_is_an_engine():
    with running_server(None, metrics_port=0) as server:
        scrape = Scrape(server)
        assert scrape["serving"] == 0 and ("num_requests_running",) not in scrape.samples
    engine = StandInEngine()
    with running_server(engine, metrics_port=0) as server:
        assert Scrape(server)["num_requests_running"] == 0
        engine.start()
