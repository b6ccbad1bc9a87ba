"""Settings of an engine."""

import dataclasses

from k3jax.errors import UserError
from k3jax.sampling.params import MAX_LOGPROBS

CHUNK = 128
"""Prefill steps take multiples of this many tokens: the match unit of the cache, two KDA chunks, one MLA page."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine may use, and how it goes about it.

    Attributes:
      max_batch: most requests that run at once.
      prefill_tokens: most prompt tokens in one step, a multiple of 128.
      context: most tokens of a request, new ones included; None = the model's, or what the pages hold if that is less.
      num_pages: MLA pages of 128 tokens; None = what memory has room for.
      cache_bytes: device memory for snapshots and for pages that no request is using; None = a share of what is free.
      cache: whether prefixes are reused; if not, nothing is looked up, kept or published.
      max_waiting: most requests that wait for their turn.
      deterministic: the bits of an answer do not depend on the cache, nor on what else runs: one prefill shape, one
        decode shape, chunks that end at multiples of `prefill_tokens`, pages for the whole answer from the start.
      num_logprobs: how many of the most likely tokens a request may ask for beside each new one.

    Raises:
      UserError: a value is outside its range.
    """

    max_batch: int = 16
    prefill_tokens: int = 512
    context: int | None = None
    num_pages: int | None = None
    cache_bytes: int | None = None
    cache: bool = True
    max_waiting: int = 1024
    deterministic: bool = False
    num_logprobs: int = 5

    def __post_init__(self):
        tokens = self.prefill_tokens
        self._check("max_batch", self.max_batch >= 1, "at least 1")
        self._check("prefill_tokens", tokens > 0 and tokens % CHUNK == 0, f"a positive multiple of {CHUNK}")
        self._check("context", self.context is None or self.context >= 2, "at least 2, or None for the model's own")
        self._check("num_pages", self.num_pages is None or self.num_pages >= 1, "at least 1, or None to fill memory")
        self._check("cache_bytes", self.cache_bytes is None or self.cache_bytes >= 0, "at least 0, or None for a share")
        self._check("max_waiting", self.max_waiting >= 1, "at least 1")
        self._check("num_logprobs", 0 <= self.num_logprobs <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}")

    def _check(self, field: str, holds: bool, expected: str) -> None:
        if not holds:
            raise UserError(f"{field} is {getattr(self, field)!r}, expected {expected}")
