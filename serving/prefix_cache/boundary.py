"""Boundaries: positions of prompts at which a state is, was or will be kept, and what is known about their return."""

import collections
import dataclasses
import enum
from collections.abc import Hashable

import numpy as np

from serving.prefix_cache.policy import Policy


class Kind(enum.Enum):
    """Why a prefill stops here; where two reasons meet, the first one listed counts."""

    PROMPT_END = "prompt end"
    JUNCTION = "junction"
    DECLARED = "declared"
    INTERVAL = "interval"


@dataclasses.dataclass(eq=False, slots=True)
class Boundary:
    """A position of a prompt. Without a snapshot in any tier it is a tombstone: evidence of what was seen.

    Attributes:
      key: chained key of the unit that ends here.
      num_tokens: tokens before it.
      kind: why a prefill stopped here first.
      turn: of its conversation, from 1.
      new_tokens: by how many tokens the prompt went beyond what was known of it.
      forks: requests that went on from here, and for which no deeper boundary was known.
      homes: tiers that have a snapshot.
      row: its place in the table.
    """

    key: Hashable
    num_tokens: int
    kind: Kind
    turn: int = 0
    new_tokens: int = 0
    forks: int = 0
    homes: int = 0
    row: int = -1

    @property
    def superseded(self) -> bool:
        """A prompt end whose conversation went on: the deeper one is hit from now on."""
        return self.kind is Kind.PROMPT_END and self.forks == 1


class BoundaryTable:
    """All boundaries that are known, each waiting for its next use; the policy learns from how long they wait.

    Tombstones are bounded in number; those that were evicted or used longest ago go first.
    """

    def __init__(self, policy: Policy, max_tombstones: int):
        self.policy = policy
        self.max_tombstones = max_tombstones
        self.known: dict[Hashable, Boundary] = {}
        self.tombstones: collections.OrderedDict[Hashable, Boundary] = collections.OrderedDict()
        self.classes = np.zeros(64, np.int64)
        self.since = np.full(64, np.inf)  # inf: the row is free
        self._free = list(range(63, -1, -1))

    def add(self, boundary: Boundary, now: float) -> Boundary:
        """Makes it known, or returns the one that is known by its key."""
        if boundary.key in self.known:
            return self.known[boundary.key]
        if not self._free:
            size = len(self.since)
            self._free.extend(range(2 * size - 1, size - 1, -1))
            self.classes = np.concatenate([self.classes, np.zeros(size, np.int64)])
            self.since = np.concatenate([self.since, np.full(size, np.inf)])
        boundary.row = self._free.pop()
        boundary.homes = 0
        self.known[boundary.key] = self.tombstones[boundary.key] = boundary
        self._wait(boundary, now)
        self._trim(now)
        return boundary

    def used(self, boundary: Boundary, now: float) -> None:
        """A request came for it; the wait for the next one begins."""
        self.policy.observe(self.classes[boundary.row], self._age(boundary, now), used=True)
        self._wait(boundary, now)
        if not boundary.homes:
            self.tombstones.move_to_end(boundary.key)

    def gained_home(self, boundary: Boundary) -> None:
        """A tier has a snapshot of it now."""
        boundary.homes += 1
        self.tombstones.pop(boundary.key, None)

    def lost_home(self, boundary: Boundary, now: float) -> None:
        """A tier has dropped its snapshot."""
        boundary.homes -= 1
        if not boundary.homes:
            self.tombstones[boundary.key] = boundary
            self._trim(now)

    def rates(self, rows: np.ndarray, now: float) -> np.ndarray:
        """Uses to be expected per second, of the boundaries in these rows."""
        return self.policy.rates(self.classes[rows], np.maximum(now - self.since[rows], 0))

    def learn(self, now: float) -> None:
        """Lets the policy see the waits that have not ended."""
        rows = np.flatnonzero(self.since < np.inf)
        self.policy.learn(self.classes[rows], np.maximum(now - self.since[rows], 0), now)

    def clear(self, now: float) -> None:
        """Forgets all boundaries; the caller has dropped all snapshots."""
        for boundary in list(self.known.values()):
            self._remove(boundary, now)

    def _wait(self, boundary: Boundary, now: float) -> None:
        self.classes[boundary.row] = self.policy.classify(boundary)
        self.since[boundary.row] = now

    def _age(self, boundary: Boundary, now: float) -> float:
        return max(now - self.since[boundary.row], 0.0)

    def _trim(self, now: float) -> None:
        while len(self.tombstones) > self.max_tombstones:
            self._remove(next(iter(self.tombstones.values())), now)

    def _remove(self, boundary: Boundary, now: float) -> None:
        self.policy.observe(self.classes[boundary.row], self._age(boundary, now), used=False)
        self.since[boundary.row] = np.inf
        self._free.append(boundary.row)
        self.tombstones.pop(boundary.key, None)
        del self.known[boundary.key]
