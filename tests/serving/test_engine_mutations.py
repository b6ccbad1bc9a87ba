"""Each deliberate defect of the engine is seen: an answer from the cache is no longer that of a cold run.

On Kimi K3's architecture; `test_engine.py` runs on Kimi Linear's.
"""

import jax
import numpy as np
import pytest

from k3jax.sampling import SamplingParams
from k3jax.state import Snapshots
from tests.serving.engine_harness import Stream, ask, check_idle, greedy_gap, on_engine_thread, prompt, start

MODEL = "k3-tiny"
SCORED = SamplingParams(temperature=0, logprobs=0)


class Wrapped:
    """Programs with one method of another kind; `change(programs)` returns {name: method}."""

    def __init__(self, programs, change):
        self._programs = programs
        self.__dict__.update(change(programs))

    def __getattr__(self, name):
        return getattr(self._programs, name)


def wrap_programs(change):
    def mutate(core):
        core._programs = Wrapped(core._programs, change)

    return mutate


def without_restoring(programs):
    return {"restore": lambda state, slot, snapshot: state}


def restoring_into_the_next_slot(programs):
    return {"restore": lambda state, slot, snapshot: programs.restore(state, slot % 4 + 1, snapshot)}


def keeping_the_state_one_chunk_early(programs):
    def prefill(state, shape, inputs):
        positions = inputs.snapshot_positions
        return programs.prefill(
            state, shape, inputs.replace(snapshot_positions=np.where(positions > 0, positions - 64, positions))
        )

    return {"prefill": prefill}


def donating_what_is_cached(programs):
    def restore(state, slot, snapshot):
        state = programs.restore(state, slot, snapshot)
        jax.tree.map(lambda array: array.delete(), snapshot)
        return state

    return {"restore": restore}


def publish_before_the_write(core):
    """At admission, with what the slot holds then."""
    occupy = core._occupy

    def occupy_and_publish(sequence, now):
        occupy(sequence, now)
        model, admission = core._state.model, sequence.admission
        snapshot = Snapshots(*(pool[:, admission.slot] for pool in (model.kda_state, model.conv_tail)))
        for stop in admission.stops:
            core.cache.publish(admission, stop, snapshot, now=now)
        admission.stops = ()

    core._occupy = occupy_and_publish


@pytest.fixture
def engine():
    engine = start(MODEL)
    yield engine
    engine.stop()


def hits_are_right(engine) -> bool:
    """Whether two hits in a row, beside a neighbour, give what a cold run gives."""
    ids = prompt(300, seed=1)
    answers = []
    for salt in ("cold", "warm", "warm", "warm"):
        neighbour = Stream(engine, prompt(200, seed=2), salt=salt)
        answers.append(ask(engine, ids, sampling=SCORED, new=12, salt=salt))
        neighbour.answer()
        if answers[-1].done.finish_reason == "error":
            return False
    cold, _, *hits = answers
    return greedy_gap(MODEL, ids, cold) < 1e-3 and all(
        hit.cached == 256 and hit.ids == cold.ids and np.allclose(hit.logprobs, cold.logprobs, rtol=0, atol=1e-4)
        for hit in hits
    )


def test_hits_are_right_without_a_defect(engine):
    assert hits_are_right(engine)
    check_idle(engine)


@pytest.mark.parametrize("change", [
    without_restoring, restoring_into_the_next_slot, keeping_the_state_one_chunk_early, donating_what_is_cached,
])
def test_a_wrong_program_is_seen(engine, change):
    on_engine_thread(engine, wrap_programs(change))
    assert not hits_are_right(engine)


def test_publication_before_the_write_is_seen(engine):
    on_engine_thread(engine, publish_before_the_write)
    assert not hits_are_right(engine)


def test_a_slot_given_away_too_early_is_seen(engine):
    """A release while the request still runs: its neighbour gets the same slot."""

    def mutate(core):
        occupy = core._occupy

        def occupy_and_give_slot_away(sequence, now):
            occupy(sequence, now)
            core.cache.slots.free.append(sequence.admission.slot)

        core._occupy = occupy_and_give_slot_away

    on_engine_thread(engine, mutate)
    assert not hits_are_right(engine)


def test_stale_pages_are_seen(engine):
    """A page table that a step does not get: its tokens go to the pages of the slot's last owner."""
    contents = []

    def change(programs):
        def admit(state, slot, row):
            contents.append(row.page_table)
            return programs.admit(state, slot, row.replace(page_table=contents[0]))

        return {"admit": admit}

    on_engine_thread(engine, wrap_programs(change))
    assert not hits_are_right(engine)
