"""Through the real server, on both tiny checkpoints: a hit is as long as expected and its answer the cold one."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoints import TINY
from tests.serving.engine_harness import (
    UNIT,
    before_rounds,
    changed_programs,
    check_idle,
    expected_hit,
    gather,
    is_there,
    on_engine_thread,
    oracle,
    poison,
    prompt,
)
from tests.serving.service import BOUND, Call, ask, ask_all, check_greedy, check_same, serving, wait_for

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 319, 320, 383, 384)


@pytest.fixture(scope="module", params=TINY)
def running(request):
    with serving(request.param) as service:
        yield service


@pytest.fixture
def service(running):
    """With an empty cache."""
    running.client.reset_cache()
    yield running
    check_idle(running.engine)


def residents(service) -> list[tuple[int, object]]:
    """(tokens, snapshot) of all that is kept."""
    return on_engine_thread(service.engine, lambda core: [
        (resident.boundary.num_tokens, resident.snapshot) for resident in core.cache.device.residents.values()
    ])


def snapshot_at(service, ids, salt, tokens):
    """What was kept after so many tokens of a prompt."""
    key = service.engine._keys.of(ids, salt)[tokens // UNIT - 1]
    resident = on_engine_thread(service.engine, lambda core: core.cache.device.residents.get(key))
    assert resident, f"nothing was kept at {tokens}"
    return resident.snapshot


# Lengths


def test_prompts_of_all_lengths(service):
    """All at once, so that steps are packed; each with a prefix of its own. N8, and vllm#50235: 1 or 2 tokens more."""
    before = service.engine.stats()
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    longer = [np.append(ids, [7, 8][: 1 + n % 2]) for n, ids in enumerate(prompts)]
    cold, warm, extended = ask_all(service, prompts), ask_all(service, prompts), ask_all(service, longer)
    for length, ids, first, second in zip(LENGTHS, prompts, cold, warm):
        check_greedy(service, ids, first)
        check_same(service, ids, second, first)
        assert (first.cached, second.cached) == (0, expected_hit(length)), length
    for length, ids, answer in zip(LENGTHS, longer, extended):
        check_greedy(service, ids, answer)
        assert answer.cached == expected_hit(length)
    after, hits = service.engine.stats(), 2 * sum(map(expected_hit, LENGTHS))
    assert after.cache.hit_tokens - before.cache.hit_tokens == hits
    assert after.computed_tokens - before.computed_tokens == sum(map(len, [*prompts, *prompts, *longer])) - hits
    assert after.compiles_total == before.compiles_total


@pytest.mark.slow
def test_every_length_up_to_three_units(service):
    for first in range(1, 3 * UNIT + 1, 16):
        service.client.reset_cache()
        lengths = range(first, first + 16)
        prompts = [prompt(length, seed=length) for length in lengths]
        cold, warm = ask_all(service, prompts, new=3), ask_all(service, prompts, new=3)
        for length, ids, one, other in zip(lengths, prompts, cold, warm):
            assert (one.cached, other.cached) == (0, expected_hit(length)), length
            check_same(service, ids, other, one)
        check_greedy(service, prompts[5], cold[5])


@pytest.mark.parametrize("length, new", [(900, 124), (100, 300), pytest.param(1, 1023, marks=pytest.mark.slow)])
def test_as_many_tokens_as_there_may_be(service, length, new):
    """vllm#50493: the last column of the page table; and one token more than that is refused elsewhere."""
    ids = prompt(length, seed=1)
    cold = ask(service, ids, new=new)
    warm = ask(service, ids, new=new)
    assert len(cold.ids) == new and warm.cached == expected_hit(length)
    check_same(service, ids, warm, cold)
    logits = oracle(service.name, [*ids, *cold.ids], min(new, 200))
    chosen = logits[np.arange(len(logits)), cold.ids[-len(logits) :]]
    assert (logits.max(axis=1) - chosen).max() < 1e-3  # N7: states do not drift


# What prompts share


