"""What goes wrong around an engine: each fault has its status, and others are unharmed."""

import asyncio
import contextlib
import socket
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from k3jax.errors import UserError
from serving.api import servicer
from serving.api.v1 import decoder_pb2_grpc
from serving.client import Accepted, Client, Delta, Done, RequestError, Sampling
from serving.client.events import event_of
from serving.client.request import generate_request
from serving.server import server as server_module
from tests.serving.api_server import running_server
from tests.serving.stand_in_engine import StandInEngine

SERVICE = "k3jax.v1.Decoder"


@contextlib.contextmanager
def serving(*args, server=None, **kwargs):
    """A stand-in engine behind a server, and a client."""
    engine = StandInEngine(*args, **kwargs)
    engine.start()
    with running_server(engine, **(server or {})) as running, Client(running.address) as client:
        client.wait_until_ready(10)
        try:
            yield engine, client, running
        finally:
            engine.paused.clear()


def refused(call, *args, **kwargs) -> RequestError:
    with pytest.raises(RequestError) as caught:
        result = call(*args, **kwargs)
        if not isinstance(result, (tuple, str)):
            list(result or ())
    assert "\n" not in caught.value.message and "Traceback" not in caught.value.message
    return caught.value


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def answer(client, prompt="x", **options):
    events = list(client.generate(prompt, **options))
    assert isinstance(events[0], Accepted) and isinstance(events[-1], Done)
    return "".join(event.text for event in events if isinstance(event, Delta)), events[-1]


def health(client, service="") -> int:
    stub = health_pb2_grpc.HealthStub(client._channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service)).status


SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_while_weights_are_loaded():
    with running_server(None) as server, Client(server.address) as client:
        assert health(client) == health(client, SERVICE) == NOT_SERVING
        error = refused(client.generate, "x")
        assert error.code is grpc.StatusCode.UNAVAILABLE and "the server is starting" in error.message
        assert refused(client.cache_stats).code is grpc.StatusCode.UNAVAILABLE
        assert client.tokenize("hé") == (104, 195, 169)
        with pytest.raises(RequestError) as caught:
            client.wait_until_ready(0.2)
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_stopped_server_leaves_no_task_behind():
    """Those are complained about on standard error when the loop closes."""
    with serving() as (_, client, server):
        watch = health_pb2_grpc.HealthStub(client._channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert next(watch).status == SERVING
        server.loop.call_soon_threadsafe(server.stopping.set)
        with pytest.raises(grpc.RpcError):
            list(watch)
    assert not asyncio.all_tasks(server.loop)


def test_health_follows_the_engine(monkeypatch):
    with serving() as (engine, client, server):
        seen = []
        watch = health_pb2_grpc.HealthStub(client._channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))

        def look():
            with contextlib.suppress(grpc.RpcError):  # cancelled at the end
                seen.extend(reply.status for reply in watch)

        threading.Thread(target=look, daemon=True).start()
        wait_for(lambda: seen == [SERVING])
        engine.state = "failed"
        wait_for(lambda: seen == [SERVING, NOT_SERVING])
        error = refused(client.generate, "x")
        assert error.code is grpc.StatusCode.UNAVAILABLE and "out of order after a failure" in error.message
        engine.state = "serving"
        wait_for(lambda: seen == [SERVING, NOT_SERVING, SERVING] and health(client) == SERVING)
        monkeypatch.setattr(server_module, "_STUCK_SECONDS", -1.0)
        wait_for(lambda: seen[3:] == [NOT_SERVING])
        watch.cancel()


def test_queue_full_says_when_to_try_again():
    with serving(max_batch=1, max_waiting=1) as (engine, client, _):
        engine.paused.set()
        running = [threading.Thread(target=answer, args=(client,), kwargs={"max_new_tokens": 1}) for _ in range(2)]
        for thread in running:
            thread.start()
        wait_for(lambda: client.cache_stats().waiting == 1)
        error = refused(client.generate, "x")
        assert (error.code, error.retry_after) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 1.0)
        engine.paused.clear()
        for thread in running:
            thread.join(10)
            assert not thread.is_alive()


