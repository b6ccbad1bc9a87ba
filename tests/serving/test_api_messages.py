"""What a client asks for is what the engine gets, field by field."""

import dataclasses
import time

import numpy as np

from k3jax.catalog import describe
from k3jax.sampling import SamplingParams
from serving.api.messages import engine_request
from serving.client import Sampling
from serving.client.request import generate_request

DEMO = describe("demo")
IDS = np.arange(300, dtype=np.int32)


def request(**options):
    message = generate_request(IDS, **options)
    return engine_request(message, np.array(message.token_ids.ids, np.int32), DEMO, engine_id="mine#7", seconds=5.0)


def test_every_field_that_is_set():
    values = {
        "temperature": 0.25, "top_k": 7, "top_p": 0.5, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": -0.5, "seed": 2**40 + 1, "stop": ("one", "two"), "stop_token_ids": (3, 5), "logprobs": 2,
    }
    now = time.monotonic()
    asked = request(
        sampling=Sampling(**values), max_new_tokens=11, priority=-3, cache_breakpoints=[130, 256], cache_salt="salt",
        request_id="mine",
    )
    assert asked.sampling == SamplingParams(**values)
    assert asked.id == "mine#7" and asked.token_ids.tolist() == IDS.tolist()
    assert (asked.max_new_tokens, asked.priority, asked.breakpoints, asked.salt) == (11, -3, (130, 256), "salt")
    assert asked.stop_token_ids == {3, 5, *DEMO.defaults.stop_token_ids}
    assert asked.deadline and 4.9 < asked.deadline - now < 5.5
    assert request(sampling=Sampling(stop_token_ids=(3,)), ignore_eos=True).stop_token_ids == {3}


def test_what_is_not_set():
    asked, defaults = request(), DEMO.defaults.sampling
    assert asked.sampling.seed is not None and request().sampling.seed != asked.sampling.seed
    for field in {field.name for field in dataclasses.fields(SamplingParams)} - {"seed"}:
        assert getattr(asked.sampling, field) == getattr(defaults, field), field
    assert (asked.max_new_tokens, asked.priority, asked.breakpoints, asked.salt) == (128, 0, (), "")
    assert asked.stop_token_ids == set(DEMO.defaults.stop_token_ids)


def test_a_zero_is_a_value():
    zero = Sampling(temperature=0.0, top_k=0, min_p=0.0, presence_penalty=0.0, seed=0, logprobs=0)
    sampling = request(sampling=zero).sampling
    assert (sampling.temperature, sampling.seed, sampling.logprobs) == (0.0, 0, 0)
