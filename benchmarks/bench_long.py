"""One very long prompt, and another that goes on from it, through the server.

    python -m benchmarks.bench_long --tokens 1048576 -- --checkpoint DIR --prefill-tokens 8192 --max-batch 1

starts a server with the flags after `--` and a context that holds the prompts. The server's memory is shown when it is
ready and after each answer: pools are allocated at the start, so it should hardly grow.
"""

import argparse
import asyncio
import contextlib
import random
import subprocess
import time

from benchmarks.bench_service import ask, check_idle, memory_mib, running_server
from serving.client import AsyncClient

NEW_TOKENS = 16


def memory(pid: int) -> str:
    """Of the server's process: on the host, and on NVIDIA GPUs if there are any."""
    text = f"{memory_mib(pid):.0f} MiB resident"
    with contextlib.suppress(FileNotFoundError):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
        text += ", GPU " + subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return text


async def _main(arguments: argparse.Namespace) -> None:
    rng, own = random.Random(0), arguments.own_tokens
    flags = [*arguments.server_flags, "--context", str(arguments.tokens + own + NEW_TOKENS)]
    async with contextlib.AsyncExitStack() as stack:
        address, pid = await stack.enter_async_context(running_server(flags))
        client = await stack.enter_async_context(AsyncClient(address))
        print(f"ready: {memory(pid)}")
        vocab_size = (await client.model_info()).vocab_size
        prompt = [rng.randrange(vocab_size) for _ in range(arguments.tokens)]
        for name, end in (("the prompt", []), ("more of it", [rng.randrange(vocab_size) for _ in range(own)])):
            start = time.monotonic()
            result = await ask(client, prompt + end, NEW_TOKENS, None)
            if result.error:
                raise RuntimeError(result.error)
            print(
                f"{name}: {result.prompt_tokens} tokens, {result.cached_tokens} of them cached, first token after "
                f"{result.first:.2f} s, {result.tokens} tokens after {time.monotonic() - start:.2f} s; {memory(pid)}",
                flush=True,
            )
        print(await check_idle(client))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1048576)
    parser.add_argument("--own-tokens", type=int, default=200, help="what the second prompt adds")
    parser.add_argument("server_flags", nargs="*", metavar="-- SERVER FLAGS")
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
