"""Tokenizer: golden ids, incremental text, and damaged files."""

import hashlib
import json
import os
import pathlib
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.errors import UserError
from k3jax.tokenizer import ByteTokenizer, TiktokenTokenizer

FILES = pathlib.Path(__file__).parent / "data" / "tokenizer"
GOLDEN = json.loads((FILES / "tokenizer_golden.json").read_text())
SMALL = TiktokenTokenizer.from_directory(FILES)

# "text" -> ids under the published vocabulary of the real models, without special tokens.
REAL_VECTORS = {
    "Hello world": "19180,2695",
    "Hello, world!": "19180,11,2695,0",
    "你好世界": "33845,2243",
    "don't DON'T it'ſ": "88709,92629,64833,483,6,129,123",
    "12345678": "6694,12972,4447",
    "  two  spaces\n\n\tTab": "220,2069,220,14803,382,197,11855",
    "foo\r\nbar": "10570,462,4566",
    "你好，世界。今天是2024年3月15日！": "33845,378,2243,292,35408,2975,19,532,18,892,1308,778,856",
    "〇一二〇": "91894,35063,91894",
    "café naïve Ünïcode": "122583,1941,7915,44187,367,61412,77,44187,2431",
    "}\n/// doc": "896,5101,8272",
    "Привет мир": "159025,63694,5993,17898",
    "こんにちは世界": "16444,29194,6880,43566,8831,2243",
    "안녕하세요 세계": "109004,34910,243,13181,102898,110620,73168",
    "🙂👩‍💻": "5885,46813,64390,102,67963,66122,119",
    "a\u00a0b\u2003c": "64,5406,65,64731,66",
    "<|open|>think<|sep|>": "27,91,4454,91,29,39964,27,91,40433,91,29",
    "你don't": "633,88709",
    'x = {"k": [1, 2.5, null]}': "87,327,9392,74,1289,793,16,11,220,17,13,20,11,1704,24216",
    "   ": "274",
    "\n\n\n": "3898",
    "price: ¥1,234.50": "18493,25,4331,98,16,11,18697,13,1643",
}


