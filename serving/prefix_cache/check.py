"""Whether the books balance: everything that is kept in two places, or could be recounted, is."""

import collections
from typing import TYPE_CHECKING

from serving.prefix_cache.admission import Phase
from serving.prefix_cache.tier import Resident, Tier

if TYPE_CHECKING:
    from serving.prefix_cache.cache import PrefixCache


def check(cache: "PrefixCache") -> None:
    """Recounts a cache.

    Raises:
      AssertionError: with what does not add up.
    """
    live, transfers = list(cache.admissions), list(cache.transfers.under_way)
    slots = cache.slots.free + [admission.slot for admission in live]
    _equal("slots", sorted(slots), list(range(1, cache.slots.count)))
    stores = [transfer for transfer in transfers if transfer.to == "host"]
    loads = [transfer for transfer in transfers if transfer.to == "device"]

    _check_pages(cache.device, [admission.owned for admission in live] + [transfer.owned for transfer in loads])
    _check_pages(cache.host, [transfer.owned for transfer in stores])
    pins = [admission.source for admission in live if admission.source]
    pins += [transfer.source for transfer in stores] + [pin.resident for pin in cache.pins.pins.values()]
    _check_pins(cache.device, pins, [admission.held_page for admission in live])
    _check_pins(cache.host, [transfer.source for transfer in loads], [transfer.held_page for transfer in stores])
    for tier in (cache.device, cache.host):
        _check_residents(tier)
        _true(f"{tier.name}: {tier.bytes_used} bytes are used of {tier.budget}", not tier.over_budget())
    _equal("bytes reserved", cache.host.reserved_bytes, sum(transfer.reserved_bytes for transfer in stores))
    _true("more is pinned than the pin budget", cache.pins.bytes_used <= cache.pins.budget)
    _check_boundaries(cache)

    ahead = collections.Counter(
        stop.key for admission in live if admission.epoch == cache.epoch for stop in admission.ahead.values()
    )
    _equal("pending keys", dict(cache.pending), dict(ahead))
    for admission in live:
        _true("a released request is live", admission.phase is not Phase.RELEASED)


def _check_pages(tier: Tier, owned: list[set[int]]) -> None:
    """Each page is free, owned by one request or transfer, or cached."""
    tree, name = tier.pages, tier.name
    cached = [page for page in range(1, tier.pool.count) if tree.key[page] is not None]
    everything = tier.pool.free + [page for pages in owned for page in pages] + cached
    _equal(f"{name} pages", sorted(everything), list(range(1, tier.pool.count)))
    _equal(f"{name} cached pages", tree.size, len(cached))
    children = collections.Counter(tree.parent[page] for page in cached)
    locked = 0
    for page in cached:
        _equal(f"{name} page {page}: children", tree.children[page], children[page])
        _true(f"{name} page {page} serves nobody", tree.children[page] or tree.kept[page] or tree.locks[page])
        locked += tree.locks[page] > 0
    _equal(f"{name} locked pages", tree.num_locked, locked)
    for key, page in tree.page_of.items():
        _true(f"{name} page {page} has another key", tree.key[page] == key)


def _check_pins(tier: Tier, pinned: list[Resident], held: list[int]) -> None:
    """Pins and locks are as many as those who hold something."""
    pins = collections.Counter(pinned)
    for resident in {*tier.residents.values(), *pins}:
        _equal(f"{tier.name} pins at {resident.boundary.num_tokens}", resident.pins, pins[resident])
    locks = collections.Counter(page for page in [*held, *(resident.page for resident in pinned)] if page)
    # From the leaves up: a locked page is one lock on its parent.
    tree, depth = tier.pages, {}
    for page in range(1, tier.pool.count):
        if tree.key[page] is not None:
            depth[page] = _depth(tier, page)
    for page in sorted(depth, key=depth.get, reverse=True):
        _equal(f"{tier.name} page {page}: locks", tree.locks[page], locks[page])
        if locks[page]:
            locks[tree.parent[page]] += 1


def _depth(tier: Tier, page: int) -> int:
    depth = 0
    while page:
        page, depth = tier.pages.parent[page], depth + 1
    return depth


def _check_residents(tier: Tier) -> None:
    """Snapshots have their pages, the tree and the columns are right."""
    unit, tree = tier.config.unit, tier.pages
    rows = [resident.row for resident in tier.residents.values()]
    _equal(f"{tier.name} rows", sorted(rows + tier.free_rows), list(range(len(tier.at))))
    _equal(f"{tier.name} kept pages", sum(tree.kept), len(rows))
    for key, resident in tier.residents.items():
        boundary, where = resident.boundary, f"{tier.name} snapshot at {resident.boundary.num_tokens}"
        _true(f"{where}: wrong key or length", boundary.key == key == resident.path[-1])
        _equal(where, boundary.num_tokens, len(resident.path) * unit)
        _true(f"{where}: pages are missing", tree.reach(resident.path) == len(resident.path))
        _true(f"{where}: its page is not kept", tree.page_of[key] == resident.page and tree.kept[resident.page])
        chain = [0] + [tree.page_of[step] for step in resident.path]
        _equal(f"{where}: parents of its pages", [tree.parent[page] for page in chain[1:]], chain[:-1])
        above = [tier.residents[step] for step in resident.path[:-1] if step in tier.residents]
        _true(f"{where}: wrong parent", resident.parent is (above[-1] if above else tier.root))
        _true(f"{where}: its parent does not know it", resident in resident.parent.children)
        _true(f"{where}: unknown boundary", tier.boundaries.known.get(key) is boundary)
        _true(f"{where}: wrong row", tier.at[resident.row] is resident)
        _equal(f"{where}: evictable", bool(tier.evictable[resident.row]), resident.pins == 0)
        _equal(f"{where}: leaf", bool(tier.is_leaf[resident.row]), not resident.children)
        floor = max((r.boundary.num_tokens for r in above if not r.boundary.superseded), default=0)
        flops = tier.config.cost.flops
        _equal(f"{where}: FLOPs saved", tier.saved[resident.row], flops(boundary.num_tokens) - flops(floor))
    children = sum(len(resident.children) for resident in [tier.root, *tier.residents.values()])
    _equal(f"{tier.name} children", children, len(rows))


def _check_boundaries(cache: "PrefixCache") -> None:
    table = cache.boundaries
    for key, boundary in table.known.items():
        homes = (key in cache.device.residents) + (key in cache.host.residents)
        _equal(f"homes of the boundary at {boundary.num_tokens}", boundary.homes, homes)
        _equal("whether it is a tombstone", key in table.tombstones, homes == 0)
    _true("too many tombstones", len(table.tombstones) <= table.max_tombstones)
    _equal("rows of boundaries", len({boundary.row for boundary in table.known.values()}), len(table.known))
    _true("too many units are remembered", len(cache.evidence.seen) <= cache.evidence.seen.limit)


def _true(what: str, holds: bool) -> None:
    if not holds:
        raise AssertionError(what)


def _equal(what: str, found, expected) -> None:
    if found != expected:
        raise AssertionError(f"{what}: {found}, expected {expected}")
