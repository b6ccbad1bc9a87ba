"""A request on its way through the engine."""

from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf

import numpy as np

from serving.engine.request import Accepted, Event, Request, Timings, Usage
from serving.prefix_cache import Admission

Sink = Callable[[Event], None]


class Sequence:
    """A request and how far it has come; only the engine's thread changes it.

    Attributes:
      request: what was asked for.
      sink: who is told.
      seed: of the draws.
      arrival: number in the order of arrival, which preemption does not change.
      tokens: [n] int32 to prefill: the prompt and, after a preemption, what was generated before it.
      keys: of the complete units of `tokens`.
      generated: new tokens that were read back.
      admission: slot and pages; None while it waits.
      computed: how many of `tokens` are computed, or will be by a step that was dispatched, or were cached.
      accepted: what was said at the first admission; None before.
      done: whether it has ended; steps in flight may still compute tokens of it, which nobody wants.
    """

    def __init__(self, request: Request, sink: Sink, *, tokens: np.ndarray, keys: SequenceOf[Hashable], seed: int,
                 arrival: int, now: float):
        self.request, self.sink, self.seed, self.arrival = request, sink, seed, arrival
        self.tokens, self.keys = tokens, keys
        self.generated: list[int] = []
        self.admission: Admission | None = None
        self.computed = 0
        self.accepted: Accepted | None = None
        self.done = False
        self._submitted = now
        self._started = self._first_token = self._ended = None

    @property
    def order(self) -> tuple[int, int]:
        """The smallest goes first."""
        return -self.request.priority, self.arrival

    @property
    def left(self) -> int:
        """New tokens that are still to come."""
        return self.request.max_new_tokens - len(self.generated)

    def admitted(self, admission: Admission, now: float) -> None:
        """It has a slot."""
        self.admission, self.computed = admission, admission.hit_tokens
        if self.accepted is None:
            self._started = now
            self.accepted = Accepted(admission.hit_tokens, len(self.tokens))

    def preempted(self, tokens: np.ndarray, keys: SequenceOf[Hashable]) -> None:
        """It waits again, and starts from these tokens next time."""
        self.admission, self.computed = None, 0
        self.tokens, self.keys = tokens, keys

    def push(self, token: int, now: float) -> None:
        """A new token was read back."""
        if not self.generated:
            self._first_token = now
        self.generated.append(token)

    def ended(self, now: float) -> None:
        """Nothing more will come."""
        self.done, self._ended = True, now

    def usage(self) -> Usage:
        """So far."""
        cached = self.accepted.cached_tokens if self.accepted else 0
        return Usage(len(self.request.token_ids), cached, len(self.generated))

    def timings(self) -> Timings:
        """After the end; a phase that was not reached took no time."""
        end = self._ended
        started = end if self._started is None else self._started
        first = end if self._first_token is None else self._first_token
        return Timings(started - self._submitted, first - started, end - first)
