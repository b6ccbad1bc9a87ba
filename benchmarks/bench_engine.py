"""What the engine's thread costs beside the device: its CPU time for a decode step outside the compiled call.

    python benchmarks/bench_engine.py [--checkpoint demo] [--batch 64] [--tokens 1500]

Twice the same requests, a decode step for all of them each round, and sinks that only count. The first time steps are
computed. The second time the compiled decode step is replaced by a function that returns the tokens of one real step at
once: all that is left is the engine, and the CPU time of its thread needs no clocks inside the loop.
"""

import argparse
import threading
import time

import numpy as np

import k3jax
from k3jax.sampling import SamplingParams
from serving.engine.config import EngineConfig
from serving.engine.engine import Engine
from serving.engine.request import Done, Request

PROMPT = 100


class Run:
    """A batch of requests that begin together and have answers of the same length."""

    def __init__(self, engine: Engine, batch: int, tokens: int, logprobs: int | None):
        self.engine, self.batch, self.tokens, self.logprobs = engine, batch, tokens, logprobs
        self.running, self.finished = threading.Semaphore(0), threading.Semaphore(0)

    def measure(self, replace_decode: bool) -> tuple[float, float]:
        """(wall, CPU) milliseconds of the engine's thread for a step, while all of them decode."""
        rng = np.random.default_rng(0)
        for number in range(self.batch):
            self.engine.submit(Request(
                id=str(number), token_ids=rng.integers(0, self.engine.lm.config.vocab_size, PROMPT),
                sampling=SamplingParams(seed=number, logprobs=self.logprobs), max_new_tokens=self.tokens,
            ), self.sink())
        for _ in range(self.batch):
            self.running.acquire()
        if replace_decode:
            self.command(self.replace_decode)
        first = self.command(self.read)
        self.finished.acquire()
        # The thread that has just ended one of them is about to end the others.
        last = self.command(self.read)
        for _ in range(self.batch - 1):
            self.finished.acquire()
        wall, cpu, steps = (after - before for before, after in zip(first, last))
        return wall / steps * 1e3, cpu / steps * 1e3

    def sink(self):
        count = 0

        def sink(event) -> None:
            nonlocal count
            count += 1
            if count == 3:  # accepted, and two tokens
                self.running.release()
            if type(event) is Done:
                self.finished.release()

        return sink

    def command(self, function):
        """Runs it on the engine's thread."""
        done, results = threading.Event(), []

        def command(now: float) -> None:
            results.append(function())
            done.set()

        with self.engine._door:
            self.engine._command(command)
        done.wait()
        return results[0]

    def read(self) -> tuple[float, float, int]:
        return time.monotonic(), time.thread_time(), self.engine.stats().decode_steps

    def replace_decode(self) -> None:
        core = self.engine._core
        decode = core._programs.decode
        core._state, sample = decode(core._state, np.zeros((self.batch, 3), np.int32))
        sample.token_ids.block_until_ready()
        core._programs.decode = lambda state, rows: (state, sample)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="demo")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--logprobs", type=int, help="each row asks for so many")
    args = parser.parse_args()

    lm = k3jax.load(args.checkpoint, dtype="float32")
    # One shape of each kind: quick to compile.
    engine = Engine(lm, EngineConfig(max_batch=args.batch, prefill_tokens=512, deterministic=True))
    engine.start()
    engine.ready.wait()
    wall, cpu = Run(engine, args.batch, 100, args.logprobs).measure(replace_decode=False)
    print(f"{args.batch} rows: a step takes {wall:.2f} ms, and {cpu:.3f} ms CPU of the engine's thread in all")
    _, cpu = Run(engine, args.batch, args.tokens, args.logprobs).measure(replace_decode=True)
    print(f"{args.batch} rows: {cpu:.3f} ms CPU of the engine's thread without the compiled call")
    engine.stop()


if __name__ == "__main__":
    main()
