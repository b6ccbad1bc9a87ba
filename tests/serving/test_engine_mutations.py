"""Each deliberate defect of the engine turns a test red, through the real server.

On Kimi Linear's architecture; the tests themselves run on both.
"""

import copy
import queue

import jax
import jax.numpy as jnp
import pytest

from k3jax import kda
from k3jax.model import K3ForCausalLM
from k3jax.state import Snapshots
from serving.client import RequestError
from serving.engine import scheduler
from serving.engine.config import EngineConfig
from serving.engine.core import Core
from serving.engine.engine import Engine
from serving.engine.keys import PrefixKeys
from serving.engine.plan import Plan
from serving.engine.programs import empty_prefill
from serving.engine.slots import Slots
from serving.engine.steps import prefill_step
from tests.golden import tiny_model
from tests.serving import engine_harness, service, test_engine, test_service_hits, test_service_pressure
from tests.serving.engine_harness import Wrapped, on_engine_thread, start
from tests.serving.mutation import break_source

MODEL = "kimi-linear-tiny"


def hits(name, *arguments):
    return getattr(test_service_hits, name), arguments


def pressure(name, *arguments):
    return getattr(test_service_pressure, name), arguments


RESUME = hits("test_n2_resumed_at_any_boundary")
TWINS = hits("test_sixteen_twins_in_one_step")
LONGEST = hits("test_as_many_tokens_as_there_may_be", 100, 300)
CANCEL_PREFILL = pressure("test_cancel_in_any_phase_and_resend_at_once", 2, 0)
CANCEL_DECODE = pressure("test_cancel_in_any_phase_and_resend_at_once", 8, 0)
PREEMPT = pressure("test_preemption_before_any_step", test_service_pressure.REPEATING)
SHORT_OF_PAGES = pressure("test_preemption_for_want_of_pages")


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(service, "SECONDS", 5.0)
    monkeypatch.setattr(engine_harness, "SECONDS", 5.0)
    monkeypatch.setattr(engine_harness, "experts_tie", lambda *_: False)
    wait_for = test_service_pressure.wait_for
    monkeypatch.setattr(test_service_pressure, "wait_for", lambda condition: wait_for(condition, 4.0))


def check_red(check, mutate=lambda core: None):
    """The test fails: by an assertion, or because a request does not get its answer."""
    test, arguments = check
    with pytest.raises((AssertionError, RequestError, pytest.fail.Exception)):
        with service.serving(MODEL) as running:
            on_engine_thread(running.engine, mutate)
            test(running, *arguments)


