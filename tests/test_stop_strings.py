"""Stop strings in a stream, against a search through the complete text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.sampling.stop_strings import StopStrings


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Letter by letter: what is shown, and the longest stop string that ends where the first one does."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def cut(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[first:last] for first, last in zip(bounds, bounds[1:])]


@given(
    text=st.text("ab\n", max_size=24), stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=24),
)
def test_any_splitting_shows_what_the_complete_text_does(text, stops, cuts):
    expected, matched = oracle(text, stops)
    stream, shown, pushed = StopStrings(stops), "", ""
    for piece in cut(text, cuts):
        shown, pushed = shown + stream.push(piece), pushed + piece
        so_far, _ = oracle(pushed, stops)
        assert so_far.startswith(shown)
        # Nothing is held back but what may begin a stop string.
        held = so_far[len(shown):]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    assert stream.matched == matched
    assert shown + stream.flush() == expected


@pytest.mark.parametrize(("pieces", "stops", "shown", "matched"), [
    (["Hel", "lo\n\nUs", "er: x"], ["\n\nUser:"], "Hello", "\n\nUser:"),
    (["abcdef"], ["abcdef", "cd"], "ab", "cd"),
    (["xxab"], ["b", "ab"], "xx", "ab"),
    (["aab"], ["ab", "aac"], "a", "ab"),
    (["a🙂b"], ["🙂"], "a", "🙂"),
    (["abc"], [], "abc", None),
])
def test_examples(pieces, stops, shown, matched):
    stream = StopStrings(stops)
    assert "".join(map(stream.push, pieces)) + stream.flush() == shown
    assert stream.matched == matched
    if matched:
        assert stream.push("more") == stream.flush() == ""


def test_text_is_not_held_longer_than_needed():
    stream = StopStrings(["<end>"])
    assert [stream.push(piece) for piece in ["a<", "en", "x", "<e", "<", "en"]] == ["a", "", "<enx", "", "<e", ""]
    assert stream.flush() == "<en"
