"""What goes into the engine, and the events that come out of it."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from k3jax.generation import TokenLogprobs
from k3jax.sampling import SamplingParams


class QueueFull(Exception):
    """As many requests wait as may wait: try again later."""


class NotServing(Exception):
    """The engine is starting, draining, stopped or failed."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A prompt and what to do with it.

    Attributes:
      id: chosen by the caller, of no other request in flight.
      token_ids: [n] the prompt, at least one token.
      sampling: how tokens are chosen. Its `stop` and `stop_token_ids` are the caller's business; see below.
      max_new_tokens: most new tokens, at least 1.
      stop_token_ids: tokens that end the answer: all that apply, the model's own too.
      priority: requests of a higher one run first.
      breakpoints: positions of the prompt which others are expected to share, 0 .. n.
      salt: requests with different ones share nothing in the cache.
      deadline: on the clock of `time.monotonic`; None = none.
    """

    id: str
    token_ids: Sequence[int] | np.ndarray
    sampling: SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    breakpoints: tuple[int, ...] = ()
    salt: str = ""
    deadline: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """The request runs from now on; the first event, unless the request ends in the queue.

    Attributes:
      cached_tokens: prompt tokens that need not be computed.
      prompt_tokens: all of them.
    """

    cached_tokens: int
    prompt_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens, a stop token included.

    Attributes:
      ids: at least one.
      logprobs: one for each; None unless asked for.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; `cached_tokens` are among the `prompt_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Timings:
    """Seconds in the queue, from there to the first new token, and from there to the end."""

    queue_s: float
    prefill_s: float
    decode_s: float


FinishReason = Literal["stop", "length", "abort", "deadline", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """The last event, and there is always one.

    Attributes:
      finish_reason: "stop" (a stop token), "length" (`max_new_tokens`), "abort", "deadline", or "error".
      stop_token: the stop token.
      usage: tokens.
      timings: seconds.
      message: of an error.
    """

    finish_reason: FinishReason
    stop_token: int | None
    usage: Usage
    timings: Timings
    message: str | None = None


Event = Accepted | Tokens | Done
