"""Tokenizer: golden ids, incremental text, and damaged files."""

import base64
import functools
import hashlib
import json
import os
import pathlib
import shutil

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.errors import UserError
from k3jax.presets import preset
from k3jax.tokenizer import ByteTokenizer, TiktokenTokenizer, check_tokenizer
from k3jax.tokenizer.tokenizer import PATTERN

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
    "<|kimi_image_placeholder|>": "27,91,74,30223,11947,114136,91,29",
    # Pieces of Kimi K3's chat format.
    "message": "2778", "think": "39964", "response": "12092", "tools": "25385", "call": "10257", "argument": "47185",
    "json": "5534", " role": "6244", " type": "1798", " name": "1530", " index": "4002", " key": "2355",
    " tool": "4453", '="': "878", '"': "1", "user": "2482", "assistant": "69702", "system": "14062", "tool": "20960",
    "string": "2033", "number": "10006", "boolean": "16849", "null": "6562", "object": "3721", "array": "4392",
    "tool-declare": "20960,120083,677", "thinking-effort": "130400,59991,470", "tool-choice": "20960,135230",
    "response-format": "12092,46906",
}

# Names in the special slots of the published tokenizers, for each family.
REAL_NAMES = {
    "kimi-k3": {
        163584: "[BOS]", 163585: "[EOS]", 163586: "<|end_of_msg|>", 163587: "<|open|>", 163588: "<|close|>",
        163589: "<|sep|>", 163590: "[start_header_id]", 163591: "[end_header_id]", 163593: "[EOT]",
        163594: "<|reserved_token_163594|>", 163601: "<|reserved_token_163601|>", 163602: "<|media_begin|>",
        163603: "<|media_content|>", 163604: "<|media_end|>", 163605: "<|media_pad|>", 163649: "<osagent_mode>",
        163838: "[UNK]", 163839: "[PAD]",
    },
    "kimi-k2": {
        163584: "[BOS]", 163585: "[EOS]", 163586: "<|im_end|>", 163587: "<|im_user|>", 163588: "<|im_assistant|>",
        163589: "<|reserved_token_163589|>", 163590: "<|start_header_id|>", 163591: "<|end_header_id|>",
        163593: "[EOT]", 163594: "<|im_system|>", 163595: "<|tool_calls_section_begin|>",
        163596: "<|tool_calls_section_end|>", 163597: "<|tool_call_begin|>", 163598: "<|tool_call_argument_begin|>",
        163599: "<|tool_call_end|>", 163601: "<|im_middle|>", 163602: "<|media_begin|>", 163603: "<|media_content|>",
        163604: "<|media_end|>", 163605: "<|media_pad|>", 163838: "[UNK]", 163839: "[PAD]",
    },
}

# Texts with markers -> ids under the published vocabularies.
REAL_MARKUP = {
    "kimi-k3": {
        "<|open|>message role=\"user\"<|sep|>": "163587,2778,6244,878,2482,1,163589",
        "<|close|>message<|sep|><|end_of_msg|>": "163588,2778,163589,163586",
        "<|media_begin|>image 640x480<|media_content|><|media_pad|><|media_end|>":
            "163602,4017,220,24057,87,19665,163603,163605,163604",
        "Need it.<|close|>think<|sep|><|open|>response<|sep|>Ok<|close|>response<|sep|>":
            "20082,483,13,163588,39964,163589,163587,12092,163589,18345,163588,12092,163589",
    },
    "kimi-k2": {
        "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>":
            "163587,2482,163601,9663,163586,163588,69702,163601",
        "<|open|>think<|sep|>": REAL_VECTORS["<|open|>think<|sep|>"],
    },
}


def lines():
    return (FILES / "tiktoken.model").read_bytes().splitlines()


