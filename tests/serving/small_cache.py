"""A cache of comfortable size for a tiny model, and requests that run from start to end in one call."""

import dataclasses
import itertools

import numpy as np

from serving.prefix_cache import Admission, CacheConfig, ChainHasher, CostModel, PrefixCache

UNIT = 128
COST = CostModel(flops_per_token=100.0, attention_flops=1.0, snapshot_bytes=100_000, token_bytes=10)
HASHER = ChainHasher(model="tiny", weights="1", state_layout="f32", unit=UNIT)
CONFIG = CacheConfig(cost=COST, num_slots=17, num_pages=2000, device_bytes=20_000_000, unit=UNIT)


def make_cache(**changes) -> PrefixCache:
    return PrefixCache(dataclasses.replace(CONFIG, **changes))


def text(seed: int, num_tokens: int) -> list[int]:
    """Tokens that no other seed has."""
    return np.random.default_rng(seed).integers(0, 160_000, num_tokens).tolist()


class Server:
    """Admits, prefills, publishes and releases; its clock moves a second per request."""

    def __init__(self, cache: PrefixCache | None = None, **changes):
        self.cache = cache or make_cache(**changes)
        self.now = 0.0
        self.states = itertools.count()

    def keys(self, tokens: list[int], salt: str = "") -> list[bytes]:
        return HASHER.keys(tokens, salt=salt)

    def admit(self, tokens: list[int], salt: str = "", **options) -> Admission | None:
        self.now += 1
        return self.cache.admit(self.keys(tokens, salt), len(tokens), now=self.now, **options)

    def publish(self, admission: Admission, stop: int) -> bool:
        return self.cache.publish(admission, stop, f"state {next(self.states)} at {stop}", now=self.now)

    def release(self, admission: Admission) -> None:
        self.cache.release(admission, now=self.now)
        self.cache.check()

    def run(self, tokens: list[int], salt: str = "", **options) -> int:
        """A whole request; returns its hit length."""
        admission = self.admit(tokens, salt, **options)
        for stop in admission.stops:
            self.publish(admission, stop)
        self.release(admission)
        return admission.hit_tokens

    def hit(self, tokens: list[int], salt: str = "") -> int:
        """What a lookup finds."""
        return self.cache.lookup(self.keys(tokens, salt), len(tokens)).hit_tokens
