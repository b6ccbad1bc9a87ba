"""The protocol of a replayed cache, and the replay."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from serving.prefix_cache import CostModel
from serving.simulator.trace import BLOCK_TOKENS, Request


class ReplayedCache(Protocol):
    """A prefix cache without a model: prompts come one after the other and are published at once.

    Attributes:
      bytes_used: snapshots and MLA pages together.
      evictions: snapshots dropped so far.
    """

    bytes_used: int
    evictions: int

    def access(self, blocks: Sequence[int], num_tokens: int, now: float) -> int:
        """Looks a prompt up, then keeps of it what the policy keeps.

        Args:
          blocks: ids of its complete blocks; a hit may cover the first `(num_tokens - 1) // BLOCK_TOKENS`, since the
            last token is always computed.
          num_tokens: length of the prompt.
          now: seconds.

        Returns:
          Tokens whose prefill is saved: a multiple of `BLOCK_TOKENS`, less than `num_tokens`.
        """


@dataclasses.dataclass(frozen=True)
class Policy:
    """A way to fill and empty a cache.

    Attributes:
      name: on the command line.
      title: in tables and plots.
      make: `make(budget_bytes, cost, **parameters)` gives an empty cache.
      grid: values of the free parameters to choose from.
    """

    name: str
    title: str
    make: Callable[..., ReplayedCache]
    grid: Sequence[Mapping[str, Any]] = ({},)


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a cache did with a trace.

    Attributes:
      hit_tokens: [requests] int64.
      peak_bytes, end_bytes: between requests.
      evictions: snapshots dropped.
      seconds: time the replay took.
    """

    hit_tokens: np.ndarray
    peak_bytes: int
    end_bytes: int
    evictions: int
    seconds: float


def replay(policy: Policy, requests: Sequence[Request], budget_bytes: int, cost: CostModel,
           parameters: Mapping[str, Any]) -> Replay:
    """Sends the requests through an empty cache.

    Raises:
      RuntimeError: the policy breaks the rules: more bytes than the budget, or a hit that no prompt can have.
    """
    start = time.perf_counter()
    cache = policy.make(budget_bytes, cost, **parameters)
    hits = np.zeros(len(requests), np.int64)
    peak = 0
    for index, request in enumerate(requests):
        hit = cache.access(request.complete_blocks, request.num_tokens, request.now)
        if not 0 <= hit < request.num_tokens or hit % BLOCK_TOKENS:
            raise RuntimeError(f"{policy.name} hits {hit} of {request.num_tokens} tokens")
        if cache.bytes_used > budget_bytes:
            raise RuntimeError(f"{policy.name} keeps {cache.bytes_used} bytes of {budget_bytes}")
        hits[index] = hit
        peak = max(peak, cache.bytes_used)
    return Replay(hits, peak, cache.bytes_used, cache.evictions, time.perf_counter() - start)
