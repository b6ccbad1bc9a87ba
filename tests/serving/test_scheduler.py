"""Plans of prefill steps: pure functions of what waits, so any queue will do."""

import types

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.config import EngineConfig
from serving.engine.scheduler import plan_prefill, victim
from serving.engine.shapes import decode_rows, prefill_shapes, snapshot_counts

UNIT = 128


class Waiting:
    """As much of a sequence as plans need."""

    def __init__(self, length, hit, stops, order=(0, 0)):
        self.tokens, self.computed, self.order = np.zeros(length, np.int32), hit, order
        self.admission = types.SimpleNamespace(stops=stops, hit_tokens=hit)


@st.composite
def queues(draw):
    """Prompts that begin at a hit, with stops at units from there to their end."""
    queue = []
    for _ in range(draw(st.integers(1, 12))):
        length = draw(st.integers(1, 1200))
        ends = (length - 1) // UNIT
        hit = draw(st.integers(0, ends))
        stops = draw(st.sets(st.integers(hit + 1, ends), max_size=6)) if ends > hit else ()
        queue.append(Waiting(length, hit * UNIT, tuple(stop * UNIT for stop in sorted(stops))))
    return queue


def configs():
    return st.builds(
        EngineConfig, max_batch=st.sampled_from([1, 2, 5, 16, 64]),
        prefill_tokens=st.sampled_from([128, 384, 512, 2048]), deterministic=st.booleans(),
    )


@given(queues(), configs())
def test_every_token_is_computed_once_and_every_state_kept_where_it_can_be(queue, config):
    shapes = prefill_shapes(config)
    grid = config.prefill_tokens if config.deterministic else None
    kept = {sequence: [] for sequence in queue}
    waiting = list(queue)
    while waiting:
        first = waiting[0].computed
        planned = plan_prefill(waiting, shapes, grid=grid, keep=True)
        assert planned, "nothing is done though something waits"
        shape, chunks = planned
        assert chunks[0].sequence is waiting[0] and [chunk.sequence for chunk in chunks] == waiting[: len(chunks)]
        count, stops = sum(chunk.count for chunk in chunks), sum(len(chunk.stops) for chunk in chunks)
        assert count <= shape.tokens and len(chunks) <= shape.sequences and stops <= shape.snapshots
        smaller = [s for s in shapes if s.tokens < shape.tokens]
        assert not any(count <= s.tokens and len(chunks) <= s.sequences and stops <= s.snapshots for s in smaller)
        assert snapshot_counts(shape, config)[-1] >= stops
        for chunk in chunks:
            sequence = chunk.sequence
            assert chunk.first == sequence.computed and chunk.count > 0
            # KDA's state can be kept at multiples of 64 tokens from where a call begins, and at its end.
            assert all((stop - chunk.first) % 64 == 0 for stop in chunk.stops)
            assert chunk.ends_prompt == (chunk.end == len(sequence.tokens))
            assert chunk.ends_prompt or chunk.end % 64 == 0
            assert grid is None or chunk.first // grid == (chunk.end - 1) // grid
            kept[sequence].extend(chunk.stops)
            sequence.computed = chunk.end
        assert waiting[0].computed > first
        waiting = [sequence for sequence in waiting if sequence.computed < len(sequence.tokens)]
    assert all(tuple(stops) == sequence.admission.stops for sequence, stops in kept.items())


@given(queues(), configs())
def test_a_full_step_is_filled(queue, config):
    """As many tokens as fit, in whole tiles of 64, unless sequences, snapshots or the grid say otherwise."""
    shapes = prefill_shapes(config)
    shape, chunks = plan_prefill(queue, shapes, grid=None, keep=False)
    left = shapes[-1].tokens - sum(chunk.count for chunk in chunks)
    assert not any(chunk.stops for chunk in chunks)
    assert len(chunks) in (len(queue), shapes[-1].sequences) or left < 64
    assert [chunk.ends_prompt for chunk in chunks].count(False) <= 1


def test_a_prompt_in_the_grid_is_cut_at_its_multiples_whatever_was_cached():
    """N5: an absolute grid."""
    shapes = prefill_shapes(EngineConfig(prefill_tokens=256, deterministic=True))
    for hit in range(0, 896, UNIT):
        sequence, ends = Waiting(1000, hit, (896,)), []
        while sequence.computed < 1000:
            (chunk,) = plan_prefill([sequence], shapes, grid=256, keep=True)[1]
            sequence.computed = chunk.end
            ends.append(chunk.end)
        assert ends == [end for end in (256, 512, 768, 1000) if end > hit]


def test_nothing_to_do():
    assert plan_prefill([], prefill_shapes(EngineConfig()), grid=None, keep=True) is None


def test_who_makes_room_is_the_last_in_order():
    """Of lower priority, then the youngest."""
    sequences = [Waiting(1, 0, (), order) for order in ((0, 3), (5, 1), (-1, 9), (5, 2))]
    assert victim(sequences).order == (5, 2)


def test_there_are_few_shapes():
    for config in (EngineConfig(), EngineConfig(max_batch=256, prefill_tokens=8192)):
        prefill, decode = prefill_shapes(config), decode_rows(config)
        assert prefill[-1].tokens == config.prefill_tokens and decode[-1] == config.max_batch and decode[0] == 1
        assert len(prefill) <= 5 and len(decode) <= 5
        assert all(b.tokens <= 4 * a.tokens for a, b in zip(prefill, prefill[1:]) if a.tokens > UNIT)
        alone = EngineConfig(max_batch=config.max_batch, prefill_tokens=config.prefill_tokens, deterministic=True)
        assert len(prefill_shapes(alone)) == len(decode_rows(alone)) == len(snapshot_counts(prefill[-1], alone)) == 1
