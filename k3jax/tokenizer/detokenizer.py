"""Text out of a stream of tokens, never half a character."""

import codecs
from typing import Protocol


class Vocabulary(Protocol):
    """What a stream of tokens needs: see `k3jax.tokenizer.Tokenizer`."""

    def is_special(self, token_id: int) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class IncrementalDetokenizer:
    """Turns tokens into text as they come, never emitting half a character.

    The bytes of an incomplete character (at most three) are held back while they can still become valid; bytes that
    cannot become valid turn into U+FFFD at once. Special tokens give no text of their own and end what was held back.
    """

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that is certain once this token is known; often empty inside a multi-byte character."""
        if self._vocabulary.is_special(token_id):
            return self.flush()
        text = self._decoder.decode(self._vocabulary.token_bytes(token_id))
        held, _ = self._decoder.getstate()
        # Python also waits for the last byte of a surrogate, which UTF-8 forbids.
        return text + self.flush() if held[:1] == b"\xed" and held[1:] >= b"\xa0" else text

    def flush(self) -> str:
        """The bytes held back, as U+FFFD; call it after the last token."""
        return self._decoder.decode(b"", final=True)
