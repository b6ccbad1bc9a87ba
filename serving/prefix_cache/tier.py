"""A tier: snapshots and pages within a budget of bytes, and which of them to give up first."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from serving.prefix_cache.boundary import Boundary, BoundaryTable, Kind
from serving.prefix_cache.config import CacheConfig
from serving.prefix_cache.pages import IdPool, PageTree
from serving.prefix_cache.stats import Stats


class Resident:
    """A boundary's snapshot in one tier.

    Residents form a tree: the parent is the next shallower one on the path, or the tier's root.
    """

    __slots__ = ("boundary", "path", "page", "snapshot", "born", "used", "pins", "offered", "parent", "children", "row")

    def __init__(self, boundary: Boundary, path: Sequence[Hashable], page: int, snapshot: Any, now: float):
        self.boundary = boundary
        self.path = path  # keys of its units
        self.page = page
        self.snapshot = snapshot
        self.born = self.used = now
        self.pins = 0
        self.offered = False  # to the host tier, since its last use
        self.parent: Resident | None = None
        self.children: set[Resident] = set()
        self.row = -1


class Tier:
    """Snapshots and cached pages in one memory.

    The order of eviction is rate * FLOPs saved / bytes freed, lowest first: `rate` is the policy's, the FLOPs are those
    between the boundary and the next shallower one that will outlive it, and the bytes are those of the snapshot and,
    where no deeper snapshot needs them, of the pages since the next shallower one.
    """

    def __init__(self, name: str, config: CacheConfig, *, budget: int, num_pages: int, max_snapshots: int | None,
                 boundaries: BoundaryTable, stats: Stats):
        self.name = name
        self.config = config
        self.budget = budget
        self.max_snapshots = max_snapshots
        self.boundaries = boundaries
        self.stats = stats
        self.pool = IdPool(num_pages)
        self.pages = PageTree(self.pool)
        self.reserved_bytes = 0
        self.residents: dict[Hashable, Resident] = {}
        self.root = Resident(Boundary(None, 0, Kind.JUNCTION), (), 0, None, 0.0)  # the start of every prompt
        self.at: list[Resident | None] = []
        self.free_rows: list[int] = []
        self.wait = np.zeros(0, np.int64)  # row in the boundary table
        self.saved = np.zeros(0)
        self.bytes = np.zeros(0)
        self.evictable = np.zeros(0, bool)
        self.is_leaf = np.zeros(0, bool)

    @property
    def bytes_used(self) -> int:
        """Snapshots, idle pages, and what transfers under way have reserved."""
        snapshots = len(self.residents) * self.config.snapshot_bytes
        return snapshots + self.pages.num_idle * self.config.page_bytes + self.reserved_bytes

    def over_budget(self) -> bool:
        """Whether something must go."""
        too_many = self.max_snapshots is not None and len(self.residents) > self.max_snapshots
        return too_many or self.bytes_used > self.budget

    def cache_pages(self, path: Sequence[Hashable], first: int, pages: Sequence[int], owned: set[int]) -> int:
        """Caches pages that were written.

        Args:
          path: keys of all units from the start.
          first: unit of the first page; those before it are cached.
          pages: ids up to the end of the path.
          owned: those that become cached are taken out; where a twin was first, its page is the cached one.

        Returns:
          The last page of the path, which the caller must keep or hold.
        """
        parent = self.pages.page_of[path[first - 1]] if first else 0
        for key, page in zip(path[first:], pages):
            cached = self.pages.page_of.get(key)
            if cached is None:
                self.pages.add(key, page, parent)
                owned.discard(page)
                cached = page
            parent = cached
        return parent

    def insert(self, boundary: Boundary, path: Sequence[Hashable], snapshot: Any, now: float) -> None:
        """Adds a snapshot whose pages are cached already."""
        resident = Resident(boundary, path, self.pages.page_of[boundary.key], snapshot, now)
        above = (self.residents.get(key) for key in reversed(path[:-1]))
        parent = resident.parent = next(filter(None, above), self.root)
        if self.pages.children[resident.page]:
            # It may lie between the parent and residents that were there before.
            resident.children = {
                child for child in parent.children
                if len(child.path) > len(path) and child.path[len(path) - 1] == boundary.key
            }
        parent.children -= resident.children
        parent.children.add(resident)
        for child in resident.children:
            child.parent = resident
        self._take_row(resident)
        self.residents[boundary.key] = resident
        self.pages.keep(resident.page)
        self.boundaries.gained_home(boundary)
        self._revalue(resident)
        self._revalue(parent)
        self.revalue_below(resident)

    def evict(self, resident: Resident, now: float) -> None:
        """Drops a snapshot, and the pages that nothing else needs."""
        assert resident and not resident.pins, "something pinned would have to be evicted"
        parent = resident.parent
        parent.children.discard(resident)
        parent.children |= resident.children
        for child in resident.children:
            child.parent = parent
        self._revalue(parent)
        self.revalue_below(resident)
        self._leave(resident, now)
        self.stats.evicted[self.name, resident.boundary.kind.value] += 1
        self.stats.lifetimes.add(now - resident.born)
        self.stats.idle_times.add(now - resident.used)

    def clear(self, now: float) -> None:
        """Drops every snapshot, also pinned ones; pages that are held stay until they are let go."""
        self.root.children.clear()
        for resident in list(self.residents.values()):
            self._leave(resident, now)
        self.pages.forget()

    def pin(self, resident: Resident) -> None:
        """It cannot be evicted, nor its pages, until `unpin`."""
        resident.pins += 1
        self.evictable[resident.row] = False
        self.pages.hold(resident.page)

    def unpin(self, resident: Resident) -> None:
        """The end of one `pin`; the caller shrinks the tier, which may have more idle pages now."""
        resident.pins -= 1
        if resident.row >= 0:  # not dropped by `clear`
            self.evictable[resident.row] = not resident.pins
        self.pages.unhold(resident.page)

    def shrink(self, now: float) -> None:
        """Evicts until the tier is within its budget."""
        if self.over_budget():
            victims = self._lowest_first(now)
            while self.over_budget():
                self.evict(next(victims, (None,))[0], now)

    def can_free(self, number: int) -> bool:
        """Whether so many pages are free or would be once everything that nobody uses is evicted."""
        return number <= len(self.pool.free) + self.pages.num_idle

    def free_pages(self, number: int, now: float) -> None:
        """Evicts until so many pages are free; see `can_free` first."""
        if len(self.pool.free) < number:
            victims = self._lowest_first(now, frees_pages=True)
            while len(self.pool.free) < number:
                self.evict(next(victims, (None,))[0], now)

    def reserve(self, size: int, pages: int, score: float, now: float) -> bool:
        """Sets bytes aside, and makes pages free, by evicting what scores lower; False when that does not suffice."""
        self.reserved_bytes += size
        victims = self._lowest_first(now)
        while self.over_budget() or len(self.pool.free) < pages:
            resident, lowest = next(victims, (None, score))
            if lowest >= score:
                self.reserved_bytes -= size
                return False
            self.evict(resident, now)
        return True

    def highest(self, now: float, condition: Callable[[Resident], bool]) -> tuple[Resident | None, float]:
        """The resident to keep longest among those that are not pinned and meet the condition, and its score."""
        scores = self._scores(self.boundaries.rates(self.wait, now), self.evictable)
        for row in np.argsort(-scores, kind="stable"):
            if self.evictable[row] and condition(self.at[row]):
                return self.at[row], scores[row]
        return None, 0.0

    def _lowest_first(self, now: float, *, frees_pages: bool = False) -> Iterator[tuple[Resident, float]]:
        """What to evict, with its score; the caller evicts each before it asks for the next, and values change.

        With `frees_pages`, only residents whose last pages nothing else needs.
        """
        rates = self.boundaries.rates(self.wait, now)
        read = np.zeros(len(rates), bool)
        while True:
            eligible = self.evictable & ~read & (self.is_leaf if frees_pages else True)
            if not eligible.any():
                return
            scores = self._scores(rates, eligible)
            row = int(np.argmin(scores))
            if frees_pages and self.pages.locks[self.at[row].page]:
                read[row] = True
            else:
                yield self.at[row], scores[row]

    def _scores(self, rates: np.ndarray, eligible: np.ndarray) -> np.ndarray:
        """[rows] FLOPs saved per second and byte; infinite for residents that are not eligible."""
        return np.where(eligible, rates * self.saved / self.bytes, np.inf)

    def revalue_below(self, resident: Resident) -> None:
        """Values those below anew that are measured from here or from above."""
        for child in resident.children:
            self._revalue(child)
            if child.boundary.superseded:
                self.revalue_below(child)

    def _leave(self, resident: Resident, now: float) -> None:
        self.evictable[resident.row] = False
        self.at[resident.row] = None
        self.free_rows.append(resident.row)
        resident.row = -1
        del self.residents[resident.boundary.key]
        self.pages.unkeep(resident.page)
        self.boundaries.lost_home(resident.boundary, now)

    def _revalue(self, resident: Resident) -> None:
        if resident is self.root:
            return
        flops, tokens, row = self.config.cost.flops, resident.boundary.num_tokens, resident.row
        # A superseded prompt end goes before those below it do, so they are not measured from there.
        floor = resident.parent
        while floor.boundary.superseded:
            floor = floor.parent
        self.saved[row] = flops(tokens) - flops(floor.boundary.num_tokens)
        self.is_leaf[row] = not resident.children
        pages = 0 if resident.children else (tokens - resident.parent.boundary.num_tokens) // self.config.unit
        self.bytes[row] = self.config.snapshot_bytes + pages * self.config.page_bytes

    def _take_row(self, resident: Resident) -> None:
        if not self.free_rows:
            size, more = len(self.at), max(64, len(self.at))
            self.free_rows.extend(range(size + more - 1, size - 1, -1))
            self.at.extend([None] * more)
            for name in ("wait", "saved", "bytes", "evictable", "is_leaf"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.ones(more, column.dtype)]))
            self.evictable[size:] = False
        row = resident.row = self.free_rows.pop()
        self.at[row] = resident
        self.wait[row] = resident.boundary.row
        self.evictable[row] = True
