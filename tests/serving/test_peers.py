"""The peers' policies on traces small enough to follow by hand.

A prompt is written as a word: one letter a block, and one token more, so that every block may be hit. A block costs 1
and a state 10 units.
"""

import functools
import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers import POLICIES
from benchmarks.peers.marconi import MarconiCache
from benchmarks.peers.radix_tree import RadixTree
from benchmarks.peers.sglang import SglangCache
from benchmarks.peers.vllm import VllmCache
from serving.prefix_cache import CostModel
from serving.simulator.trace import BLOCK_TOKENS

UNIT = BLOCK_TOKENS
COST = CostModel(flops_per_token=1.0, attention_flops=0.0, snapshot_bytes=10 * UNIT, token_bytes=1)
PLENTY = 4000


def blocks(word: str) -> tuple[str, ...]:
    """The id of a block is the prefix that it ends."""
    return tuple(itertools.accumulate(word))


class Driver:
    """Sends words to a cache, a second apart, and counts in blocks and units."""

    def __init__(self, make, units: int, **parameters):
        self.cache = make(units * UNIT, COST, **parameters)
        self.now = 0.0

    def __call__(self, word: str, extra: int = 1) -> int:
        self.now += 1
        hit = self.cache.access(blocks(word), len(word) * BLOCK_TOKENS + extra, self.now)
        assert hit % BLOCK_TOKENS == 0
        return hit // BLOCK_TOKENS

    @property
    def units(self) -> float:
        return self.cache.bytes_used / UNIT


EVERY = [(policy, parameters) for policy in POLICIES for parameters in policy.grid]


@pytest.mark.parametrize("policy, parameters", EVERY, ids=lambda value: getattr(value, "name", str(value)))
def test_every_setting_of_every_peer_hits_repeats_only(policy, parameters):
    send = Driver(policy.make, PLENTY, **parameters)
    # A length that every interval divides.
    long = "".join(map(chr, range(0x100, 0x100 + 192)))
    assert send(long + "a") == 0
    assert send(long + "b") == (192 if parameters.get("interval") else 0)
    assert send(long + "c") == 192
    assert send("x" + long) == 0
    assert send("a") == 0


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_the_last_token_is_always_computed(policy):
    send = Driver(policy.make, PLENTY, **policy.grid[0])
    assert [send("ab", extra=0), send("ab", extra=0)] == [0, 1]
    assert [send("x", extra=0), send("x", extra=0), send("", extra=9)] == [0, 0, 0]


@pytest.mark.parametrize("make, parameters", [(VllmCache, {}), (SglangCache, {"state_share": 0.5}),
                                              (MarconiCache, {"alpha": 1.0})], ids=["vllm", "sglang", "marconi"])
def test_the_third_prompt_hits_the_junction(make, parameters):
    send = Driver(make, PLENTY, **parameters)
    assert [send("abcd"), send("abxy"), send("abz"), send("abcde"), send("abxyz")] == [0, 0, 2, 4, 4]


class TestVllm:
    def test_interval_keeps_no_prompt_ends(self):
        send = Driver(VllmCache, PLENTY, interval=2 * BLOCK_TOKENS)
        assert [send("abcde"), send("abcde"), send("abcx"), send("ax"), send("axy")] == [0, 4, 2, 0, 2]
        # Nine blocks, states at ab, abcd, abcx and ax.
        assert send.units == 5 + 1 + 2 + 4 * 10

    def test_least_recently_used_goes_first_and_a_hit_refreshes(self):
        send = Driver(VllmCache, 22)
        assert [send("a"), send("b"), send("a"), send("c")] == [0, 0, 1, 0]
        assert send.units == 22
        assert [send("a"), send("b")] == [1, 0]

    def test_a_state_without_its_kv_is_no_hit(self):
        # Freed in the order KV, state: one unit too many takes the KV of a, and leaves its state.
        send = Driver(VllmCache, 32)
        assert [send("a"), send("b"), send("c")] == [0, 0, 0]
        assert send.units == 32 and send.cache.evictions == 0
        assert send("a") == 0

    def test_tails_go_first(self):
        # abcd is 14 units, x 11: of 24, the KV of d is the one too many. Its state stands alone, so nothing hits ...
        send = Driver(VllmCache, 24)
        assert [send("abcd"), send("x"), send("abcd")] == [0, 0, 0]
        # ... but the KV of abc was evidence of a junction there.
        assert send("abcq") == 3


