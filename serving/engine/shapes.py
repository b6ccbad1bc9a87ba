"""Which shapes of steps there are."""

import dataclasses

from serving.engine.config import CHUNK, EngineConfig

MOST_SEQUENCES = 8
GROWTH = 4
"""From one shape to the next larger one: few programs, and less than three quarters of a step is padding."""


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """Static sizes of a prefill step.

    Attributes:
      tokens: packed rows, T.
      sequences: most prompts in it, N.
      snapshots: most states kept of it, M.
    """

    tokens: int
    sequences: int
    snapshots: int


def prefill_shapes(config: EngineConfig) -> tuple[PrefillShape, ...]:
    """The smallest first; just the largest in deterministic mode."""
    sizes = [config.prefill_tokens]
    while not config.deterministic and sizes[-1] > CHUNK:
        sizes.append(max(CHUNK, sizes[-1] // GROWTH // CHUNK * CHUNK))
    # Of each prompt at least its end is kept.
    return tuple(
        PrefillShape(tokens, sequences, max(2, sequences))
        for tokens in reversed(sizes)
        for sequences in [min(tokens // CHUNK, config.max_batch, MOST_SEQUENCES)]
    )


def snapshot_counts(shape: PrefillShape, config: EngineConfig) -> tuple[int, ...]:
    """For which numbers of snapshots there are programs, the smallest first: most steps keep none.

    In deterministic mode it is one program, cache or not: another might round differently.
    """
    if config.deterministic:
        return (shape.snapshots,)
    return (0, shape.snapshots) if config.cache else (0,)


def decode_rows(config: EngineConfig) -> tuple[int, ...]:
    """Rows of decode steps, the smallest first; just the largest in deterministic mode."""
    sizes = [config.max_batch]
    while not config.deterministic and sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // GROWTH))
    return tuple(reversed(sizes))
