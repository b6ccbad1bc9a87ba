"""Keys against SHA-256 written out by hand, and what must and must not change them."""

import hashlib
import struct

import numpy as np
import pytest

from serving.prefix_cache import ChainHasher

NAMES = {"model": "kimi-k3", "weights": "v1", "state_layout": "float32 HVK"}
HASHER = ChainHasher(**NAMES, unit=64)
TOKENS = list(range(1000, 1200))


def by_hand(tokens, salt=b"", extra=None):
    def fields(*data):
        return hashlib.sha256(b"".join(struct.pack("<Q", len(d)) + d for d in data)).digest()

    root = fields(b"k3jax prefix cache 1", b"kimi-k3", b"v1", b"float32 HVK", b"64")
    key, keys = fields(root.hex().encode(), salt), []
    for unit in range(len(tokens) // 64):
        data = struct.pack("<64i", *tokens[64 * unit : 64 * unit + 64])
        key = hashlib.sha256(key + data + (extra or {}).get(unit, b"")).digest()
        keys.append(key)
    return keys


def test_keys_are_the_chain_written_out():
    assert HASHER.keys(TOKENS) == by_hand(TOKENS) and len(by_hand(TOKENS)) == 3
    assert HASHER.keys(TOKENS, salt="alice", extra={1: b"img"}) == by_hand(TOKENS, b"alice", {1: b"img"})


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint64, ">i4"])
def test_the_kind_of_array_does_not_matter(dtype):
    assert HASHER.keys(np.array(TOKENS, dtype)) == HASHER.keys(TOKENS) == HASHER.keys(tuple(TOKENS))
    assert HASHER.keys(np.repeat(np.array(TOKENS, dtype), 2)[::2]) == HASHER.keys(TOKENS)


@pytest.mark.parametrize("length,units", [(0, 0), (1, 0), (63, 0), (64, 1), (65, 1), (127, 1), (128, 2)])
def test_only_complete_units_have_keys(length, units):
    assert len(HASHER.keys([1] * length)) == units


def test_an_early_token_changes_every_key_after_it_and_none_before():
    changed = HASHER.keys(TOKENS[:70] + [5] + TOKENS[71:])
    assert [a == b for a, b in zip(changed, HASHER.keys(TOKENS))] == [True, False, False]


@pytest.mark.parametrize("changed", [{"model": "v1"}, {"weights": "v2"}, {"state_layout": "bfloat16 HVK"}])
def test_another_model_weights_or_layout_share_nothing(changed):
    assert not set(ChainHasher(**NAMES | changed, unit=64).keys(TOKENS)) & set(HASHER.keys(TOKENS))


def test_fields_do_not_run_together():
    one = ChainHasher(model="ab", weights="c", state_layout="", unit=64)
    other = ChainHasher(model="a", weights="bc", state_layout="", unit=64)
    assert not set(one.keys(TOKENS)) & set(other.keys(TOKENS))


def test_salts_and_images_separate():
    lists = [
        HASHER.keys(TOKENS), HASHER.keys(TOKENS, salt="a"), HASHER.keys(TOKENS, salt="b"),
        HASHER.keys(TOKENS, extra={0: b"a"}), HASHER.keys(TOKENS, extra={0: b"b"}),
    ]
    assert len({key for keys in lists for key in keys}) == 3 * len(lists)
    later = HASHER.keys(TOKENS, extra={2: b"image"})
    assert later[:2] == lists[0][:2] and later[2] != lists[0][2]


@pytest.mark.parametrize("tokens,message", [
    ([1, -1], "token id -1 does not lie in 0 .. 2147483647"),
    ([2**31], "token id 2147483648 does not lie in 0 .. 2147483647"),
    ([2**40], "token id 1099511627776 does not lie in 0 .. 2147483647"),
    ([2**70], "tokens are object, expected whole numbers that fit in 32 bits"),
    ([1.5], "tokens are float64, expected whole numbers that fit in 32 bits"),
    (["a"], "tokens are <U1, expected whole numbers that fit in 32 bits"),
    ([True], "tokens are bool, expected whole numbers that fit in 32 bits"),
    ([[1, 2]], r"tokens have shape \(1, 2\), expected one dimension"),
])
def test_bad_tokens_are_one_clear_line(tokens, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        HASHER.keys(tokens)


def test_the_largest_id_is_fine():
    assert HASHER.keys([2**31 - 1] * 64) == by_hand([2**31 - 1] * 64)