class TestSglang:
    def test_an_inner_state_becomes_a_tombstone_and_a_hit_needs_a_state(self):
        send = Driver(SglangCache, 100, state_share=0.2)
        assert [send("ab"), send("abcd"), send("x")] == [0, 2, 0]
        # Two states fit: that of ab went, its KV is still there and abcd can still be hit.
        assert send.cache.evictions == 1 and send.units == 5 + 20
        assert [send("abcd"), send("ab")] == [4, 0]

    def test_tombstones_without_children_go_with_the_last_child(self):
        send = Driver(SglangCache, 100, state_share=0.2)
        for word in ("ab", "abcd", "x", "y"):
            send(word)
        assert send.units == 2 + 20
        assert send("abz") == 0

    def test_the_kv_pool_evicts_the_oldest_leaf_with_its_state(self):
        send = Driver(SglangCache, 100, state_share=0.9)
        assert [send("abcdef"), send("uvwxyz")] == [0, 0]
        assert send.units == 6 + 10
        assert [send("uvwxyz"), send("abcdef")] == [6, 0]

    def test_a_hit_makes_its_state_recent(self):
        send = Driver(SglangCache, 100, state_share=0.3)
        assert [send("a"), send("b"), send("ax"), send("c"), send("ay")] == [0, 0, 1, 0, 1]

    def test_only_the_state_that_was_used_becomes_recent(self):
        send = Driver(SglangCache, 100, state_share=0.3)
        assert [send("a"), send("ab"), send("x"), send("abc")] == [0, 1, 0, 2]
        assert [send("x"), send("aq")] == [1, 0]

    def test_pools_do_not_lend_to_each_other(self):
        send = Driver(SglangCache, 100, state_share=0.3)
        for word in "abcdefgh":
            send(word)
        assert send.units == 3 + 30


class TestMarconi:
    def test_without_alpha_the_oldest_goes_first(self):
        send = Driver(MarconiCache, 22, alpha=0.0)
        assert [send("a"), send("b"), send("a"), send("c")] == [0, 0, 1, 0]
        assert [send("a"), send("b")] == [1, 0]

    def test_a_hit_refreshes_its_node(self):
        send = Driver(MarconiCache, 33, alpha=0.0)
        assert [send("a"), send("b"), send("ax"), send("c"), send("ay")] == [0, 0, 1, 0, 1]

    @pytest.mark.parametrize("alpha, survivor", [(0.5, "x"), (2.0, "abcdefgh")])
    def test_alpha_weighs_flops_per_byte_against_recency(self, alpha, survivor):
        # Two candidates, so each score is 0 or 1: abcdefgh is older, x saves less per byte.
        send = Driver(MarconiCache, 34, alpha=alpha)
        assert [send("abcdefgh"), send("x"), send("new")] == [0, 0, 0]
        assert send(survivor) == len(survivor)

    def test_flops_and_bytes_count_from_the_parent(self):
        # g saves one block beyond abcdef, for 11 units; xy two for 12.
        send = Driver(MarconiCache, 39, alpha=9.0)
        assert [send("abcdef"), send("abcdefg"), send("xy"), send("n"), send("xyz")] == [0, 6, 0, 0, 2]

    def test_an_inner_node_loses_its_state_and_its_child_gets_the_kv(self):
        send = Driver(MarconiCache, 34, alpha=0.0)
        assert [send("ab"), send("abcd"), send("x")] == [0, 2, 0]
        assert send.units == 4 + 10 + 11
        assert [send("abcd"), send("abq")] == [4, 0]

    def test_a_branch_stays_while_it_has_two_children(self):
        # a, ab and ac are one block and a state each: 33. The oldest is a, but only leaves may go for x.
        send = Driver(MarconiCache, 33, alpha=0.0)
        assert [send("a"), send("ab"), send("ac"), send("x")] == [0, 1, 1, 0]
        assert send("ad") == 1

    def test_the_prompt_at_hand_is_evicted_only_if_nothing_else_is_left(self):
        send = Driver(MarconiCache, 12, alpha=9.0)
        assert [send("ab"), send("x"), send("x")] == [0, 0, 1]
        # The states of x and xy do not fit together, and save as much per byte: the one touched first goes.
        assert [send("xy"), send("xyz")] == [1, 2]

    def test_equal_scores_evict_the_oldest(self):
        send = Driver(MarconiCache, 22, alpha=1.0)
        send.now = 7.0
        hits = []
        for word in ("a", "b", "a", "c", "a"):
            hits.append(send(word))
            send.now = 7.0
        assert hits == [0, 0, 1, 0, 1]


