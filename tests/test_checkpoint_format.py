"""Repositories that are missing something, damaged or at odds with themselves: one line that names the culprit."""

import json
import shutil

import numpy as np
import pytest

from k3jax.checkpoint import Repository, detect_expert_format
from k3jax.checkpoint.safetensors import MAX_HEADER_BYTES, read_header
from k3jax.errors import UserError
from tests.checkpoints import TINY, read_shards, tiny_checkpoint, write_index, write_raw_shard, write_shard

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def refusal(function, *arguments) -> str:
    """The message of the UserError, which must be one line."""
    with pytest.raises(UserError) as error:
        function(*arguments)
    message = str(error.value)
    assert message and "\n" not in message
    return message


@pytest.fixture
def repository(tmp_path):
    """Two shards with two tensors each, and their index."""
    (tmp_path / "config.json").write_text("{}")
    write_shard(tmp_path / "one.safetensors", {"a": np.arange(6, dtype=np.float32), "b": np.zeros((2, 3), np.uint8)})
    write_shard(tmp_path / "two.safetensors", {"c": np.ones(4, np.float16), "d": np.zeros((0, 2), np.float32)})
    one, two = "one.safetensors", "two.safetensors"
    write_index(tmp_path, {"a": one, "b": one, "c": two, "d": two})
    return tmp_path


@pytest.mark.parametrize("name", TINY)
def test_golden_checkpoints(name):
    repository = Repository.open(tiny_checkpoint(name))
    arrays = read_shards(tiny_checkpoint(name))
    assert {key: (info.shape, info.nbytes) for key, info in repository.tensors.items()} == {
        key: (array.shape, array.nbytes) for key, array in arrays.items()
    }
    for key in list(arrays)[::50]:
        info = repository.tensors[key]
        assert info.file.read_bytes()[info.offset : info.offset + info.nbytes] == arrays[key].tobytes()
    assert detect_expert_format(repository) == {"k3-tiny": "mxfp4", "kimi-linear-tiny": "dense"}[name]


def test_headers_of_two_shards(repository):
    tensors = Repository.open(repository).tensors
    assert tensors["b"].shape == (2, 3) and tensors["b"].dtype == "U8" and tensors["b"].nbytes == 6
    assert tensors["b"].offset == tensors["a"].offset + 24
    assert tensors["d"].nbytes == 0 and tensors["d"].file.name == "two.safetensors"


