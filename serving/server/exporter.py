"""Metrics over HTTP."""

import http.server
import socket
import socketserver
import threading

import prometheus_client


class Exporter:
    """Answers GET /metrics, always in Prometheus' plain text format.

    `prometheus_client` has a server, but that one also speaks OpenMetrics, and writes `k3jax_` for `k3jax:` then: the
    name of a metric would depend on the version of Prometheus that asks.

    Attributes:
      port: where it listens.
    """

    def __init__(self, host: str, port: int, registry: prometheus_client.CollectorRegistry):
        """Raises `OSError` when one cannot listen there."""
        prometheus_client.disable_created_metrics()  # a line more for each that hardly anybody reads
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = type("Server", (_Server,), {"address_family": family})
        handler = type("Handler", (_Handler,), {"registry": registry})
        self._server = server((host, port), handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def stop(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


class _Handler(http.server.BaseHTTPRequestHandler):
    registry: prometheus_client.CollectorRegistry
    timeout = 10.0  # seconds, of a client that sends nothing

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "metrics are under /metrics")
            return
        body = prometheus_client.generate_latest(self.registry)
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        """Nothing: somebody asks every few seconds."""
