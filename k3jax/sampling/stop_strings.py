"""Ends a stream of text at the first stop string."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on as soon as no stop string can begin in it.

    The first stop string to be complete wins, and of those complete at the same character the longest. So what is
    found does not depend on how the text is cut into pieces, and nothing after it need be known.

    Args:
      stops: texts of at least one character.

    Attributes:
      matched: the stop string that was found; None before.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to be shown once this piece is known; empty after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        ends = {stop: start + len(stop) for stop in self._stops if (start := text.find(stop)) >= 0}
        if ends:
            self.matched = min(ends, key=lambda stop: (ends[stop], -len(stop)))
            self._held = ""
            return text[: ends[self.matched] - len(self.matched)]
        shown = len(text) - self._longest_start(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text held back; call it after the last piece."""
        text, self._held = self._held, ""
        return text

    def _longest_start(self, text: str) -> int:
        """Characters at the end of the text that a stop string may begin with."""
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
