"""SGLang's radix cache for hybrid models: at most one state a node, and two pools with an LRU list each.

Described in SGLang's "Hybrid Models Meet SGLang", sgl#11214 and, for what a hit refreshes, sgl#31648. Simplified, not
to SGLang's loss: states are kept at the end of the prompt, which later prompts can reach, not after its answer; and
running requests hold no states.
"""

from collections import OrderedDict
from collections.abc import Sequence

from benchmarks.peers.radix_tree import Node, RadixTree
from serving.prefix_cache import CostModel
from serving.simulator.replay import Policy
from serving.simulator.trace import BLOCK_TOKENS


class SglangCache:
    """A tree whose nodes own the KV of their edge and maybe a state. A node without one is a tombstone.

    The state pool evicts any node, oldest first: an inner one becomes a tombstone, a leaf goes with its KV. The KV pool
    evicts leaves, oldest first. Tombstones left without children go along, so that a leaf always has a state.
    """

    def __init__(self, budget_bytes: int, cost: CostModel, state_share: float):
        """`state_share` of the budget is the pool of states; the split is fixed at start-up."""
        self.state_bytes, self.block_bytes = cost.snapshot_bytes, BLOCK_TOKENS * cost.token_bytes
        self.max_states = int(state_share * budget_bytes) // self.state_bytes
        self.max_blocks = (budget_bytes - self.max_states * self.state_bytes) // self.block_bytes
        self.tree = RadixTree()
        self.kv_lru: OrderedDict[Node, None] = OrderedDict()
        self.state_lru: OrderedDict[Node, None] = OrderedDict()
        self.num_blocks = 0
        self.evictions = 0

    @property
    def bytes_used(self) -> int:
        return len(self.state_lru) * self.state_bytes + self.num_blocks * self.block_bytes

    def access(self, blocks: Sequence[int], num_tokens: int, now: float) -> int:
        del now
        blocks = blocks[:(num_tokens - 1) // BLOCK_TOKENS]
        path, matched = self.tree.match(blocks)
        hit = next((node for node in reversed(path) if node in self.state_lru), self.tree.root)
        if hit in self.state_lru:
            # Only the state that was used becomes recent, not those above it.
            self.state_lru.move_to_end(hit)
        # KV deeper than the state shows a shared prefix; this request leaves a state where it branches off.
        for depth in sorted({matched, len(blocks)}):
            if depth > hit.depth:
                self._keep_state(blocks[:depth])
        self._touch_kv(blocks)
        while len(self.state_lru) > self.max_states:
            self._evict_state()
        while self.num_blocks > self.max_blocks:
            # A parent is always more recent than its children, so the oldest node is a leaf.
            self._remove_leaf(next(iter(self.kv_lru)))
        return hit.depth * BLOCK_TOKENS

    def _keep_state(self, blocks: Sequence[int]) -> None:
        node, made = self.tree.insert(blocks)
        for new in made:
            self.kv_lru[new] = None
            if not new.children:
                self.num_blocks += len(new.edge)
        self.state_lru[node] = None

    def _touch_kv(self, blocks: Sequence[int]) -> None:
        for node in reversed(self.tree.match(blocks)[0]):
            self.kv_lru.move_to_end(node)

    def _evict_state(self) -> None:
        node = next(iter(self.state_lru))
        if node.children:
            del self.state_lru[node]
            self.evictions += 1
        else:
            self._remove_leaf(node)

    def _remove_leaf(self, node: Node) -> None:
        """Removes a leaf, then the tombstones above that have become leaves."""
        self.evictions += 1
        del self.state_lru[node]
        while True:
            self.tree.remove_leaf(node)
            del self.kv_lru[node]
            self.num_blocks -= len(node.edge)
            node = node.parent
            if node is self.tree.root or node.children or node in self.state_lru:
                break


SGLANG = Policy(
    "sglang", "SGLang: radix nodes, two LRUs", SglangCache,
    tuple({"state_share": share / 100} for share in (20, 30, 40, 45, 50, 55, 60, 65, 70, 75, 80, 90)),
)
