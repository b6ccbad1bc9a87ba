"""The text of a stream of new tokens, up to a stop string."""

from collections.abc import Sequence

from k3jax.sampling.stop_strings import StopStrings
from k3jax.tokenizer import Tokenizer


class TextStream:
    """Gives text as soon as it is certain: never half a character, and nothing that a stop string may begin with.

    Args:
      tokenizer: of the tokens.
      stops: texts that end the stream.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._detokenizer, self._stops = tokenizer.detokenizer(), StopStrings(stops)

    @property
    def stop(self) -> str | None:
        """The stop string that was found; None before."""
        return self._stops.matched

    def push(self, token_id: int) -> str:
        """The text that is certain once this token is known."""
        return self._stops.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """The text held back, which may complete a stop string; call it after the last token."""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
