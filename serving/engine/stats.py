"""What an engine reports about itself."""

import collections
import dataclasses

from serving.prefix_cache import Stats


@dataclasses.dataclass
class Counters:
    """The totals of `EngineStats`, which tells what they mean; only the engine's thread changes them."""

    prefill_steps: int = 0
    decode_steps: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    finished: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    preemptions: int = 0
    nan_requests: int = 0
    restarts: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot; totals count from when the engine was made, restarts included.

    Attributes:
      state: "starting", "serving", "draining", "failed" or "stopped".
      running: requests that have a slot.
      waiting: requests in the queue.
      context: most tokens of a request.
      pages, free_pages, cached_pages: MLA pages in all, of nobody, and of the cache (some of which requests read).
      page_bytes, snapshot_bytes: sizes.
      snapshots: states that are kept.
      cache_bytes_used, cache_bytes: of snapshots and idle pages, and their limit.
      cache: counters of the prefix cache since the last start.
      compiles_total: programs that the engine's thread has compiled.
      prefill_steps, decode_steps: steps.
      prompt_tokens: computed or taken from the cache, of requests that ran.
      computed_tokens: prompt tokens that were computed; those of a preempted request again.
      generated_tokens: new tokens.
      finished: requests by finish reason.
      preemptions: requests that had to make room and begin again.
      nan_requests: requests whose logits were no numbers.
      restarts: times that the engine began anew after an exception.
    """

    state: str
    running: int
    waiting: int
    context: int
    pages: int
    free_pages: int
    cached_pages: int
    page_bytes: int
    snapshot_bytes: int
    snapshots: int
    cache_bytes_used: int
    cache_bytes: int
    cache: Stats
    compiles_total: int
    prefill_steps: int
    decode_steps: int
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    finished: dict[str, int]
    preemptions: int
    nan_requests: int
    restarts: int
