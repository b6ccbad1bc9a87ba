"""Physical ids, and the tree of cached MLA pages."""

import bisect
from collections.abc import Hashable, Iterable, Sequence


class IdPool:
    """Hands out the ids 1 .. count - 1; id 0 is the dummy and never leaves."""

    def __init__(self, count: int):
        self.count = count
        self.free = list(range(count - 1, 0, -1))

    def take(self, number: int) -> list[int]:
        """So many ids; the caller has seen that there are enough."""
        assert number <= len(self.free)
        split = len(self.free) - number
        taken = self.free[split:][::-1]
        del self.free[split:]
        return taken

    def give(self, ids: Iterable[int]) -> None:
        """Takes ids back."""
        self.free.extend(ids)


class PageTree:
    """Cached pages of one tier by key; the parent of a page is the page of the unit before it, or 0.

    A page stays while something below it, or it itself, is *kept* (a snapshot ends here) or *held* (a request or a
    transfer reads it). So whoever needs [0, b) keeps or holds the one page before b.
    """

    def __init__(self, pool: IdPool):
        self.pool = pool
        self.page_of: dict[Hashable, int] = {}
        self.size = 0
        self.num_locked = 0
        self.key: list[Hashable] = [None] * pool.count
        self.parent = [0] * pool.count
        self.children = [0] * pool.count
        self.kept = [False] * pool.count
        # Own holds plus locked children: above zero means that a hold is here or below.
        self.locks = [0] * pool.count

    @property
    def num_idle(self) -> int:
        """Pages that nobody reads: all of them come free when every snapshot goes that is not held."""
        return self.size - self.num_locked

    def reach(self, keys: Sequence[Hashable]) -> int:
        """How many leading keys have pages."""
        return bisect.bisect_left(keys, True, key=lambda key: key not in self.page_of)

    def add(self, key: Hashable, page: int, parent: int) -> None:
        """A page that was taken from the pool is cached; something must keep or hold it next."""
        self.page_of[key] = page
        self.key[page], self.parent[page] = key, parent
        self.children[parent] += 1
        self.size += 1

    def keep(self, page: int) -> None:
        """A snapshot ends here."""
        self.kept[page] = True

    def unkeep(self, page: int) -> None:
        """It is gone."""
        self.kept[page] = False
        self._prune(page)

    def hold(self, page: int) -> None:
        """Somebody reads this page and those above it; nothing to do for page 0."""
        while page:
            self.locks[page] += 1
            if self.locks[page] > 1:
                return
            self.num_locked += 1
            page = self.parent[page]

    def unhold(self, page: int) -> None:
        """The end of one `hold`."""
        bottom = page
        while page:
            self.locks[page] -= 1
            if self.locks[page]:
                break
            self.num_locked -= 1
            page = self.parent[page]
        self._prune(bottom)

    def forget(self) -> None:
        """No page can be found any more; those that are held stay until they are let go."""
        self.page_of.clear()

    def _prune(self, page: int) -> None:
        freed = []
        while page and not (self.children[page] or self.kept[page] or self.locks[page]):
            key, self.key[page] = self.key[page], None
            found = self.page_of.pop(key, page)
            if found != page:  # of a later epoch
                self.page_of[key] = found
            freed.append(page)
            page = self.parent[page]
            self.children[page] -= 1
        self.size -= len(freed)
        self.pool.give(freed)
