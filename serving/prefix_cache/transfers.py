"""Copies between the tiers: planned here, made by the engine, and both ends stay while one is under way."""

import dataclasses
from typing import Any

from serving.prefix_cache.admission import Admission
from serving.prefix_cache.stats import Stats
from serving.prefix_cache.tier import Resident, Tier


@dataclasses.dataclass(eq=False)
class Transfer:
    """A copy that the engine makes, and answers with `complete` or `fail`.

    Attributes:
      to: "host" or "device".
      num_tokens: position of the snapshot.
      snapshot: handle to copy from.
      source_pages, target_pages: page ids in either tier, pairwise; pages that are there already are left out.
    """

    to: str
    num_tokens: int
    snapshot: Any = dataclasses.field(repr=False)
    source_pages: list[int]
    target_pages: list[int]
    # The cache's own notes.
    source: Resident = dataclasses.field(repr=False)
    epoch: int
    admission: Admission | None = None  # that loads
    held_page: int = 0  # of the host, above the target pages of a store
    reserved_bytes: int = 0
    owned: set[int] = dataclasses.field(default_factory=set, repr=False)  # pages to give back in the end


class Transfers:
    """Stores, ahead of eviction so that giving up device memory never waits for a copy; and loads, for hits."""

    def __init__(self, device: Tier, host: Tier, stats: Stats):
        self.device = device
        self.host = host
        self.stats = stats
        self.under_way: dict[Transfer, None] = {}

    def store(self, epoch: int, now: float) -> Transfer | None:
        """Of the most valuable snapshot that the host lacks, if it is worth more than what must go there for it.

        Once between two uses: what the host has given up again does not come back.
        """
        source, score = self.device.highest(now, lambda resident: resident.boundary.homes == 1 and not resident.offered)
        if source is None:
            return None
        path, pages = source.path, self.host.pages
        shared = pages.reach(path)
        held = pages.page_of[path[shared - 1]] if shared else 0
        pages.hold(held)
        missing = len(path) - shared
        size = self.host.config.snapshot_bytes + missing * self.host.config.page_bytes
        if not self.host.reserve(size, missing, score, now):
            pages.unhold(held)
            return None
        self.device.pin(source)
        source.offered = True
        targets = self.host.pool.take(missing)
        return self._begin(Transfer(
            "host", source.boundary.num_tokens, source.snapshot,
            source_pages=[self.device.pages.page_of[key] for key in path[shared:]],
            target_pages=targets, source=source, epoch=epoch, held_page=held, reserved_bytes=size, owned=set(targets),
        ))

    def load(self, admission: Admission, source: Resident) -> Transfer:
        """Of a host snapshot, and of the pages that the device lacks."""
        missing = source.path[admission.held_units :]
        self.host.pin(source)
        return self._begin(Transfer(
            "device", source.boundary.num_tokens, source.snapshot,
            source_pages=[self.host.pages.page_of[key] for key in missing],
            target_pages=admission.pages[admission.held_units :][: len(missing)],
            source=source, epoch=admission.epoch, admission=admission,
        ))

    def end(self, transfer: Transfer, snapshot: Any | None, *, epoch: int, now: float) -> None:
        """It ended; without a snapshot it failed."""
        del self.under_way[transfer]
        if transfer.to == "device":
            self._end_load(transfer, snapshot, now)
        else:
            self._end_store(transfer, snapshot if transfer.epoch == epoch else None, now)
        self.host.shrink(now)
        self.device.shrink(now)

    def _begin(self, transfer: Transfer) -> Transfer:
        self.under_way[transfer] = None
        return transfer

    def _end_store(self, transfer: Transfer, snapshot: Any | None, now: float) -> None:
        source, host = transfer.source, self.host
        host.reserved_bytes -= transfer.reserved_bytes
        if snapshot is not None:
            first = len(source.path) - len(transfer.target_pages)
            host.cache_pages(source.path, first, transfer.target_pages, transfer.owned)
            host.insert(source.boundary, source.path, snapshot, now)
            self.stats.stored += 1
        host.pool.give(sorted(transfer.owned))
        host.pages.unhold(transfer.held_page)
        self.device.unpin(source)

    def _end_load(self, transfer: Transfer, snapshot: Any | None, now: float) -> None:
        source = transfer.source
        self.host.unpin(source)
        # What could not be read is not offered again.
        if snapshot is None and source.row >= 0 and not source.pins:
            self.host.evict(source, now)
        # Of a request that has left meanwhile.
        self.device.pool.give(sorted(transfer.owned))
