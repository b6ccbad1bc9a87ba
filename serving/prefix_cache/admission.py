"""What a lookup finds, and what a request holds from admission to release."""

import dataclasses
import enum
from collections.abc import Hashable, Sequence
from typing import Any

from serving.prefix_cache.boundary import Boundary
from serving.prefix_cache.tier import Resident


@dataclasses.dataclass(frozen=True)
class Match:
    """What a lookup found.

    Attributes:
      hit_tokens: deepest position before the prompt's last token that has a snapshot and pages for all before it; 0 for
        none.
      tier: "device" or "host", where that snapshot is; None without a hit.
      mla_tokens: how far device pages reach, state or not.
      junction: where this prompt leaves what an earlier one went on with, if that is beyond the hit; else 0.
      pending_tokens: how deep running requests are about to publish on this path. Where it is more than `hit_tokens`,
        to wait may be cheaper than to compute the same.
    """

    hit_tokens: int
    tier: str | None
    mla_tokens: int
    junction: int
    pending_tokens: int


class Phase(enum.Enum):
    """Where an admission stands."""

    LOADING = "waiting for its state from the host"
    RUNNING = "running"
    FAILED = "without the state it was promised"
    RELEASED = "released"


@dataclasses.dataclass(eq=False)
class Admission:
    """A request's share of the pools, from `admit` to `release`. Read it; only the cache changes it.

    Attributes:
      slot: its live KDA state.
      pages: page ids of the prompt and of the tokens to come, in order. Those before `hit_tokens` are written already.
      hit_tokens: prefill begins here.
      restore: snapshot to copy into the slot; None without a hit, when the slot must be zeroed, and after
        `PrefixCache.restored`. While the phase is LOADING it is yet to come.
      stops: positions above `hit_tokens`, ascending, at which a prefill must stop and may publish.
      phase: where it stands.
    """

    slot: int
    pages: list[int]
    hit_tokens: int
    restore: Any | None = dataclasses.field(repr=False)
    stops: tuple[int, ...]
    phase: Phase
    # The cache's own notes.
    path: Sequence[Hashable] = dataclasses.field(repr=False)  # keys of the units before the prompt's last token
    ahead: dict[int, Boundary] = dataclasses.field(repr=False)  # stops that are not published yet
    owned: set[int] = dataclasses.field(repr=False)  # pages that are not cached
    held_page: int  # deepest cached page that it reads ...
    held_units: int  # ... and how many units that are
    source: Resident | None  # pinned until its snapshot is copied
    epoch: int