def test_messages_that_are_none(caplog):
    with serving() as (_, client, _):
        call = client._channel.unary_stream(f"/{SERVICE}/Generate")
        for data in (b"\xff\xff\xff", b"\x12\x05\x0a", b"\x0a\x02\xff\xfe"):
            with pytest.raises(grpc.RpcError) as caught:
                list(call(data))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == "the message is not a valid protobuf of its type; see decoder.proto"
        with pytest.raises(grpc.RpcError) as caught:
            client._channel.unary_unary(f"/{SERVICE}/Tokenize")(b"\xff")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            client._channel.unary_unary(f"/{SERVICE}/Train")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert answer(client, max_new_tokens=3)[0] == "abc"
    assert not caplog.records or all(record.levelname != "ERROR" for record in caplog.records)


def test_message_above_the_limit():
    with serving() as (_, client, _):
        error = refused(client.generate, "x" * (17 * 2**20))
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in error.message
        assert answer(client, "x" * (15 * 2**20), max_new_tokens=1)[1].usage.prompt_tokens == 15 * 2**20


def test_engine_fault_reaches_those_in_flight():
    with serving() as (engine, client, _):
        stream = client.generate("x", max_new_tokens=10**6)
        next(stream)
        engine.fail("the engine failed: RuntimeError")
        with pytest.raises(RequestError, match="the engine failed: RuntimeError") as caught:
            list(stream)
        assert caught.value.code is grpc.StatusCode.INTERNAL
        assert answer(client, max_new_tokens=3)[0] == "abc"


def test_unforeseen_exception_is_logged_and_not_told(monkeypatch, caplog):
    with serving() as (engine, client, _):
        monkeypatch.setattr(engine, "submit", lambda *_: {}["secret"])
        error = refused(client.generate, "x")
        assert error.code is grpc.StatusCode.INTERNAL and "secret" not in error.message
        assert any(record.exc_info and "secret" in str(record.exc_info[1]) for record in caplog.records)


def test_client_that_goes_away_frees_the_request():
    with serving() as (engine, client, _):
        stream = client.generate("x", max_new_tokens=10**6, request_id="mine")
        next(stream)
        stream.close()
        wait_for(lambda: not engine.requests)
        # Its name is free at once, also while the engine has not seen the cancellation yet.
        engine.paused.set()
        message = generate_request("x", max_new_tokens=10**6, request_id="mine")
        for number in (1, 2):
            call = client._stub.Generate(message)
            wait_for(lambda: len(engine.requests) == number)
            call.cancel() if number == 1 else client.close()
            wait_for(lambda: [entry[3] for entry in engine.requests.values()] == ["abort"] * number)
        engine.paused.clear()
        wait_for(lambda: not engine.requests)


def test_a_name_is_taken_while_its_request_runs_and_abort_ends_it():
    with serving() as (engine, client, _):
        stream = client.generate("x", max_new_tokens=10**6, request_id="mine")
        assert next(stream).request_id == "mine"
        error = refused(client.generate, "y", request_id="mine")
        assert error.code is grpc.StatusCode.ALREADY_EXISTS and "'mine'" in error.message
        client.abort("somebody else's")
        client.abort("mine")
        *deltas, done = stream
        assert done.finish_reason == "abort" and done.stop_reason is None
        assert done.usage.completion_tokens == sum(len(delta.token_ids) for delta in deltas)
        assert answer(client, request_id="mine", max_new_tokens=3)[0] == "abc"


def test_client_that_does_not_read_loses_its_request_and_nobody_elses():
    # Without the probe a stream's window stays at 64 KiB; it may grow to 16 MiB otherwise.
    options = [("grpc.http2.bdp_probe", 0)]
    message = generate_request("x", max_new_tokens=10**6, sampling=Sampling(logprobs=20))
    with serving(b"a", num_logprobs=20, server={"stall_seconds": 0.3}) as (engine, client, server):
        with grpc.insecure_channel(client.address, options=options) as channel:
            stream = decoder_pb2_grpc.DecoderStub(channel).Generate(message)
            next(stream)
            wait_for(lambda: not engine.requests and not server._servicer.active, 20)
            with pytest.raises(grpc.RpcError) as caught:
                list(stream)
            assert caught.value.code() is grpc.StatusCode.ABORTED and "did not read" in caught.value.details()
        assert answer(client, max_new_tokens=300)[0] == "a" * 300
        assert engine.finished["abort"] == 1 and engine.finished["length"] == 1


