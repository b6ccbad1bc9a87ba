"""What runs next: pure functions of what waits."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from serving.engine.sequence import Sequence
from serving.engine.shapes import PrefillShape
from serving.prefix_cache.config import STATE_CHUNK


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens first .. first + count - 1 of a sequence, and the positions in it after which the state is kept."""

    sequence: Sequence
    first: int
    count: int
    stops: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def ends_prompt(self) -> bool:
        """Whether it is the last one: the token after it is wanted."""
        return self.end == len(self.sequence.tokens)


def plan_prefill(sequences: Iterable[Sequence], shapes: SequenceOf[PrefillShape], *, grid: int | None,
                 keep: bool) -> tuple[PrefillShape, list[Chunk]] | None:
    """The next prefill step: chunks of several sequences, the first ones first.

    A state can be kept only at multiples of 64 tokens from where a chunk begins, so chunks that do not end a prompt end
    at such multiples. A chunk never ends just because a state is to be kept inside it.

    Args:
      sequences: with a slot, and with tokens left to compute, in order.
      shapes: of steps, the smallest first.
      grid: chunks also end at multiples of this many tokens; None for no grid.
      keep: whether states are kept at the stops.

    Returns:
      The smallest shape that takes the chunks, and these; None when there is nothing to do.
    """
    largest = shapes[-1]
    chunks: list[Chunk] = []
    tokens, snapshots = largest.tokens, largest.snapshots
    for sequence in sequences:
        if len(chunks) == largest.sequences:
            break
        chunk = _next_chunk(sequence, tokens, snapshots, grid, keep)
        if chunk is None:
            break
        chunks.append(chunk)
        tokens -= chunk.count
        snapshots -= len(chunk.stops)
    if not chunks:
        return None
    count, stops = largest.tokens - tokens, largest.snapshots - snapshots
    shape = next(
        shape for shape in shapes
        if count <= shape.tokens and len(chunks) <= shape.sequences and stops <= shape.snapshots
    )
    return shape, chunks


def _next_chunk(sequence: Sequence, tokens: int, snapshots: int, grid: int | None, keep: bool) -> Chunk | None:
    """As much as fits into so many tokens and snapshots."""
    first, end = sequence.computed, len(sequence.tokens)
    if grid:
        end = min(end, (first // grid + 1) * grid)
    if end > first + tokens:
        end = first + tokens // STATE_CHUNK * STATE_CHUNK
    stops = [stop for stop in sequence.admission.stops if first < stop <= end] if keep else []
    if len(stops) > snapshots:
        # As far as possible before the first stop for which there is no room.
        end = stops[snapshots] - STATE_CHUNK
        stops = stops[:snapshots]
    return Chunk(sequence, first, end - first, tuple(stops)) if end > first else None


def victim(sequences: Iterable[Sequence]) -> Sequence:
    """Who has to make room: the last in order."""
    return max(sequences, key=lambda sequence: sequence.order)