class TestRadixTree:
    def test_insert_splits_where_prefixes_part(self):
        tree = RadixTree()
        leaf, made = tree.insert("abcd")
        assert (leaf.depth, made) == (4, [leaf])
        end, made = tree.insert("abx")
        branch = made[0]
        assert (branch.depth, branch.edge, end.edge, made) == (2, ("a", "b"), ("x",), [branch, end])
        assert leaf.parent is branch and leaf.edge == ("c", "d")
        assert tree.match("abcq") == ([branch], 3)
        assert tree.insert("ab") == (branch, [])
        assert tree.insert("") == (tree.root, [])

    def test_removal_and_merging(self):
        tree = RadixTree()
        leaf, _ = tree.insert("abcd")
        end, (branch, _) = tree.insert("abx")
        tree.remove_leaf(end)
        assert tree.match("abx") == ([branch], 2)
        assert tree.merge_into_child(branch) is leaf
        assert leaf.edge == tuple("abcd") and tree.match("abcd") == ([leaf], 4)


def audit(cache) -> None:
    """Counts a tree cache again from its nodes."""
    nodes, stack = [], [cache.tree.root]
    while stack:
        node = stack.pop()
        for first, child in node.children.items():
            assert child.parent is node and child.edge[0] == first and child.depth == node.depth + len(child.edge)
            nodes.append(child)
            stack.append(child)
    if isinstance(cache, SglangCache):
        states = len(cache.state_lru)
        assert set(cache.kv_lru) == set(nodes) and set(cache.state_lru) <= set(nodes)
        assert all(node.children or node in cache.state_lru for node in nodes), "a leaf without a state"
    else:
        states = len(nodes)
        assert set(cache.nodes.rows) == set(nodes)
    assert cache.bytes_used == UNIT * (10 * states + sum(len(node.edge) for node in nodes))


@given(
    words=st.lists(st.text("ab", min_size=0, max_size=6), max_size=40),
    make=st.sampled_from([
        functools.partial(SglangCache, state_share=0.5), functools.partial(SglangCache, state_share=0.9),
        functools.partial(MarconiCache, alpha=0.0), functools.partial(MarconiCache, alpha=0.7),
    ]),
    units=st.integers(11, 90),
)
@settings(max_examples=300, deadline=None)
def test_trees_keep_count_and_stay_within_the_budget(words, make, units):
    send = Driver(make, units)
    seen = []
    for word in words:
        hit = send(word)
        assert hit <= max((len(os.path.commonprefix([word, other])) for other in seen), default=0)
        assert send.units <= units
        audit(send.cache)
        seen.append(word)
