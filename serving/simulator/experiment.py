"""The comparison: parameters fitted on the first half of a trace, results counted on the second."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from serving.prefix_cache import CostModel
from serving.simulator.bounds import infinite_cache, offline_greedy
from serving.simulator.replay import Policy, replay
from serving.simulator.trace import Request

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Savings:
    """What hits save of a part of a trace.

    Attributes:
      tokens: hit tokens, a share of all input tokens.
      flops: prefill FLOPs saved, a share of all prefill FLOPs.
    """

    tokens: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Result:
    """A policy at a budget.

    Attributes:
      name, title: of the policy.
      savings: on the second half, with the cache that the first half left.
      whole_trace: on both halves.
      parameters: as fitted.
      peak_bytes, end_bytes, evictions, seconds: of the replay of the whole trace, see `Replay`.
    """

    name: str
    title: str
    savings: Savings
    whole_trace: Savings
    parameters: Mapping[str, Any]
    peak_bytes: int
    end_bytes: int
    evictions: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Budget:
    """All policies at one budget, and the offline greedy bound (see `offline_greedy`) on the second half."""

    gib: float
    offline: Savings
    results: tuple[Result, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """A finished comparison.

    Attributes:
      num_requests, num_tokens: of the whole trace.
      whole_ceiling: what an infinite cache saves of the whole trace.
      ceiling: what it saves of the second half.
    """

    num_requests: int
    num_tokens: int
    whole_ceiling: Savings
    ceiling: Savings
    budgets: tuple[Budget, ...]


def compare(requests: Sequence[Request], policies: Sequence[Policy], budgets_gib: Sequence[float], cost: CostModel,
            progress: Callable[[str], None] = lambda message: None) -> Report:
    """Replays the trace for every policy and budget; `progress` is told in words what comes next."""
    lengths = np.array([request.num_tokens for request in requests])
    half = len(requests) // 2

    def savings(hits: np.ndarray, start: int = half) -> Savings:
        hits, total = hits[start:], lengths[start:]
        return Savings(float(hits.sum() / total.sum()), float(cost.flops(hits).sum() / cost.flops(total).sum()))

    ceiling = infinite_cache(requests)
    budgets = []
    for gib in budgets_gib:
        budget_bytes = int(gib * GIB)
        results = []
        for policy in policies:
            progress(f"{policy.name} at {gib:g} GiB")
            parameters = fit(policy, requests[:half], budget_bytes, cost)
            done = replay(policy, requests, budget_bytes, cost, parameters)
            results.append(Result(
                policy.name, policy.title, savings(done.hit_tokens), savings(done.hit_tokens, 0), parameters,
                done.peak_bytes, done.end_bytes, done.evictions, done.seconds,
            ))
        budgets.append(Budget(gib, savings(offline_greedy(requests, budget_bytes, cost)), tuple(results)))
    return Report(len(requests), int(lengths.sum()), savings(ceiling, 0), savings(ceiling), tuple(budgets))


def fit(policy: Policy, requests: Sequence[Request], budget_bytes: int, cost: CostModel) -> Mapping[str, Any]:
    """The parameters with the most hit tokens among the later half of these requests: the cache is warm by then."""
    if len(policy.grid) == 1:
        return policy.grid[0]
    warm = len(requests) // 2
    hits = [replay(policy, requests, budget_bytes, cost, each).hit_tokens[warm:].sum() for each in policy.grid]
    return policy.grid[int(np.argmax(hits))]
