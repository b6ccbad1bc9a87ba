"""Deliberate defects: the oracle, without the cache's own bookkeeping check, must see each of them."""

import hashlib

import pytest

from serving.prefix_cache import ChainHasher, Phase, PrefixCache
from serving.prefix_cache.boundary import Boundary, Kind
from serving.prefix_cache.evidence import Evidence
from serving.prefix_cache.pages import IdPool, PageTree
from serving.prefix_cache.pins import Pins
from serving.prefix_cache.seen import SeenUnits
from serving.prefix_cache.tier import Tier
from serving.prefix_cache.transfers import Transfers
from tests.serving.cache_machine import CacheMachine, run_machine
from tests.serving.cache_oracle import Prompt, Snapshot

OPERATIONS = 30_000
"""For the control; a defect ends its run when it is seen, most within a few thousand."""

MOST_OPERATIONS = 300_000
"""How long a defect may hide: what is generated differs from one installation to the next."""


class OracleOnly(CacheMachine):
    check_books = False


def replace(owner, name, make):
    """A mutation that replaces `owner.name` by `make(original)`."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def nothing(original):
    return lambda *args, **kwargs: None


# Identity and lookup

def without_salt(original):
    return lambda self, tokens, *, salt="", extra=None: original(self, tokens, extra=extra)


def without_extra(original):
    return lambda self, tokens, *, salt="", extra=None: original(self, tokens, salt=salt)


def without_parent(original):
    def keys(self, tokens, *, salt="", extra=None):
        full, size = original(self, tokens, salt=salt, extra=extra), self.unit
        units = [str(tokens[start : start + size]) for start in range(0, len(full) * size, size)]
        return [hashlib.sha256((salt + unit + str((extra or {}).get(n))).encode()).digest() for n, unit in
                enumerate(units)]
    return keys


def whole_prompt(original):
    return lambda self, keys, num_tokens: original(self, keys, num_tokens + 1)


def one_unit_less(original):
    return lambda self, keys, num_tokens: original(self, keys, max(num_tokens - self.config.unit, 1))


def shallowest_hit(original):
    def find(self, path):
        found = [original(self, path[:number]) for number in range(1, len(path) + 1)]
        return next((one for one in found if one[0]), original(self, path))
    return find


def lookup_renews(original):
    def lookup(self, keys, num_tokens):
        self.evidence.seen.add(keys[: (num_tokens - 1) // self.config.unit])
        return original(self, keys, num_tokens)
    return lookup


def lookup_takes_a_page(original):
    def lookup(self, keys, num_tokens):
        if self.device.pool.free:
            self.device.pool.free.pop()
        return original(self, keys, num_tokens)
    return lookup


# Publication

def published_at_admission(original):
    def admit(self, keys, num_tokens, **options):
        admission = original(self, keys, num_tokens, **options)
        if admission and admission.ahead and admission.phase is Phase.RUNNING:
            stop = admission.stops[0]
            nothing_yet = Snapshot(Prompt("nobody", (0,) * (stop // self.config.unit), 1), stop)
            self._publish(admission, admission.ahead[stop], nothing_yet, options["now"])
        return admission
    return admit


def published_off_by_one(original):
    def publish(self, admission, boundary, snapshot, now):
        earlier = [stop for stop in admission.stops if stop < boundary.num_tokens]
        wrong = Snapshot(snapshot.prompt, earlier[-1]) if earlier else snapshot
        return original(self, admission, boundary, wrong, now)
    return publish


def published_after_the_end(original):
    def publish(self, admission, num_tokens, snapshot, *, now):
        if admission.phase is Phase.RELEASED and admission.epoch == self.epoch and admission.stops:
            stop = admission.stops[-1]
            boundary = Boundary(admission.path[stop // self.config.unit - 1], stop, Kind.PROMPT_END)
            return self._publish(admission, boundary, snapshot, now)
        return original(self, admission, num_tokens, snapshot, now=now)
    return publish


def published_after_a_reset(original):
    def publish(self, admission, num_tokens, snapshot, *, now):
        admission.epoch = self.epoch
        return original(self, admission, num_tokens, snapshot, now=now)
    return publish


def twin_replaces(original):
    def publish(self, admission, boundary, snapshot, now):
        result = original(self, admission, boundary, snapshot, now)
        if boundary.key in self.device.residents:
            self.device.residents[boundary.key].snapshot = snapshot
        return result
    return publish


def anywhere(original):
    def publish(self, admission, num_tokens, snapshot, *, now):
        if num_tokens not in admission.ahead and admission.ahead:
            num_tokens = next(iter(admission.ahead))
        return original(self, admission, num_tokens, snapshot, now=now)
    return publish


# Ownership and release

def leaking_slot(original):
    def release(self, admission, *, now):
        live = admission.phase is not Phase.RELEASED
        original(self, admission, now=now)
        if live:
            self.slots.free.pop()
    return release


def leaking_pages(original):
    def release(self, admission, *, now):
        admission.owned = set()
        original(self, admission, now=now)
    return release


def holding_on(original):
    def release(self, admission, *, now):
        admission.held_page = 0
        original(self, admission, now=now)
    return release


def released_twice(original):
    def release(self, admission, *, now):
        again = admission.phase is Phase.RELEASED
        original(self, admission, now=now)
        if again:
            self.slots.give([admission.slot])
    return release


def cached_and_owned(original):
    return lambda self, path, first, pages, owned: original(self, path, first, pages, set(owned))


def own_page_instead_of_the_twins(original):
    def cache_pages(self, path, first, pages, owned):
        for key in path[first:]:
            self.pages.page_of.pop(key, None)
        return original(self, path, first, pages, owned)
    return cache_pages


def refusal_keeps_its_hold(original):
    def unhold(self, page):
        return None
    return unhold


def dummy_page(original):
    def take(self, number):
        return [0] * number if number and not self.free[-1] % 7 else original(self, number)
    return take


def half_admitted(original):
    return lambda self, number: True if number <= 2 else original(self, number)


# Pins and eviction

def pins_do_not_hold(original):
    def pin(self, resident):
        original(self, resident)
        self.evictable[resident.row] = True
        resident.pins -= 1
    return pin


def pages_of_pins_do_not_hold(original):
    def pin(self, resident):
        resident.pins += 1
        self.evictable[resident.row] = False
    return pin


def source_stays_pinned(original):
    return lambda self, admission: setattr(admission, "source", None)


def no_eviction(original):
    return lambda self: False


def eager_eviction(original):
    def shrink(self, now):
        original(self, now)
        for resident in [r for r in self.residents.values() if not r.pins][3:]:
            self.evict(resident, now)
    return shrink


def pages_of_deeper_ones_go(original):
    def unkeep(self, page):
        self.kept[page] = False
        self.kept[self.parent[page]] = False
        self._prune(page)
    return unkeep


def snapshots_without_limit(original):
    def over_budget(self):
        limit, self.max_snapshots = self.max_snapshots, None
        result = original(self)
        self.max_snapshots = limit
        return result
    return over_budget


def pins_for_ever(original):
    return lambda self, now: None


def pins_without_budget(original):
    return property(lambda self: 0)


# The host tier

def load_pages_free_at_release(original):
    def release(self, admission, *, now):
        loading = self.transfers.under_way
        self.transfers.under_way = {}
        original(self, admission, now=now)
        self.transfers.under_way = loading
    return release


def load_without_pages(original):
    def load(self, admission, source):
        transfer = original(self, admission, source)
        transfer.source_pages, transfer.target_pages = transfer.source_pages[:-1], transfer.target_pages[:-1]
        return transfer
    return load


def failed_load_stays(original):
    def end(self, transfer, snapshot, now):
        self.host.unpin(transfer.source)
        self.device.pool.give(sorted(transfer.owned))
    return end


def failed_store_counts(original):
    return lambda self, transfer, snapshot, now: original(self, transfer, snapshot or transfer.snapshot, now)


def stored_after_a_reset(original):
    def end(self, transfer, snapshot, *, epoch, now):
        return original(self, transfer, snapshot, epoch=transfer.epoch, now=now)
    return end


def store_without_a_pin(original):
    def store(self, epoch, now):
        transfer = original(self, epoch, now)
        if transfer:
            self.device.unpin(transfer.source)
            transfer.source.pins += 1
        return transfer
    return store


# Where to stop

def no_junctions(original):
    return lambda self, path, hit_tokens: 0


def extensions_are_forks(original):
    def fork(self, keys):
        shared = sum(key in dict(self.items()) for key in keys)
        return shared if shared < len(keys) else 0
    return fork


def no_declared(original):
    return lambda self, path, hit_tokens, deepest, declared, now: original(self, path, hit_tokens, deepest, (), now)


MUTATIONS = {
    "salt dropped": replace(ChainHasher, "keys", without_salt),
    "image dropped": replace(ChainHasher, "keys", without_extra),
    "parent hash dropped": replace(ChainHasher, "keys", without_parent),
    "hit on the whole prompt": replace(PrefixCache, "_path", whole_prompt),
    "boundary one unit early": replace(PrefixCache, "_path", one_unit_less),
    "shallowest instead of deepest hit": replace(PrefixCache, "_find", shallowest_hit),
    "lookup notes what it saw": replace(PrefixCache, "lookup", lookup_renews),
    "lookup takes a page": replace(PrefixCache, "lookup", lookup_takes_a_page),
    "published at admission": replace(PrefixCache, "admit", published_at_admission),
    "snapshot of an earlier stop": replace(PrefixCache, "_publish", published_off_by_one),
    "published after release": replace(PrefixCache, "publish", published_after_the_end),
    "published after reset": replace(PrefixCache, "publish", published_after_a_reset),
    "twin replaces a snapshot": replace(PrefixCache, "_publish", twin_replaces),
    "published off a stop": replace(PrefixCache, "publish", anywhere),
    "release skips the slot": replace(PrefixCache, "release", leaking_slot),
    "release skips the pages": replace(PrefixCache, "release", leaking_pages),
    "release skips the hold": replace(PrefixCache, "release", holding_on),
    "second release": replace(PrefixCache, "release", released_twice),
    "cached pages stay owned": replace(Tier, "cache_pages", cached_and_owned),
    "own page shadows a twin's": replace(Tier, "cache_pages", own_page_instead_of_the_twins),
    "holds never end": replace(PageTree, "unhold", refusal_keeps_its_hold),
    "dummy page handed out": replace(IdPool, "take", dummy_page),
    "pages short but admitted": replace(Tier, "can_free", half_admitted),
    "pinned entries are evicted": replace(Tier, "pin", pins_do_not_hold),
    "pages of pinned entries are evicted": replace(Tier, "pin", pages_of_pins_do_not_hold),
    "source stays pinned": replace(PrefixCache, "_unpin_source", source_stays_pinned),
    "budget ignored": replace(Tier, "over_budget", no_eviction),
    "limit of snapshots ignored": replace(Tier, "over_budget", snapshots_without_limit),
    "evicts for nothing": replace(Tier, "shrink", eager_eviction),
    "eviction takes the pages of others": replace(PageTree, "unkeep", pages_of_deeper_ones_go),
    "pins never expire": replace(Pins, "expire", pins_for_ever),
    "pin budget ignored": replace(Pins, "bytes_used", pins_without_budget),
    "target pages of a load are given away": replace(PrefixCache, "release", load_pages_free_at_release),
    "load leaves a page out": replace(Transfers, "load", load_without_pages),
    "failed load is offered again": replace(Transfers, "_end_load", failed_load_stays),
    "failed store counts": replace(Transfers, "_end_store", failed_store_counts),
    "stored after reset": replace(Transfers, "end", stored_after_a_reset),
    "store without a pin": replace(Transfers, "store", store_without_a_pin),
    "no junctions": replace(Evidence, "junction", no_junctions),
    "the next turn is a fork": replace(SeenUnits, "fork", extensions_are_forks),
    "declared positions ignored": replace(Evidence, "admitted", no_declared),
    "units seen are not noted": replace(SeenUnits, "add", nothing),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_oracle_sees(mutation, monkeypatch):
    MUTATIONS[mutation](monkeypatch)
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        run_machine(MOST_OPERATIONS, machine=OracleOnly, shrink=False)


def test_without_mutation_the_same_run_is_green():
    assert run_machine(OPERATIONS, machine=OracleOnly, shrink=False) >= OPERATIONS
