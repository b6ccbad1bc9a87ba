"""Turns a pattern of layers into few loops, so that compile time does not grow with depth."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """`count` equal layers in a row."""

    kind: Hashable
    count: int


class Segment(NamedTuple):
    """A group of runs, repeated.

    Attributes:
      first: index of its first layer.
      runs: the runs of one repetition.
      repeats: how often the group follows itself.
    """

    first: int
    runs: tuple[Run, ...]
    repeats: int

    @property
    def period(self) -> int:
        """Layers of one repetition."""
        return sum(run.count for run in self.runs)


def schedule(kinds: Sequence[Hashable]) -> tuple[Segment, ...]:
    """Groups layers, in order, into repeated runs.

    Kimi K3's 93 layers become one dense KDA layer, two KDA layers, 22 times (one MLA, three KDA), and two MLA layers.

    Args:
      kinds: what distinguishes the program of each layer.
    """
    runs: list[Run] = []
    for kind in kinds:
        if runs and runs[-1].kind == kind:
            runs[-1] = Run(kind, runs[-1].count + 1)
        else:
            runs.append(Run(kind, 1))
    segments, start, first = [], 0, 0
    while start < len(runs):
        period, repeats = _best_repetition(runs[start:])
        segment = Segment(first, tuple(runs[start : start + period]), repeats)
        segments.append(segment)
        first += segment.period * repeats
        start += period * repeats
    return tuple(segments)


def _best_repetition(runs: Sequence[Run]) -> tuple[int, int]:
    """(period, repeats) of the repetition at the start that covers most runs; (1, 1) when nothing repeats."""
    best = (1, 1)
    for period in range(1, len(runs) // 2 + 1):
        repeats = 1
        while runs[repeats * period : (repeats + 1) * period] == runs[:period]:
            repeats += 1
        if repeats > 1 and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best
