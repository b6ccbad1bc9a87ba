"""What went wrong in other engines: each public bug that a cache without an engine can show, with the hit it must give.

Names refer to the issue of the project in question (vllm-project/vllm, sgl-project/sglang, ...).
"""

import gc
import weakref

import pytest

from serving.prefix_cache import ChainHasher, Phase
from tests.serving.small_cache import COST, UNIT, Server, text


def floor(num_tokens: int) -> int:
    """The deepest boundary before the last token."""
    return (num_tokens - 1) // UNIT * UNIT


def test_vllm_56525_aborted_prefill_leaves_what_was_committed_and_no_more():
    server = Server(interval=2048)
    prompt = text(1, 8000)
    admission = server.admit(prompt)
    assert server.hit(prompt) == 0, "nothing is published by being scheduled"
    server.publish(admission, 2048)
    server.release(admission)
    assert server.hit(prompt) == 2048
    assert server.run(prompt) == 2048
    assert server.hit(prompt) == floor(8000)


def test_vllm_56524_a_slot_without_a_hit_must_be_zeroed():
    server = Server(num_slots=2)
    prompt = text(1, 1000)
    server.run(prompt)
    assert server.admit(text(2, 1000)).restore is None, "the one slot was used before"


def test_vllm_57908_a_snapshot_never_changes_under_those_who_extend_it():
    server = Server()
    prompt = text(1, 1024 + 1)
    server.run(prompt)
    handle = next(iter(server.cache.device.residents.values())).snapshot
    for seed in range(100):
        admission = server.admit(prompt + text(seed, 300))
        assert admission.hit_tokens == 1024 and admission.restore is handle
        shared = set(admission.pages[:8])
        assert not shared & admission.owned, "a shared page would be written"
        for stop in admission.stops:
            server.publish(admission, stop)
        server.release(admission)
    assert server.cache.device.residents[server.keys(prompt)[7]].snapshot is handle


def test_vllm_29387_sixteen_twins_in_one_step():
    server = Server()
    prompt = text(1, 1500)
    twins = [server.admit(prompt) for _ in range(16)]
    assert [twin.hit_tokens for twin in twins] == [0] * 16, "no state is promised that is not there"
    assert server.cache.lookup(server.keys(prompt), 1500).pending_tokens == floor(1500), "waiting would pay"
    pages = [page for twin in twins for page in twin.pages]
    assert len(set(pages)) == len(pages)
    first = server.publish(twins[0], floor(1500))
    handle = server.admit(prompt + [1])
    assert first and handle is None, "all slots are taken"
    assert all(server.publish(twin, floor(1500)) for twin in twins[1:])
    for twin in twins:
        server.release(twin)
    assert server.cache.stats.published == 1 and server.cache.stats.duplicates == 15
    assert server.admit(prompt).restore == "state 0 at 1408", "the first one stayed"


@pytest.mark.parametrize("length", [1535, 1536, 1537, 3071, 3072, 3073])
@pytest.mark.parametrize("more", [1, 2])
def test_vllm_50235_lengths_around_a_multiple_of_the_block(length, more):
    server = Server()
    prompt = text(1, length)
    server.run(prompt)
    assert server.hit(prompt + text(2, more)) == floor(length) >= length - UNIT


def test_vllm_45238_shared_1500_unique_700_third_request_hits():
    server = Server()
    shared = text(0, 1500)
    hits = [server.run(shared + text(user, 700)) for user in (1, 2, 3, 4)]
    assert hits == [0, 0, floor(1500), floor(1500)]


@pytest.mark.parametrize("shared", [UNIT + 1, 883, 1535])
def test_vllm_40696_53749_prompts_shorter_than_a_block(shared):
    server = Server()
    prompt = text(1, shared)
    assert server.run(prompt) == 0
    assert server.run(prompt + text(2, 50)) == floor(shared) > 0