@pytest.mark.parametrize("shared", [127, 128, 129, 200, 256, 300, 384])
def test_the_third_prompt_hits_the_fork_of_the_first_two(service, shared):
    """vllm#45238, vmlx-swift#219; from then on everybody does, however many come at once."""
    common = prompt(shared, seed=2)
    prompts = [np.concatenate([common, prompt(200, seed=10 + n)]) for n in range(6)]
    answers = [ask(service, ids) for ids in prompts[:3]] + ask_all(service, prompts[3:])
    hit = shared // UNIT * UNIT
    assert [answer.cached for answer in answers] == [0, 0, *[hit] * 4]
    for ids, answer in zip(prompts, answers):
        check_greedy(service, ids, answer)
    assert service.client.cache_stats().junctions >= (hit > 0)


def test_sixteen_twins_in_one_step(service):
    """vllm#29387, I15: one computes, the others take it over."""
    ids = prompt(300, seed=3)
    cold = ask(service, ids, cache_salt="alone")
    before = service.engine.stats().computed_tokens
    with before_rounds(service.engine, gather(service.engine, lambda core: len(core.by_id) == 16)):
        answers = ask_all(service, [ids] * 16)
    assert sorted(answer.cached for answer in answers) == [0] + [256] * 15
    assert service.engine.stats().computed_tokens - before == 300 + 15 * 44
    for answer in answers:
        check_same(service, ids, answer, cold)


def test_a_twin_whose_elder_goes_away_computes_by_itself(service):
    ids = prompt(700, seed=4)
    cold = ask(service, ids, cache_salt="alone")
    steps = service.engine.stats().prefill_steps
    stages = gather(
        service.engine, lambda core: is_there(core, "elder"), lambda core: len(core.by_id) == 4,
        lambda core: not is_there(core, "elder"),
    )
    with before_rounds(service.engine, stages):
        elder = Call(service, ids, request_id="elder")
        elder.hear()
        younger = [Call(service, ids) for _ in range(3)]
        wait_for(lambda: service.engine.stats().prefill_steps == steps + 2)
        stats = service.engine.stats()
        assert (stats.running, stats.waiting) == (1, 3)
        elder.cancel()
        answers = [call.answer() for call in younger]
    assert sorted(answer.cached for answer in answers) == [0, 640, 640]
    for answer in answers:
        check_same(service, ids, answer, cold)


def test_ten_turns_compute_what_is_new(service):
    """llama.cpp#20428, sgl#37834: each turn hits the last prompt's end. N6: nothing is kept of states made by decoding.

    The stops lie in prompts, though each answer passes a multiple of the unit sooner or later.
    """
    ids, ends = prompt(140, seed=5), []
    for turn in range(10):
        before = service.engine.stats().computed_tokens
        answer = ask(service, ids, new=30)
        check_greedy(service, ids, answer)
        assert answer.cached == (ends[-1] if ends else 0)
        assert service.engine.stats().computed_tokens - before == len(ids) - answer.cached
        ends.append(expected_hit(len(ids)))
        ids = np.concatenate([ids, answer.ids, prompt(50, seed=20 + turn)])
    assert {tokens for tokens, _ in residents(service)} <= set(ends)


def test_declared_positions_are_hit_by_the_second_prompt(service):
    """club-3090#1262: rounded down to a unit; one that lies in the middle of what comes later counts as well."""
    ids = prompt(700, seed=6)
    assert ask(service, ids, cache_breakpoints=[130, 300, 300, 640]).cached == 0
    for length, hit in ((140, 128), (255, 128), (383, 256), (650, 640)):
        answer = ask(service, np.concatenate([ids[:length], prompt(50, seed=7)]))
        assert answer.cached == hit
        check_greedy(service, np.concatenate([ids[:length], prompt(50, seed=7)]), answer)


