"""What prompts tell about each other: which boundary they return to, where they fork, and so where to stop."""

from collections.abc import Hashable, Iterable, Sequence

from serving.prefix_cache.boundary import Boundary, BoundaryTable, Kind
from serving.prefix_cache.config import CacheConfig
from serving.prefix_cache.seen import SeenUnits


class Evidence:
    """Boundaries and units seen so far; none of it needs a snapshot or a page."""

    def __init__(self, config: CacheConfig, boundaries: BoundaryTable):
        self.unit = config.unit
        self.interval = config.interval
        self.boundaries = boundaries
        self.seen = SeenUnits(config.max_seen_units)

    def junction(self, path: Sequence[Hashable], hit_tokens: int) -> int:
        """Position beyond the hit where the prompt leaves what an earlier one went on with; 0 if there is none."""
        fork = self.seen.fork(path) * self.unit
        return fork if fork > hit_tokens else 0

    def admitted(self, path: Sequence[Hashable], hit_tokens: int, deepest: Boundary | None, declared: Iterable[int],
                 now: float) -> list[Boundary]:
        """A prompt came.

        Args:
          path: keys of its units.
          hit_tokens: where its prefill begins.
          deepest: known boundary on the path.
          declared: positions named by the client.
          now: seconds.

        Returns:
          The boundaries at which its prefill should stop, in order.
        """
        end = len(path) * self.unit
        turn = self._returned(deepest, end, now) if deepest else 1
        new_tokens = end - (deepest.num_tokens if deepest else 0)
        kinds = dict.fromkeys(range(self.interval, end + 1, self.interval), Kind.INTERVAL) if self.interval else {}
        kinds |= {position // self.unit * self.unit: Kind.DECLARED for position in declared}
        kinds[self.junction(path, hit_tokens)] = Kind.JUNCTION
        kinds[end] = Kind.PROMPT_END
        self.seen.add(path)
        return [
            self.boundaries.add(
                Boundary(path[position // self.unit - 1], position, kinds[position], turn, new_tokens), now
            )
            for position in sorted(kinds) if hit_tokens < position <= end
        ]

    def _returned(self, boundary: Boundary, end: int, now: float) -> int:
        """A prompt that ends at `end` came back to this boundary; returns which turn of its conversation that is."""
        turn = 1
        if boundary.num_tokens == end:
            turn = boundary.turn = boundary.turn + 1
            boundary.new_tokens = 0
        else:
            boundary.forks += 1
            # The first to go on is the next turn; the second may be its author's correction. More are others.
            if boundary.kind in (Kind.PROMPT_END, Kind.DECLARED) and boundary.forks <= 2:
                turn = boundary.turn + 1
        self.boundaries.used(boundary, now)
        return turn
