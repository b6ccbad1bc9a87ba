"""The cache that the server uses, as the simulator sees it."""

from collections.abc import Sequence

from serving.prefix_cache import CacheConfig, CostModel, PrefixCache
from serving.simulator.replay import Policy
from serving.simulator.trace import BLOCK_TOKENS

LONGEST_PROMPT = 2**20
"""Tokens of room for the prompt at hand, beside the cache."""


class OurCache:
    """`PrefixCache` with one request at a time, whose snapshots are published at once."""

    def __init__(self, budget_bytes: int, cost: CostModel):
        block_bytes = BLOCK_TOKENS * cost.token_bytes
        self.cache = PrefixCache(CacheConfig(
            cost=cost, num_slots=2, num_pages=1 + budget_bytes // block_bytes + LONGEST_PROMPT // BLOCK_TOKENS,
            device_bytes=budget_bytes, unit=BLOCK_TOKENS,
        ))

    @property
    def bytes_used(self) -> int:
        return self.cache.device.bytes_used

    @property
    def evictions(self) -> int:
        return self.cache.stats.evicted.total()

    def access(self, blocks: Sequence[int], num_tokens: int, now: float) -> int:
        admission = self.cache.admit(blocks, num_tokens, now=now)
        for stop in admission.stops:
            self.cache.publish(admission, stop, stop, now=now)
        self.cache.release(admission, now=now)
        return admission.hit_tokens


OURS = Policy("k3jax", "k3jax", OurCache)
