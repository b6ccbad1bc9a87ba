"""Who is evicted: the learned index against brute force, its order before it knows anything, and what it learns."""

import itertools

import numpy as np
import pytest

from serving.prefix_cache import LearnedReuse, LeastRecentlyUsed, PrefixCache
from serving.prefix_cache import reuse as reuse_module
from serving.prefix_cache.boundary import Boundary, Kind
from serving.prefix_cache.reuse import gittins_index
from tests.serving.small_cache import COST, UNIT, Server, make_cache, text


def index_by_brute_force(hazard, widths):
    """Integrates survival over fine steps, and tries every horizon."""
    best = np.zeros(len(hazard))
    for start in range(len(hazard)):
        alive, used, kept, ratios = 1.0, 0.0, 0.0, []
        for bin_ in range(start, len(hazard)):
            step = widths[bin_] / 4000
            for _ in range(4000):
                now = alive * np.exp(-hazard[bin_] * step)
                used, kept, alive = used + alive - now, kept + (alive + now) / 2 * step, now
            ratios.append(used / kept)
        best[start] = max(ratios)
    return best


def test_gittins_index_is_the_best_ratio_over_all_horizons():
    rng = np.random.default_rng(0)
    widths = np.array([4.0, 2.0, 3.0, 10.0, 50.0])
    hazards = np.exp(rng.uniform(-8, 0, (6, 5)))
    expected = [index_by_brute_force(hazard, widths) for hazard in hazards]
    np.testing.assert_allclose(gittins_index(hazards, widths), expected, rtol=1e-5)


def test_a_constant_hazard_is_its_own_index():
    widths = np.array([1.0, 5.0, 100.0])
    np.testing.assert_allclose(gittins_index(np.full((1, 3), 0.02), widths), 0.02)


def boundary(kind=Kind.PROMPT_END, **fields):
    return Boundary(b"key", 1024, kind, **fields)


def rate(policy, boundary, age):
    return policy.rates(np.array([policy.classify(boundary)]), np.array([float(age)]))[0]


@pytest.mark.parametrize("age", [0, 10, 100, 1000])
def test_before_it_knows_anything(age):
    policy = LearnedReuse()
    order = [
        boundary(turn=1, forks=1), boundary(Kind.INTERVAL), boundary(turn=1), boundary(Kind.JUNCTION),
    ]
    rates = [rate(policy, one, age) for one in order]
    assert rates == sorted(rates) and len(set(rates)) == 4, "superseded, interval, prompt end, junction"
    assert rate(policy, boundary(turn=1), age) > rate(policy, boundary(turn=1), age * 3 + 10), "recent ones first"


@pytest.mark.parametrize("one,other", [
    (boundary(turn=1), boundary(turn=2)),
    (boundary(turn=1), boundary(turn=1, forks=1)),
    (boundary(turn=1, forks=1), boundary(turn=1, forks=2)),
    (boundary(turn=1, new_tokens=600), boundary(turn=1, new_tokens=6000)),
    (boundary(Kind.DECLARED), boundary(turn=1)),
    (boundary(Kind.DECLARED), boundary(Kind.DECLARED, forks=1)),
    (boundary(Kind.INTERVAL), boundary(Kind.JUNCTION)),
])
def test_different_expectations_are_different_classes(one, other):
    assert LearnedReuse().classify(one) != LearnedReuse().classify(other)


def test_every_boundary_has_a_class():
    policy, seen = LearnedReuse(), set()
    for kind, turn, new, forks in itertools.product(Kind, range(9), (0, 1, 700, 10**5, 10**8), range(9)):
        seen.add(policy.classify(boundary(kind, turn=turn, new_tokens=new, forks=forks)))
    count = reuse_module._NUM_CLASSES
    assert seen <= set(range(-8, count)) and max(seen) == count - 1
    assert {policy.classify(boundary(turn=turn, new_tokens=10**9)) for turn in range(1, 9)} <= set(range(count))


def test_seconds_are_counted_where_they_were_spent():
    """Waits that go on count like those that have just ended; against a sum over small steps."""
    rng = np.random.default_rng(1)
    classes, ages = rng.integers(0, 5, 40), np.exp(rng.uniform(-2, 9, 40))
    expected = np.zeros((reuse_module._NUM_CLASSES, reuse_module._NUM_BINS))
    for class_, age in zip(classes, ages):
        middles = (np.arange(20000) + 0.5) * age / 20000
        bins = np.searchsorted(reuse_module._EDGES, middles, side="right") - 1
        np.add.at(expected[class_], bins, age / 20000)
    np.testing.assert_allclose(reuse_module._seconds_waited(classes, ages), expected, atol=1.0, rtol=1e-3)
    policy = LearnedReuse()
    for class_, age in zip(classes, ages):
        policy.observe(class_, age, used=False)
    np.testing.assert_allclose(policy._seconds, reuse_module._seconds_waited(classes, ages), rtol=1e-9)


def test_it_learns_when_users_come_back():
    """Half come back after two minutes, the others never: worth most shortly before, and nothing afterwards."""
    policy, one = LearnedReuse(), boundary(turn=1, new_tokens=5000)
    class_ = policy.classify(one)
    for number in range(200):
        policy.observe(class_, 120.0 if number % 2 else 3000.0, used=bool(number % 2))
    policy.learn(np.zeros(0, int), np.zeros(0), 0.0)
    rates = {age: rate(policy, one, age) for age in (0, 60, 110, 200, 600)}
    assert rates[110] > rates[60] > rates[0] > 10 * rates[200]
    assert rates[0] == pytest.approx(0.5 / 120, rel=0.3), "P(comes back) over the time it takes"


