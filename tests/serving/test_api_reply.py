"""Text, stop strings and token ids of a stream, however the engine's events come together."""

import hypothesis
import hypothesis.strategies as st

from k3jax.sampling import SamplingParams
from k3jax.text_stream import TextStream
from k3jax.tokenizer import ByteTokenizer
from serving.api.reply import Reply
from serving.api.v1 import decoder_pb2 as pb
from serving.engine.request import Accepted, Done, Request, Timings, Tokens, Usage

TOKENIZER = ByteTokenizer()
EOS = 258


def events_of(tokens, cuts, reason, stop_token=None):
    """One Accepted, Tokens, and Done, in batches that arrive together."""
    done = Done(reason, stop_token, Usage(7, 3, len(tokens)), Timings(1.0, 2.0, 3.0))
    events = [Accepted(3, 7), *(Tokens((token,), None) for token in tokens), done]
    cuts = sorted({0, len(events), *(cut % len(events) for cut in cuts)})
    return [events[start:end] for start, end in zip(cuts, cuts[1:])]


def reply_to(tokens, stops=(), cuts=(), reason="length", stop_tokens=(), stop_token=None):
    request = Request(
        id="r#1", token_ids=(1,) * 7, sampling=SamplingParams(stop=stops, seed=5), max_new_tokens=1000,
        stop_token_ids=frozenset(stop_tokens),
    )
    reply = Reply(request, "r", TextStream(TOKENIZER, stops))
    messages = [message for batch in events_of(tokens, cuts, reason, stop_token) for message in reply.push(batch)]
    assert messages[0].accepted == pb.Accepted(request_id="r", prompt_tokens=7, cached_tokens=3, seed=5)
    deltas = [message.delta for message in messages[1:]]
    assert all(delta.token_ids or delta.text for delta in deltas)
    ids = [token for delta in deltas for token in delta.token_ids]
    return ids, "".join(delta.text for delta in deltas), reply.finish().done


@hypothesis.given(
    text=st.text("aбé≈😀", max_size=12), stops=st.lists(st.text("aбé≈😀", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_text_ends_at_the_first_stop_string_and_ids_with_the_token_that_completes_it(text, stops, cuts):
    data = text.encode()
    # The oracle sees the whole text; of bytes that end inside a character, the complete ones count.
    ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}
    ids, shown, done = reply_to(tuple(data), tuple(stops), cuts)
    assert done.usage == pb.Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=len(ids))
    if not ends:
        assert (bytes(ids), shown, done.finish_reason) == (data, text, pb.FINISH_REASON_LENGTH)
        return
    first = min(ends, key=lambda stop: (ends[stop], -len(stop)))
    assert shown == text[: ends[first] - len(first)]
    assert bytes(ids) == text[: ends[first]].encode()
    assert (done.finish_reason, done.stop_string) == (pb.FINISH_REASON_STOP, first)


@hypothesis.given(data=st.binary(max_size=12), cuts=st.lists(st.integers(0, 20), max_size=6))
def test_any_bytes_give_the_text_of_all_of_them(data, cuts):
    ids, shown, _ = reply_to(tuple(data), cuts=cuts)
    assert bytes(ids) == data and shown == data.decode("utf-8", errors="replace")


def test_half_a_character_is_never_delivered():
    request = Request(id="r#1", token_ids=(1,), sampling=SamplingParams(seed=1), max_new_tokens=9)
    reply = Reply(request, "r", TextStream(TOKENIZER, ()))
    texts = [reply.push([Tokens((byte,), None)])[0].delta.text for byte in "a≈😀".encode()]
    assert texts == ["a", "", "", "≈", "", "", "", "😀"]


def test_stop_token_ends_the_text_and_is_delivered_as_id():
    for stop_token, tokens, shown in ((EOS, (*b"ab", EOS), "ab"), (ord("b"), tuple(b"ab"), "a")):
        ids, text, done = reply_to(tokens, reason="stop", stop_tokens=(stop_token,), stop_token=stop_token)
        assert (tuple(ids), text) == (tokens, shown)
        assert (done.finish_reason, done.stop_token_id) == (pb.FINISH_REASON_STOP, stop_token)


def test_bytes_held_back_come_at_the_end():
    ids, text, done = reply_to((*b"a", 0xE2, 0x89))
    assert (bytes(ids), text, done.finish_reason) == (b"a\xe2\x89", "a\ufffd", pb.FINISH_REASON_LENGTH)
    # They may even complete a stop string.
    ids, text, done = reply_to((*b"a", 0xE2, 0x89), ("\ufffd",))
    assert (bytes(ids), text, done.stop_string) == (b"a\xe2\x89", "a", "\ufffd")


def test_abort_keeps_what_there_is():
    ids, text, done = reply_to(tuple(b"ab"), ("bc",), reason="abort")
    assert (bytes(ids), text, done.finish_reason) == (b"ab", "ab", pb.FINISH_REASON_ABORT)
    assert done.WhichOneof("stop_reason") is None
