"""What happened in a cache since it was made."""

import collections
import dataclasses


@dataclasses.dataclass
class Stats:
    """Counters; tokens are those of admitted prompts.

    Attributes:
      admitted: requests.
      refused: admissions for which there was no slot or not enough pages.
      prompt_tokens: looked up.
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
    """

    admitted: int = 0
    refused: int = 0
    prompt_tokens: int = 0
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
