"""What a request may ask for."""

import dataclasses
import math

import numpy as np
import pytest

import k3jax
from k3jax.sampling.params import MAX_SEED, SamplingParams, fresh_seed

MISTAKES = [
    ("temperature", -0.1, "temperature is -0.1, expected a number of at least 0 (0 = greedy)"),
    ("temperature", math.nan, "temperature is nan"),
    ("temperature", math.inf, "temperature is inf"),
    ("temperature", 10**400, "temperature is 1000"),
    ("temperature", 1e39, "temperature is 1e+39"),
    ("temperature", "hot", "temperature is 'hot'"),
    ("temperature", True, "temperature is True"),
    ("temperature", None, "temperature is None"),
    ("top_k", -1, "top_k is -1, expected a whole number from 0 (off) to 2147483647"),
    ("top_k", 2**31, "top_k is 2147483648"),
    ("top_k", 1.0, "top_k is 1.0"),
    ("top_k", True, "top_k is True"),
    ("top_p", 0, "top_p is 0, expected a number above 0 and at most 1 (off)"),
    ("top_p", 1.01, "top_p is 1.01"),
    ("top_p", math.nan, "top_p is nan"),
    ("min_p", -0.01, "min_p is -0.01, expected a number from 0 (off) to 1"),
    ("min_p", 1.5, "min_p is 1.5"),
    ("repetition_penalty", 0, "repetition_penalty is 0, expected a number from 0.01 to 100 (1 = off)"),
    ("repetition_penalty", -1.0, "repetition_penalty is -1.0"),
    ("repetition_penalty", math.inf, "repetition_penalty is inf"),
    ("presence_penalty", 2.1, "presence_penalty is 2.1, expected a number from -2 to 2 (0 = off)"),
    ("presence_penalty", math.nan, "presence_penalty is nan"),
    ("seed", -1, f"seed is -1, expected a whole number from 0 to {2**63 - 1}"),
    ("seed", 2**63, "seed is 9223372036854775808"),
    ("seed", False, "seed is False"),
    ("seed", 1.5, "seed is 1.5"),
    ("stop", [""], "stop is ('',), expected texts of at least one character"),
    ("stop", "", "stop is ('',)"),
    ("stop", ["a", 1], "stop is ('a', 1)"),
    ("stop", ["\ud800"], "stop is ('\\ud800',)"),
    ("stop", 3, "stop is 3, expected a list"),
    ("stop", None, "stop is None, expected a list"),
    ("stop_token_ids", [1, -1], "stop_token_ids is (1, -1), expected token ids, whole numbers of at least 0"),
    ("stop_token_ids", [True], "stop_token_ids is (True,)"),
    ("stop_token_ids", ["5"], "stop_token_ids is ('5',)"),
    ("stop_token_ids", 7, "stop_token_ids is 7, expected a list"),
    ("logprobs", -1, "logprobs is -1, expected a whole number from 0 to 20"),
    ("logprobs", 21, "logprobs is 21"),
    ("logprobs", True, "logprobs is True"),
]


@pytest.mark.parametrize(("field", "value", "message"), MISTAKES, ids=[f"{row[0]}={row[1]!r:.12}" for row in MISTAKES])
def test_values_out_of_range_are_refused_in_one_line(field, value, message):
    with pytest.raises(k3jax.UserError) as error:
        SamplingParams(**{field: value})
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_the_ends_of_the_ranges_are_allowed():
    for name, values in {
        "temperature": (0, 3e38, np.float32(0.5)), "top_k": (0, 2**31 - 1, np.int64(5)), "top_p": (1e-9, 1, 1.0),
        "min_p": (0, 1), "repetition_penalty": (0.01, 100), "presence_penalty": (-2, 2), "seed": (0, 2**63 - 1, None),
        "logprobs": (0, 20, None), "stop": ((), ["a"]), "stop_token_ids": ((), [0]),
    }.items():
        for value in values:
            SamplingParams(**{name: value})


def test_lists_become_tuples_and_a_text_is_one_stop_string():
    params = SamplingParams(stop="END", stop_token_ids=[3, 4])
    assert (params.stop, params.stop_token_ids) == (("END",), (3, 4))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert hash(params) == hash(dataclasses.replace(params, stop=["END"]))


def test_defaults_are_what_the_report_recommends():
    params = k3jax.SamplingParams()
    assert (params.temperature, params.top_p, params.seed) == (1.0, 0.95, None)
    assert not params.greedy and SamplingParams(temperature=0).greedy
    off = (params.top_k, params.min_p, params.repetition_penalty, params.presence_penalty, params.logprobs)
    assert off == (0, 0, 1, 0, None)


def test_fresh_seeds_differ_and_are_allowed():
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100 and all(SamplingParams(seed=seed).seed <= MAX_SEED for seed in seeds)
    assert max(seeds) > 2**32
