"""Marconi (Pan et al., MLSys 2025, arXiv 2411.19379): judicious admission and FLOP-aware eviction in a radix tree.

The paper keeps a state after the last decoded token; traces have no ids for answers, so here it is kept at the end of
the prompt. The paper tunes alpha by replaying the requests of a bootstrap window over a grid; here the window is the
first half of the trace, as for the parameters of every policy.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.peers.radix_tree import Node, RadixTree
from serving.prefix_cache import CostModel
from serving.simulator.replay import Policy
from serving.simulator.trace import BLOCK_TOKENS


class MarconiCache:
    """Every node of the tree has a state: the end of a prompt, or a branch found by inserting a prompt speculatively.

    A node with at most one child may be evicted: a leaf with its KV, an inner node's state alone, whose KV the child
    then owns. The lowest recency + alpha * FLOP efficiency goes first, both scaled to 0..1 over the candidates.
    """

    def __init__(self, budget_bytes: int, cost: CostModel, alpha: float):
        self.budget_bytes = budget_bytes
        self.cost = cost
        self.state_bytes, self.block_bytes = cost.snapshot_bytes, BLOCK_TOKENS * cost.token_bytes
        self.alpha = alpha
        self.tree = RadixTree()
        self.nodes = _NodeTable(budget_bytes // self.state_bytes + 2)
        self.bytes_used = 0
        self.evictions = 0

    def access(self, blocks: Sequence[int], num_tokens: int, now: float) -> int:
        blocks = blocks[:(num_tokens - 1) // BLOCK_TOKENS]
        path, matched = self.tree.match(blocks)
        hit = path[-1] if path else self.tree.root
        end, made = self.tree.insert(blocks)
        self.bytes_used += len(made) * self.state_bytes
        self.bytes_used += (len(blocks) - matched) * self.block_bytes
        # A hit refreshes the node that it used, not those above.
        current = [node for node in dict.fromkeys((hit, *made, end)) if node is not self.tree.root]
        for node in current:
            self.nodes.touch(node, now)
        # A split and a new leaf change what their neighbours are worth.
        for node in (*current, *(child for new in made for child in new.children.values()), *(n.parent for n in made)):
            self._value(node)
        while self.bytes_used > self.budget_bytes:
            self._evict(current)
        return hit.depth * BLOCK_TOKENS

    def _value(self, node: Node) -> None:
        """FLOP efficiency: what a hit here saves beyond one at the parent, for the bytes beyond the parent's."""
        if node is self.tree.root:
            return
        flops = self.cost.flops
        saved = flops(node.depth * BLOCK_TOKENS) - flops(node.parent.depth * BLOCK_TOKENS)
        size = self.state_bytes + len(node.edge) * self.block_bytes
        self.nodes.set_efficiency(node, saved / size, evictable=len(node.children) <= 1)

    def _evict(self, current: Sequence[Node]) -> None:
        """Evicts one node, of the current request only if there is no other."""
        node = self.nodes.lowest(self.alpha, current)
        self.nodes.remove(node)
        self.bytes_used -= self.state_bytes
        self.evictions += 1
        if node.children:
            self._value(self.tree.merge_into_child(node))
        else:
            self.bytes_used -= len(node.edge) * self.block_bytes
            self.tree.remove_leaf(node)
            self._value(node.parent)


class _NodeTable:
    """What eviction compares, in arrays with a row for each node of the tree."""

    def __init__(self, size: int):
        self.rows: dict[Node, int] = {}
        self.nodes: list[Node | None] = [None] * size
        self.free = list(range(size))
        self.accesses = 0
        self.last_access = np.zeros(size)
        self.order = np.zeros(size, np.int64)
        self.efficiency = np.zeros(size)
        self.evictable = np.zeros(size, bool)

    def touch(self, node: Node, now: float) -> None:
        """Adds the node if it is new."""
        if node not in self.rows:
            self.rows[node] = self.free.pop()
            self.nodes[self.rows[node]] = node
        row = self.rows[node]
        self.accesses += 1
        self.last_access[row], self.order[row] = now, self.accesses

    def set_efficiency(self, node: Node, efficiency: float, *, evictable: bool) -> None:
        row = self.rows[node]
        self.efficiency[row], self.evictable[row] = efficiency, evictable

    def remove(self, node: Node) -> None:
        row = self.rows.pop(node)
        self.nodes[row], self.evictable[row] = None, False
        self.free.append(row)

    def lowest(self, alpha: float, current: Sequence[Node]) -> Node:
        """The evictable node with the lowest score, the oldest of equals; of `current` only if there is no other."""
        candidates = self.evictable.copy()
        candidates[[self.rows[node] for node in current if node in self.rows]] = False
        rows = np.flatnonzero(candidates if candidates.any() else self.evictable)
        score = _scaled(self.last_access[rows]) + alpha * _scaled(self.efficiency[rows])
        rows = rows[score == score.min()]
        return self.nodes[rows[np.argmin(self.order[rows])]]


def _scaled(values: np.ndarray) -> np.ndarray:
    """To 0..1."""
    low = values.min()
    return (values - low) / max(values.max() - low, np.finfo(float).tiny)


MARCONI = Policy(
    "marconi", "Marconi", MarconiCache,
    tuple({"alpha": tenths / 10} for tenths in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30, 50)),
)
