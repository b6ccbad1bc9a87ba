"""A real gRPC server in a thread of the test."""

import asyncio
import contextlib
import threading

from k3jax.catalog import describe
from serving.api.backend import Backend
from serving.server.config import ServerConfig
from serving.server.server import Server


@contextlib.contextmanager
def running_server(engine, checkpoint="demo", grace=0.0, port=0, **config):
    """Yields the server, listening on a free port; `engine` may be None."""
    loop, started, result = asyncio.new_event_loop(), threading.Event(), []
    config = ServerConfig(checkpoint=checkpoint, port=port, **config)

    async def serve():
        backend = Backend(config.checkpoint, config.dtype, describe(config.checkpoint))
        backend.engine = engine
        server = Server(config, backend)
        try:
            await server.start()
            result.append(server)
        except Exception as error:
            result.append(error)
            return
        finally:
            started.set()
        server.stopping = asyncio.Event()
        await server.stopping.wait()
        await server.stop(grace)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    started.wait()
    server = result[0]
    if isinstance(server, Exception):
        raise server
    server.loop = loop
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(server.stopping.set)
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"
        loop.close()
