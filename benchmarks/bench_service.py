"""Load on a server: latencies, errors, cache hits, and whether everything is given back afterwards.

    python -m benchmarks.bench_service --requests 200 --streams 16 -- --checkpoint demo --max-batch 16

starts a server with the flags after `--` and stops it at the end; with --address it uses one that runs already. Prompts
fall into groups that share a prefix; some requests are cancelled at a random token.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator

import numpy as np

from serving.client import Accepted, AsyncClient, Delta, RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked for.

    Attributes:
      requests, streams: in all, and at once.
      groups: prefixes that prompts share.
      shared_tokens, own_tokens: of a prompt.
      new_tokens: of an answer.
      cancel_share: of the requests that are cancelled, 0 to 1.
      seed: of prompts and cancellations.
    """

    requests: int
    streams: int
    groups: int
    shared_tokens: int
    own_tokens: int
    new_tokens: int
    cancel_share: float
    seed: int


@dataclasses.dataclass
class Result:
    """What one request saw; times in seconds."""

    cached_tokens: int = 0
    prompt_tokens: int = 0
    first: float | None = None
    gaps: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    cancelled: bool = False
    error: str | None = None


async def run_load(client: AsyncClient, load: Load) -> tuple[list[Result], float]:
    """The results of all requests, and the seconds that they took together."""
    rng = random.Random(load.seed)
    vocab_size = (await client.model_info()).vocab_size

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    prefixes = [tokens(load.shared_tokens) for _ in range(load.groups)]

    def requests() -> Iterator[tuple[list[int], int | None]]:
        for _ in range(load.requests):
            cancel = rng.randrange(load.new_tokens) if rng.random() < load.cancel_share else None
            yield rng.choice(prefixes) + tokens(load.own_tokens), cancel

    results, left = [], requests()

    async def worker() -> None:
        for prompt, cancel_at in left:
            results.append(await ask(client, prompt, load.new_tokens, cancel_at))

    start = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(load.streams)))
    return results, time.monotonic() - start


async def ask(client: AsyncClient, prompt: list[int], new_tokens: int, cancel_at: int | None) -> Result:
    """One request; with `cancel_at` it is cancelled when so many tokens have come."""
    result, last = Result(), time.monotonic()
    stream = client.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True)
    try:
        async with contextlib.aclosing(stream):
            async for event in stream:
                if isinstance(event, Accepted):
                    result.cached_tokens, result.prompt_tokens = event.cached_tokens, event.prompt_tokens
                elif isinstance(event, Delta) and event.token_ids:  # some bring text that was held back
                    now = time.monotonic()
                    if result.first is None:
                        result.first = now - last
                    else:
                        result.gaps += [(now - last) / len(event.token_ids)] * len(event.token_ids)
                    last = now
                    result.tokens += len(event.token_ids)
                if cancel_at is not None and result.tokens >= cancel_at:
                    result.cancelled = True
                    break
    except RequestError as error:
        result.error = f"{error.code.name}: {error.message}"
    return result


async def check_idle(client: AsyncClient) -> str:
    """What is left when nothing is under way; raises when that does not add up."""
    for _ in range(500):
        stats = await client.cache_stats()
        if not stats.running + stats.waiting:
            break
        await asyncio.sleep(0.02)
    assert not stats.running + stats.waiting, f"{stats.running} requests run and {stats.waiting} wait for nobody"
    assert stats.free_pages + stats.cached_pages == stats.pages, f"pages are missing: {stats}"
    assert stats.used_bytes <= stats.budget_bytes, f"the cache is larger than its budget: {stats}"
    return (
        f"idle: {stats.free_pages} free and {stats.cached_pages} cached of {stats.pages} pages, {stats.snapshots} "
        f"snapshots, {stats.used_bytes / 2**20:.0f} of {stats.budget_bytes / 2**20:.0f} MiB"
    )


def report(results: list[Result], seconds: float) -> None:
    """Prints what the clients saw."""
    finished = [result for result in results if not result.error and not result.cancelled]
    errors = [result.error for result in results if result.error]
    firsts = [result.first for result in finished]
    gaps = [gap for result in finished for gap in result.gaps]
    tokens = sum(result.tokens for result in results)
    prompt = sum(result.prompt_tokens for result in results)
    cached = sum(result.cached_tokens for result in results)
    cancelled = sum(result.cancelled for result in results)
    print(f"{len(finished)} finished, {cancelled} cancelled, {len(errors)} errors in {seconds:.1f} s")
    for error in sorted(set(errors)):
        print(f"  {errors.count(error)} x {error}")
    hits = cached / max(prompt, 1)
    print(f"{tokens / seconds:.0f} new tokens/s, {prompt / seconds:.0f} prompt tokens/s, {hits:.1%} of them cached")
    for name, values in (("first token", firsts), ("between tokens", gaps)):
        if values:
            p50, p90, p99 = np.percentile(values, (50, 90, 99)) * 1e3
            print(f"{name}: p50 {p50:.1f} ms, p90 {p90:.1f} ms, p99 {p99:.1f} ms")


def memory_mib(pid: int) -> float:
    """Resident memory of a process of this machine."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024


@contextlib.asynccontextmanager
async def running_server(flags: list[str]) -> AsyncIterator[tuple[str, int]]:
    """Address and process id of a server that ends with the block."""
    command = [sys.executable, "-m", "serving.server", "--port", "0", *flags]
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        process = subprocess.Popen(command, stderr=open(log.name, "w"))
        try:
            while not (found := re.search(r"serving on (\S+)\n", pathlib.Path(log.name).read_text())):
                await asyncio.sleep(0.1)
                assert process.poll() is None, pathlib.Path(log.name).read_text()
            yield found[1], process.pid
        finally:
            process.terminate()
            print(f"the server ended with exit code {process.wait()}")


async def _main(arguments: argparse.Namespace) -> None:
    load = Load(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Load)})
    async with contextlib.AsyncExitStack() as stack:
        address, pid = arguments.address, None
        if address is None:
            address, pid = await stack.enter_async_context(running_server(arguments.server_flags))
        client = await stack.enter_async_context(AsyncClient(address))
        await client.wait_until_ready(600)
        for number in range(arguments.rounds):
            round_load = dataclasses.replace(load, seed=load.seed + number)
            report(*await run_load(client, round_load))
            print(await check_idle(client), end="\n" if pid is None else f", server RSS {memory_mib(pid):.0f} MiB\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="of a server that runs; otherwise one is started with the flags after --")
    parser.add_argument("--rounds", type=int, default=1, help="of the load; memory is shown after each")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--shared-tokens", type=int, default=512)
    parser.add_argument("--own-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--cancel-share", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("server_flags", nargs="*", metavar="-- SERVER FLAGS")
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
