"""Histograms that cost next to nothing to add to, on a thread that has better things to do."""

import bisect
from collections.abc import Sequence

SECONDS = tuple(float(f"{digit}e{power}") for power in range(-4, 4) for digit in (1, 2, 5))
TOKENS = tuple(float(4**power) for power in range(11))


class Histogram:
    """How many values fell where, as Prometheus counts them. One thread adds; another may copy meanwhile.

    Attributes:
      bounds: upper ends of the buckets, ascending, inclusive; one more bucket has no end.
      counts: values in each bucket.
      sum: of all values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]):
        self.bounds, self.counts, self.sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """One value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> "Histogram":
        """As it stands."""
        other = Histogram(self.bounds)
        other.counts, other.sum = self.counts.copy(), self.sum
        return other
