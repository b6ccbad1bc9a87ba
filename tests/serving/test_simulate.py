"""The simulator: traces, replay, bounds, fitting, and the command."""

import gzip
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys

import pytest

from k3jax.errors import UserError
from k3jax.presets import preset
from serving.prefix_cache import CostModel
from serving.simulator.bounds import infinite_cache, offline_greedy
from serving.simulator.command import main
from serving.simulator.experiment import compare, fit
from serving.simulator.ours import OURS
from serving.simulator.policies import policies
from serving.simulator.replay import Policy, replay
from serving.simulator.table import table
from serving.simulator.trace import BLOCK_TOKENS, Request, read_trace

ROOT = pathlib.Path(__file__).parents[2]
UNIT = BLOCK_TOKENS
COST = CostModel(flops_per_token=1.0, attention_flops=0.0, snapshot_bytes=10 * UNIT, token_bytes=1)
"""A block costs 1 unit, a snapshot 10."""


def prompts(*words: str, seconds=range(10**6)) -> list[Request]:
    """A letter is a block; one token more, so that every block may be hit. A second apart unless told otherwise."""
    return [
        Request(float(now), len(word) * BLOCK_TOKENS + 1, (*itertools.accumulate(word), f"{word}|{now}"))
        for word, now in zip(words, seconds)
    ]


def in_blocks(hits) -> list[int]:
    return [int(hit) // BLOCK_TOKENS for hit in hits]


def cells(markdown: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in markdown.splitlines() if row.startswith("|")]


def line(**changes) -> str:
    fields = {"timestamp": 3000, "input_length": 1000, "output_length": 7, "hash_ids": [4, 5], **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not None})


class TestTrace:
    def test_reads_plain_and_compressed_files(self, tmp_path):
        text = line() + "\n" + line(timestamp=3000.5, input_length=1025, hash_ids=[4, 6, 7]) + "\n"
        (tmp_path / "a.jsonl").write_text(text)
        with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
            file.write(text)
        expected = [Request(3.0, 1000, (4, 5)), Request(3.0005, 1025, (4, 6, 7))]
        assert read_trace(tmp_path / "a.jsonl") == read_trace(str(tmp_path / "a.jsonl.gz")) == expected
        assert [request.complete_blocks for request in expected] == [(4,), (4, 6)]

    @pytest.mark.parametrize("wrong, message", [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[1]", "a list, expected an object"),
        (line(timestamp=None), "no timestamp; expected timestamp, input_length, output_length and hash_ids"),
        (line(output_length=None), "no output_length"),
        (line(hash_ids=None), "no hash_ids"),
        (line(timestamp="3000"), "timestamp is '3000', expected a number of at least 0"),
        (line(timestamp=float("nan")), "timestamp is nan"),
        (line(timestamp=-1), "timestamp is -1"),
        (line(timestamp=2999), "timestamp 2999 comes after 3000; expected requests in order of time"),
        (line(input_length=True), "input_length is True, expected a whole number of at least 1"),
        (line(input_length=0, hash_ids=[]), "input_length is 0"),
        (line(input_length=1000.0), "input_length is 1000.0"),
        (line(output_length=-1), "output_length is -1"),
        (line(hash_ids=[4, "5"]), "hash_ids is [4, '5'], expected a list of whole numbers"),
        (line(hash_ids={"4": 5}), "hash_ids is {'4': 5}"),
        (line(input_length=1025), "2 hash_ids for input_length 1025, expected 3: one per 512 tokens"),
        (line(hash_ids=[5, 4]), "block 5 follows the start here and block 4 earlier"),
        (line(hash_ids=[4, 4]), "block 4 follows block 4 here and the start earlier"),
    ])
    def test_a_bad_line_is_named(self, wrong, message, tmp_path):
        path = tmp_path / "trace.jsonl"
        path.write_text(f"{line()}\n{wrong}\n")
        with pytest.raises(UserError) as caught:
            read_trace(path)
        assert str(caught.value).startswith(f"{path}, line 2: {message}") and "\n" not in str(caught.value)

    @pytest.mark.parametrize("name, content, message", [
        ("none.jsonl", None, "cannot read"),
        ("empty.jsonl", b"", "holds no requests"),
        ("plain.jsonl.gz", b"{}", "cannot read"),
        ("cut.jsonl.gz", gzip.compress(line().encode() * 99)[:-20], "cannot read"),
        ("binary.jsonl", b"\xff\xfe", "cannot read"),
    ])
    def test_an_unreadable_file_is_named(self, name, content, message, tmp_path):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message) as caught:
            read_trace(tmp_path / name)
        assert name in str(caught.value) and "\n" not in str(caught.value)


