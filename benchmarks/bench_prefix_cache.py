"""Hashing, and lookup plus admission of a 128k-token prompt with 10,000 snapshots in the cache.

    python benchmarks/bench_prefix_cache.py [--entries 10000] [--repeats 21]

The floor of hashing is SHA-256 over the same bytes in one call; that of admission is one dictionary probe for each key
and one list slice for the pages, which is the least that a flat index can do.
"""

import argparse
import functools
import hashlib
import os
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

from k3jax.presets import KIMI_K3
from serving.prefix_cache import CacheConfig, ChainHasher, CostModel, PrefixCache

PROMPT = 128 * 1024
ENTRY = 12_800  # tokens of each prompt in the cache


def median(function: Callable[[], float], repeats: int) -> float:
    """Median of the seconds that a function reports."""
    return statistics.median(function() for _ in range(repeats))


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def bench_hashing(repeats: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 163_840, PROMPT, np.int32)
    hasher = ChainHasher(model="kimi-k3", weights="1", state_layout="float32")
    data = tokens.tobytes()
    for name, function in (
        ("int32 array", functools.partial(hasher.keys, tokens)),
        ("floor: SHA-256 of the bytes", functools.partial(hashlib.sha256, data)),
    ):
        taken = median(functools.partial(seconds, function), repeats)
        print(f"hashing {PROMPT} tokens, {name}: {taken * 1e3:.2f} ms, {PROMPT / taken / 1e6:.0f}M tokens/s")


def random_keys(num_tokens: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(num_tokens // 128)]


def full_cache(entries: int, spare_pages: int) -> PrefixCache:
    """A cache with so many snapshots, nearly all of whose other pages are taken."""
    cost = CostModel.for_model(KIMI_K3)
    pages = entries * (ENTRY // 128) + 1 + spare_pages
    cache = PrefixCache(CacheConfig(
        cost=cost, num_slots=4, num_pages=pages + 1, device_bytes=2 * entries * (cost.snapshot_bytes + 2**30),
    ))
    for _ in range(entries):
        serve(cache, random_keys(ENTRY) + [b""], ENTRY + 1, publish=True)
    assert len(cache.device.residents) == entries
    return cache


def serve(cache: PrefixCache, keys: list[bytes], num_tokens: int, *, publish: bool) -> float:
    """A whole request; returns the seconds for lookup and admission."""
    now = float(cache.stats.admitted)
    start = time.perf_counter()
    cache.lookup(keys, num_tokens)
    admission = cache.admit(keys, num_tokens, now=now)
    taken = time.perf_counter() - start
    for stop in admission.stops if publish else ():
        cache.publish(admission, stop, "state", now=now)
    cache.release(admission, now=now)
    return taken


def bench_admission(entries: int, repeats: int) -> None:
    pages = PROMPT // 128
    roomy, tight = full_cache(entries, 4 * pages), full_cache(entries, 0)
    known = random_keys(PROMPT)
    serve(roomy, known, PROMPT, publish=True)

    def evicting() -> float:
        while len(tight.device.residents) < entries:
            serve(tight, random_keys(ENTRY) + [b""], ENTRY + 1, publish=True)
        return serve(tight, random_keys(PROMPT), PROMPT, publish=False)

    for name, function in (
        ("miss, pages are free", lambda: serve(roomy, random_keys(PROMPT), PROMPT, publish=False)),
        ("hit of all but the last unit", lambda: serve(roomy, known, PROMPT, publish=False)),
        ("hit of half", lambda: serve(roomy, known[: pages // 2] + random_keys(PROMPT // 2), PROMPT, publish=False)),
        (f"miss, evicting {-(-PROMPT // ENTRY)} snapshots for its pages", evicting),
    ):
        print(f"lookup and admission, {name}: {median(function, repeats) * 1e3:.2f} ms")

    index, pool, fresh = dict.fromkeys(random_keys(entries * ENTRY)), list(range(10**6)), random_keys(PROMPT)
    floor = median(lambda: seconds(lambda: ([key in index for key in fresh], pool[-pages:])), repeats)
    print(f"floor: {floor * 1e3:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=21)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, median of {arguments.repeats}")
    bench_hashing(arguments.repeats)
    bench_admission(arguments.entries, arguments.repeats)


if __name__ == "__main__":
    main()
