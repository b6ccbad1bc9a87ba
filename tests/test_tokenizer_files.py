"""Tokenizer files: damaged ones, and those of another model."""

import dataclasses
import pathlib
import shutil

import pytest

from k3jax.catalog import describe
from k3jax.errors import UserError
from k3jax.presets import preset
from k3jax.tokenizer import ByteTokenizer, TiktokenTokenizer, check_tokenizer
from tests.checkpoints import tiny_checkpoint

FILES = pathlib.Path(__file__).parent / "data" / "tokenizer"


def lines():
    return (FILES / "tiktoken.model").read_bytes().splitlines()


DAMAGE = {
    "missing": ("tiktoken.model", None, "cannot read .*tiktoken.model"),
    "not base64": ("tiktoken.model", b"\n".join([*lines(), b"%%% 640"]), "line 641"),
    "no rank": ("tiktoken.model", b"AA==\n", "line 1"),
    "hole": ("tiktoken.model", b"\n".join(lines()[:-2] + lines()[-1:]), "line 639"),
    "hole in the middle": ("tiktoken.model", b"\n".join(lines()[:300] + lines()[301:]), "line 301"),
    "rank twice": ("tiktoken.model", b"\n".join([*lines()[:301], lines()[301].split()[0] + b" 300"]), "line 302"),
    "empty": ("tiktoken.model", b"", "no token for byte 0x00"),
    "same token twice": ("tiktoken.model", b"\n".join([*lines(), lines()[-1].split()[0] + b" 640"]), "line 641"),
    "a byte is missing": ("tiktoken.model", b"\n".join(lines()[:255]), "no token for byte 0xff"),
    "binary": ("tiktoken.model", b"\x00\xff\xfe", "line 1"),
    "no config": ("tokenizer_config.json", None, "cannot read .*tokenizer_config.json"),
    "config not JSON": ("tokenizer_config.json", b"{", "no readable added_tokens_decoder"),
    "config a list": ("tokenizer_config.json", b"[]", "no readable added_tokens_decoder"),
    "outside the slots": (
        "tokenizer_config.json", b'{"added_tokens_decoder": {"5": {"content": "x"}}}', "outside the slots 640..895",
    ),
    "name twice": (
        "tokenizer_config.json",
        b'{"added_tokens_decoder": {"640": {"content": "x"}, "641": {"content": "x"}}}',
        "a name of its own",
    ),
    "name of an unnamed slot": (
        "tokenizer_config.json", b'{"added_tokens_decoder": {"640": {"content": "<|reserved_token_641|>"}}}',
        "a name of its own",
    ),
}


@pytest.mark.parametrize("file, content, message", DAMAGE.values(), ids=DAMAGE)
def test_damaged_files(tmp_path, file, content, message):
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(FILES / name, tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        TiktokenTokenizer.from_directory(tmp_path)
    assert "\n" not in str(raised.value)


BYTES = {bytes([byte]): byte for byte in range(256)}
K3 = {258: "<|end_of_msg|>", 259: "<|open|>", 260: "<|close|>", 261: "<|sep|>"}
K2 = {258: "<|im_end|>", 259: "<|im_user|>", 260: "<|im_assistant|>"}
SHIFTED_K3 = {slot + 1: name for slot, name in K3.items()}
FAMILIES = {  # names -> (family, accepted by Kimi K3, accepted by Kimi-Linear)
    "k3": (K3, "kimi-k3", True, False),
    "k2": (K2, "kimi-k2", False, True),
    "no names": ({}, None, True, True),
    "some names": ({258: "<|im_end|>", 259: "<|im_start|>", 300: "<|sep|>"}, None, True, True),
    "shifted": (SHIFTED_K3, None, False, False),
}


@pytest.mark.parametrize("names, family, fits_k3, fits_linear", FAMILIES.values(), ids=FAMILIES)
def test_names_tell_the_family(names, family, fits_k3, fits_linear):
    tokenizer = TiktokenTokenizer(BYTES, names)
    assert tokenizer.family == family
    k3 = preset("demo")
    mixture = dataclasses.replace(k3, attn_res_block_size=None)
    for config, fits in ((k3, fits_k3), (preset("kimi-linear-48b"), fits_linear), (mixture, names is not SHIFTED_K3)):
        if fits:
            check_tokenizer(tokenizer, config)
        else:
            with pytest.raises(UserError, match="config.json describes|end_of_msg.* id 259, expected 258") as raised:
                check_tokenizer(tokenizer, config)
            assert "\n" not in str(raised.value)


def test_every_id_has_an_embedding():
    tokenizer, config = ByteTokenizer(), preset("demo")
    check_tokenizer(tokenizer, config)
    check_tokenizer(tokenizer, dataclasses.replace(config, vocab_size=513))
    with pytest.raises(UserError, match="the tokenizer has 512 ids but vocab_size in config.json is 511"):
        check_tokenizer(tokenizer, dataclasses.replace(config, vocab_size=511))


def test_describing_a_checkpoint_checks_its_tokenizer(tmp_path):
    assert describe(tiny_checkpoint("k3-tiny")).tokenizer.family == describe("demo").tokenizer.family == "kimi-k3"
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(tiny_checkpoint("k3-tiny") / name, tmp_path)
    shutil.copy(tiny_checkpoint("kimi-linear-tiny") / "config.json", tmp_path)
    with pytest.raises(UserError, match="special tokens of Kimi K3 but config.json describes Kimi-Linear"):
        describe(tmp_path)