class TestBounds:
    def test_infinite_cache_is_the_longest_prefix_seen_before(self):
        rng = random.Random(1)
        words = ["".join(rng.choices("ab", k=rng.randrange(1, 8))) for _ in range(120)]
        requests = [Request(0.0, len(word) * BLOCK_TOKENS - rng.choice((0, 99)), tuple(itertools.accumulate(word)))
                    for word in words]
        expected = [
            min(request.num_tokens - 1, BLOCK_TOKENS * max(
                (len(os.path.commonprefix([words[index], earlier])) for earlier in words[:index]), default=0))
            for index, request in enumerate(requests)
        ]
        assert infinite_cache(requests).tolist() == expected
        assert max(expected) > 3 * BLOCK_TOKENS

    def test_offline_greedy_gets_everything_when_there_is_room(self):
        requests = prompts("abcd", "xy", "abz", "abcde", "xyz", "abzz", "q")
        assert in_blocks(offline_greedy(requests, 10**9, COST)) == [0, 0, 2, 4, 2, 3, 0]

    def test_offline_greedy_prefers_what_is_used_soon(self):
        # ab costs 12 units and so does xy: with 23 only one can wait, and xy waits for two seconds instead of ten.
        requests = prompts("ab", "xy", "ab", "xy", seconds=(0, 9, 10, 11))
        assert in_blocks(offline_greedy(requests, 23 * UNIT, COST)) == [0, 0, 0, 2]
        assert in_blocks(offline_greedy(requests, 24 * UNIT, COST)) == [0, 0, 2, 2]

    def test_offline_greedy_prefers_what_saves_more(self):
        # Both wait for two seconds; abcdef saves 6 of 16 units, x 1 of 11.
        requests = prompts("x", "abcdef", "x", "abcdef")
        assert in_blocks(offline_greedy(requests, 16 * UNIT, COST)) == [0, 0, 0, 6]

    def test_offline_greedy_prefers_what_is_small(self):
        # Per second abcdef saves 6/5 and x 1 unit; per second and byte, 6/5/16 and 1/11.
        requests = prompts("abcdef", "x", "x", "abcdef", seconds=(0, 2, 3, 5))
        assert in_blocks(offline_greedy(requests, 16 * UNIT, COST)) == [0, 0, 1, 0]

    def test_offline_greedy_counts_the_deepest_prefix(self):
        requests = prompts("abcdef", "ax", "abcdef")
        assert in_blocks(offline_greedy(requests, 10**9, COST)) == [0, 1, 6]

    def test_offline_greedy_falls_back_to_a_shallower_prefix(self):
        # abcdef (16 units) cannot be kept, but everybody's a can: 11 units from each prompt to the next.
        requests = prompts("abcdef", "ax", "ay", "abcdef")
        assert in_blocks(offline_greedy(requests, 15 * UNIT, COST)) == [0, 1, 1, 1]

    def test_offline_greedy_takes_prompts_of_one_instant_in_their_order(self):
        requests = prompts("ab", "ab", "ab", seconds=(5, 5, 5))
        assert in_blocks(offline_greedy(requests, 12 * UNIT, COST)) == [0, 2, 2]


class LastPrompt:
    """Keeps the latest prompt if it is at least `least` blocks long."""

    def __init__(self, budget_bytes, cost, least=1):
        self.least, self.kept, self.evictions, self.bytes_used = least, (), 0, 0

    def access(self, blocks, num_tokens, now):
        hit = BLOCK_TOKENS * len(os.path.commonprefix([self.kept, blocks]))
        if len(blocks) >= self.least:
            self.kept, self.bytes_used = blocks, len(blocks) * UNIT
        return hit


