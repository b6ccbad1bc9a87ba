"""The service with real engines on tiny checkpoints: what a client gets, and that it is what the model says."""

import asyncio
import contextlib
import math
import threading
import time
import types
import urllib.request

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from k3jax.catalog import describe
from serving.client import AsyncClient, Client, RequestError, Sampling
from tests.checkpoints import TINY, tiny_checkpoint
from tests.serving import engine_harness
from tests.serving.service import Heard, serving

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module", params=TINY)
def service(request):
    with serving(request.param) as service:
        yield service


@pytest.fixture
def client(service):
    return service.client


@pytest.fixture(scope="module")
def k3_service():
    with serving("k3-tiny") as service:
        yield service


@pytest.fixture
def k3(k3_service):
    return k3_service.client


def ask(client, prompt, new=8, sampling=GREEDY, **options):
    options = {"ignore_eos": True, "max_new_tokens": new, "sampling": sampling, **options}
    return Heard(client.generate(prompt, **options))


def refused(client, prompt=(1, 2, 3), **options):
    with pytest.raises(RequestError) as caught:
        list(client.generate(prompt, **options))
    assert "\n" not in caught.value.message
    assert ask(client, [1, 2, 3], new=1).done.finish_reason == "length"  # and serves on
    return caught.value.code, caught.value.message


def test_greedy_answer_is_the_models_and_the_second_time_it_is_cached(service, client):
    ids = engine_harness.prompt(300, seed=1)
    cold = ask(client, ids)
    engine_harness.check_greedy(service.name, ids, cold)
    assert (cold.accepted.prompt_tokens, cold.accepted.cached_tokens, cold.accepted.seed) == (300, 0, None)
    assert (cold.done.finish_reason, cold.done.stop_reason) == ("length", None)
    timings = cold.done.timings
    assert timings.queue_s >= 0 and timings.prefill_s > 0 and timings.decode_s > 0
    before = client.cache_stats()
    warm = ask(client, [*ids, 7], new=8)
    engine_harness.check_greedy(service.name, [*ids, 7], warm)
    after = client.cache_stats()
    assert warm.accepted.cached_tokens == 256 == after.hit_tokens - before.hit_tokens
    assert ask(client, [*ids, 7], cache_salt="another's").accepted.cached_tokens == 0
    client.reset_cache()
    assert ask(client, [*ids, 7]).accepted.cached_tokens == 0
    stats = client.cache_stats()
    assert (stats.running, stats.waiting) == (0, 0) and stats.free_pages + stats.cached_pages == stats.pages
    assert 0 < stats.used_bytes <= stats.budget_bytes and stats.enabled and stats.admitted > 3


def test_declared_breakpoints_are_cached(k3):
    ids = engine_harness.prompt(400, seed=2)
    ask(k3, ids, cache_breakpoints=[130])
    assert ask(k3, [*ids[:140], *engine_harness.prompt(100, seed=3)]).accepted.cached_tokens == 128


def test_log_probabilities_are_those_of_the_model(k3):
    ids = engine_harness.prompt(50, seed=4)
    heard = ask(k3, ids, sampling=Sampling(temperature=0.0, logprobs=3))
    logits = engine_harness.oracle("k3-tiny", [*ids, *heard.ids], len(heard.ids))
    expected = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) - logits.max(
        1, keepdims=True
    )
    for row, token, entry in zip(expected, heard.ids, heard.logprobs, strict=True):
        assert math.isclose(entry.logprob, row[token], abs_tol=1e-3)
        assert [top for top, _ in entry.top][0] == token and len(entry.top) == 3
        for top, logprob in entry.top:
            assert math.isclose(logprob, row[top], abs_tol=1e-3)
    assert ask(k3, ids).logprobs == []
    assert all(entry.top == () for entry in ask(k3, ids, sampling=Sampling(temperature=0.0, logprobs=0)).logprobs)


