"""The gRPC server: our service, health, reflection, metrics; from the first connection to the last."""

import asyncio
import contextlib
import errno
import faulthandler
import logging
import socket
import time

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from k3jax.errors import UserError
from serving.api.backend import Backend
from serving.api.limits import MAX_MESSAGE_BYTES
from serving.api.metrics import Metrics
from serving.api.servicer import SERVICE, DecoderServicer
from serving.api.status import StatusInterceptor
from serving.api.v1 import decoder_pb2_grpc
from serving.server.config import ServerConfig
from serving.server.exporter import Exporter

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Otherwise a second server would share the port, and get half of the calls.
    ("grpc.so_reuseport", 0),
    # Clients may ask whether we are alive, however long a prefill takes. Pings are cheap, and a machine that is busy
    # delivers them in bursts: nobody is sent away for them.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # And we ask them: a client whose machine is gone closes nothing.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
_HEALTH_INTERVAL = 0.05
_STUCK_SECONDS = 60.0
_LAST_MOMENT = 0.05
_LAST_WORDS = 5.0
"""Seconds that streams have to end once the engine has."""

log = logging.getLogger(__name__)


class Server:
    """Listens from `start` on, so that health can be asked while weights are loaded, until `stop`.

    Attributes:
      backend: what it serves from.
      port, metrics_port: where it listens; known after `start`.
    """

    def __init__(self, config: ServerConfig, backend: Backend):
        self.config, self.backend = config, backend
        self._metrics = Metrics(backend)
        self._servicer = DecoderServicer(
            backend, self._metrics, max_seconds=config.max_seconds, stall_seconds=config.stall_seconds
        )
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[StatusInterceptor(SERVICE, self._metrics.refused)], options=_OPTIONS
        )
        decoder_pb2_grpc.add_DecoderServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self._watcher: asyncio.Task | None = None
        self._exporter: Exporter | None = None
        self.port = self.metrics_port = 0

    @property
    def address(self) -> str:
        """For clients."""
        return _join(self.config.host, self.port)

    @property
    def metrics_address(self) -> str:
        """For Prometheus."""
        return _join(self.config.host, self.metrics_port)

    async def start(self) -> None:
        """Listens.

        Raises:
          UserError: an address is in use, or is none of this machine.
        """
        self.port = self._listen()
        if self.config.metrics_port is not None:
            self.metrics_port = self._export_metrics(self.config.metrics_port)
        await self._report_health(False)
        await self._server.start()
        self._watcher = asyncio.create_task(self._watch_health())

    async def stop(self, grace: float) -> None:
        """Refuses new requests, lets those under way finish for at most `grace` seconds, aborts the rest, and ends."""
        self.backend.draining = True
        await self._health.enter_graceful_shutdown()
        if self._watcher:
            self._watcher.cancel()
        engine = self.backend.engine
        if engine and engine.ready.is_set():
            await asyncio.to_thread(engine.drain, grace)
            await asyncio.to_thread(engine.stop)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                while self._servicer.active:
                    await asyncio.sleep(0.01)
        await self._server.stop(grace=0.1)
        # gRPC does not wait for its tasks of calls that it has cut off, such as a Watch: they need another moment.
        await asyncio.sleep(_LAST_MOMENT)
        if self._exporter:
            self._exporter.stop()

    def _listen(self) -> int:
        host, port = self.config.host, self.config.port
        _check_address(host, port, "port")
        try:
            return self._server.add_insecure_port(_join(host, port))
        except RuntimeError as error:  # somebody was faster
            raise UserError(f"cannot listen on {_join(host, port)}: {error}") from None

    def _export_metrics(self, port: int) -> int:
        _check_address(self.config.host, port, "metrics_port")
        try:
            self._exporter = Exporter(self.config.host, port, self._metrics.registry)
        except OSError as error:  # somebody was faster
            raise UserError(f"cannot listen on {_join(self.config.host, port)}: {error.strerror}") from None
        return self._exporter.port

    async def _watch_health(self) -> None:
        """Keeps the health service up to date."""
        reported, stuck = False, False
        while True:
            await asyncio.sleep(_HEALTH_INTERVAL)
            engine, serving = self.backend.engine, self.backend.serving
            if serving and time.monotonic() - engine.heartbeat > _STUCK_SECONDS:
                if not stuck:
                    log.error("the engine is stuck", extra={"seconds": _STUCK_SECONDS})
                    faulthandler.dump_traceback()
                serving, stuck = False, True
            else:
                stuck = False
            if serving != reported:
                reported = serving
                await self._report_health(serving)

    async def _report_health(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)
        log.info("health", extra={"serving": serving})


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_address(host: str, port: int, field: str) -> None:
    """Whether one can listen there; gRPC itself only says that it cannot.

    Raises:
      UserError: one cannot; says why.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        remedy = f"choose another {field}" if error.errno == errno.EADDRINUSE else "host is an address of this machine"
        raise UserError(f"cannot listen on {_join(host, port)}: {error.strerror}; {remedy}") from None
