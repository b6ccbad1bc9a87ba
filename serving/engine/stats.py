"""What an engine reports about itself."""

import collections
import dataclasses

from serving.histogram import SECONDS, TOKENS, Histogram
from serving.prefix_cache import Stats


def _step_seconds() -> dict[str, Histogram]:
    return {kind: Histogram(SECONDS) for kind in ("prefill", "decode")}


@dataclasses.dataclass
class Counters:
    """The totals of `EngineStats`, which tells what they mean; only the engine's thread changes them."""

    cache: Stats = dataclasses.field(default_factory=Stats)
    prefill_steps: int = 0
    decode_steps: int = 0
    iteration_tokens: Histogram = dataclasses.field(default_factory=lambda: Histogram(TOKENS))
    step_seconds: dict[str, Histogram] = dataclasses.field(default_factory=_step_seconds)
    restore_seconds: Histogram = dataclasses.field(default_factory=lambda: Histogram(SECONDS))
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    finished: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    preemptions: int = 0
    nan_requests: int = 0
    restarts: int = 0

    def copy(self) -> "Counters":
        """As they stand; from any thread: it only reads numbers, and copies small containers each in one go."""
        return dataclasses.replace(
            self, cache=self.cache.copy(), iteration_tokens=self.iteration_tokens.copy(),
            step_seconds={kind: seconds.copy() for kind, seconds in self.step_seconds.items()},
            restore_seconds=self.restore_seconds.copy(), finished=collections.Counter(dict(self.finished)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot; totals count from when the engine was made, restarts included.

    Attributes:
      state: "starting", "serving", "draining", "failed" or "stopped".
      running: requests that have a slot.
      waiting: requests in the queue.
      context: most tokens of a request.
      match_unit: hits, snapshots and pages lie at multiples of so many tokens.
      pages, free_pages, cached_pages: MLA pages in all, of nobody, and of the cache.
      idle_pages: cached ones that no request reads.
      page_bytes, snapshot_bytes: sizes.
      snapshots: states that are kept.
      cache_bytes_used, cache_bytes: of snapshots and idle pages, and their limit.
      policy: the class that guesses which snapshots are used again.
      lost: slots and pages that nobody has, though nothing runs: a fault of the engine.
      compiles_total: programs that the engine's thread has compiled.
      cache: counters of the prefix cache.
      prefill_steps, decode_steps: steps.
      iteration_tokens: tokens computed in a round: those of a decode and of a prefill step, whichever it had.
      step_seconds: by kind, from when the device could begin with a step until its tokens were there.
      restore_seconds: the same of copies of snapshots into slots.
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
    match_unit: int
    pages: int
    free_pages: int
    cached_pages: int
    idle_pages: int
    page_bytes: int
    snapshot_bytes: int
    snapshots: int
    cache_bytes_used: int
    cache_bytes: int
    policy: str
    lost: int
    compiles_total: int
    cache: Stats
    prefill_steps: int
    decode_steps: int
    iteration_tokens: Histogram
    step_seconds: dict[str, Histogram]
    restore_seconds: Histogram
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    finished: collections.Counter[str]
    preemptions: int
    nan_requests: int
    restarts: int