def test_unset_is_the_checkpoints_default_and_zero_is_a_value(k3):
    ids = engine_harness.prompt(20, seed=5)
    greedy = ask(k3, ids)
    drawn = ask(k3, ids, sampling=Sampling(seed=11))  # temperature 1, top-p 0.95
    assert drawn.accepted.seed == 11 and drawn.ids != greedy.ids
    assert ask(k3, ids, sampling=Sampling(seed=11, temperature=1.0, top_p=0.95)).ids == drawn.ids
    assert ask(k3, ids, sampling=Sampling(seed=11, top_k=1)).ids == greedy.ids
    fresh = ask(k3, ids, sampling=Sampling())
    assert ask(k3, ids, sampling=Sampling(seed=fresh.accepted.seed)).ids == fresh.ids
    defaults = k3.model_info().default_sampling
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.seed) == (1.0, 0.95, 0, None)
    assert len(Heard(k3.generate(ids, sampling=GREEDY, ignore_eos=True)).ids) == 128


def test_text_in_and_out(k3):
    tokenizer = describe(tiny_checkpoint("k3-tiny")).tokenizer
    assert k3.tokenize("Once upon") == tuple(tokenizer.encode("Once upon"))
    assert k3.tokenize("<|open|>", markup=True) == (tokenizer.special_tokens["<|open|>"],)
    assert k3.detokenize(tokenizer.encode("höh")) == "höh"
    long = "word " * 3000  # tokenized beside the event loop
    assert k3.tokenize(long) == tuple(tokenizer.encode(long))
    heard = ask(k3, "Once upon a time", new=40)
    assert heard.accepted.prompt_tokens == len(tokenizer.encode("Once upon a time"))
    assert ask(k3, tokenizer.encode("Once upon a time"), new=40).ids == heard.ids
    shown = b"".join(tokenizer.token_bytes(token) for token in heard.ids if not tokenizer.is_special(token))
    assert heard.text.replace("\ufffd", "") == shown.decode("utf-8", "ignore").replace("\ufffd", "")
    assert ask(k3, "<|open|>x", markup=True).accepted.prompt_tokens < ask(k3, "<|open|>x").accepted.prompt_tokens


def test_stop_strings_and_stop_tokens(k3):
    heard = ask(k3, "Once upon a time", new=60)
    stop = next(delta.text for delta in heard.deltas[10:] if delta.text.strip("\ufffd"))
    cut = ask(k3, "Once upon a time", new=60, sampling=Sampling(temperature=0.0, stop=("never", stop)))
    assert cut.text == heard.text[: heard.text.index(stop)]
    assert cut.ids == heard.ids[: len(cut.ids)] and (cut.done.finish_reason, cut.done.stop_reason) == ("stop", stop)
    token = heard.ids[5]
    at_token = ask(k3, "Once upon a time", new=60, sampling=Sampling(temperature=0.0, stop_token_ids=(token,)))
    assert at_token.ids == heard.ids[: heard.ids.index(token) + 1]
    assert (at_token.done.finish_reason, at_token.done.stop_reason) == ("stop", token)


MISTAKES = {
    "no prompt": ([], {}, "the prompt is empty"),
    "empty text": ("", {}, "the prompt is empty"),
    "id too large": ([1, 10**6], {}, "token id 1000000 is outside the vocabulary"),
    "id negative": ([1, -1], {}, "token id -1 is outside the vocabulary"),
    "too long": ([1] * 2000, {}, "beyond the context of 1024"),
    "huge limit": ([1], {"max_new_tokens": 2**62}, "beyond the context of 1024"),
    "no new tokens": ([1], {"max_new_tokens": 0}, "max_new_tokens is 0, expected at least 1"),
    "negative limit": ([1], {"max_new_tokens": -5}, "max_new_tokens is -5, expected at least 1"),
    "temperature": ([1], {"sampling": Sampling(temperature=-1.0)}, "temperature is -1.0, expected"),
    "not a number": ([1], {"sampling": Sampling(temperature=float("nan"))}, "temperature is nan, expected"),
    "top p of zero": ([1], {"sampling": Sampling(top_p=0.0)}, "top_p is 0.0, expected"),
    "top k": ([1], {"sampling": Sampling(top_k=-1)}, "top_k is -1, expected"),
    "min p": ([1], {"sampling": Sampling(min_p=2.0)}, "min_p is 2.0, expected"),
    "repetition": ([1], {"sampling": Sampling(repetition_penalty=0.0)}, "repetition_penalty is 0.0, expected"),
    "presence": ([1], {"sampling": Sampling(presence_penalty=9.0)}, "presence_penalty is 9.0, expected"),
    "seed": ([1], {"sampling": Sampling(seed=-1)}, "seed is -1, expected"),
    "empty stop": ([1], {"sampling": Sampling(stop=("",))}, "stop is ('',), expected"),
    "stop token": ([1], {"sampling": Sampling(stop_token_ids=(10**6,))}, "stop token id 1000000 is outside"),
    "logprobs": ([1], {"sampling": Sampling(logprobs=6)}, "logprobs is 6"),
    "breakpoint": ([1], {"cache_breakpoints": [2]}, "breakpoint 2 does not lie in the prompt of 1 tokens"),
    "negative breakpoint": ([1], {"cache_breakpoints": [-1]}, "breakpoint -1 does not lie in the prompt"),
    "long name": ([1], {"request_id": "x" * 129}, "request_id has 129 characters, expected at most 128"),
}


