"""Who comes back, and when: hazards learned from the waits of all boundaries, and the index to rank them by.

A chat user needs a minute or two to read and write, so a boundary is worth most some time *after* its last use: plain
recency evicts everything just before it is needed.
"""

import math
from typing import TYPE_CHECKING

import numpy as np

from serving.prefix_cache.boundary import Kind

if TYPE_CHECKING:
    from serving.prefix_cache.boundary import Boundary

# Ages fall in bins: 0 .. 4 s, then two an octave, the last without an end.
_NUM_BINS = 26
_EDGES = np.concatenate([[0.0], 4.0 * 2.0 ** (np.arange(_NUM_BINS) / 2)])
_WIDTHS = np.diff(_EDGES)

# Classes: prompt ends by turn and by the size of what was new, then boundaries that prompts went on from.
_TURNS, _SIZES, _FORKS = 5, 8, 6
_DECLARED = _TURNS * _SIZES  # and one more: gone on from once
_INTERVAL = _DECLARED + 2
_BRANCHED = _DECLARED + 3
_NUM_CLASSES = _BRANCHED + _FORKS

# Before anything was observed. The hazard falls with age, which makes the order that of recency ...
_PRIOR_HAZARD = 0.3 / (60 + (_EDGES[:-1] + _EDGES[1:]) / 2)
# ... among equals: superseded prompt ends go first, then interval points, prompt ends, and junctions last.
_PRIOR_FACTOR = np.ones(_NUM_CLASSES)
_PRIOR_FACTOR[_INTERVAL] = 0.5
_PRIOR_FACTOR[_BRANCHED:] = 2.0
_PRIOR_FACTOR[_BRANCHED] = 0.1

# How many observed uses weigh as much as the prior, for a class as a whole and for one bin of it.
_CLASS_WEIGHT, _BIN_WEIGHT = 2.0, 1.0
_HALF_LIFE = 4 * 3600.0


class LearnedReuse:
    """The default policy.

    For each class and bin of ages it counts uses, and the seconds that boundaries spent waiting there, whether or not
    their snapshot had been evicted by then: the policy does not blind itself. The hazard (uses per second) is shrunk
    towards the hazard of all classes times the class's own factor. What is returned is not the hazard itself but the
    Gittins index: the best ratio, over all times tau to wait, of P(used within tau) to the expected time kept until
    then. It is what memory is worth when it can be taken away at any time.
    """

    def __init__(self):
        self._uses = np.zeros((_NUM_CLASSES, _NUM_BINS))
        self._seconds = np.zeros((_NUM_CLASSES, _NUM_BINS))
        self._last_learned: float | None = None
        self._index = self._indices(self._seconds)

    def classify(self, boundary: "Boundary") -> int:
        """By turn and new tokens while nothing went on from here; by how often something did, afterwards."""
        if boundary.kind is Kind.PROMPT_END and boundary.forks == 0:
            size = min(max(boundary.new_tokens // 512, 1).bit_length(), _SIZES) - 1
            return (min(boundary.turn, _TURNS) - 1) * _SIZES + size
        if boundary.kind is Kind.DECLARED and boundary.forks < 2:
            return _DECLARED + boundary.forks
        if boundary.kind is Kind.INTERVAL and boundary.forks == 0:
            return _INTERVAL
        # A junction is made because two prompts part there, an interval point while one passes.
        branches = boundary.forks + {Kind.JUNCTION: 2, Kind.INTERVAL: 1}.get(boundary.kind, 0)
        return _BRANCHED + min(branches, _FORKS) - 1

    def observe(self, class_: int, age: float, *, used: bool) -> None:
        """See `Policy`."""
        bin_ = int(_bins(np.float64(age)))
        self._seconds[class_, :bin_] += _WIDTHS[:bin_]
        self._seconds[class_, bin_] += age - _EDGES[bin_]
        self._uses[class_, bin_] += used

    def learn(self, classes: np.ndarray, ages: np.ndarray, now: float) -> None:
        """See `Policy`; old observations fade."""
        if self._last_learned is not None:
            fade = math.exp2(-max(now - self._last_learned, 0) / _HALF_LIFE)
            self._uses *= fade
            self._seconds *= fade
        self._last_learned = now
        self._index = self._indices(self._seconds + _seconds_waited(classes, ages))

    def rates(self, classes: np.ndarray, ages: np.ndarray) -> np.ndarray:
        """See `Policy`."""
        return self._index[classes, _bins(ages)]

    def _indices(self, seconds: np.ndarray) -> np.ndarray:
        """[classes, bins] from the time spent waiting, [classes, bins]."""
        pooled = (self._uses.sum(0) + 1) / (seconds.sum(0) + 1 / _PRIOR_HAZARD)
        factor = self._uses.sum(1) + _CLASS_WEIGHT * _PRIOR_FACTOR
        factor /= seconds @ pooled + _CLASS_WEIGHT
        expected = factor[:, None] * pooled
        return gittins_index((self._uses + _BIN_WEIGHT) / (seconds + _BIN_WEIGHT / expected), _WIDTHS)


def gittins_index(hazard: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """The best ratio of P(used) to the expected seconds kept, from the start of each bin to the end of any later one.

    Args:
      hazard: [..., bins] uses per second.
      widths: [bins] seconds.

    Returns:
      [..., bins] per second.
    """
    used = -np.expm1(-hazard * widths)
    kept = used / hazard  # E[min(time to use, width)] of an exponential wait
    bins = hazard.shape[-1]
    alive, hits, seconds, best = (np.zeros_like(hazard) for _ in range(4))
    alive += 1
    for ahead in range(bins):
        starts = slice(0, bins - ahead)
        hits[..., starts] += alive[..., starts] * used[..., ahead:]
        seconds[..., starts] += alive[..., starts] * kept[..., ahead:]
        alive[..., starts] *= 1 - used[..., ahead:]
        np.maximum(best[..., starts], hits[..., starts] / seconds[..., starts], out=best[..., starts])
    return best


def _bins(ages: np.ndarray) -> np.ndarray:
    """The bin of each age."""
    octaves = np.log2(np.maximum(ages, 1.0) / 4.0)
    return np.clip(np.floor(octaves * 2) + 1, 0, _NUM_BINS - 1).astype(np.int64)


def _seconds_waited(classes: np.ndarray, ages: np.ndarray) -> np.ndarray:
    """[classes, bins] seconds that waits of these ages, not yet ended, spent in each bin."""
    bins = _bins(ages)
    cells, shape = classes * _NUM_BINS + bins, (_NUM_CLASSES, _NUM_BINS)
    here = np.bincount(cells, minlength=_NUM_CLASSES * _NUM_BINS).reshape(shape)
    in_bin = np.bincount(cells, ages - _EDGES[bins], minlength=_NUM_CLASSES * _NUM_BINS).reshape(shape)
    passed = here.sum(1, keepdims=True) - np.cumsum(here, 1)
    return in_bin + passed * _WIDTHS
