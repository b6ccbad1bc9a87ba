"""Sizes and budgets of a prefix cache."""

import dataclasses
from typing import Any

from k3jax.errors import UserError
from serving.prefix_cache.cost import CostModel

STATE_CHUNK = 64
"""KDA's chunk: prefill can export a state at its multiples only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What there is to hand out and to keep.

    A device tier holds at most `device_bytes` of snapshots and of pages that no request is using. Pages in use are
    working memory: `num_pages` bounds them, together with the cached ones.

    Attributes:
      cost: bytes of a snapshot and of a token's latents, and the FLOPs that a hit saves.
      num_slots: live KDA states, counting the dummy slot 0.
      num_pages: physical MLA pages of one match unit each, counting the dummy page 0.
      device_bytes: budget of the device tier.
      unit: match unit in tokens, a multiple of 64: hits, snapshots and pages lie at its multiples.
      max_snapshots: limit on device snapshots of its own, for an engine that allocates its pages up front.
      host_bytes: budget of the host tier; 0 for none.
      pin_bytes: how much of the device tier may be pinned.
      interval: also stop at multiples of this many tokens, a multiple of the unit; 0 for none.
      max_tombstones: boundaries without a snapshot that are remembered, to learn who comes back.
      max_seen_units: units of past prompts that are remembered, to see where prompts fork.
    """

    cost: CostModel
    num_slots: int
    num_pages: int
    device_bytes: int
    unit: int = 128
    max_snapshots: int | None = None
    host_bytes: int = 0
    pin_bytes: int = 0
    interval: int = 0
    max_tombstones: int = 16384
    max_seen_units: int = 2**18

    @property
    def page_bytes(self) -> int:
        """Bytes of an MLA page, all layers."""
        return self.unit * self.cost.token_bytes

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a snapshot, all layers."""
        return self.cost.snapshot_bytes

    def __post_init__(self):
        smallest = self.snapshot_bytes + self.page_bytes
        _check(self, "unit", self.unit > 0 and self.unit % STATE_CHUNK == 0, f"a positive multiple of {STATE_CHUNK}")
        _check(self, "num_slots", self.num_slots >= 2, "at least 2: slot 0 is a dummy")
        _check(self, "num_pages", self.num_pages >= 2, "at least 2: page 0 is a dummy")
        _check(self, "device_bytes", self.device_bytes >= smallest, f"at least {smallest}: a snapshot and a page")
        _check(self, "max_snapshots", self.max_snapshots is None or self.max_snapshots >= 1, "at least 1, or None")
        _check(
            self, "host_bytes", self.host_bytes == 0 or self.host_bytes >= smallest,
            f"0, or at least {smallest}: a snapshot and a page",
        )
        _check(self, "pin_bytes", 0 <= self.pin_bytes <= self.device_bytes, "between 0 and device_bytes")
        _check(
            self, "interval", self.interval >= 0 and self.interval % self.unit == 0,
            f"0, or a multiple of the unit {self.unit}",
        )
        _check(self, "max_tombstones", self.max_tombstones >= 1, "at least 1")
        _check(self, "max_seen_units", self.max_seen_units >= 0, "0 or more")


def _check(config: Any, field: str, holds: bool, expected: str) -> None:
    if not holds:
        raise UserError(f"{field} is {getattr(config, field)!r}, expected {expected}")
