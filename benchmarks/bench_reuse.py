"""What the prefix cache gains when prompts share a beginning, and what it costs when they do not, through the server.

    python -m benchmarks.bench_reuse -- --checkpoint demo --max-batch 8

starts two servers with the flags after `--`, one of them with `--no-cache`. First come prompts that nobody has seen
and, in turns with them, prompts that share all but their last tokens with one of these, one at a time: that compares
times to the first token. Then the same prompts without anything in common go to both servers in turns, several at once.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import time

from benchmarks.bench_service import Result, ask, running_server
from serving.client import AsyncClient

Prompts = list[list[int]]


async def first_tokens(client: AsyncClient, prompts: Prompts) -> tuple[list[float], list[int]]:
    """(seconds to the first token, cached tokens) of each prompt, one after the other."""
    results = [await _must(ask(client, prompt, 1, None)) for prompt in prompts]
    return [result.first for result in results], [result.cached_tokens for result in results]


async def throughput(client: AsyncClient, prompts: Prompts, streams: int, new_tokens: int) -> float:
    """Tokens of prompts and answers a second."""
    left, start = iter(prompts), time.monotonic()

    async def worker() -> int:
        count = 0
        for prompt in left:
            count += len(prompt) + (await _must(ask(client, prompt, new_tokens, None))).tokens
        return count

    counts = await asyncio.gather(*(worker() for _ in range(streams)))
    return sum(counts) / (time.monotonic() - start)


async def _must(request) -> Result:
    result = await request
    if result.error:
        raise RuntimeError(result.error)
    return result


async def _main(arguments: argparse.Namespace) -> None:
    rng = random.Random(0)
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for flags in ([], ["--no-cache"]):
            address, _ = await stack.enter_async_context(running_server([*arguments.server_flags, *flags]))
            clients.append(await stack.enter_async_context(AsyncClient(address)))
        cached, uncached = clients
        vocab_size = (await cached.model_info()).vocab_size

        def tokens(count: int) -> list[int]:
            return [rng.randrange(vocab_size) for _ in range(count)]

        cold, warm, hits = [], [], []
        for _ in range(arguments.repeats):
            shared = tokens(arguments.shared_tokens)
            seconds, reused = await first_tokens(cached, [shared + tokens(arguments.own_tokens) for _ in range(2)])
            cold, warm, hits = [*cold, seconds[0]], [*warm, seconds[1]], [*hits, reused[1]]
        print(
            f"first token of {arguments.shared_tokens} + {arguments.own_tokens} tokens: cold "
            f"{statistics.median(cold) * 1e3:.1f} ms, warm {statistics.median(warm) * 1e3:.1f} ms with "
            f"{statistics.median(hits):.0f} cached; ratio {statistics.median(warm) / statistics.median(cold):.4f}"
        )

        rates = [], []
        for number in range(arguments.rounds):
            prompts = [tokens(rng.randint(2048, 8192)) for _ in range(arguments.requests)]
            order = list(zip(clients, rates))
            for client, seen in order if number % 2 else reversed(order):
                seen.append(await throughput(client, prompts, arguments.streams, arguments.new_tokens))
            print(f"round {number}: {rates[0][-1]:.0f} tokens/s with the cache, {rates[1][-1]:.0f} without")
        on, off = map(statistics.median, rates)
        print(f"without reuse: {on:.0f} tokens/s with the cache, {off:.0f} without; ratio {on / off:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared-tokens", type=int, default=8192)
    parser.add_argument("--own-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=24, help="in a round without reuse")
    parser.add_argument("--streams", type=int, default=8, help="at once, without reuse")
    parser.add_argument("--new-tokens", type=int, default=64, help="of an answer, without reuse")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("server_flags", nargs="*", metavar="-- SERVER FLAGS")
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