def test_vllm_53749_the_shortest_prompt_that_can_hit():
    server = Server()
    server.run(text(1, 5000))
    assert server.hit(text(1, UNIT)) == 0 and server.run(text(1, UNIT + 1)) == 0
    assert server.run(text(1, UNIT + 1)) == UNIT


def test_vllm_52897_three_repeats_with_a_chunk_longer_than_the_prompt():
    server = Server()
    prompt = text(1, 1900)
    assert [server.run(prompt) for _ in range(3)] == [0, floor(1900), floor(1900)]
    assert server.cache.stats.hit_tokens == 2 * floor(1900) and server.cache.stats.prompt_tokens == 3 * 1900


def test_vllm_53084_a_null_state_is_refused():
    server = Server()
    prompt = text(1, 1000)
    admission = server.admit(prompt)
    with pytest.raises(ValueError, match="expected a handle of the state"):
        server.cache.publish(admission, floor(1000), None, now=0)
    server.cache.check()
    assert server.hit(prompt) == 0
    assert server.publish(admission, floor(1000)) and server.hit(prompt) == floor(1000)


@pytest.mark.parametrize("changed", [{"model": "x"}, {"weights": "2"}, {"state_layout": "bf16"}, {"unit": 64}])
def test_lmc_4247_another_layout_shares_nothing(changed):
    base = {"model": "m", "weights": "1", "state_layout": "f32", "unit": UNIT}
    prompt = text(1, 1000)
    assert not set(ChainHasher(**base).keys(prompt)) & set(ChainHasher(**base | changed).keys(prompt))


def test_vllm_backport_77_resume_at_every_boundary():
    server = Server(interval=UNIT)
    prompt = text(1, 2000)
    server.run(prompt)
    for length in range(UNIT + 1, 2001):
        assert server.hit(prompt[:length] + [7]) == floor(length + 1)


def test_asc_16315_preemption_makes_progress_with_a_tiny_pool():
    server = Server(num_pages=20, num_slots=3, interval=UNIT)
    first, second = text(1, 15 * UNIT), text(2, 15 * UNIT)
    running = server.admit(first)
    server.publish(running, UNIT)
    assert server.admit(second) is None, "there is no room for both"
    server.release(running)
    other = server.admit(second)
    assert other.hit_tokens == 0
    server.release(other)
    steps, hits = 0, []
    while server.hit(first) < floor(len(first)):
        again = server.admit(first)
        hits.append(again.hit_tokens)
        server.publish(again, again.stops[0])
        server.release(again)
        steps += 1
    assert steps <= 15 and hits == sorted(hits)


def test_sgl_16067_21404_refusals_take_nothing():
    server = Server(num_slots=2)
    prompt = text(1, 1000)
    server.run(prompt)
    running = server.admit(text(2, 500))
    pages = list(server.cache.device.pool.free)
    for _ in range(1000):
        assert server.admit(prompt + [1]) is None
    assert server.cache.device.pool.free == pages and server.cache.stats.refused_attempts == 1000
    server.cache.check()
    server.release(running)
    assert server.run(prompt + [1]) == floor(1000)


def test_sgl_19169_trt_14524_all_slots_with_the_longest_requests_fit_what_sizing_says():
    requests, length = 8, 10 * UNIT
    server = Server(num_slots=requests + 1, num_pages=requests * 10 + 1, device_bytes=10 * COST.snapshot_bytes)
    for _ in range(3):
        admitted = [server.admit(text(seed, length)) for seed in range(requests)]
        for admission in admitted:
            for stop in admission.stops:
                server.publish(admission, stop)
        server.cache.check()
        for admission in admitted:
            server.release(admission)


def test_sgl_37834_37837_the_prompt_end_is_reusable_not_prompt_and_output():
    server = Server()
    prompt = text(1, 600)
    server.run(prompt, max_new_tokens=500)
    assert server.run(prompt + text(2, 100)) == floor(600)


