"""What an eviction policy is: a guess how soon a boundary is used again; value and bytes are not its business."""

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from serving.prefix_cache.boundary import Boundary


class Policy(Protocol):
    """Boundaries are in classes; a class has a rate of use for each age, the seconds since the last use."""

    def classify(self, boundary: "Boundary") -> int:
        """The class of a boundary that was used just now."""

    def observe(self, class_: int, age: float, *, used: bool) -> None:
        """A wait ended at this age: by a use, or because the boundary was forgotten."""

    def learn(self, classes: np.ndarray, ages: np.ndarray, now: float) -> None:
        """Called now and then with the waits that have not ended: [boundaries] each."""

    def rates(self, classes: np.ndarray, ages: np.ndarray) -> np.ndarray:
        """[boundaries] uses to be expected per second."""


class LeastRecentlyUsed:
    """Knows nothing but that what was used last is used next."""

    def classify(self, boundary: "Boundary") -> int:
        """One for all."""
        return 0

    def observe(self, class_: int, age: float, *, used: bool) -> None:
        """Nothing to learn."""

    def learn(self, classes: np.ndarray, ages: np.ndarray, now: float) -> None:
        """Nothing to learn."""

    def rates(self, classes: np.ndarray, ages: np.ndarray) -> np.ndarray:
        """The younger the better."""
        return 1 / (1 + ages)
