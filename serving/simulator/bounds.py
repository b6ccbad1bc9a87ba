"""What no cache can beat, and what one that knows the future gets."""

from collections.abc import Iterator, Sequence

import numpy as np

from serving.prefix_cache import CostModel
from serving.simulator.trace import BLOCK_TOKENS, Request


def infinite_cache(requests: Sequence[Request]) -> np.ndarray:
    """Hit tokens [requests] int64 of a cache that keeps everything, a state after every block included.

    A partial last block matches as well: its id stands for one prompt.
    """
    seen: set[int] = set()
    hits = np.zeros(len(requests), np.int64)
    for index, request in enumerate(requests):
        known = 0
        while known < len(request.blocks) and request.blocks[known] in seen:
            known += 1
        hits[index] = min(known * BLOCK_TOKENS, request.num_tokens - 1)
        seen.update(request.blocks)
    return hits


def offline_greedy(requests: Sequence[Request], budget_bytes: int, cost: CostModel) -> np.ndarray:
    """Hit tokens [requests] int64 of a cache that knows when every prefix is used next.

    A prefix may be kept from one prompt that has it to the next. Those spans are taken in the order of the FLOPs they
    save per byte and second, if their snapshot and MLA pages fit throughout; a page under two prefixes is paid twice.
    So this is what foresight can do at least, not a proven optimum.
    """
    spans = np.array(list(_spans(requests)), np.int64).reshape(-1, 3)
    first, second, blocks = spans.T
    now = np.array([request.now for request in requests])
    size = cost.snapshot_bytes + blocks * (BLOCK_TOKENS * cost.token_bytes)
    # Traces round their time: prompts of one instant are a millisecond apart.
    value = cost.flops(blocks * BLOCK_TOKENS) / (size * np.maximum(now[second] - now[first], 1e-3))
    used = np.zeros(len(requests), np.int64)
    hits = np.zeros(len(requests), np.int64)
    for span in np.argsort(-value, kind="stable"):
        during = used[first[span]:second[span]]
        tokens = blocks[span] * BLOCK_TOKENS
        if tokens > hits[second[span]] and during.max() + size[span] <= budget_bytes:
            during += size[span]
            hits[second[span]] = tokens
    return hits


def _spans(requests: Sequence[Request]) -> Iterator[tuple[int, int, int]]:
    """(earlier request, later request, blocks): the deepest prefixes that the later one shares with each earlier one.

    Of a prefix only its last use before counts, so that the spans of one prefix never overlap.
    """
    last: dict[int, int] = {}
    for index, request in enumerate(requests):
        usable = request.blocks[:(request.num_tokens - 1) // BLOCK_TOKENS]
        users = [last.get(block) for block in usable]
        for depth, user in enumerate(users, 1):
            deeper = users[depth] if depth < len(users) else None
            if user is not None and user != deeper:
                yield user, index, depth
        last.update(dict.fromkeys(usable, index))
