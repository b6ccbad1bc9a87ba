"""`generation_config.json`: what it sets, and what is wrong with it."""

import dataclasses
import json
import shutil

import pytest

import k3jax
from k3jax.catalog import describe
from k3jax.presets import DEMO, KIMI_K3
from k3jax.sampling import SamplingParams
from k3jax.sampling.defaults import GenerationDefaults
from tests.checkpoints import DATA


def read(directory, content, config=DEMO) -> GenerationDefaults:
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "generation_config.json").write_text(text)
    return GenerationDefaults.from_directory(directory, config)


def test_the_published_file_of_kimi_k3(tmp_path):
    defaults = read(tmp_path, '{"max_length": 1048576, "eos_token_id": 163586}', KIMI_K3)
    assert defaults == GenerationDefaults(SamplingParams(temperature=1.0, top_p=0.95), (163586,))


def test_without_the_file_the_architecture_names_the_stop_token(tmp_path):
    assert GenerationDefaults.from_directory(tmp_path, DEMO) == GenerationDefaults(SamplingParams(), (258,))
    assert GenerationDefaults.of_model(dataclasses.replace(DEMO, eos_token_id=None)).stop_token_ids == ()


@pytest.mark.parametrize(("content", "expected", "stop_token_ids"), [
    ({}, {}, (258,)),
    ({"eos_token_id": [258, 7], "top_k": 50, "do_sample": True}, {"top_k": 50}, (258, 7)),
    ({"temperature": 0.6, "top_p": 1, "min_p": 0.05, "repetition_penalty": 1.1},
     {"temperature": 0.6, "top_p": 1, "min_p": 0.05, "repetition_penalty": 1.1}, (258,)),
    ({"top_k": -1}, {"top_k": 0}, (258,)),
    ({"top_k": 0, "eos_token_id": []}, {"top_k": 0}, ()),
    ({"temperature": None, "top_k": None, "eos_token_id": None, "do_sample": None}, {}, (258,)),
    ({"do_sample": False}, {"temperature": 0}, (258,)),
    ({"do_sample": False, "temperature": 0.6, "top_p": 0.8}, {"temperature": 0, "top_p": 0.8}, (258,)),
    ({"seed": 3, "stop": ["x"], "presence_penalty": 1, "transformers_version": "5"}, {}, (258,)),
], ids=str)
def test_fields_of_the_file_win(content, expected, stop_token_ids, tmp_path):
    assert read(tmp_path, content) == GenerationDefaults(SamplingParams(**expected), stop_token_ids)


@pytest.mark.parametrize(("content", "message"), [
    ("{", "is not JSON"),
    ("[1]", "holds a list, expected a JSON object"),
    ({"temperature": -1}, "temperature is -1, expected"),
    ('{"temperature": NaN}', "temperature is nan, expected"),
    ({"temperature": "0.6", "do_sample": False}, "temperature is '0.6', expected"),
    ({"top_k": 1.5}, "top_k is 1.5, expected"),
    ({"top_k": -2}, "top_k is -2, expected"),
    ({"top_p": 0.0}, "top_p is 0.0, expected"),
    ({"do_sample": 0}, "do_sample is 0, expected true or false"),
    ({"eos_token_id": 512}, "eos_token_id is 512, expected ids of the vocabulary, 0..511"),
    ({"eos_token_id": [258, -1]}, "eos_token_id is [258, -1], expected"),
    ({"eos_token_id": "258"}, "eos_token_id is '258', expected"),
    ({"eos_token_id": True}, "eos_token_id is True, expected"),
], ids=str)
def test_a_wrong_file_is_refused_by_name(content, message, tmp_path):
    with pytest.raises(k3jax.UserError) as error:
        read(tmp_path, content)
    assert message in str(error.value) and str(tmp_path / "generation_config.json") in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(k3jax.UserError, match="cannot read .*generation_config.json: Is a directory"):
        GenerationDefaults.from_directory(tmp_path, DEMO)
    (tmp_path / "generation_config.json").rmdir()
    (tmp_path / "generation_config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(k3jax.UserError, match="is not JSON"):
        GenerationDefaults.from_directory(tmp_path, DEMO)


def test_a_checkpoint_comes_with_its_defaults(tmp_path):
    shutil.copy(DATA / "kimi-linear-tiny" / "config.json", tmp_path)
    assert describe(tmp_path).defaults == GenerationDefaults(SamplingParams(), (258,))
    read(tmp_path, {"temperature": 0.25, "eos_token_id": [1, 2]})
    assert describe(tmp_path).defaults == GenerationDefaults(SamplingParams(temperature=0.25), (1, 2))
    assert describe("demo").defaults == describe("random:demo").defaults == GenerationDefaults(SamplingParams(), (258,))