def test_unread_tokens_are_bounded(monkeypatch):
    monkeypatch.setattr(servicer, "_MAX_UNREAD_TOKENS", 100)
    message = generate_request("x", max_new_tokens=10**6, sampling=Sampling(logprobs=20))
    with serving(b"a", num_logprobs=20) as (engine, client, server):
        with grpc.insecure_channel(client.address, options=[("grpc.http2.bdp_probe", 0)]) as channel:
            stream = decoder_pb2_grpc.DecoderStub(channel).Generate(message)
            next(stream)
            wait_for(lambda: not engine.requests, 20)
            with pytest.raises(grpc.RpcError) as caught:
                list(stream)
            assert caught.value.code() is grpc.StatusCode.ABORTED and "did not read" in caught.value.details()
        engine.step_seconds = 0.005  # who reads may have longer answers than that
        assert answer(client, max_new_tokens=150)[0] == "a" * 150


def test_stop_string_ends_the_request_in_the_engine_too():
    with serving(b"abc") as (engine, client, _):
        text, done = answer(client, max_new_tokens=10**6, sampling=Sampling(stop=("cab",)))
        assert (text, done.finish_reason, done.stop_reason) == ("ab", "stop", "cab")
        wait_for(lambda: engine.finished["abort"] == 1)


def test_tokens_after_a_stop_string_are_dropped():
    """They come together with those before it when the event loop is late."""
    with serving(b"abc") as (engine, client, server):
        engine.paused.set()
        call = client._stub.Generate(generate_request("x", max_new_tokens=300, sampling=Sampling(stop=("cab",))))
        wait_for(lambda: engine.requests)
        held = threading.Event()
        server.loop.call_soon_threadsafe(held.wait, 10)
        engine.paused.clear()
        wait_for(lambda: not engine.requests)
        held.set()
        _, *deltas, done = map(event_of, call)
        assert "".join(delta.text for delta in deltas) == "ab" and done.stop_reason == "cab"
        assert bytes(sum((delta.token_ids for delta in deltas), ())) == b"abcab"
        assert done.usage.completion_tokens == 5


def test_client_that_lags_gets_fewer_messages_and_all_tokens():
    with serving(b"abc") as (engine, client, server):
        hold = threading.Event()
        server.loop.call_soon_threadsafe(hold.wait, 10)  # the event loop does nothing meanwhile
        stream = client.generate("x", max_new_tokens=900)
        reader = []
        thread = threading.Thread(target=lambda: reader.extend(stream))
        thread.start()
        hold.set()
        wait_for(lambda: engine.requests)
        server.loop.call_soon_threadsafe(time.sleep, 0.5)
        thread.join(30)
        deltas = reader[1:-1]
        assert sum((delta.token_ids for delta in deltas), ()) == tuple(b"abc" * 300)
        assert max(len(delta.token_ids) for delta in deltas) > 50


def test_deadlines():
    with serving(max_batch=1) as (engine, client, _):
        start = time.monotonic()
        error = refused(client.generate, "x", max_new_tokens=10**6, timeout=0.3)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED and 0.2 < time.monotonic() - start < 5
        wait_for(lambda: not engine.requests)
        engine.paused.set()
        error = refused(client.generate, "x", timeout=0.2)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        engine.paused.clear()
        wait_for(lambda: not engine.requests)
        assert answer(client, max_new_tokens=3)[0] == "abc"


def test_server_has_a_deadline_of_its_own():
    with serving(server={"max_seconds": 0.2}) as (engine, client, _):
        start = time.monotonic()
        error = refused(client.generate, "x", max_new_tokens=10**6)
        assert time.monotonic() - start < 2.5
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "the deadline passed after" in error.message and "of 1000000 tokens" in error.message
        assert not engine.requests


