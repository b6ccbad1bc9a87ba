"""The command `python -m serving.demo`: starts a server, asks twice, and shows what the prefix cache saves."""

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from k3jax.cli.command import OK, Parser, print_text, run, say
from k3jax.errors import UserError
from serving.client import Accepted, Client, Delta, Done, RequestError, Sampling

_STORY = (
    "Kimi Delta Attention keeps a state of constant size for each layer, however long the prompt was. A server that "
    "remembers these states need not read a prompt again from its beginning: it goes on where an earlier one left. "
)
_QUESTION = "What does the second reader save?"
_READY_SECONDS = 300


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run(lambda: _run(argv), interrupted="interrupted")


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m serving.demo", description="A server with the demo model, and two questions.")
    parser.parse_args(argv)
    say("starting a server with the demo model; the first start takes a minute, later ones less")
    try:
        with _server() as address, Client(address) as client:
            client.wait_until_ready(_READY_SECONDS)
            document = _STORY * 12
            _, cold = _ask(client, "the first answer", document)
            cached, warm = _ask(client, "a longer prompt that begins the same", document + _QUESTION)
            say(f"{cached} tokens came from the cache, and the first token {cold / warm:.1f} times as fast")
    except RequestError as error:
        raise UserError(error.message) from None
    return OK


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """The address of a server process, which ends when the block does."""
    command = [sys.executable, "-m", "serving.server", "--checkpoint", "demo", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        address = None
        for line in process.stderr:
            if line.startswith("k3jax: "):
                sys.stderr.write(line)
            if found := re.fullmatch(r"k3jax: serving on (\S+)\n", line):
                address = found[1]
                break
        if address is None:
            raise UserError(f"the server ended with exit code {process.wait()} before it was ready")
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    say(f"the server shut down with exit code {process.returncode}")


def _ask(client: Client, title: str, prompt: str) -> tuple[int, float]:
    """Streams an answer; returns the cached tokens and the seconds to the first new one."""
    start, first, cached = time.monotonic(), None, 0
    say(f"{title}:")
    options = {"max_new_tokens": 64, "ignore_eos": True, "sampling": Sampling(temperature=0.8, seed=1)}
    for event in client.generate(prompt, **options):
        match event:
            case Accepted(cached_tokens=cached):
                pass
            case Delta():
                first = first or time.monotonic()
                print_text(event.text)
            case Done(usage=usage):
                print(flush=True)
                say(
                    f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached, first token after "
                    f"{first - start:.3f} s"
                )
    return cached, first - start