def test_sgljax_1456_prompts_over_many_intervals_hit():
    server = Server(interval=512)
    shared = text(0, 512 * 7 + 40)
    server.run(shared + text(1, 300))
    for user in (2, 3):
        assert server.run(shared + text(user, 300)) >= 512 * 7


def test_trt_13179_more_requests_than_slots_wait():
    server = Server(num_slots=4)
    admitted = [server.admit(text(seed, 300)) for seed in range(10)]
    assert [admission is not None for admission in admitted] == [True] * 3 + [False] * 7
    server.release(admitted[0])
    assert server.admit(text(9, 300)) is not None


def test_trt_15653_16598_states_are_taken_at_required_stops_only():
    server = Server(interval=1024)
    admission = server.admit(text(1, 3000), declared=[700, 2950])
    assert admission.stops == (640, 1024, 2048, 2944)
    for wrong in (0, 1, 512, 700, 1023, 3000):
        with pytest.raises(ValueError, match="expected one of the stops"):
            server.publish(admission, wrong)
    server.cache.check()


def test_llama_20428_21831_each_turn_of_a_chat_computes_its_own_tokens():
    server, chat = Server(), text(0, 900)
    server.run(chat)
    for turn in range(1, 11):
        new = text(turn, 150 + 37 * turn)
        before, chat = len(chat), chat + new
        assert len(chat) - server.run(chat) <= len(new) + UNIT
        assert before - server.cache.config.unit <= server.cache.stats.hit_tokens


def test_atom_2175_flashml_287_osaurus_1201_an_incomplete_restore_is_computed_anew():
    server = Server(host_bytes=20_000_000, num_pages=20)
    prompt = text(1, 1000)
    server.run(prompt)
    server.cache.complete(server.cache.store(now=server.now), "host copy", now=server.now)
    server.run(text(2, 18 * UNIT))
    assert server.cache.lookup(server.keys(prompt), 1000).tier == "host"

    admission = server.admit(prompt)
    assert admission.hit_tokens == floor(1000) and admission.phase is Phase.LOADING
    server.cache.fail(server.cache.loading(admission), now=server.now)
    with pytest.raises(ValueError, match="expected it to be running"):
        server.publish(admission, floor(1000))
    server.release(admission)
    assert server.run(prompt) == 0, "the broken copy is not offered again"
    assert server.hit(prompt) == floor(1000)


