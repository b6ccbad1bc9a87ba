"""CPU time of the server outside the engine for each delivered token.

    python -m benchmarks.bench_front_end --streams 64

The engine is the stand-in of the tests, which hands out a token a stream at a fixed pace; the load comes from another
process.
"""

import argparse
import asyncio
import multiprocessing
import time

import numpy as np

from benchmarks.bench_service import Load, report, run_load
from serving.client import AsyncClient
from tests.serving.api_server import running_server
from tests.serving.stand_in_engine import StandInEngine


def load_from(address: str, load: Load) -> None:
    async def run() -> None:
        async with AsyncClient(address) as client:
            await client.wait_until_ready(60)
            report(*await run_load(client, load))

    asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--new-tokens", type=int, default=200)
    arguments = parser.parse_args()
    streams, new_tokens = arguments.streams, arguments.new_tokens
    engine = StandInEngine(b"front end ", arguments.step_ms / 1e3, max_batch=streams)
    engine.start()
    load = Load(requests=streams, streams=streams, groups=1, shared_tokens=8, own_tokens=8, new_tokens=new_tokens,
                cancel_share=0.0, seed=0)
    with running_server(engine) as server:
        process = multiprocessing.get_context("spawn").Process(target=load_from, args=(server.address, load))
        process.start()

        def reach(tokens: int) -> np.ndarray:
            while engine.tokens < tokens:
                time.sleep(0.01)
            return np.array([time.monotonic(), time.process_time(), engine.cpu_seconds, engine.tokens])

        # Without the beginning and the end, where streams come and go.
        start = reach(streams * new_tokens // 10)
        seconds, cpu, engine_cpu, tokens = reach(streams * new_tokens * 9 // 10) - start
        process.join()
    cost = (cpu - engine_cpu) / tokens
    print(f"{streams} streams, {tokens / seconds:.0f} tokens/s: front end {cost * 1e3:.3f} ms a token")


if __name__ == "__main__":
    main()