def test_a_lone_observation_does_not_rule():
    policy, other = LearnedReuse(), boundary(turn=5, new_tokens=600)
    for _ in range(300):
        policy.observe(policy.classify(boundary(turn=1, new_tokens=600)), 500.0, used=False)
    policy.learn(np.zeros(0, int), np.zeros(0), 0.0)
    pooled = rate(policy, other, 0)
    policy.observe(policy.classify(other), 3.0, used=True)
    policy.learn(np.zeros(0, int), np.zeros(0), 0.0)
    assert pooled < rate(policy, other, 0) < 0.5


def test_old_observations_fade():
    policy, one = LearnedReuse(), boundary(turn=1)
    none = np.zeros(0, int), np.zeros(0)
    policy.learn(*none, 0.0)
    for _ in range(100):
        policy.observe(policy.classify(one), 50.0, used=True)
    policy.learn(*none, 0.0)
    fresh = rate(policy, one, 40)
    policy.learn(*none, 100 * 3600.0)
    assert rate(policy, one, 40) < fresh / 5


def chats(server, seconds_between_turns, strangers):
    """Ten chats of six turns, and strangers between the turns who never come back; returns hit tokens of the chats."""
    conversations, hits, seed = [text(number, 1000) for number in range(10)], 0, itertools.count(100)
    for _ in range(6):
        for number, chat in enumerate(conversations):
            hits += server.run(chat)
            conversations[number] = chat + text(next(seed), 200)
            for _ in range(strangers):
                server.run(text(next(seed), 4000))
        server.now += seconds_between_turns
    return hits


def test_chats_survive_strangers_better_than_with_recency():
    sizes = {"device_bytes": 14 * (COST.snapshot_bytes + 40 * UNIT * COST.token_bytes)}
    learned = chats(Server(PrefixCache(make_cache(**sizes).config)), 30, 3)
    recent = chats(Server(PrefixCache(make_cache(**sizes).config, LeastRecentlyUsed())), 30, 3)
    assert learned > 2 * recent + 10_000


def test_what_was_evicted_still_teaches():
    """Not one of these is found again, and yet it is learned that they all come back after a minute."""
    server = Server(max_snapshots=1)
    for _ in range(2):
        for number in range(60):
            assert server.run(text(number, 500)) == 0
    server.cache.boundaries.learn(server.now)
    policy = server.cache.policy
    class_ = policy.classify(boundary(turn=1, new_tokens=500))
    rates = policy.rates(np.array([class_, class_]), np.array([55.0, 75.0]))
    assert policy._uses[class_].sum() >= 55 and rates[0] > 3 * rates[1]


def residents(server):
    return [r.boundary for r in server.cache.device.residents.values()]


def test_a_superseded_state_goes_first_though_it_was_used_last():
    one_each = COST.snapshot_bytes + 9 * UNIT * COST.token_bytes
    server = Server(device_bytes=3 * one_each)
    chat = text(1, 600)
    server.run(text(2, 600))
    server.run(chat)
    server.run(chat + text(3, 300))
    assert len(residents(server)) == 3
    server.run(text(4, 700))
    assert not any(one.superseded for one in residents(server))
    assert server.hit(text(2, 600)) and server.hit(chat + text(3, 300)) and server.hit(text(4, 700))


def test_turns_are_counted():
    server, chat, ends = Server(), text(0, 300), []
    for turn in range(4):
        server.run(chat)
        ends.append(server.cache.boundaries.known[server.keys(chat)[(len(chat) - 1) // UNIT - 1]])
        chat = chat + text(turn + 1, 300)
    assert [end.turn for end in ends] == [1, 2, 3, 4]
    assert [end.superseded for end in ends] == [True, True, True, False]
    server.run(chat[:300] + text(9, 300))
    assert ends[0].forks == 2 and not ends[0].superseded, "it is a fork now"


def test_the_value_of_what_lies_below_a_fork_is_measured_from_the_fork():
    server, shared = Server(), text(0, 10 * UNIT)
    for user in range(1, 4):
        server.run(shared + text(user, 3 * UNIT))
    device = server.cache.device
    by_kind = {r.boundary.kind: r for r in device.residents.values()}
    junction, end = by_kind[Kind.JUNCTION], by_kind[Kind.PROMPT_END]
    assert device.saved[junction.row] == COST.flops(10 * UNIT)
    assert device.saved[end.row] == COST.flops(12 * UNIT) - COST.flops(10 * UNIT)
    assert device.bytes[junction.row] == COST.snapshot_bytes
    assert device.bytes[end.row] == COST.snapshot_bytes + 2 * UNIT * COST.token_bytes


def test_another_policy_can_be_tried():
    class Oldest(LeastRecentlyUsed):
        def rates(self, classes, ages):
            return 1.0 + ages

    size = COST.snapshot_bytes + 8 * UNIT * COST.token_bytes
    server = Server(PrefixCache(make_cache(device_bytes=3 * size).config, Oldest()))
    for seed in range(5):
        server.run(text(seed, 1000))
    assert [bool(server.hit(text(seed, 1000))) for seed in range(5)] == [True, True, True, False, False]
