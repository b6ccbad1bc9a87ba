"""vLLM's two ways to cache recurrent states: one on a grid of blocks, and one at prompt ends and junctions.

Described in vLLM's documentation of automatic prefix caching and in vllm#37898 (junctions), #45845 (intervals) and
#52216 (prompt ends and junctions become the default). Three simplifications, none of them to vLLM's loss: every block
has 512 tokens; blocks of running requests do not occupy the cache; a state costs its own bytes, not those of padded
pages.
"""

from collections import OrderedDict
from collections.abc import Sequence

from serving.prefix_cache import CostModel
from serving.simulator.replay import Policy
from serving.simulator.trace import BLOCK_TOKENS


class VllmCache:
    """One queue for blocks of KV and for states, the least recently freed first.

    Both are entries of their own under the id of the prefix that they end: a state may outlive its KV and the other way
    round, and counts only together with the KV of the whole prefix.
    """

    def __init__(self, budget_bytes: int, cost: CostModel, interval: int = 0):
        """A state every `interval` tokens; 0: at the end of a prompt and at its junction with earlier ones."""
        self.budget_bytes = budget_bytes
        self.interval = interval // BLOCK_TOKENS
        self.size = {"kv": BLOCK_TOKENS * cost.token_bytes, "state": cost.snapshot_bytes}
        self.queue: OrderedDict[tuple[str, int], None] = OrderedDict()
        self.bytes_used = 0
        self.evictions = 0

    def access(self, blocks: Sequence[int], num_tokens: int, now: float) -> int:
        del now
        blocks = blocks[:(num_tokens - 1) // BLOCK_TOKENS]
        with_kv = 0
        while with_kv < len(blocks) and ("kv", blocks[with_kv]) in self.queue:
            with_kv += 1
        hit = with_kv
        while hit and ("state", blocks[hit - 1]) not in self.queue:
            hit -= 1
        if self.interval:
            passing, held = range(self.interval, len(blocks) + 1, self.interval), [hit]
            passing = [depth for depth in passing if depth > hit]
        else:
            # KV that reaches deeper than any state is the sign of a shared prefix: the junction is kept for the third.
            passing, held = [], [hit, with_kv, len(blocks)]
        # States passed on the way are freed as prefill moves on. What the request holds to its end is freed last: KV,
        # then states, each from the tail, so that deep entries go first.
        for depth in passing:
            self._free("state", blocks[depth - 1])
        for block in reversed(blocks):
            self._free("kv", block)
        for depth in sorted({depth for depth in held if depth}, reverse=True):
            self._free("state", blocks[depth - 1])
        while self.bytes_used > self.budget_bytes:
            (kind, _), _ = self.queue.popitem(last=False)
            self.bytes_used -= self.size[kind]
            self.evictions += kind == "state"
        return hit * BLOCK_TOKENS

    def _free(self, kind: str, block: int) -> None:
        """To the end of the queue, as new or used again."""
        if (kind, block) in self.queue:
            self.queue.move_to_end((kind, block))
        else:
            self.queue[kind, block] = None
            self.bytes_used += self.size[kind]


VLLM_INTERVAL = Policy(
    "vllm-interval", "vLLM: interval, LRU", VllmCache,
    tuple({"interval": blocks * BLOCK_TOKENS} for blocks in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)),
)
VLLM_JUNCTION = Policy("vllm-junction", "vLLM: prompt end + junction, LRU", VllmCache)