class TestReplay:
    def test_counts_hits_and_bytes(self):
        done = replay(Policy("last", "", LastPrompt), prompts("ab", "abc", "a"), 9 * UNIT, COST, {})
        assert in_blocks(done.hit_tokens) == [0, 2, 1]
        assert (done.peak_bytes, done.end_bytes) == (3 * UNIT, UNIT)

    def test_a_policy_that_cheats_is_caught(self):
        with pytest.raises(RuntimeError, match="keeps 1536 bytes of 1024"):
            replay(Policy("last", "", LastPrompt), prompts("abc"), 2 * UNIT, COST, {})
        for hit in (-512, 100, 1024):
            class Liar(LastPrompt):
                def access(self, blocks, num_tokens, now):
                    return hit

            with pytest.raises(RuntimeError, match=f"liar hits {hit} of 513 tokens"):
                replay(Policy("liar", "", Liar), prompts("a"), UNIT, COST, {})

    def test_fit_counts_the_warm_half_of_what_it_is_given(self):
        policy = Policy("last", "", LastPrompt, ({"least": 1}, {"least": 2}))
        # To keep short prompts is better on all six, but worse on the last three.
        requests = prompts("x", "x", "x", "xy", "z", "xyz")
        assert in_blocks(replay(policy, requests, 99 * UNIT, COST, {"least": 1}).hit_tokens) == [0, 1, 1, 1, 0, 0]
        assert in_blocks(replay(policy, requests, 99 * UNIT, COST, {"least": 2}).hit_tokens) == [0, 0, 0, 0, 0, 2]
        assert fit(policy, requests, 99 * UNIT, COST) == {"least": 2}
        assert fit(policy, requests[:3], 99 * UNIT, COST) == {"least": 1}

    def test_compare_counts_the_second_half_and_keeps_the_cache_of_the_first(self):
        requests = prompts("ab", "abc", "abcd", "x")
        (budget,) = (report := compare(requests, [Policy("last", "Last", LastPrompt)], [1], COST)).budgets
        (result,) = budget.results
        second = 5 * BLOCK_TOKENS + 2
        assert result.savings.tokens == result.savings.flops == 3 * BLOCK_TOKENS / second
        assert result.whole_trace.tokens == 5 * BLOCK_TOKENS / (second + 5 * BLOCK_TOKENS + 2)
        assert report.ceiling.tokens == budget.offline.tokens == result.savings.tokens
        assert report.num_tokens == 10 * BLOCK_TOKENS + 4
        assert cells(table(report))[2][:6] == ["1", "Last", "", "59.95 %", "100.0 %", "100.0 %"]

    def test_flops_grow_with_depth(self):
        cost = CostModel(flops_per_token=0.0, attention_flops=2.0, snapshot_bytes=10 * UNIT, token_bytes=1)
        requests = prompts("q", "abc", "abcd")
        (budget,) = compare(requests, [Policy("last", "", LastPrompt)], [1], cost).budgets
        assert budget.results[0].savings.flops == pytest.approx(1536**2 / (1537**2 + 2049**2))


class TestOurs:
    def test_repeats_and_junctions_are_hit(self):
        done = replay(OURS, prompts("abcd", "abxy", "abz", "abcde"), 10**9, COST, {})
        assert in_blocks(done.hit_tokens) == [0, 0, 2, 4]

    def test_every_byte_is_in_the_budget(self):
        rng = random.Random(2)
        words = ["".join(rng.choices("abc", k=rng.randrange(1, 9))) for _ in range(300)]
        done = replay(OURS, prompts(*words), 60 * UNIT, COST, {})
        assert 40 * UNIT < done.peak_bytes <= 60 * UNIT and done.evictions > 100
        assert done.hit_tokens.sum() > 0
        assert (done.hit_tokens <= infinite_cache(prompts(*words))).all()


def run(*arguments, cwd=ROOT, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "serving.simulate", *map(str, arguments)], cwd=cwd, capture_output=True, text=True,
        timeout=120, env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def conversation(tmp_path_factory) -> pathlib.Path:
    """Forty chats of five turns, a minute apart, over one system prompt."""
    rng = random.Random(3)
    ids = itertools.count(1)
    turns = []
    for _chat in range(40):
        blocks, now = [0], rng.uniform(0, 600)
        for _ in range(5):
            blocks = blocks + [next(ids) for _ in range(rng.randrange(1, 12))]
            turns.append((now, blocks))
            now += rng.uniform(30, 90)
    path = tmp_path_factory.mktemp("traces") / "chats.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for now, blocks in sorted(turns):
            # A chat's last block is complete, so that the next turn shares it.
            print(line(timestamp=round(1000 * now), input_length=512 * len(blocks), hash_ids=blocks), file=file)
    return path