def test_shutting_down_lets_requests_finish_and_refuses_new_ones():
    finished = []
    with serving(step_seconds=0.01, server={"grace": 20.0}) as (engine, client, server):
        with Client(client.address) as other:
            other.wait_until_ready(10)
            stream = client.generate("x", max_new_tokens=100)
            next(stream)
            reader = threading.Thread(target=lambda: finished.extend(stream))
            reader.start()
            server.loop.call_soon_threadsafe(server.stopping.set)
            wait_for(lambda: health(other) == NOT_SERVING)
            error = refused(other.generate, "y")
            assert error.code is grpc.StatusCode.UNAVAILABLE and "shutting down" in error.message
            reader.join(30)
    assert finished and finished[-1].finish_reason == "length" and finished[-1].usage.completion_tokens == 100


def test_shutting_down_ends_what_takes_too_long():
    with serving(server={"grace": 0.2}) as (engine, client, server):
        stream = client.generate("x", max_new_tokens=10**6)
        next(stream)
        server.loop.call_soon_threadsafe(server.stopping.set)
        with pytest.raises(RequestError, match="the server shut down before the answer was complete") as caught:
            list(stream)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert not engine.requests and engine.state == "stopped"


def test_port_in_use_and_addresses_of_other_machines():
    with running_server(None) as server:
        for field in ("port", "metrics_port"):
            config = {"port": 0, "metrics_port": None, field: server.port}
            with pytest.raises(UserError, match=f"Address already in use; choose another {field}"):
                start_and_stop(**config)
    with pytest.raises(UserError, match="cannot listen on 192.0.2.1:0"):
        start_and_stop(host="192.0.2.1")
    with pytest.raises(UserError, match="cannot listen on no-such-host.invalid:0"):
        start_and_stop(host="no-such-host.invalid")


def start_and_stop(**config):
    with running_server(None, **config):
        pass


class Wire:
    """A proxy between client and server that can be cut: no byte passes from then on, and nothing is closed."""

    def __init__(self, port):
        self._port, self.is_cut, self._sockets = port, threading.Event(), []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):  # closed at the end
            while True:
                ends = [self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._port))]
                self._sockets += ends
                for source, target in (ends, ends[::-1]):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source, target):
        with contextlib.suppress(OSError):
            while not self.is_cut.is_set():
                data = source.recv(65536)
                if self.is_cut.is_set():
                    return
                target.sendall(data)

    def close(self):
        for one in [self._listener, *self._sockets]:
            one.close()


def test_client_whose_machine_is_gone(monkeypatch):
    """Nobody closes the connection: the server's own pings are not answered."""
    pings = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 500}
    options = tuple((name, pings.get(name, value)) for name, value in server_module._OPTIONS)
    assert options != server_module._OPTIONS
    monkeypatch.setattr(server_module, "_OPTIONS", options)
    with serving(b"a") as (engine, client, server):
        wire = Wire(server.port)
        with contextlib.closing(wire), Client(wire.address) as gone:
            stream = gone.generate("x", max_new_tokens=10**6)
            next(stream)
            wire.is_cut.set()
            wait_for(lambda: not engine.requests and not server._servicer.active)
            assert engine.finished["abort"] == 1
        assert answer(client, max_new_tokens=3)[0] == "aaa"


def test_listens_on_ipv6():
    with running_server(None, host="::1") as server, Client(server.address) as client:
        assert server.address.startswith("[::1]:") and health(client) == NOT_SERVING


@pytest.mark.slow
def test_pings_every_ten_seconds_are_welcome():
    with serving() as (engine, client, _):
        engine.paused.set()
        options = [("grpc.keepalive_time_ms", 10_000), ("grpc.http2.max_pings_without_data", 0)]
        with grpc.insecure_channel(client.address, options=options) as channel:
            call = channel.unary_stream(f"/{SERVICE}/Generate")
            stream = call(b"\x12\x03\x0a\x01\x01")
            time.sleep(45)
            engine.paused.clear()
            assert len(list(stream)) > 2