def test_without_a_cache_the_answers_are_the_same(service):
    ids = prompt(300, seed=7)
    cold = ask(service, ids)
    with serving(service.name, cache=False) as uncached:
        for answer in ask_all(uncached, [ids] * 3):
            check_same(service, ids, answer, cold)
            assert answer.cached == 0
        stats = uncached.client.cache_stats()
        assert (stats.enabled, stats.snapshots, stats.cached_pages, stats.published) == (False, 0, 0, 0)


def test_salts_separate_and_an_early_token_too(service):
    ids = prompt(300, seed=6)
    cold = ask(service, ids, cache_salt="one")
    changed = ids.copy()
    changed[0] += 1
    for others, salt, hit in ((ids, "other", 0), (ids, "", 0), (changed, "one", 0), (ids[1:], "one", 0),
                              (ids, "one", 256)):
        answer = ask(service, others, cache_salt=salt)
        assert answer.cached == hit
        check_greedy(service, others, answer)
    check_same(service, ids, answer, cold)


def test_the_donor_decodes_on_while_others_hit_what_it_published(service):
    """FreeToken#287, vllm#57908: hits in the same steps as the donor's decoding; nobody changes what others read."""
    ids = prompt(390, seed=7)
    cold = ask(service, ids, new=200, cache_salt="alone")
    donor = Call(service, ids, new=200)
    donor.hear(), donor.hear()
    branches = [np.concatenate([ids[:384], prompt(1 + 20 * n, seed=n)]) for n in range(8)]
    for branch, answer in zip(branches, ask_all(service, branches, new=20)):
        assert answer.cached == 384
        check_greedy(service, branch, answer)
    check_same(service, ids, donor.answer(), cold)


def test_what_is_cached_never_changes(service):
    """I8, bit by bit: states and pages, under a hundred and more steps of those who go on from them."""

    def sums(core):
        device, pages = core.cache.device, np.asarray(core._state.model.mla_pages)
        return {
            key: [hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest() for array in (
                *map(np.asarray, jax.tree.leaves(resident.snapshot)),
                pages[:, [device.pages.page_of[unit] for unit in resident.path]],
            )]
            for key, resident in device.residents.items()
        }

    shared = prompt(384, seed=8)
    ask(service, shared)
    ask(service, prompt(257, seed=9))
    kept = on_engine_thread(service.engine, sums)
    assert len(kept) == 2
    steps = service.engine.stats().decode_steps
    for _ in ask_all(service, [np.concatenate([shared, prompt(1 + n, seed=n)]) for n in range(8)], new=70):
        pass
    ask(service, prompt(257, seed=9))
    after = on_engine_thread(service.engine, sums)
    assert {key: after[key] for key in kept} == kept
    assert service.engine.stats().decode_steps - steps >= 140


# Numbers


def test_n1_a_restored_slot_is_the_snapshot_bit_for_bit(service):
    """Also when it was in the host's memory meanwhile."""
    ids, checked = prompt(300, seed=10), []

    def change(programs):
        def restore(state, slot, snapshot):
            host = jax.tree.map(lambda array: np.array(array), snapshot)
            given = jax.tree.map(jnp.asarray, host) if len(checked) % 2 else snapshot
            state, done = programs.restore(state, slot, given)
            for pool, kept in ((state.model.kda_state, host.kda_state), (state.model.conv_tail, host.conv_tail)):
                assert np.asarray(pool[:, slot]).tobytes() == kept.tobytes() and np.any(kept)
            checked.append(slot)
            return state, done

        return {"restore": restore}

    cold = ask(service, ids)
    with changed_programs(service.engine, change):
        answers = [ask(service, ids) for _ in range(4)]
    assert len(checked) == 4
    for answer in answers:
        assert answer.cached == 256
        check_same(service, ids, answer, cold)
        assert answer.scores.tobytes() == answers[0].scores.tobytes()