@pytest.mark.parametrize("prompt, options, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_invalid_arguments(k3, prompt, options, message):
    code, said = refused(k3, prompt, **options)
    assert code is grpc.StatusCode.INVALID_ARGUMENT and message in said


def test_a_checkpoint_without_tokenizer_takes_and_gives_ids():
    with serving("kimi-linear-tiny") as service:
        client = service.client
        assert not client.model_info().has_tokenizer
        assert ask(client, [1, 2, 3]).text == ""
        for call in (lambda: list(client.generate("x")), lambda: client.tokenize("x"), lambda: client.detokenize([1])):
            with pytest.raises(RequestError, match="has no tokenizer files"):
                call()
        code, said = refused(client, sampling=Sampling(stop=("x",)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "has no tokenizer files" in said


def test_model_info(k3):
    info, config = k3.model_info(), describe(tiny_checkpoint("k3-tiny")).config
    assert (info.vocab_size, info.num_layers) == (config.vocab_size, len(config.layer_types))
    assert (info.context, info.match_unit, info.dtype, info.deterministic) == (1024, 128, "float32", False)
    assert info.stop_token_ids == (config.eos_token_id,)


def test_many_streams_at_once_some_cancelled_in_every_phase(service, client):
    shared = engine_harness.prompt(260, seed=6)
    prompts = [[*shared, number] for number in range(12)]
    alone = [ask(client, prompt, new=10).ids for prompt in prompts]

    async def one(client, number, prompt):
        ids = []
        async with contextlib.aclosing(
            client.generate(prompt, max_new_tokens=10, ignore_eos=True, sampling=GREEDY)
        ) as stream:
            async for event in stream:
                if number % 3 == 0 and len(ids) >= number % 4:
                    return None
                ids.extend(getattr(event, "token_ids", ()))
        return ids

    async def everyone():
        async with AsyncClient(client.address) as other:
            return await asyncio.gather(*(one(other, number, prompt) for number, prompt in enumerate(prompts)))

    for _ in range(3):
        together = asyncio.run(everyone())
        assert [number for number, ids in enumerate(together) if ids is None] == [0, 3, 6, 9]
        for ids, prompt, own in zip(together, prompts, alone):
            if ids is not None and ids != own:  # in another batch a tie may go the other way
                engine_harness.check_greedy(service.name, prompt, types.SimpleNamespace(ids=ids))
    wait_until_idle(client)


def wait_until_idle(client):
    end = time.monotonic() + 20
    while (stats := client.cache_stats()).running + stats.waiting:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert stats.free_pages + stats.cached_pages == stats.pages


def test_deadline_while_it_runs(k3):
    with pytest.raises(RequestError) as caught:
        list(k3.generate(engine_harness.prompt(900, seed=7), max_new_tokens=120, ignore_eos=True, timeout=0.05))
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until_idle(k3)


def test_priority_goes_first():
    with serving("k3-tiny", slots=1) as service:
        client, order = service.client, []

        def send(name, priority):
            ask(client, engine_harness.prompt(200, seed=8), new=2, priority=priority)
            order.append(name)

        running = client.generate([1], max_new_tokens=400, ignore_eos=True, request_id="first")
        next(running)
        threads = []
        for number, (name, priority) in enumerate([("low", -1), ("middle", 0), ("high", 5)]):
            threads.append(threading.Thread(target=send, args=(name, priority)))
            threads[-1].start()
            while client.cache_stats().waiting < number + 1:
                time.sleep(0.005)
        client.abort("first")
        assert list(running)[-1].finish_reason == "abort"
        for thread in threads:
            thread.join(60)
        assert order == ["high", "middle", "low"]


def test_reflection_names_the_service(k3):
    stub = reflection_pb2_grpc.ServerReflectionStub(k3._channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="k3jax.v1.Decoder"),
    ]
    listed, described = stub.ServerReflectionInfo(iter(requests))
    names = {service.name for service in listed.list_services_response.service}
    assert {"k3jax.v1.Decoder", "grpc.health.v1.Health"} <= names
    file = descriptor_pb2.FileDescriptorProto.FromString(described.file_descriptor_response.file_descriptor_proto[0])
    assert [method.name for method in file.service[0].method] == [
        "Generate", "Abort", "Tokenize", "Detokenize", "GetModelInfo", "GetCacheStats", "ResetCache"
    ]


def scrape(service) -> dict:
    """All samples by name and labels."""
    url = f"http://{service.server.metrics_address}/metrics"
    text = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url).read().decode()
    return {
        (sample.name.removeprefix("k3jax:"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text) for sample in family.samples
    }


def test_metrics_count_what_happened(k3_service, k3):
    before = scrape(k3_service)
    ids = engine_harness.prompt(300, seed=9)
    ask(k3, ids, new=5)
    ask(k3, ids, new=3)
    refused(k3, [-1])  # and one more request, of 3 + 1 tokens
    stream = k3.generate(ids, max_new_tokens=300, ignore_eos=True)
    next(stream), next(stream)
    stream.close()
    wait_until_idle(k3)
    after = scrape(k3_service)

    def change(*key):
        return after[key] - before.get(key, 0)

    length = ("finished_reason", "length")
    assert change("request_success_total", length) == change("request_prompt_tokens_count") == 3
    assert change("request_prompt_tokens_sum") == 603 and change("request_generation_tokens_sum") == 9
    assert change("prefix_cache_queries_total") == 903 and change("prefix_cache_hits_total") == 512
    assert change("time_to_first_token_seconds_count") == 4 and change("inter_token_latency_seconds_count") >= 6
    assert change("e2e_request_latency_seconds_count") == 4
    assert change("admission_rejections_total", ("code", "INVALID_ARGUMENT")) == 1
    assert change("cancelled_total", ("phase", "decode")) == 1
    assert change("compiles_total") == 0 and change("step_seconds_count", ("kind", "prefill")) > 0
    assert (after["num_requests_running",], after["num_requests_waiting",], after["serving",]) == (0, 0, 1)
    assert after["kv_cache_usage_perc",] == 0 and after["state_snapshots", ("tier", "device")] > 0


def test_asynchronous_client_has_the_same_calls(k3):
    calls = {name for name in vars(Client) if not name.startswith("_")}
    assert calls == {name for name in vars(AsyncClient) if not name.startswith("_")}

    async def use():
        async with AsyncClient(k3.address) as other:
            await other.wait_until_ready(10)
            info, ids = await other.model_info(), await other.tokenize("Once upon")
            text = await other.detokenize(ids)
            await other.abort("nobody")
            await other.reset_cache()
            events = [event async for event in other.generate("Once", max_new_tokens=3, sampling=GREEDY)]
            with pytest.raises(RequestError) as caught:
                [event async for event in other.generate([-1])]
            return info, text, events, await other.cache_stats(), caught.value.code

    info, text, events, stats, code = asyncio.run(use())
    assert info == k3.model_info() and text == "Once upon" and stats == k3.cache_stats()
    assert Heard(events).ids == Heard(k3.generate("Once", max_new_tokens=3, sampling=GREEDY)).ids
    assert code is grpc.StatusCode.INVALID_ARGUMENT
