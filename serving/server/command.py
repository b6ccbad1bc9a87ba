"""The command `python -m serving.server`."""

import argparse
import asyncio
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from k3jax.catalog import Description, describe
from k3jax.cli.command import OK, Parser, run, say
from serving.server.config import ServerConfig, add_flags, from_arguments

if TYPE_CHECKING:
    from serving.api.backend import Backend
    from serving.engine.engine import Engine

ENGINE_FAILED = 1

_EPILOG = """\
examples:
  python -m serving.server                                the built-in demo: random weights, so noise
  python -m serving.server --checkpoint DIR --port 50051
  python -m serving.client --prompt "Once upon a time"    in another terminal
  grpcurl -plaintext 127.0.0.1:50051 describe k3jax.v1.Decoder

The health service says NOT_SERVING until everything is compiled. What happens is logged to standard error, one JSON
object a line. SIGTERM and Ctrl-C let requests finish; a second one ends at once.

exit codes:
  0    stopped by a signal
  1    the engine failed, or an internal error
  2    a mistake in the input; one line on standard error says which
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m serving.server",
        description="Serves Kimi K3 or Kimi-Linear over gRPC, as k3jax.v1.Decoder.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (see `--help`)."""
    return run(lambda: _run(_parser().parse_args(argv)), interrupted="interrupted")


def _run(args: argparse.Namespace) -> int:
    config = from_arguments(args)
    # Before JAX is imported and weights are read: those can take many minutes.
    description = describe(config.checkpoint)
    return asyncio.run(_serve(config, description))


async def _serve(config: ServerConfig, description: Description) -> int:
    from serving.api.backend import Backend
    from serving.server.logs import log_to_stderr
    from serving.server.server import Server

    log_to_stderr()
    backend = Backend(config.checkpoint, config.dtype, description)
    server = Server(config, backend)
    asked_to_stop = _stop_signals()
    await server.start()
    say(f"listening on {server.address}")
    if config.metrics_port is not None:
        say(f"metrics on http://{server.metrics_address}/metrics")
    ready = False
    try:
        loading = _in_thread(lambda: _load(config))
        await _first(asked_to_stop, loading)
        if loading.done():
            backend.engine = loading.result()
            await _first(asked_to_stop, asyncio.create_task(_until_ready(backend.engine)))
        ready = backend.serving
        if ready:
            _introduce(backend, server.address)
            await _first(asked_to_stop, asyncio.create_task(_until_failed(backend.engine)))
    finally:
        if asked_to_stop.done():
            say(f"shutting down; requests have {config.grace:g} s to finish, a second signal ends at once")
        await server.stop(config.grace)
    if not asked_to_stop.done():
        failure = backend.engine.failure
        say(f"error: the engine failed: {type(failure).__name__}: {' '.join(str(failure).split())}")
        return ENGINE_FAILED
    if not ready:
        # Another thread is loading or compiling, which cannot be interrupted.
        sys.stderr.flush()
        os._exit(OK)
    return OK


def _introduce(backend: "Backend", address: str) -> None:
    """What the server has to offer, now that it is known."""
    engine, config = backend.engine, backend.description.config
    stats = engine.stats()
    say(
        f"model {backend.checkpoint}: {len(config.layer_types)} layers, {backend.dtype}, context of {stats.context} "
        f"tokens, {engine.config.max_batch} requests at once{', deterministic' if engine.config.deterministic else ''}"
    )
    if engine.config.cache:
        room = min(stats.cache_bytes // (stats.snapshot_bytes + stats.page_bytes), stats.pages)
        say(
            f"cache: match unit {stats.match_unit} tokens, {stats.snapshot_bytes} bytes "
            f"({stats.snapshot_bytes / 2**20:.2f} MiB) a snapshot, room for {room} of them with a page each, shortest "
            f"cacheable prompt {stats.match_unit + 1} tokens, policy {stats.policy}"
        )
    else:
        say("cache: off")
    if backend.checkpoint == "demo":
        say("the demo model has random weights: what it writes is noise, not language")
    say(f"serving on {address}")


def _stop_signals() -> asyncio.Future:
    """Done at the first signal; the second ends the process."""
    loop = asyncio.get_running_loop()
    asked = loop.create_future()

    def stop(number: int) -> None:
        if asked.done():
            os._exit(128 + number)
        asked.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    return asked


def _in_thread(function) -> asyncio.Future:
    """Its result; unlike a thread of asyncio's own, this one does not keep the process."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def call() -> None:
        try:
            result = function()
        except BaseException as error:
            loop.call_soon_threadsafe(future.set_exception, error)
        else:
            loop.call_soon_threadsafe(future.set_result, result)

    threading.Thread(target=call, daemon=True).start()
    return future


async def _first(*futures: asyncio.Future) -> None:
    """Waits for one of them."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _load(config: ServerConfig) -> "Engine":
    """The engine, which goes on compiling in its own thread."""
    import k3jax
    from k3jax.cli.compilation_cache import enable_compilation_cache
    from serving.engine.engine import Engine

    enable_compilation_cache()
    engine = Engine(k3jax.load(config.checkpoint, dtype=config.dtype, progress=True), config.engine())
    engine.start()
    return engine


async def _until_ready(engine: "Engine") -> None:
    while engine.state == "starting":
        await asyncio.sleep(0.02)


async def _until_failed(engine: "Engine") -> None:
    while engine.state != "failed":
        await asyncio.sleep(0.1)
