"""Every call, made by a stranger through reflection and by our own client: they agree."""

import pytest

from k3jax.catalog import describe
from serving.client import Client, RequestError, Sampling
from tests.checkpoints import tiny_checkpoint
from tests.serving import engine_harness
from tests.serving.api_server import running_server
from tests.serving.stranger import Stranger

MODEL = "k3-tiny"


@pytest.fixture(scope="module")
def service():
    engine = engine_harness.start(MODEL)
    with running_server(engine, str(tiny_checkpoint(MODEL)), dtype="float32") as server:
        with Client(server.address) as client:
            client.wait_until_ready(10)
            yield Stranger(client._channel), client


def test_every_call_can_be_made_by_reflection_and_says_what_the_client_says(service):
    stranger, client = service
    assert stranger.methods == {
        "Generate", "Abort", "Tokenize", "Detokenize", "GetModelInfo", "GetCacheStats", "ResetCache",
    }
    assert stranger("ResetCache") == {}
    tokenizer = describe(tiny_checkpoint(MODEL)).tokenizer
    ids = stranger("Tokenize", text="Once upon a time")["token_ids"]
    assert tuple(ids) == client.tokenize("Once upon a time") == tuple(tokenizer.encode("Once upon a time"))
    assert stranger("Detokenize", token_ids=ids) == {"text": "Once upon a time"}
    assert client.detokenize(ids) == "Once upon a time"
    assert stranger("Abort", request_id="nobody's") == {}

    info, known = stranger("GetModelInfo"), client.model_info()
    assert (info["context"], info["match_unit"], info["dtype"]) == ("1024", 128, "float32")  # JSON's way with int64
    assert (known.context, known.match_unit, known.vocab_size) == (1024, 128, int(info["vocab_size"]))
    assert known.default_sampling == Sampling(temperature=1.0, top_k=0, top_p=0.95, min_p=0.0, repetition_penalty=1.0,
                                              presence_penalty=0.0)
    assert info["default_sampling"]["top_p"] == 0.95 and "seed" not in info["default_sampling"]

    prompt = engine_harness.prompt(300, seed=1).tolist()
    for cached in (0, 256):
        first, *deltas, last = stranger(
            "Generate", token_ids={"ids": prompt}, sampling={"temperature": 0}, max_new_tokens=4, ignore_eos=True
        )
        assert first["accepted"]["cached_tokens"] == str(cached)
        tokens = [token for event in deltas for token in event["delta"]["token_ids"]]
        assert len(tokens) == 4 and last["done"]["finish_reason"] == "FINISH_REASON_LENGTH"
        assert last["done"]["usage"] == {
            "prompt_tokens": "300", "cached_tokens": str(cached), "completion_tokens": "4"
        }
        assert last["done"]["timings"]["prefill_s"] > 0
    *_, done = client.generate(prompt, max_new_tokens=4, ignore_eos=True, sampling=Sampling(temperature=0.0))
    assert done.usage.cached_tokens == 256

    stats, ours = stranger("GetCacheStats"), client.cache_stats()
    assert {name: int(value) for name, value in stats.items()} == {
        name: int(getattr(ours, name)) for name in ours.__dataclass_fields__
    }
    assert (ours.hit_tokens, ours.snapshots, ours.enabled, ours.slots) == (512, 1, True, 4)
    assert stranger("ResetCache") == {}
    assert client.cache_stats().snapshots == 0 and client.cache_stats().hit_tokens == 512


def test_abort_ends_the_stream_of_another_connection(service):
    stranger, client = service
    stream = client.generate([1, 2, 3], max_new_tokens=1000, ignore_eos=True, request_id="long")
    next(stream), next(stream)
    assert stranger("Abort", request_id="long") == {}
    *_, done = stream
    assert done.finish_reason == "abort" and 1 <= done.usage.completion_tokens < 1000
    with pytest.raises(RequestError, match="token id -5 is outside the vocabulary"):
        client.detokenize([-5])
