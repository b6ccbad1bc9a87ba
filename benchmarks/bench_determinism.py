"""How far answers from the cache, in company, are from cold answers alone; beside what rounding does anyway.

    python -m benchmarks.bench_determinism [--checkpoint DIR] [--prompts 100]

Every prompt is asked for three times: alone without reuse, then with all others at once and a cache that knows their
common beginnings, and alone in float32. Compared are the log-probabilities of the new tokens as long as both chose the
same ones. In deterministic mode warm and cold must not differ in a bit.
"""

import argparse
import queue

import numpy as np

import k3jax
from k3jax.sampling import SamplingParams
from serving.engine.config import EngineConfig
from serving.engine.engine import Engine
from serving.engine.request import Accepted, Done, Request, Tokens
from tests.checkpoints import tiny_checkpoint

LONGEST, NEW_TOKENS = 1800, 32


def prompts_that_share(rng: np.random.Generator, count: int, vocab_size: int) -> list[np.ndarray]:
    """Each goes on from some part of an earlier one, or begins anew."""
    prompts = [rng.integers(0, vocab_size, rng.integers(200, 1200))]
    while len(prompts) < count:
        base = prompts[rng.integers(len(prompts))]
        kept = base[: rng.integers(0, len(base) + 1)]
        prompts.append(np.concatenate([kept, rng.integers(0, vocab_size, rng.integers(1, 400))])[:LONGEST])
    return prompts


class Asked:
    """A request that was sent to an engine."""

    def __init__(self, engine: Engine, prompt: np.ndarray, number: int, salt: str):
        self._events: queue.Queue = queue.Queue()
        engine.submit(Request(
            id=f"{salt}{number}", token_ids=prompt, sampling=SamplingParams(temperature=0, logprobs=2),
            max_new_tokens=NEW_TOKENS, salt=salt,
        ), self._events.put)

    def answer(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """(token ids, log-probabilities, margins over the second best, cached tokens)."""
        ids, logprobs, margins, cached = [], [], [], 0
        while not isinstance(event := self._events.get(), Done):
            if isinstance(event, Accepted):
                cached = event.cached_tokens
            elif isinstance(event, Tokens):
                ids += event.ids
                logprobs += [one.logprob for one in event.logprobs]
                margins += [one.top[0][1] - one.top[1][1] for one in event.logprobs]
        return np.array(ids), np.array(logprobs), np.array(margins), cached


class Difference:
    """Of pairs of answers."""

    def __init__(self):
        self.distances: list[float] = []
        self.flips: list[float] = []
        self.pairs = 0

    def add(self, one, other) -> None:
        ids, logprobs, margins, _ = one
        same = ids == other[0]
        common = len(ids) if same.all() else int(same.argmin())
        self.distances += np.abs(logprobs[:common] - other[1][:common]).tolist()
        self.pairs += 1
        if common < len(ids):
            self.flips.append(margins[common])

    def __str__(self) -> str:
        p50, p99, most = np.percentile(self.distances, (50, 99, 100))
        text = f"p50 {p50:.2g}, p99 {p99:.2g}, max {most:.2g}; {len(self.flips)} of {self.pairs} answers part ways"
        return text + (f", at margins up to {max(self.flips):.2g}" if self.flips else "")


def run(lm, prompts, *, deterministic: bool):
    """(answers alone without reuse, answers in company with reuse)."""
    engine = Engine(lm, EngineConfig(context=2048, max_batch=16, num_pages=2000, deterministic=deterministic))
    engine.start()
    engine.ready.wait()
    alone = [Asked(engine, prompt, number, f"alone{number} ").answer() for number, prompt in enumerate(prompts)]
    rounds = [
        [asked.answer() for asked in [Asked(engine, prompt, n, "shared") for n, prompt in enumerate(prompts)]]
        for _ in range(2)
    ]
    engine.stop()
    return alone, rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a directory (default: the tests' tiny K3)")
    parser.add_argument("--prompts", type=int, default=100)
    args = parser.parse_args()
    checkpoint = args.checkpoint or tiny_checkpoint("k3-tiny")
    models = {dtype: k3jax.load(checkpoint, dtype=dtype) for dtype in ("float32", "bfloat16")}
    prompts = prompts_that_share(np.random.default_rng(0), args.prompts, models["float32"].config.vocab_size)
    exact = None
    for dtype, lm in models.items():
        for deterministic in (False, True):
            alone, rounds = run(lm, prompts, deterministic=deterministic)
            warm = Difference()
            for answers in rounds:
                for one, other in zip(alone, answers):
                    warm.add(one, other)
            cached = sum(answer[3] for answers in rounds for answer in answers)
            share = cached / sum(map(len, prompts)) / len(rounds)
            mode = "deterministic" if deterministic else "default"
            print(f"{dtype} {mode}: warm and cold {warm}; {share:.0%} cached")
            exact = exact or alone
            rounding = Difference()
            for one, other in zip(exact, alone):
                rounding.add(one, other)
            if dtype != "float32":
                print(f"  float32 and {dtype}, both cold: {rounding}")


if __name__ == "__main__":
    main()
