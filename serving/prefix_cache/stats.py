"""What happened in a cache since it was made."""

import collections
import dataclasses

from serving.histogram import SECONDS, Histogram


def _seconds() -> Histogram:
    return dataclasses.field(default_factory=lambda: Histogram(SECONDS))


@dataclasses.dataclass
class Stats:
    """Counters; tokens are those of admitted prompts.

    Attributes:
      admitted: requests.
      refused_attempts: to be admitted, for which there was no slot or not enough pages; who tries again counts again.
      prompt_tokens: looked up.
      hits: requests that began from a snapshot.
      hit_tokens: not computed again.
      host_hit_tokens: those of them that came from the host tier.
      almost_hit_tokens: beyond the hit, of which pages were cached but no state.
      junctions: forks of prompts that were found.
      published: boundaries that entered the cache.
      duplicates: publications of a boundary that was there already.
      refused_publications: after a release or a reset.
      evicted: snapshots dropped, by tier and kind.
      stored: snapshots copied to the host tier.
      failed_transfers: copies between the tiers that did not arrive.
      reuse_gaps: seconds between two uses of a snapshot.
      idle_times: seconds between the last use of a snapshot, or its publication, and its eviction.
      lifetimes: seconds between its publication and its eviction.
    """

    admitted: int = 0
    refused_attempts: int = 0
    prompt_tokens: int = 0
    hits: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    almost_hit_tokens: int = 0
    junctions: int = 0
    published: int = 0
    duplicates: int = 0
    refused_publications: int = 0
    evicted: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    stored: int = 0
    failed_transfers: int = 0
    reuse_gaps: Histogram = _seconds()
    idle_times: Histogram = _seconds()
    lifetimes: Histogram = _seconds()

    def copy(self) -> "Stats":
        """As it stands; from any thread."""
        return dataclasses.replace(
            self, evicted=collections.Counter(dict(self.evicted)), reuse_gaps=self.reuse_gaps.copy(),
            idle_times=self.idle_times.copy(), lifetimes=self.lifetimes.copy(),
        )
