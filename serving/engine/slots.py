"""What is in the slots, in columns: decode steps are planned for all of them at once."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np

from k3jax.state import PAGE_SIZE
from serving.engine.sequence import Sequence

_NO_TOKEN = -2
"""Pads lists of stop tokens; no step chooses it."""


class Slots:
    """One row for each slot, dummy slot 0 included.

    Attributes:
      sequences: who has it, or None.
      decoding: [slots] bool, whether the next decode step has a row for it.
      context: [slots] int64 tokens processed once all dispatched steps have run.
      left: [slots] int64 new tokens that no dispatched step computes.
      pages: [slots, max pages] int32.
      capacity: [slots] int64 tokens that its pages hold.
      stop_tokens: [slots, most] int64.
    """

    def __init__(self, num_slots: int, max_pages: int):
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.decoding = np.zeros(num_slots, bool)
        self.context = np.zeros(num_slots, np.int64)
        self.left = np.zeros(num_slots, np.int64)
        self.pages = np.zeros((num_slots, max_pages), np.int32)
        self.capacity = np.zeros(num_slots, np.int64)
        self.stop_tokens = np.full((num_slots, 1), _NO_TOKEN, np.int64)

    def take(self, sequence: Sequence) -> int:
        """A sequence was admitted; returns its slot."""
        slot = sequence.admission.slot
        assert self.sequences[slot] is None, "a slot has two owners"
        self.sequences[slot] = sequence
        self.pages[slot] = 0
        self.set_pages(slot, sequence.admission.pages)
        self._set_stop_tokens(slot, sequence.request.stop_token_ids)
        return slot

    def leave(self, slot: int) -> None:
        """The sequence in it was released."""
        self.sequences[slot] = None
        self.decoding[slot] = False

    def set_pages(self, slot: int, pages: SequenceOf[int]) -> None:
        """The sequence in it has these pages now."""
        self.pages[slot, : len(pages)] = pages
        self.capacity[slot] = len(pages) * PAGE_SIZE

    def begin_decoding(self, slot: int, context: int, left: int) -> None:
        """A step was dispatched that ends its prompt, and `left` tokens are to come after that step's."""
        self.context[slot], self.left[slot] = context, left
        self.decoding[slot] = left > 0

    def without_room(self) -> list[Sequence]:
        """Those whose next token has no page, in order."""
        slots = np.flatnonzero(self.decoding & (self.context >= self.capacity))
        return sorted((self.sequences[slot] for slot in slots), key=lambda sequence: sequence.order)

    def decode_rows(self, sizes: Iterable[int]) -> tuple[np.ndarray, np.ndarray] | None:
        """The next decode step: ([n] slots, [B, 3] int32 rows of `decode_step`), and moves on; None without any."""
        slots = np.flatnonzero(self.decoding)
        if not slots.size:
            return None
        context = self.context[slots]
        rows = np.zeros((next(size for size in sizes if size >= slots.size), 3), np.int32)
        rows[: slots.size, 0] = slots
        rows[: slots.size, 1] = context
        rows[: slots.size, 2] = self.pages[slots, context // PAGE_SIZE]
        self.context[slots] += 1
        self.left[slots] -= 1
        self.decoding[slots] = self.left[slots] > 0
        return slots, rows

    def are_stops(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """[n] bool, whether these tokens end the answers in these slots."""
        return (self.stop_tokens[slots] == tokens[:, None]).any(axis=1)

    def _set_stop_tokens(self, slot: int, tokens: frozenset[int]) -> None:
        missing = len(tokens) - self.stop_tokens.shape[1]
        if missing > 0:
            self.stop_tokens = np.pad(self.stop_tokens, ((0, 0), (0, missing)), constant_values=_NO_TOKEN)
        self.stop_tokens[slot] = _NO_TOKEN
        self.stop_tokens[slot, : len(tokens)] = list(tokens)