def stream(tokenizer, ids):
    detokenizer = tokenizer.detokenizer()
    return [detokenizer.push(token) for token in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("case", GOLDEN["texts"], ids=lambda case: repr(case["text"][:20]))
def test_golden_ids(case):
    assert SMALL.encode(case["text"]) == case["ids_plain"]
    assert SMALL.decode(case["ids_plain"]) == case["text"]


@pytest.mark.parametrize("case", GOLDEN["texts"], ids=lambda case: repr(case["text"][:20]))
def test_golden_ids_of_markup(case):
    assert SMALL.encode(case["text"], markup=True) == case["ids_special_allowed"]


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


@functools.cache
def oracle() -> tiktoken.Encoding:
    """tiktoken's own search for special tokens, which lets a name win wherever it is in the text."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines())}
    return tiktoken.Encoding("oracle", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=GOLDEN["special_tokens"])


PIECES = st.sampled_from([*list(GOLDEN["special_tokens"])[:12], "<|", "|>", "open", "[", " ", "\n", "天", "don't"])


@given(text=st.lists(PIECES | st.text(max_size=4), max_size=8).map("".join))
@settings(deadline=None, max_examples=200)
def test_markup_agrees_with_tiktoken_and_plain_text_holds_no_marker(text):
    ids = SMALL.encode(text, markup=True)
    assert ids == oracle().encode(text, allowed_special="all")
    assert not any(map(SMALL.is_special, SMALL.encode(text)))
    assert SMALL.decode(ids) == SMALL.decode(SMALL.encode(text)) == text


def test_where_one_name_begins_another_the_longer_wins():
    ranks = {bytes([byte]): byte for byte in range(256)}
    tokenizer = TiktokenTokenizer(ranks, {256: "<a", 257: "<a>", 258: "<a>>"})
    assert tokenizer.encode("<a>>><a<a>", markup=True) == [258, ord(">"), 256, 257]


def test_long_texts_are_cut_between_markers():
    """Each stretch of text is cut on its own, so a marker that lies across a 400,000th character stays whole."""
    marker, text = "<|open|>", "x " * 199_999
    assert SMALL.encode(text + marker + text, markup=True) == [*SMALL.encode(text), 643, *SMALL.encode(text)]
    run = "message" * 3572  # 25,004 characters; the cut falls inside a word, which changes its ids
    assert SMALL.encode(run + marker + run, markup=True) == [*SMALL.encode(run), 643, *SMALL.encode(run)]
    assert len(SMALL.encode(run)) > len(SMALL.encode("message" * 3571)) + len(SMALL.encode("message"))


def test_byte_tokenizer_knows_its_markers():
    tokenizer = ByteTokenizer()
    text = "a<|end_of_msg|><|reserved_token_300|>é"
    assert tokenizer.encode(text, markup=True) == [97, 258, 300, *"é".encode()]
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([97, 258, 300]) == text[:-1]


@pytest.mark.parametrize("markup", [False, True])
@pytest.mark.parametrize("tokenizer", [SMALL, ByteTokenizer()], ids=["tiktoken", "bytes"])
def test_surrogates_are_joined_or_replaced(tokenizer, markup):
    text = json.loads(r'"a\ud83d\ude42b\ud83dc"')
    assert tokenizer.decode(tokenizer.encode(text, markup)) == "a🙂b\ufffdc"


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


@given(ids=st.lists(st.integers(0, 639) | st.integers(640, 895) | st.sampled_from([240, 159, 152, 0xED]), max_size=20))
@settings(deadline=None, max_examples=300)
def test_streamed_tokens_are_the_text_between_markers(ids):
    """Nothing is lost, added or reordered, and at most three bytes wait."""
    detokenizer, seen, run, expected = SMALL.detokenizer(), "", [], ""
    for token in ids:
        seen += detokenizer.push(token)
        if SMALL.is_special(token):
            expected, run = expected + SMALL.decode(run), []
            assert seen == expected
        else:
            run.append(token)
            data = b"".join(map(SMALL.token_bytes, run))
            certain = [expected + data[: len(data) - held].decode("utf-8", "replace") for held in range(4)]
            assert seen in certain
    assert seen + detokenizer.flush() == expected + SMALL.decode(run)


@pytest.mark.parametrize("tokenizer", [SMALL, ByteTokenizer()], ids=["tiktoken", "bytes"])
@pytest.mark.parametrize("token", [-1, 1000])
def test_unknown_id(tokenizer, token):
    with pytest.raises(UserError, match=f"token id {token} is outside"):
        tokenizer.decode([token])


@pytest.fixture(scope="module")
def real_folder():
    folder = os.environ.get("K3JAX_TOKENIZER")
    if not folder:
        pytest.skip("K3JAX_TOKENIZER names no folder with the published tiktoken.model")
    return pathlib.Path(folder)


@pytest.fixture(scope="module", params={"kimi-k3": "k3", "kimi-k2": "kimi-linear"}.items(), ids=lambda item: item[0])
def real(request, real_folder, tmp_path_factory):
    """(family, its published tokenizer)."""
    family, name = request.param
    config = real_folder / f"tokenizer_config.{name}.json"
    if not config.exists():
        pytest.skip(f"the folder of K3JAX_TOKENIZER has no {config.name}")
    directory = tmp_path_factory.mktemp(family)
    shutil.copy(real_folder / "tiktoken.model", directory)
    shutil.copy(config, directory / "tokenizer_config.json")
    return family, TiktokenTokenizer.from_directory(directory)


def test_published_vocabulary(real):
    family, tokenizer = real
    assert (tokenizer.num_base_tokens, tokenizer.vocab_size, tokenizer.family) == (163584, 163840, family)
    wrong = {
        text: tokenizer.encode(text)
        for text, ids in REAL_VECTORS.items()
        if ",".join(map(str, tokenizer.encode(text))) != ids or tokenizer.decode(tokenizer.encode(text)) != text
    }
    assert not wrong


def test_published_markers(real):
    family, tokenizer = real
    assert {token_id: tokenizer.decode([token_id]) for token_id in REAL_NAMES[family]} == REAL_NAMES[family]
    for text, ids in REAL_MARKUP[family].items():
        assert tokenizer.encode(text, markup=True) == [int(token_id) for token_id in ids.split(",")]
    check_tokenizer(tokenizer, preset({"kimi-k3": "kimi-k3", "kimi-k2": "kimi-linear-48b"}[family]))


def test_published_character_of_two_tokens(real):
    _, tokenizer = real
    assert [tokenizer.token_bytes(token_id) for token_id in (5885, 46813)] == [b"\xf0\x9f", b"\x99\x82"]
    assert stream(tokenizer, [5885, 46813, 163586]) == ["", "🙂", "", ""]
