"""Boundaries that somebody asked to keep for a while."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from serving.prefix_cache.tier import Resident, Tier


@dataclass
class _Pin:
    resident: Resident
    ttl: float
    until: float


class Pins:
    """Pins with a time to live, which every use renews, within a budget of bytes (shared pages count for each)."""

    def __init__(self, tier: Tier, budget: int):
        self.tier = tier
        self.budget = budget
        self.pins: dict[Hashable, _Pin] = {}

    @property
    def bytes_used(self) -> int:
        """Snapshots and pages of all that is pinned."""
        return sum(self._size(pin.resident) for pin in self.pins.values())

    def add(self, key: Hashable, ttl: float, now: float) -> bool:
        """Pins, or renews, the boundary with this key; False when it is not there or the budget is spent."""
        self.expire(now)
        resident = self.tier.residents.get(key)
        if resident is None:
            return False
        if key not in self.pins:
            if self.bytes_used + self._size(resident) > self.budget:
                return False
            self.tier.pin(resident)
        self.pins[key] = _Pin(resident, ttl, now + ttl)
        return True

    def remove(self, key: Hashable, now: float) -> None:
        """Ends a pin, if there is one."""
        if key in self.pins:
            self.tier.unpin(self.pins.pop(key).resident)
            self.tier.shrink(now)

    def renew(self, path: Sequence[Hashable], now: float) -> None:
        """A prompt went through these units."""
        for pin in self.pins.values():
            units = pin.resident.boundary.num_tokens // self.tier.config.unit
            if units <= len(path) and path[units - 1] == pin.resident.boundary.key:
                pin.until = now + pin.ttl

    def expire(self, now: float) -> None:
        """Ends those whose time is over."""
        for key in [key for key, pin in self.pins.items() if pin.until <= now]:
            self.remove(key, now)

    def clear(self, now: float) -> None:
        """Ends all."""
        for key in list(self.pins):
            self.remove(key, now)

    def _size(self, resident: Resident) -> int:
        config = self.tier.config
        return config.snapshot_bytes + resident.boundary.num_tokens * config.cost.token_bytes