def test_n2_resumed_at_any_boundary(service):
    """vllm-backport#77, N5: the state at the end is the same, wherever the prompt was cut and whoever was beside it."""
    ids = prompt(460, seed=11)
    cold = ask(service, ids, cache_salt="0")
    expected = snapshot_at(service, ids, "0", 384)
    for units in (1, 2, 3):
        salt = str(units)
        ask(service, ids[: units * UNIT + 1], cache_salt=salt)
        beside = Call(service, prompt(90 + units, seed=units), cache_salt=salt)
        warm = ask(service, ids, cache_salt=salt)
        beside.answer()
        assert warm.cached == units * UNIT
        check_same(service, ids, warm, cold)
        for array, other in zip(jax.tree.leaves(snapshot_at(service, ids, salt, 384)), jax.tree.leaves(expected)):
            array, other = np.asarray(array, np.float64), np.asarray(other, np.float64)
            assert np.linalg.norm(array - other) <= 1e-5 * np.linalg.norm(other)


def conversations(rng) -> list[np.ndarray]:
    """Prompts that go on from, fork off and repeat one another."""
    prompts = [prompt(int(length), seed=number) for number, length in enumerate(rng.integers(1, 500, 4))]
    for _ in range(12):
        base = prompts[rng.integers(len(prompts))]
        keep = base[: rng.integers(1, len(base) + 1)]
        prompts.append(np.concatenate([keep, prompt(int(rng.integers(0, 250)), seed=int(rng.integers(99)))])[:700])
    return prompts


def test_n3_n4_hit_or_miss_alone_or_in_company(service):
    """In the default mode: alone and cold, packed in any order, warm. Answers end at different times (I14)."""
    rng = np.random.default_rng(1)
    prompts = conversations(rng)
    lengths = [int(n) for n in rng.integers(1, 25, len(prompts))]
    alone = [ask(service, ids, new=new, cache_salt=str(n)) for n, (ids, new) in enumerate(zip(prompts, lengths))]
    hits, differences = 0, []
    for _ in range(2):
        order = rng.permutation(len(prompts))
        calls = {n: Call(service, prompts[n], new=lengths[n]) for n in order}
        for n, call in calls.items():
            answer = call.answer()
            hits += answer.cached
            check_same(service, prompts[n], answer, alone[n])
            if answer.ids == alone[n].ids:
                differences.extend(np.abs(answer.scores - alone[n].scores))
    assert hits > 1000 and len(differences) > 200
    assert np.percentile(differences, 99) < BOUND / 2


@pytest.mark.parametrize("value", [np.nan, 1e30])
def test_nobody_reads_what_is_in_free_slots_and_pages(service, value):
    """vllm#56524, atom#1750, I9: all that nobody owns is filled before every round, dummies and padding too."""
    prompts = [prompt(length, seed=length) for length in (5, 128, 300, 140, 257, 64)]
    cold = [ask(service, ids, new=20, cache_salt="clean") for ids in prompts]
    with before_rounds(service.engine, lambda core, now: poison(core, value)):
        first = ask_all(service, prompts, new=20)
        second = ask_all(service, prompts, new=20)
    for ids, one, other, expected in zip(prompts, first, second, cold):
        assert (one.cached, other.cached) == (0, expected_hit(len(ids)))
        check_same(service, ids, one, expected)
        check_same(service, ids, other, expected)


def test_steps_of_padding_only_change_nothing(service):
    """vllm#49757: all programs run on nobody's slot between the steps of others; N8: their outputs are numbers."""
    prompts, rounds = [prompt(300, seed=12), prompt(150, seed=13)], []
    cold = [ask(service, ids, new=10, cache_salt="quiet") for ids in prompts]

    def idle_steps(core, now):
        rounds.append(now)
        poison(core, np.nan)
        core._state = core._programs.warm_up(core._state)
        core._state, sample = core._programs.decode(core._state, np.zeros((4, 3), np.int32))
        assert (np.asarray(sample.token_ids) >= 0).all()

    with before_rounds(service.engine, idle_steps):
        answers = ask_all(service, prompts, new=10) + ask_all(service, prompts, new=10)
    assert len(rounds) > 20 and [answer.cached for answer in answers] == [0, 0, 256, 128]
    for ids, answer, expected in zip(prompts * 2, answers, cold * 2):
        check_same(service, ids, answer, expected)
