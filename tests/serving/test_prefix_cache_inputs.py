"""Mistakes: one clear line each, and the cache goes on as if nothing had been."""

import dataclasses

import pytest

from serving.prefix_cache import CacheConfig, PrefixCache
from tests.serving.small_cache import CONFIG, COST, UNIT, Server, text

SMALLEST = COST.snapshot_bytes + UNIT * COST.token_bytes


@pytest.mark.parametrize("changes,message", [
    ({"unit": 0}, "unit is 0, expected a positive multiple of 64"),
    ({"unit": 96}, "unit is 96, expected a positive multiple of 64"),
    ({"unit": -64}, "unit is -64, expected a positive multiple of 64"),
    ({"num_slots": 1}, "num_slots is 1, expected at least 2: slot 0 is a dummy"),
    ({"num_pages": 1}, "num_pages is 1, expected at least 2: page 0 is a dummy"),
    ({"device_bytes": SMALLEST - 1},
     f"device_bytes is {SMALLEST - 1}, expected at least {SMALLEST}: a snapshot and a page"),
    ({"host_bytes": 5}, f"host_bytes is 5, expected 0, or at least {SMALLEST}: a snapshot and a page"),
    ({"pin_bytes": 10**12}, "pin_bytes is 1000000000000, expected between 0 and device_bytes"),
    ({"interval": 200}, "interval is 200, expected 0, or a multiple of the unit 128"),
    ({"interval": -128}, "interval is -128, expected 0, or a multiple of the unit 128"),
    ({"max_snapshots": 0}, "max_snapshots is 0, expected at least 1, or None"),
    ({"max_tombstones": 0}, "max_tombstones is 0, expected at least 1"),
    ({"max_seen_units": -1}, "max_seen_units is -1, expected 0 or more"),
])
def test_configurations_that_cannot_work(changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        dataclasses.replace(CONFIG, **changes)


def test_the_smallest_configuration_works():
    config = CacheConfig(cost=COST, num_slots=2, num_pages=3, device_bytes=SMALLEST, unit=UNIT)
    server = Server(PrefixCache(config))
    prompt = text(1, UNIT + 1)
    assert [server.run(prompt), server.run(prompt)] == [0, UNIT]
    assert server.run(text(2, 2 * UNIT)) == 0


def busy():
    server = Server(host_bytes=20_000_000, pin_bytes=10_000_000)
    server.run(text(1, 1000))
    return server, server.admit(text(2, 1000))


@pytest.mark.parametrize("mistake,message", [
    (lambda s, a: s.cache.lookup([], 0), "num_tokens is 0, expected at least 1"),
    (lambda s, a: s.cache.admit([], 0, now=0), "num_tokens is 0, expected at least 1"),
    (lambda s, a: s.cache.lookup([b"x"], 300), "a prompt of 300 tokens has 2 units, but there are 1 keys"),
    (lambda s, a: s.cache.admit([b"x"], 300, now=0), "a prompt of 300 tokens has 2 units, but there are 1 keys"),
    (lambda s, a: s.admit(text(3, 300), max_new_tokens=-1), "max_new_tokens is -1, expected 0 or more"),
    (lambda s, a: s.admit(text(3, 300), declared=[301]),
     "declared position 301 does not lie in the prompt of 300 tokens"),
    (lambda s, a: s.admit(text(3, 300), max_new_tokens=10**6),
     "1000300 tokens need 7815 pages and there are 1999: shorten the request or raise num_pages"),
    (lambda s, a: s.cache.extend(a, 10**6, now=0),
     "1000000 tokens need 7813 pages and there are 1999: shorten the request or raise num_pages"),
    (lambda s, a: s.publish(a, 500), r"num_tokens is 500, expected one of the stops ahead: \[896\]"),
    (lambda s, a: s.cache.publish(a, 896, None, now=0),
     "the snapshot at 896 tokens is None, expected a handle of the state"),
    (lambda s, a: s.cache.pin(s.keys(text(1, 1000))[6], ttl=0, now=0), "ttl is 0, expected more than 0 seconds"),
    (lambda s, a: s.cache.complete(s.cache.store(now=0), None, now=0),
     "the snapshot of a completed transfer is None, expected a handle of the copy"),
])
def test_misuse_is_one_clear_line_and_changes_nothing(mistake, message):
    server, admission = busy()
    with pytest.raises(ValueError, match=f"^{message}$"):
        mistake(server, admission)
    server.cache.check()
    assert server.publish(admission, 896)
    server.release(admission)
    assert server.run(text(2, 1000)) == 896 and server.run(text(1, 1000)) == 896


def test_what_has_ended_has_ended():
    server, admission = busy()
    transfer = server.cache.store(now=0)
    server.cache.complete(transfer, "copy", now=0)
    for end in (lambda: server.cache.complete(transfer, "copy", now=0), lambda: server.cache.fail(transfer, now=0)):
        with pytest.raises(ValueError, match="^the transfer has ended before$"):
            end()
    server.release(admission)
    server.cache.release(admission, now=0)
    with pytest.raises(ValueError, match="^the request is released, expected it to be running$"):
        server.cache.extend(admission, 1500, now=0)
    assert server.publish(admission, 896) is False
    server.cache.check()


def spoil_slots(cache):
    cache.slots.free.pop()


def spoil_pages(cache):
    cache.device.pool.free.append(cache.device.pool.free[0])


def spoil_locks(cache):
    cache.device.pages.locks[next(iter(cache.device.pages.page_of.values()))] += 1


def spoil_lengths(cache):
    next(iter(cache.boundaries.known.values())).num_tokens += UNIT


def spoil_values(cache):
    cache.device.saved[next(iter(cache.device.residents.values())).row] += 1


def spoil_budget(cache):
    cache.device.budget = 1


def spoil_homes(cache):
    cache.boundaries.tombstones.update(cache.boundaries.known)


@pytest.mark.parametrize("spoil", [
    spoil_slots, spoil_pages, spoil_locks, spoil_lengths, spoil_values, spoil_budget, spoil_homes,
])
def test_the_check_sees(spoil):
    server, _ = busy()
    server.cache.check()
    spoil(server.cache)
    with pytest.raises(AssertionError, match="."):
        server.cache.check()
