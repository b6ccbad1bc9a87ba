"""The prefix cache: lookup, admission, publication, release."""

import collections
from collections.abc import Hashable, Sequence
from typing import Any

from k3jax.errors import UserError
from serving.prefix_cache.admission import Admission, Match, Phase
from serving.prefix_cache.boundary import Boundary, BoundaryTable
from serving.prefix_cache.check import check
from serving.prefix_cache.config import CacheConfig
from serving.prefix_cache.evidence import Evidence
from serving.prefix_cache.pages import IdPool
from serving.prefix_cache.pins import Pins
from serving.prefix_cache.policy import Policy
from serving.prefix_cache.reuse import LearnedReuse
from serving.prefix_cache.stats import Stats
from serving.prefix_cache.tier import Resident, Tier
from serving.prefix_cache.transfers import Transfer, Transfers

_LEARN_EVERY = 64
"""Admissions between two updates of the policy."""


class PrefixCache:
    """Bookkeeping of KDA states and MLA pages of one model; not thread-safe, and without a clock: `now` is in seconds.

    A request is admitted with a slot and pages, prefills from `hit_tokens` and publishes at its stops, and is released
    however it ends:

    >>> admission = cache.admit(hasher.keys(prompt), len(prompt), max_new_tokens=500, now=time.monotonic())
    >>> for stop in admission.stops:
    ...     snapshot = engine.prefill(admission, stop)
    ...     cache.publish(admission, stop, snapshot, now=time.monotonic())
    >>> cache.release(admission, now=time.monotonic())

    Keys may be any hashable values such that equal keys mean equal prefixes (`hashing.ChainHasher`).
    """

    def __init__(self, config: CacheConfig, policy: Policy | None = None, stats: Stats | None = None):
        """`policy` guesses who comes back: `LearnedReuse` by default. `stats` may be those of an earlier cache."""
        self.config = config
        self.policy = policy or LearnedReuse()
        self.stats = stats or Stats()
        self.epoch = 0
        self.slots = IdPool(config.num_slots)
        self.boundaries = BoundaryTable(self.policy, config.max_tombstones)
        self.evidence = Evidence(config, self.boundaries)
        self.device = Tier(
            "device", config, budget=config.device_bytes, num_pages=config.num_pages,
            max_snapshots=config.max_snapshots, boundaries=self.boundaries, stats=self.stats,
        )
        self.host = Tier(
            "host", config, budget=config.host_bytes, num_pages=1 + config.host_bytes // config.page_bytes,
            max_snapshots=None, boundaries=self.boundaries, stats=self.stats,
        )
        self.pins = Pins(self.device, config.pin_bytes)
        self.admissions: dict[Admission, None] = {}
        self.transfers = Transfers(self.device, self.host, self.stats)
        self.pending: collections.Counter[Hashable] = collections.Counter()

    # Finding

    def lookup(self, keys: Sequence[Hashable], num_tokens: int) -> Match:
        """The longest prefix that can be used. Changes nothing.

        Args:
          keys: one for each complete unit of the prompt; more are ignored.
          num_tokens: length of the prompt, at least 1.
        """
        path = self._path(keys, num_tokens)
        hit, tier, _ = self._find(path)
        hit_tokens = hit.boundary.num_tokens if hit else 0
        unit = self.config.unit
        pending = next((number for number in range(len(path), 0, -1) if path[number - 1] in self.pending), 0)
        return Match(
            hit_tokens=hit_tokens,
            tier=tier.name if hit else None,
            mla_tokens=self.device.pages.reach(path) * unit,
            junction=self.evidence.junction(path, hit_tokens),
            pending_tokens=pending * unit,
        )

    def _path(self, keys: Sequence[Hashable], num_tokens: int) -> Sequence[Hashable]:
        """Keys of the units before the prompt's last token, which is always computed."""
        if num_tokens < 1:
            raise UserError(f"num_tokens is {num_tokens}, expected at least 1")
        units = (num_tokens - 1) // self.config.unit
        if len(keys) < units:
            raise UserError(f"a prompt of {num_tokens} tokens has {units} units, but there are {len(keys)} keys")
        return keys[:units]

    def _find(self, path: Sequence[Hashable]) -> tuple[Resident | None, Tier, Boundary | None]:
        """The deepest snapshot, its tier, and the deepest boundary that is known, snapshot or not."""
        known, deepest = self.boundaries.known, None
        for number in range(len(path), 0, -1):
            boundary = known.get(path[number - 1])
            if boundary is None:
                continue
            assert boundary.num_tokens == number * self.config.unit, "a key stands for two positions"
            deepest = deepest or boundary
            if boundary.homes:
                tier = self.device if boundary.key in self.device.residents else self.host
                return tier.residents[boundary.key], tier, deepest
        return None, self.device, deepest

    # A request's life

    def admit(self, keys: Sequence[Hashable], num_tokens: int, *, now: float, max_new_tokens: int = 0,
              declared: Sequence[int] = ()) -> Admission | None:
        """Takes a slot, and pages for the prompt and `max_new_tokens`: all or nothing.

        Args:
          keys: see `lookup`.
          num_tokens: length of the prompt.
          now: seconds.
          max_new_tokens: room for the answer; `extend` adds more.
          declared: positions that the client expects other prompts to share; each is rounded down to a unit.

        Returns:
          The admission, or None when slots or pages are short: nothing has changed then, so try again after a release.

        Raises:
          UserError: the request could never be admitted, or makes no sense.
        """
        path = self._path(keys, num_tokens)
        unit, pages = self.config.unit, self.device.pages
        if max_new_tokens < 0:
            raise UserError(f"max_new_tokens is {max_new_tokens}, expected 0 or more")
        for position in declared:
            if not 0 <= position <= num_tokens:
                raise UserError(f"declared position {position} does not lie in the prompt of {num_tokens} tokens")
        wanted = self._pages_for(num_tokens + max_new_tokens)

        self.pins.expire(now)
        hit, tier, deepest = self._find(path)
        hit_units = len(hit.path) if hit else 0
        shared = pages.reach(path[:hit_units])
        held = pages.page_of[path[shared - 1]] if shared else 0
        pages.hold(held)
        if not self.slots.free or not self.device.can_free(wanted - shared):
            pages.unhold(held)
            self.stats.refused_attempts += 1
            return None
        source = hit if tier is self.device else None
        if source:
            self.device.pin(source)
            source.offered = False
        self._count(path, num_tokens, hit_units, tier)
        if hit:
            self.stats.reuse_gaps.add(now - hit.used)
            hit.used = now
        stops = self.evidence.admitted(path, hit_units * unit, deepest, declared, now)
        if deepest and deepest.forks <= 2:  # it may be superseded now, or not any more
            self._revalue_below(deepest)
        self.device.free_pages(wanted - shared, now)
        fresh = self.device.pool.take(wanted - shared)
        admission = Admission(
            slot=self.slots.take(1)[0],
            pages=[pages.page_of[key] for key in path[:shared]] + fresh,
            hit_tokens=hit_units * unit,
            restore=source.snapshot if source else None,
            stops=tuple(stop.num_tokens for stop in stops),
            phase=Phase.RUNNING,
            path=path,
            ahead={stop.num_tokens: stop for stop in stops},
            owned=set(fresh),
            held_page=held,
            held_units=shared,
            source=source,
            epoch=self.epoch,
        )
        self.admissions[admission] = None
        self.pending.update(stop.key for stop in stops)
        if hit and not source:
            admission.phase = Phase.LOADING
            self.transfers.load(admission, hit)
        self.pins.renew(path, now)
        if self.stats.admitted % _LEARN_EVERY == 0:
            self.boundaries.learn(now)
        return admission

    def extend(self, admission: Admission, num_tokens: int, *, now: float) -> bool:
        """Makes room for `num_tokens` tokens in all; False, and no change, when pages are short."""
        self._require_running(admission)
        fresh = self._pages_for(num_tokens) - len(admission.pages)
        if fresh <= 0:
            return True
        if not self.device.can_free(fresh):
            return False
        self.device.free_pages(fresh, now)
        taken = self.device.pool.take(fresh)
        admission.pages.extend(taken)
        admission.owned.update(taken)
        return True

    def restored(self, admission: Admission, *, now: float) -> None:
        """The copy of `admission.restore` into the slot was dispatched: it is None now, and may be evicted.

        The first publication and the release say so too.
        """
        self._require_running(admission)
        self._unpin_source(admission)
        self.device.shrink(now)

    def publish(self, admission: Admission, num_tokens: int, snapshot: Any, *, now: float) -> bool:
        """Makes the prompt's first `num_tokens` tokens reusable: their pages, and the state after them.

        Call it at stops only, in ascending order (some may be left out), and only after the write of both was
        dispatched. From then on the pages are read-only. The snapshot is opaque, and must never change.

        Returns:
          Whether the boundary is in the cache now. It is not when the request was released or the cache reset
          meanwhile, or when everything else is worth more. A twin that was first keeps its snapshot.

        Raises:
          UserError: `num_tokens` is not a stop ahead, there is no snapshot, or the request is not running.
        """
        if admission.phase is Phase.RELEASED or admission.epoch != self.epoch:
            self.stats.refused_publications += 1
            return False
        self._require_running(admission)
        if num_tokens not in admission.ahead:
            raise UserError(f"num_tokens is {num_tokens}, expected one of the stops ahead: {list(admission.ahead)}")
        if snapshot is None:
            raise UserError(f"the snapshot at {num_tokens} tokens is None, expected a handle of the state")
        boundary = admission.ahead[num_tokens]
        self._drop_ahead(admission, num_tokens)
        return self._publish(admission, boundary, snapshot, now)

    def release(self, admission: Admission, *, now: float) -> None:
        """The one way out, for finish, abort, deadline, preemption and error alike; more than once is once.

        The caller has dispatched the last write to the slot and the pages. What was published stays; a preempted
        request is admitted anew, and hits it.
        """
        if admission.phase is Phase.RELEASED:
            return
        for transfer in self.transfers.under_way:
            if transfer.admission is admission:
                # The copy writes to these pages until it ends.
                transfer.owned, admission.owned = admission.owned, set()
        admission.phase = Phase.RELEASED
        del self.admissions[admission]
        self._drop_ahead(admission, len(admission.path) * self.config.unit)
        self._unpin_source(admission)
        self.device.pages.unhold(admission.held_page)
        self.device.pool.give(sorted(admission.owned))
        self.slots.give([admission.slot])
        self.device.shrink(now)

    def distrust(self, admission: Admission, *, now: float) -> None:
        """Drops the snapshots on a prompt's path, for a request whose numbers went wrong; pinned ones stay.

        It may have had that from the snapshot that it began from, or have left it in one.
        """
        for tier in (self.device, self.host):
            for resident in filter(None, map(tier.residents.get, admission.path)):
                if not resident.pins:
                    tier.evict(resident, now)

    # The host tier

    def store(self, *, now: float) -> Transfer | None:
        """The copy to the host tier that is worth most, or None; ask when there is time to make one."""
        return self.transfers.store(self.epoch, now)

    def loading(self, admission: Admission) -> Transfer | None:
        """The copy that an admission waits for."""
        return next((transfer for transfer in self.transfers.under_way if transfer.admission is admission), None)

    def complete(self, transfer: Transfer, snapshot: Any, *, now: float) -> None:
        """A transfer arrived; `snapshot` is the handle of the copy.

        An admission that waited for it may run now, from `restore`.
        """
        if snapshot is None:
            raise UserError("the snapshot of a completed transfer is None, expected a handle of the copy")
        self._end(transfer, snapshot, now)
        admission = transfer.admission
        if admission and admission.phase is Phase.LOADING:
            boundary = transfer.source.boundary
            if admission.epoch == self.epoch and self._publish(admission, boundary, snapshot, now):
                admission.source = self.device.residents[boundary.key]
                self.device.pin(admission.source)
            admission.phase, admission.restore = Phase.RUNNING, snapshot

    def fail(self, transfer: Transfer, *, now: float) -> None:
        """A transfer did not arrive. An admission that waited for it must be released, and admitted anew."""
        self._end(transfer, None, now)
        self.stats.failed_transfers += 1
        if transfer.admission and transfer.admission.phase is Phase.LOADING:
            transfer.admission.phase = Phase.FAILED

    # The operator

    def pin(self, key: Hashable, *, ttl: float, now: float) -> bool:
        """Keeps the device snapshot at this key until `ttl` seconds after its last use.

        Returns:
          False when it is not there, or the pin budget is spent.

        Raises:
          UserError: `ttl` is not positive.
        """
        if not ttl > 0:
            raise UserError(f"ttl is {ttl}, expected more than 0 seconds")
        return self.pins.add(key, ttl, now)

    def unpin(self, key: Hashable, *, now: float) -> None:
        """Ends a pin, if there is one."""
        self.pins.remove(key, now)

    def reset(self, *, now: float) -> None:
        """Drops everything that is cached. Running requests keep their slots and pages, and publish nothing more."""
        self.epoch += 1
        self.pins.clear(now)
        self.device.clear(now)
        self.host.clear(now)
        self.boundaries.clear(now)
        self.evidence.seen.clear()
        self.pending.clear()

    def check(self) -> None:
        """Recounts everything.

        Raises:
          AssertionError: with what does not add up.
        """
        check(self)

    # Parts of the above

    def _pages_for(self, num_tokens: int) -> int:
        pages = -(-num_tokens // self.config.unit)
        if pages >= self.config.num_pages:
            raise UserError(
                f"{num_tokens} tokens need {pages} pages and there are {self.config.num_pages - 1}: "
                f"shorten the request or raise num_pages"
            )
        return pages

    def _count(self, path: Sequence[Hashable], num_tokens: int, hit_units: int, tier: Tier) -> None:
        unit, stats = self.config.unit, self.stats
        stats.admitted += 1
        stats.prompt_tokens += num_tokens
        stats.hits += hit_units > 0
        stats.hit_tokens += hit_units * unit
        if tier is self.host:
            stats.host_hit_tokens += hit_units * unit
        stats.almost_hit_tokens += max(self.device.pages.reach(path) - hit_units, 0) * unit
        stats.junctions += self.evidence.junction(path, hit_units * unit) > 0

    def _publish(self, admission: Admission, boundary: Boundary, snapshot: Any, now: float) -> bool:
        boundary = self.boundaries.add(boundary, now)  # it may have been forgotten
        path, pages = admission.path[: boundary.num_tokens // self.config.unit], self.device.pages
        first = admission.held_units
        bottom = self.device.cache_pages(path, first, admission.pages[first : len(path)], admission.owned)
        pages.hold(bottom)
        pages.unhold(admission.held_page)
        admission.held_page, admission.held_units = bottom, len(path)
        self._unpin_source(admission)
        if boundary.key in self.device.residents:
            self.stats.duplicates += 1
        else:
            self.device.insert(boundary, path, snapshot, now)
            self.stats.published += 1
        self.device.shrink(now)
        return boundary.key in self.device.residents

    def _drop_ahead(self, admission: Admission, num_tokens: int) -> None:
        """Stops up to here are behind."""
        for stop in [stop for stop in admission.ahead if stop <= num_tokens]:
            key = admission.ahead.pop(stop).key
            if admission.epoch == self.epoch:
                self.pending[key] -= 1
                if not self.pending[key]:
                    del self.pending[key]

    def _unpin_source(self, admission: Admission) -> None:
        """Its snapshot was copied; no reference stays that would keep an evicted one in memory."""
        admission.restore = None
        if admission.source:
            self.device.unpin(admission.source)
            admission.source = None

    def _revalue_below(self, boundary: Boundary) -> None:
        for tier in (self.device, self.host):
            if boundary.key in tier.residents:
                tier.revalue_below(tier.residents[boundary.key])

    def _end(self, transfer: Transfer, snapshot: Any | None, now: float) -> None:
        if transfer not in self.transfers.under_way:
            raise UserError("the transfer has ended before")
        self.transfers.end(transfer, snapshot, epoch=self.epoch, now=now)

    def _require_running(self, admission: Admission) -> None:
        if admission.phase is not Phase.RUNNING:
            raise UserError(f"the request is {admission.phase.value}, expected it to be running")