def test_freetoken_287_the_donor_goes_on_without_touching_what_it_published():
    server = Server()
    prompt = text(1, 1000)
    donor = server.admit(prompt, max_new_tokens=1000)
    server.publish(donor, floor(1000))
    reader = server.admit(prompt + [5])
    assert reader.hit_tokens == floor(1000) and reader.slot != donor.slot
    shared = set(donor.pages) & set(reader.pages)
    assert shared == set(donor.pages[: floor(1000) // UNIT])
    assert not shared & (donor.owned | reader.owned), "both write to their own pages only"


@pytest.mark.parametrize("arrives", [True, False])
def test_vllm_46283_asc_16662_abort_during_a_restore_gives_everything_back(arrives):
    server = Server(host_bytes=20_000_000, num_pages=20)
    prompt = text(1, 1000)
    server.run(prompt)
    server.cache.complete(server.cache.store(now=0), "host copy", now=0)
    server.run(text(2, 18 * UNIT))
    admission = server.admit(prompt)
    transfer = server.cache.loading(admission)
    server.release(admission)
    free = set(server.cache.device.pool.free)
    assert not free & set(transfer.target_pages), "the copy still writes there"
    (server.cache.complete(transfer, "late", now=0) if arrives else server.cache.fail(transfer, now=0))
    server.cache.check()
    assert set(transfer.target_pages) <= set(server.cache.device.pool.free)
    assert not server.cache.device.pages.num_locked and not server.cache.host.pages.num_locked


def test_lmc_4068_failed_stores_leave_no_locks():
    server = Server(host_bytes=50_000_000)
    for seed in range(100):
        server.run(text(seed, 700))
        transfer = server.cache.store(now=server.now)
        if seed % 7 == 0:
            server.cache.fail(transfer, now=server.now)
        else:
            server.cache.complete(transfer, "copy", now=server.now)
        server.cache.check()
    assert server.cache.stats.failed_transfers == 15 and server.cache.stats.stored == 85
    assert not server.cache.host.reserved_bytes
    assert not server.cache.host.pages.num_locked and not server.cache.device.pages.num_locked


def test_asc_16451_a_warm_run_has_no_stop_that_a_cold_one_has_not_but_the_junction():
    warm, shared = Server(interval=1024), text(0, 2500)
    warm.run(shared + text(1, 3000))
    for user in (2, 3, 4):
        prompt = shared + text(user, 3000)
        cold = Server(interval=1024).admit(prompt).stops
        admission = warm.admit(prompt)
        assert set(admission.stops) - set(cold) <= {floor(2500)}
        assert set(cold) - set(admission.stops) == {stop for stop in cold if stop <= admission.hit_tokens}
        for stop in admission.stops:
            warm.publish(admission, stop)
        warm.release(admission)


@pytest.mark.parametrize("length", [2344, 3644, 7132, 14144])
def test_club_1262_the_unit_not_the_block_decides_what_a_repeat_hits(length):
    server = Server(unit=UNIT)
    prompt = text(1, length)
    server.run(prompt)
    assert server.run(prompt) == floor(length) >= length - UNIT


def test_vmlx_219_other_users_hit_the_same_system_prompt():
    system = text(0, 1300)
    undeclared, declared = Server(), Server()
    assert [undeclared.run(system + text(user, 400)) for user in (1, 2, 3)] == [0, 0, floor(1300)]
    hits = [declared.run(system + text(user, 400), declared=[len(system)]) for user in (1, 2, 3)]
    assert hits == [0, floor(1301), floor(1301)]


def test_vllm_45845_long_chats_do_not_collapse_the_cache():
    """Superseded states go first: thirty chats with room for forty snapshots keep hitting turn after turn."""
    server = Server(device_bytes=40 * (COST.snapshot_bytes + 60 * UNIT * COST.token_bytes))
    chats = [text(seed, 800) for seed in range(30)]
    for turn in range(8):
        for seed, chat in enumerate(chats):
            hit = server.run(chat)
            assert hit == (floor(len(chats[seed]) - 200) if turn else 0)
            chats[seed] = chat + text(1000 + 31 * turn + seed, 200)


def test_osaurus_1930_a_prompt_end_inside_the_template_is_never_a_prefix_of_the_next_turn():
    header, chat, longer = text(99, 3), text(1, 1278), text(1, 1278) + text(2, 300)
    assert floor(len(chat + header)) > len(chat), "the last unit ends within the header"
    server = Server()
    server.run(chat + header, declared=[len(chat)])
    assert server.run(longer + header, declared=[len(longer)]) == 1152, "declared, so found at once"
    server = Server()
    server.run(chat + header)
    assert server.run(longer + header) == 0
    assert server.run(chat + text(3, 300) + header) == 1152, "a junction on second sight"


@pytest.mark.parametrize("moment", ["restored", "published", "released"])
def test_nothing_keeps_an_evicted_snapshot_in_memory(moment):
    class State:
        """Stands for gigabytes."""

    server, prompt, state = Server(max_snapshots=1), text(1, 1000), State()
    admission, alive = server.admit(prompt), weakref.ref(state)
    server.cache.publish(admission, floor(1000), state, now=0)
    del state
    server.release(admission)
    reader = server.admit(prompt + text(2, 500))
    assert reader.restore is alive() is not None
    if moment == "restored":
        server.cache.restored(reader, now=0)
    elif moment == "published":
        server.publish(reader, reader.stops[-1])
    else:
        server.release(reader)
    server.run(text(3, 1000))
    gc.collect()
    assert alive() is None
