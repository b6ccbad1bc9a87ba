"""Events from the engine's thread to the coroutines that wait for them."""

import asyncio
import collections
from collections.abc import Callable

from serving.engine.request import Event, Tokens


class Inboxes:
    """Wakes an event loop once for all events of an engine step: a wake-up costs more than an event.

    Args:
      max_tokens: how many tokens an inbox holds for a client that does not read; beyond, it drops them.
    """

    def __init__(self, max_tokens: int):
        self._loop, self._max_tokens = asyncio.get_running_loop(), max_tokens
        self._filled: collections.deque[Inbox] = collections.deque()
        self._scheduled = False

    def open(self, on_overflow: Callable[[], None]) -> "Inbox":
        """An inbox; when it overflows, `on_overflow` is called once, in the event loop."""
        return Inbox(self, self._max_tokens, on_overflow)

    def notify(self, inbox: "Inbox") -> None:
        """An inbox has something; from the engine's thread."""
        self._filled.append(inbox)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._scheduled = False  # first: whoever notifies from here on schedules another call
        while self._filled:
            self._filled.popleft().wake()


class Inbox:
    """Events of one request.

    Attributes:
      overflowed: tokens were dropped; those that were taken are not all.
    """

    def __init__(self, owner: Inboxes, max_tokens: int, on_overflow: Callable[[], None]):
        self._owner, self._max_tokens, self._on_overflow = owner, max_tokens, on_overflow
        self._events: collections.deque[Event] = collections.deque()
        self._filled = asyncio.Event()
        # Each is written by one thread only.
        self._tokens_put = self._tokens_taken = 0
        self.overflowed = False

    def put(self, event: Event) -> None:
        """The engine's sink: never blocks."""
        if isinstance(event, Tokens):
            self._tokens_put += len(event.ids)
            if self._tokens_put - self._tokens_taken > self._max_tokens:
                self.overflowed = True
        if not (self.overflowed and isinstance(event, Tokens)):
            self._events.append(event)
        self._owner.notify(self)

    async def take(self) -> list[Event]:
        """All events that have come, at least one."""
        while not self._events:
            self._filled.clear()
            await self._filled.wait()
        events = [self._events.popleft() for _ in range(len(self._events))]
        self._tokens_taken += sum(len(event.ids) for event in events if isinstance(event, Tokens))
        return events

    def wake(self) -> None:
        """Something was put; in the event loop."""
        self._filled.set()
        if self.overflowed and self._on_overflow:
            self._on_overflow()
            self._on_overflow = None