def test_one_file_without_index(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write_shard(tmp_path / "model.safetensors", {"x": np.zeros(3, np.float32)}, format="pt")
    assert list(Repository.open(tmp_path).tensors) == ["x"]


def test_missing_directory(tmp_path):
    assert "no directory" in refusal(Repository.open, tmp_path / "nowhere")


def test_missing_config(repository):
    (repository / "config.json").unlink()
    assert "config.json" in refusal(Repository.open, repository)


def test_missing_weights(repository):
    (repository / "model.safetensors.index.json").unlink()
    assert "neither model.safetensors.index.json nor model.safetensors" in refusal(Repository.open, repository)


def test_missing_shard(repository):
    (repository / "two.safetensors").unlink()
    assert "has no two.safetensors" in refusal(Repository.open, repository)


@pytest.mark.parametrize("missing", [1, 5, 30])
def test_truncated_shard(repository, missing):
    path = repository / "one.safetensors"
    path.write_bytes(path.read_bytes()[:-missing])
    message = refusal(Repository.open, repository)
    assert "one.safetensors" in message and "truncated" in message


@pytest.mark.parametrize("size", [0, 7, 20])
def test_shard_truncated_in_its_header(repository, size):
    path = repository / "one.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert "one.safetensors" in refusal(Repository.open, repository)


def test_shard_that_is_too_long(repository):
    path = repository / "one.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    assert "damaged" in refusal(Repository.open, repository)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10_000])
def test_absurd_header_length(repository, length):
    path = repository / "one.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    message = refusal(Repository.open, repository)
    assert str(length) in message and "one.safetensors" in message


def test_header_beyond_the_formats_limit_is_not_read(tmp_path):
    path = tmp_path / "big.safetensors"
    with open(path, "wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 100)
    assert f"at most {MAX_HEADER_BYTES}" in refusal(read_header, path)


@pytest.mark.parametrize("text", [b"{not json", b"\xff\xfe", b"[" * 100_000, b""])
def test_header_is_not_json(tmp_path, text):
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    assert "not JSON" in refusal(read_header, path)


def test_header_is_a_list(tmp_path):
    write_raw_shard(tmp_path / "x.safetensors", [1])
    assert "list" in refusal(read_header, tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("change", "expected"),
    {
        "no dtype": ({"dtype": None}, "dtype"),
        "unknown dtype": ({"dtype": "F33"}, "F33"),
        "unhashable dtype": ({"dtype": ["F32"]}, "no valid"),
        "negative size": ({"shape": [-2]}, "no valid"),
        "size not whole": ({"shape": [2.0]}, "no valid"),
        "shape not a list": ({"shape": 2}, "no valid"),
        "offsets too few": ({"data_offsets": [8]}, "no valid"),
        "offsets backwards": ({"data_offsets": [8, 0]}, "-8 bytes"),
        "offsets disagree with shape": ({"shape": [3]}, "expected 12"),
        "hole before": ({"data_offsets": [4, 12]}, "begins at byte 4"),
    }.values(),
)
def test_bad_entry(tmp_path, change, expected):
    write_raw_shard(tmp_path / "x.safetensors", {"weight": {**ENTRY, **change}}, bytes(12))
    message = refusal(read_header, tmp_path / "x.safetensors")
    assert "weight" in message and expected in message


def test_entry_is_a_number(tmp_path):
    write_raw_shard(tmp_path / "x.safetensors", {"weight": 3})
    assert "weight" in refusal(read_header, tmp_path / "x.safetensors")


def test_overlapping_tensors(tmp_path):
    header = {"first": ENTRY, "second": {**ENTRY, "data_offsets": [4, 12]}}
    write_raw_shard(tmp_path / "x.safetensors", header, bytes(12))
    message = refusal(read_header, tmp_path / "x.safetensors")
    assert "second" in message and "overlap" in message


def test_index_names_an_absent_tensor(repository):
    index = json.loads((repository / "model.safetensors.index.json").read_text())["weight_map"]
    write_index(repository, {**index, "ghost": "two.safetensors"})
    message = refusal(Repository.open, repository)
    assert "ghost" in message and "two.safetensors" in message


def test_tensor_in_two_shards(repository):
    write_shard(repository / "two.safetensors", {"a": np.zeros(1, np.float32), "c": np.ones(4, np.float16)})
    message = refusal(Repository.open, repository)
    assert "tensor a lies in two shards" in message and "one.safetensors" in message


def test_tensor_that_the_index_does_not_name(repository):
    write_shard(repository / "two.safetensors", {"c": np.ones(4, np.float16), "d": np.ones(1), "e": np.ones(1)})
    assert "tensor e lies in two.safetensors" in refusal(Repository.open, repository)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}',
                                  '{"weight_map": {"a": "../one.safetensors"}}'])
def test_bad_index(repository, text):
    (repository / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(Repository.open, repository)


def test_shard_is_a_directory(repository):
    (repository / "two.safetensors").unlink()
    (repository / "two.safetensors").mkdir()
    assert "two.safetensors" in refusal(Repository.open, repository)


def test_links_into_a_cache(repository, tmp_path_factory):
    """The hub's cache holds links to files with other names."""
    blobs = tmp_path_factory.mktemp("blobs")
    shutil.move(repository / "one.safetensors", blobs / "0123")
    (repository / "one.safetensors").symlink_to(blobs / "0123")
    assert Repository.open(repository).tensors["a"].nbytes == 24
