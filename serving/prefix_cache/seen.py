"""Where prompts fork: a bounded memory of the units that past prompts were made of."""

import bisect
import collections
from collections.abc import Hashable, Iterable, Sequence


class SeenUnits:
    """Keys of the units seen last, with whether the prompt went on after them.

    Keys of a prompt are stored from its end to its start, so the oldest to be dropped is always the deepest: when a key
    is there, so are those before it.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._went_on: collections.OrderedDict[Hashable, bool] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._went_on)

    def items(self) -> Iterable[tuple[Hashable, bool]]:
        """Keys, the oldest first, and whether a prompt went on after them."""
        return self._went_on.items()

    def add(self, keys: Sequence[Hashable]) -> None:
        """A prompt went through these units and ended with the last of them."""
        went_on = False
        for key in reversed(keys):
            self._went_on[key] = went_on or self._went_on.get(key, False)
            self._went_on.move_to_end(key)
            went_on = True
        while len(self._went_on) > self.limit:
            self._went_on.popitem(last=False)

    def fork(self, keys: Sequence[Hashable]) -> int:
        """How many leading units an earlier prompt shares that then went another way; 0 if none did.

        A prompt that goes on where another one ended is no fork: this is how conversations grow.
        """
        shared = bisect.bisect_left(keys, True, key=lambda key: key not in self._went_on)
        return shared if 0 < shared < len(keys) and self._went_on[keys[shared - 1]] else 0

    def clear(self) -> None:
        """Forgets everything."""
        self._went_on.clear()