def stream(tokenizer, ids):
    detokenizer = tokenizer.detokenizer()
    return [detokenizer.push(token) for token in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("case", GOLDEN["texts"], ids=lambda case: repr(case["text"][:20]))
def test_golden_ids(case):
    assert SMALL.encode(case["text"]) == case["ids_plain"]
    assert SMALL.decode(case["ids_plain"]) == case["text"]


@pytest.mark.parametrize("case", GOLDEN["long"], ids=lambda case: f"{case['unit']!r}x{case['repeat']}")
def test_golden_ids_of_overlong_runs(case):
    ids = SMALL.encode(case["unit"] * case["repeat"])
    assert (len(ids), ids[:8], ids[-8:]) == (case["num_ids"], case["first"], case["last"])
    assert hashlib.sha256(np.array(ids, "<i4").tobytes()).hexdigest() == case["sha256_of_int32_le"]


@pytest.mark.parametrize("case", GOLDEN["decode"], ids=lambda case: str(case["ids"]))
def test_golden_decode(case):
    assert SMALL.decode(case["ids"]) == case["text"]


def test_text_is_cut_every_400_000_characters():
    text = "x " * 199_999 + "xhe"
    assert SMALL.encode("xhe") == [120, 285]
    assert SMALL.encode(text)[-4:] == [32, 120, 104, 101]


def test_special_tokens():
    assert SMALL.vocab_size == GOLDEN["vocab_size"]
    assert SMALL.special_tokens == GOLDEN["special_tokens"]
    assert not SMALL.is_special(639) and SMALL.is_special(640) and SMALL.is_special(895)
    assert SMALL.token_bytes(648) == b"<|reserved_token_648|>"
    assert all(not SMALL.is_special(token) for token in SMALL.encode("<|open|>[EOS]"))


@pytest.mark.parametrize("tokenizer", [SMALL, ByteTokenizer()], ids=["tiktoken", "bytes"])
@given(text=st.text(max_size=40))
@settings(deadline=None, max_examples=200)
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(stream(tokenizer, ids)) == text


def longest_certain_prefix(data: bytes) -> str:
    """What must have been emitted after these bytes: all but a tail that some continuation completes."""
    for held in range(min(3, len(data)), 0, -1):
        tail = data[len(data) - held :]
        for continuation in (b"\x80", b"\x8f", b"\x90", b"\x9f", b"\xa0", b"\xbf"):
            for length in range(1, 4):
                try:
                    character = (tail + (continuation + b"\x80\x80")[:length]).decode("utf-8")
                except UnicodeDecodeError:
                    continue
                if len(character) == 1:
                    return data[: len(data) - held].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


@given(data=st.lists(st.sampled_from([*b"az", 0x80, 0x9F, 0xA0, 0xC0, 0xC3, 0xE0, 0xE4, 0xED, 0xF0, 0xF4, 0xF5, 0xFF])
                     | st.integers(0, 255), max_size=12))
@settings(deadline=None, max_examples=500)
def test_streamed_text_is_never_half_a_character_and_never_late(data):
    detokenizer = ByteTokenizer().detokenizer()
    seen = ""
    for count, byte in enumerate(data, start=1):
        seen += detokenizer.push(byte)
        assert seen == longest_certain_prefix(bytes(data[:count]))
    assert seen + detokenizer.flush() == bytes(data).decode("utf-8", "replace")


def test_emoji_comes_whole_and_impossible_bytes_at_once():
    assert stream(ByteTokenizer(), "🙂".encode()) == ["", "", "", "🙂", ""]
    assert stream(ByteTokenizer(), [0xF0, 0x9F, ord("a")]) == ["", "", "\ufffda", ""]
    assert stream(ByteTokenizer(), [0xFF, 0xE4]) == ["\ufffd", "", "\ufffd"]


def test_special_tokens_stream_no_text_and_end_a_character():
    assert stream(SMALL, [72, 643, 105, 642]) == ["H", "", "i", "", ""]
    assert stream(ByteTokenizer(), [0xF0, 0x9F, 258, 0x99, 0x82]) == ["", "", "\ufffd", "\ufffd", "\ufffd", ""]


@pytest.mark.parametrize("tokenizer", [SMALL, ByteTokenizer()], ids=["tiktoken", "bytes"])
@pytest.mark.parametrize("token", [-1, 1000])
def test_unknown_id(tokenizer, token):
    with pytest.raises(UserError, match=f"token id {token} is outside"):
        tokenizer.decode([token])


def lines():
    return (FILES / "tiktoken.model").read_bytes().splitlines()


DAMAGE = {
    "missing": ("tiktoken.model", None, "cannot read .*tiktoken.model"),
    "not base64": ("tiktoken.model", b"\n".join([*lines(), b"%%% 640"]), "line 641"),
    "no rank": ("tiktoken.model", b"AA==\n", "line 1"),
    "hole": ("tiktoken.model", b"\n".join(lines()[:-2] + lines()[-1:]), "line 639"),
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


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = os.environ.get("K3JAX_TOKENIZER")
    if not folder:
        pytest.skip("K3JAX_TOKENIZER names no folder with the published tiktoken.model")
    directory = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(pathlib.Path(folder) / "tiktoken.model", directory)
    (directory / "tokenizer_config.json").write_text('{"added_tokens_decoder": {}}')
    return TiktokenTokenizer.from_directory(directory)


def test_published_vocabulary(real):
    assert (real.num_base_tokens, real.vocab_size) == (163584, 163840)
    wrong = {
        text: real.encode(text)
        for text, ids in REAL_VECTORS.items()
        if ",".join(map(str, real.encode(text))) != ids or real.decode(real.encode(text)) != text
    }
    assert not wrong