DEFECTS = {
    "a hit without its state": (
        Core, "_occupy", "if admission.restore is not None", "if False", RESUME),
    "the state of another position, one chunk early": (
        Core, "_prefill", "row + stop - chunk.first", "row + stop - chunk.first - 64", RESUME),
    "a chunk that knows nothing of those before it": (
        Core, "_prefill", "= chunk.first\n", "= 0\n", RESUME),
    "no state at a chunk's end": (
        scheduler, "_next_chunk", "first < stop <= end", "first < stop < end", RESUME),
    "twins that do not wait": (
        Core, "_admit", "match.pending_tokens > match.hit_tokens", "False", TWINS),
    "twins that wait for those behind them": (
        Core, "_is_computed_ahead", "running.order > sequence.order", "False",
        pressure("test_nobody_waits_for_a_twin_of_lower_priority")),
    "a queue in the order of arrival": (
        Core, "submit", "bisect.insort(self.waiting, sequence, key=lambda waiting: waiting.order)",
        "self.waiting.append(sequence)", pressure("test_nobody_waits_for_a_twin_of_lower_priority")),
    "salts that are not looked at": (
        PrefixKeys, "of", "salt=salt", "salt=''", hits("test_salts_separate_and_an_early_token_too")),
    "a cache that cannot be turned off": (
        Core, "_prefill", "keep=self._config.cache", "keep=True",
        hits("test_without_a_cache_the_answers_are_the_same")),
    "a reset that keeps everything": (
        Core, "reset_cache", "self.cache.reset(now=now)", "pass", pressure("test_room_for_one_snapshot")),
    "declared positions that are not passed on": (
        Core, "_admit", "declared=sequence.request.breakpoints", "declared=()",
        hits("test_declared_positions_are_hit_by_the_second_prompt")),
    "one token too many": (
        Core, "_advance", "sequence.left - 1", "sequence.left", LONGEST),
    "the next page too early": (
        Slots, "decode_rows", "context // PAGE_SIZE", "(context + 1) // PAGE_SIZE", LONGEST),
    "the next page too late": (
        Slots, "without_room", "self.context >= self.capacity", "self.context > self.capacity",
        SHORT_OF_PAGES),
    "an abort that is not heard": (
        Core, "abort", "if sequence:", "if False:", pressure("test_a_slot_is_free_within_two_steps")),
    "a slot that nobody gets back": (
        Core, "_finish", "self._release(sequence, now)", "pass", CANCEL_PREFILL),
    "a slot that still decodes for its last owner": (
        Slots, "leave", "self.decoding[slot] = False", "pass", CANCEL_DECODE),
    "generated tokens forgotten by a preemption": (
        Core, "_preempt", "np.int32(sequence.generated)", "np.int32([])", PREEMPT),
    "generated tokens that count as the prompt's": (
        Core, "_occupy", "seen[sequence.tokens[prompt:]] |= GENERATED", "", PREEMPT),
    "a preemption that does not wait for tokens in flight": (
        Core, "_make_room", "if self._in_flight:", "if False:", SHORT_OF_PAGES),
    "a queue without an end": (
        Engine, "submit", ">= self.config.max_waiting", "> 10**9", pressure("test_queue_full_and_deadlines")),
    "logits that are no numbers": (
        Core, "_push", "if token < 0:", "if False:", pressure("test_no_numbers_end_that_request_only")),
    "a state handed on though its numbers are wrong": (
        Core, "_push", "self.cache.distrust(sequence.admission, now=now)", "pass",
        pressure("test_a_state_that_went_wrong_is_not_handed_on")),
    "memory of all deadlines": (
        Core, "_watch", "_FEW + 2 * len(self.by_id)", "10**9",
        pressure("test_requests_that_have_ended_are_forgotten_though_their_deadline_is_far")),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_seen(defect, monkeypatch):
    *where, check = DEFECTS[defect]
    break_source(monkeypatch, *where)
    check_red(check)


@pytest.mark.parametrize("owner, name, old, new, test", [
    (Core, "_read", "if not sequence.done:", "if True:", test_engine.test_nothing_comes_after_the_end),
    (Core, "_expire", "if not sequence.done:", "if False:", test_engine.test_deadlines_in_the_queue_and_running),
    (Core, "_send", "if not sequence.done:", "if False:", test_engine.test_a_client_that_is_gone_when_it_is_accepted),
    (Core, "end_all", "waiting or sequence.admission", "True", test_engine.test_an_exception_costs_what_runs),
    (Engine, "_serve_until_stopped", "< _TWICE", "< 0", test_engine.test_a_second_exception_is_the_end),
    (Engine, "drain", "if not self._door.wait_for(self._is_empty, timeout):", "if True:",
     test_engine.test_drain_finishes_and_stop_aborts),
])
def test_a_defect_beneath_the_server_is_seen(owner, name, old, new, test, monkeypatch):
    break_source(monkeypatch, owner, name, old, new)
    engines = []

    def begin(**settings):
        engines.append(start(MODEL, **settings))
        return engines[-1]

    with pytest.raises((AssertionError, queue.Empty, pytest.fail.Exception)):
        test(begin)
    for engine in engines:
        engine.stop()


@pytest.mark.parametrize("check", {str(check): check for *_, check in DEFECTS.values()}.values())
def test_without_a_defect_it_is_green(check):
    test, arguments = check
    with service.serving(MODEL) as running:
        test(running, *arguments)


# What is not one line of the source


def restoring_into_the_next_slot(programs):
    return {"restore": lambda state, slot, snapshot: programs.restore(state, slot % 4 + 1, snapshot)}


def donating_what_is_cached(programs):
    def restore(state, slot, snapshot):
        restored = programs.restore(state, slot, snapshot)
        jax.tree.map(lambda array: array.delete(), snapshot)
        return restored

    return {"restore": restore}


def with_the_page_table_of_the_first_owner(programs):
    rows = []

    def admit(state, slot, row):
        rows.append(row.page_table)
        return programs.admit(state, slot, row.replace(page_table=rows[0]))

    return {"admit": admit}


def without_forgetting_what_was_seen(programs):
    """A row of `seen` that is not zeroed: penalties for the tokens of the slot's last owner."""
    return {"admit": lambda state, slot, row: programs.admit(
        state, slot, row.replace(seen=row.seen | jax.device_get(state.seen[slot]))
    )}


@pytest.mark.parametrize("change, check", [
    (restoring_into_the_next_slot, RESUME),
    (donating_what_is_cached, TWINS),
    (with_the_page_table_of_the_first_owner, RESUME),
    (without_forgetting_what_was_seen, SHORT_OF_PAGES),
])
def test_a_wrong_program_is_seen(change, check):
    check_red(check, lambda core: vars(core).update(_programs=Wrapped(core._programs, change)))


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


@pytest.mark.parametrize("check", [RESUME, CANCEL_PREFILL])
def test_publication_before_the_write_is_seen(check):
    check_red(check, publish_before_the_write)


def test_a_slot_given_away_too_early_is_seen():
    """A release while the request still runs: its neighbour gets the same slot."""

    def mutate(core):
        occupy = core._occupy

        def occupy_and_give_slot_away(sequence, now):
            occupy(sequence, now)
            core.cache.slots.free.append(sequence.admission.slot)

        core._occupy = occupy_and_give_slot_away

    check_red(RESUME, mutate)


def test_a_skipped_zeroing_is_seen(monkeypatch):
    """The state of a prompt's first chunk is what the slot's last owner left, instead of zeros."""

    class Careless(K3ForCausalLM):
        """Another class, so that JAX traces it anew."""

    whole = kda.kda_prefill

    def without_zeroing(q, k, v, decay, beta, a_log, dt_bias, pool, layer, slots, has_context, *args, **kwargs):
        always = jnp.ones_like(has_context)
        return whole(q, k, v, decay, beta, a_log, dt_bias, pool, layer, slots, always, *args, **kwargs)

    monkeypatch.setattr(kda, "kda_prefill", without_zeroing)
    lm, config = tiny_model(MODEL), EngineConfig(**engine_harness.SETTINGS)
    mutant = copy.copy(engine_harness.programs(MODEL, "float32"))
    (shape,) = mutant.prefill_shapes
    step = prefill_step.lower(
        lm.params, Plan.of(lm, config).create_state(lm), empty_prefill(shape, 0),
        model=Careless(lm.config, lm.dtype), num_logprobs=config.num_logprobs,
    )
    mutant._prefill = mutant._prefill | {(shape, 0): step.compile()}
    check_red(
        hits("test_nobody_reads_what_is_in_free_slots_and_pages", 1e30),
        lambda core: vars(core).update(_programs=mutant),
    )