class TestCommand:
    def test_without_policy_all_run_and_table_plot_and_json_agree(self, conversation, tmp_path):
        picture, values = tmp_path / "hits.png", tmp_path / "hits.json"
        done = run("--trace", conversation, "--budget-gib", 32, 8, "--plot", picture, "--json", values)
        assert done.returncode == 0, done.stderr
        rows = cells(done.stdout)
        assert [row[0] for row in rows[2:]] == ["8"] * 6 + ["32"] * 6
        report = json.loads(values.read_text())
        names = [result["name"] for result in report["budgets"][0]["results"]]
        assert names == list(policies()) == ["k3jax", "vllm-interval", "vllm-junction", "sglang", "marconi"]
        for row, result in zip(rows[2:7], report["budgets"][0]["results"]):
            assert row[1] == result["title"]
            assert row[3] == f"{100 * result['savings']['tokens']:.2f} %" != "0.00 %"
            assert result["savings"]["tokens"] <= report["ceiling"]["tokens"]
            assert 0 < result["peak_bytes"] <= 8 * 2**30
        assert report["num_requests"] == 200 and report["preset"] == "kimi-k3"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert "Traceback" not in done.stderr and "k3jax: marconi at 32 GiB" in done.stderr

    def test_a_larger_cache_is_worth_more(self, conversation, tmp_path):
        run("--trace", conversation, "--budget-gib", 4, 64, "--policy", "k3jax", "--json", tmp_path / "a.json")
        small, large = json.loads((tmp_path / "a.json").read_text())["budgets"]
        assert small["results"][0]["savings"]["tokens"] < large["results"][0]["savings"]["tokens"]

    @pytest.mark.parametrize("arguments, message", [
        ([], "the following arguments are required: --trace"),
        (["--trace", "no.jsonl"], "cannot read no.jsonl: No such file or directory"),
        (["--trace", "no.jsonl", "--policy", "lru"],
         "no policy 'lru'; there are k3jax, vllm-interval, vllm-junction, sglang, marconi"),
        (["--trace", "no.jsonl", "--preset", "kimi-k4"], "no preset 'kimi-k4'"),
        (["--trace", "no.jsonl", "--budget-gib", "0.4"],
         "--budget-gib 0.4 is too small: kimi-k3 needs 0.432 for one snapshot and one block of 512 tokens"),
        (["--trace", "no.jsonl", "--budget-gib", "-1"],
         "argument --budget-gib: '-1' is not a number of GiB above 0 and up to 65536"),
        (["--trace", "no.jsonl", "--budget-gib", "nan"], "'nan' is not a number of GiB"),
        (["--trace", "no.jsonl", "--budget-gib", "1e9"], "'1e9' is not a number of GiB"),
        (["--trace", "no.jsonl", "--plot", "a.txt"], "--plot a.txt does not end in .png, .svg, .pdf"),
        (["--trace", "no.jsonl", "--json", "no/a.json"], "--json no/a.json: there is no folder no"),
    ])
    def test_a_mistake_is_one_line_and_exit_code_2(self, arguments, message):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        (reported,) = done.stderr.splitlines()
        assert reported.startswith("k3jax: error: ") and message in reported

    def test_a_bad_trace_names_file_and_line(self, tmp_path):
        (tmp_path / "trace.jsonl").write_text(line() + "\n" + line(hash_ids=None) + "\n")
        done = run("--trace", tmp_path / "trace.jsonl")
        assert done.returncode == 2
        assert done.stderr.startswith(f"k3jax: error: {tmp_path / 'trace.jsonl'}, line 2: no hash_ids; expected")

    def test_without_the_checkout_ours_runs_alone_and_says_so(self, conversation, monkeypatch, capsys):
        # As if there were no such module: None makes the import fail.
        monkeypatch.setitem(sys.modules, "benchmarks.peers", None)
        assert main(["--trace", str(conversation), "--budget-gib", "8"]) == 0
        done = capsys.readouterr()
        assert done.err.startswith("k3jax: only k3jax runs; the others need benchmarks.peers: run it in a checkout")
        assert [row[1] for row in cells(done.out)[2:]] == ["k3jax", "offline greedy"]
        assert main(["--trace", str(conversation), "--policy", "marconi"]) == 2
        assert "no policy 'marconi'; there are k3jax; the others need benchmarks.peers" in capsys.readouterr().err

    def test_without_matplotlib_the_plot_is_refused_before_the_work(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert main(["--trace", "no.jsonl", "--plot", "a.png"]) == 2
        assert '--plot needs matplotlib; install it with pip install "k3jax[notebooks]"' in capsys.readouterr().err

    def test_jax_is_not_imported(self):
        code = "import sys, serving.simulator.command as c; c.policies(); print('jax' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "False", done.stderr


@pytest.fixture(scope="module")
def mooncake() -> list[Request]:
    folder = os.environ.get("K3JAX_TRACES")
    if not folder:
        pytest.skip("set K3JAX_TRACES to the folder with mooncake_conversation.jsonl.gz")
    return read_trace(pathlib.Path(folder) / "mooncake_conversation.jsonl.gz")


class TestMooncake:
    """The conversation trace of Mooncake's FAST'25 release."""

    def test_ceiling(self, mooncake):
        tokens = sum(request.num_tokens for request in mooncake)
        assert (len(mooncake), tokens) == (12031, 144_793_823)
        assert round(100 * infinite_cache(mooncake).sum() / tokens, 2) == 37.36

    def test_targets(self, mooncake):
        cost = CostModel.for_model(preset("kimi-k3"))
        report = compare(mooncake, list(policies().values()), [64, 256, 1024], cost)
        for budget, factor in zip(report.budgets, (1.2, 1.0, 1.0)):
            ours, *peers = (result.savings.tokens for result in budget.results)
            assert factor * max(peers) <= ours <= report.ceiling.tokens
            assert ours <= budget.offline.tokens
