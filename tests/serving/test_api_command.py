"""The commands as processes: start, stop, signals, mistakes; and every flag."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.client import Client, RequestError
from serving.client.command import main as client_main
from serving.client.events import event_of
from serving.client.request import generate_request
from serving.engine.config import EngineConfig
from serving.server.command import main as server_main
from serving.server.config import ServerConfig
from tests.checkpoints import tiny_checkpoint
from tests.serving.engine_harness import prompt

ROOT = pathlib.Path(__file__).parents[2]
SMALL = ["--max-batch", "2", "--prefill-tokens", "128", "--context", "2048", "--cache-bytes", "50000000"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of a child process, with a compilation cache of these tests' own, so that only the first server compiles."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "JAX_PLATFORMS": "cpu"}


class Process:
    """A server process; `lines` is what it says on standard error."""

    def __init__(self, environment, *flags, module="serving.server"):
        self.child = subprocess.Popen(
            [sys.executable, "-m", module, "--port", "0", *flags], cwd=ROOT, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        self.lines = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.child.stderr), daemon=True)
        self._reader.start()

    def said(self, pattern: str) -> re.Match:
        """Waits for a line."""
        end = time.monotonic() + 300
        while True:
            for line in list(self.lines):
                if found := re.search(pattern, line):
                    return found
            assert self.child.poll() is None or self._reader.is_alive(), "".join(self.lines)
            assert time.monotonic() < end, "".join(self.lines)
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    def ended(self) -> int:
        code = self.child.wait(60)
        self._reader.join(10)
        assert self.child.stdout.read() == ""
        # Tracebacks are in the log's lines only.
        assert "Traceback" not in "".join(line for line in self.lines if not line.startswith("{"))
        return code


@contextlib.contextmanager
def process(environment, *flags, **options):
    server = Process(environment, *flags, **options)
    try:
        yield server
    finally:
        server.child.kill()
        server.child.wait()


@contextlib.contextmanager
def serving(environment, *flags, **options):
    """A ready server process, and a client of it."""
    checkpoint = str(tiny_checkpoint("k3-tiny"))
    with process(environment, "--checkpoint", checkpoint, *SMALL, *flags, **options) as server:
        with Client(server.said(r"serving on (\S+)")[1]) as client:
            yield server, client


def endless(client, **options):
    """A stream that has begun, of an answer that takes seconds at least."""
    stream = client.generate("x", max_new_tokens=2000, ignore_eos=True, **options)
    next(stream)
    return stream


def full_flight(client, new) -> list:
    """Six requests, of which the first two run and the others wait: sent, not read."""
    calls, end = [], time.monotonic() + 30
    for running, waiting in ((2, 0), (2, 4)):
        while len(calls) < running + waiting:
            message = generate_request(f"number {len(calls)}", max_new_tokens=new, ignore_eos=True)
            calls.append(client._stub.Generate(message))
        while (stats := client.cache_stats()).running < running or stats.waiting < waiting:
            assert time.monotonic() < end
            time.sleep(0.005)
    return calls


def fate(call) -> tuple:
    """(tokens, how it ended, what was said)."""
    tokens = 0
    try:
        for message in call:
            event = event_of(message)
            tokens += len(getattr(event, "token_ids", ()))
    except grpc.RpcError as error:
        return tokens, error.code(), error.details()
    return tokens, event.finish_reason, None


def test_a_strangers_session(environment):
    with serving(environment, "--metrics-port", "0") as (server, client):
        address = client.address
        assert server.said(r"listening on (\S+)")[1] == address and address.startswith("127.0.0.1:")
        server.said(r"metrics on http://127.0.0.1:\d+/metrics")
        said = server.said(
            r"cache: match unit 128 tokens, \d+ bytes \(([\d.]+) MiB\) a snapshot, room for (\d+) of them with a page "
            r"each, shortest cacheable prompt 129 tokens, policy LearnedReuse"
        )
        stats = client.cache_stats()
        assert float(said[1]) == pytest.approx(stats.snapshot_bytes / 2**20, abs=0.01)
        assert int(said[2]) == min(50_000_000 // (stats.snapshot_bytes + stats.page_bytes), stats.pages)
        server.said(r"model .*: \d+ layers, bfloat16, context of 2048 tokens, 2 requests at once")

        def ask(*flags):
            return subprocess.run(
                [sys.executable, "-m", "serving.client", "--address", address, *flags], cwd=ROOT, env=environment,
                capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
            )

        prompt = ["--prompt", "Once upon a time " * 60, "--max-new-tokens", "5", "--temperature", "0", "--ignore-eos"]
        cold, warm = ask(*prompt), ask(*prompt)
        assert (cold.returncode, warm.returncode) == (0, 0), cold.stderr
        statistics = (
            r"k3jax: (\d+) prompt tokens, (\d+) of them cached; 5 new ones, the first after [\d.]+ s, "
            r"then [\d.]+ tok/s; finished by length\n"
        )
        told = [re.fullmatch(statistics, done.stderr) for done in (cold, warm)]
        assert all(told), (cold.stderr, warm.stderr)
        tokens = int(told[0][1])
        assert (int(told[0][2]), int(told[1][2])) == (0, (tokens - 1) // 128 * 128) and int(told[1][2]) > 0
        assert cold.stdout == warm.stdout and cold.stdout.endswith("\n")
        assert json.loads(ask("--stats").stdout)["hit_tokens"] == int(told[1][2])
        assert json.loads(ask("--info").stdout)["context"] == 2048
        assert ask("--reset-cache").returncode == 0
        drawn = ask("--prompt-ids", "1,2,3", "--seed", "4", "--max-new-tokens", "2", "--stop-ids", "7")
        assert "seed 4, finished by" in drawn.stderr
        refused = ask("--prompt-ids", "1,2,1000000")
        assert refused.returncode == 2 and refused.stdout == ""
        assert re.fullmatch(r"k3jax: error: token id 1000000 is outside .* \(INVALID_ARGUMENT\)\n", refused.stderr)

        busy = subprocess.run(
            [sys.executable, "-m", "serving.server", "--port", address.rpartition(":")[2]], cwd=ROOT, env=environment,
            capture_output=True, text=True, timeout=60,
        )
        assert busy.returncode == 2
        assert busy.stderr == f"k3jax: error: cannot listen on {address}: Address already in use; choose another port\n"
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        events = [json.loads(line) for line in server.lines if line.startswith("{")]
        requests = [event for event in events if event["event"] == "request"]
        assert [request["outcome"] for request in requests][:2] == ["length", "length"]
        assert requests[1]["cached_tokens"] == int(told[1][2]) and requests[1]["completion_tokens"] == 5
        assert [event["serving"] for event in events if event["event"] == "health"] == [False, True]


def test_sigterm_lets_requests_finish_then_ends_the_rest(environment):
    """In full flight: those that wait are finished too, or told."""
    with serving(environment, "--grace", "30") as (server, client):
        calls = full_flight(client, 400)
        server.signal(signal.SIGTERM)
        server.said("shutting down; requests have 30 s to finish")
        with pytest.raises(RequestError) as caught:
            list(client.generate("y"))
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert list(map(fate, calls)) == [(400, "length", None)] * 6
        assert server.ended() == 0
    with serving(environment, "--grace", "0.1") as (server, client):
        calls = full_flight(client, 2000)
        server.signal(signal.SIGINT)
        tokens, codes, details = zip(*map(fate, calls))
        assert max(tokens) < 2000 and tokens[2:] == (0,) * 4
        assert set(codes) == {grpc.StatusCode.UNAVAILABLE}
        assert set(details) == {"the server shut down before the answer was complete"}
        assert server.ended() == 0


def test_a_failing_engine_begins_anew_once(environment):
    """Those in flight are told, those who wait go on, the cache is empty; a second failure within a minute is final."""
    with serving(environment, module="tests.serving.failing_server") as (server, client):
        ids = prompt(300).tolist()

        def cached():
            *_, done = client.generate(ids, max_new_tokens=1, ignore_eos=True)
            return done.usage.cached_tokens

        assert [cached() for _ in range(2)] == [0, 256]
        seen = []
        watch = health_pb2_grpc.HealthStub(client._channel).Watch(health_pb2.HealthCheckRequest())
        threading.Thread(target=lambda: _collect(watch, seen), daemon=True).start()
        calls = full_flight(client, 1000)
        server.signal(signal.SIGUSR1)
        fates = list(map(fate, calls[:2]))
        for tokens, code, details in fates:
            assert tokens < 1000 and code is grpc.StatusCode.INTERNAL
            assert details.startswith("the engine failed: RuntimeError: ") and "Traceback" not in details
        for call in calls[4:]:
            call.cancel()
        assert list(map(fate, calls[2:4])) == [(1000, "length", None)] * 2
        assert [cached() for _ in range(2)] == [0, 256]
        statuses = health_pb2.HealthCheckResponse
        assert seen == [statuses.SERVING, statuses.NOT_SERVING, statuses.SERVING]
        watch.cancel()
        last = endless(client)
        server.signal(signal.SIGUSR1)
        with pytest.raises(RequestError, match="the engine failed") as caught:
            list(last)
        assert caught.value.code is grpc.StatusCode.INTERNAL
        assert server.ended() == 1
        assert server.lines[-1].startswith("k3jax: error: the engine failed: RuntimeError: ")


def _collect(watch, seen) -> None:
    with contextlib.suppress(grpc.RpcError):  # cancelled at the end
        seen.extend(response.status for response in watch)


def test_a_second_signal_ends_at_once(environment):
    with serving(environment, "--grace", "600") as (server, client):
        stream = endless(client)
        server.signal(signal.SIGINT)
        server.said("shutting down")
        server.signal(signal.SIGINT)
        assert server.ended() == 128 + signal.SIGINT
        with pytest.raises(RequestError):
            list(stream)


def test_a_signal_while_weights_are_loaded(environment):
    with process(environment, "--checkpoint", "demo") as server:
        server.said("listening on")
        server.signal(signal.SIGTERM)
        assert server.ended() == 0


def test_a_failure_to_load_is_a_mistake(environment):
    flags = ["--num-pages", "2", "--context", "1024"]
    with process(environment, "--checkpoint", str(tiny_checkpoint("k3-tiny")), *flags) as server:
        assert server.ended() == 2
        assert server.lines[-1].startswith("k3jax: error: context is 1024, but 2 pages hold 256 tokens")


def test_a_client_that_is_interrupted_or_killed_frees_its_request(environment):
    with serving(environment) as (server, client):
        arguments = ["--address", client.address, "--prompt", "x", "--max-new-tokens", "2000", "--ignore-eos"]
        # A job in the background, as these tests may be, is started with SIGINT ignored, and so are its children.
        start = (
            "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "runpy.run_module('serving.client', run_name='__main__', alter_sys=True)"
        )
        for number, code, message in (
            (signal.SIGINT, 130, b"k3jax: interrupted\n"), (signal.SIGKILL, -signal.SIGKILL, b"")
        ):
            child = subprocess.Popen(
                [sys.executable, "-c", start, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            child.stdout.read(1)
            assert client.cache_stats().running == 1
            child.send_signal(number)
            _, errors = child.communicate(timeout=60)
            assert (child.returncode, errors) == (code, message)
            end = time.monotonic() + 10
            while client.cache_stats().running:
                assert time.monotonic() < end
                time.sleep(0.01)
        _, delta, _ = client.generate("y", max_new_tokens=1, ignore_eos=True)
        assert len(delta.token_ids) == 1


SERVER_MISTAKES = {
    "no checkpoint": (["--checkpoint", "nowhere"], "no checkpoint 'nowhere'"),
    "port": (["--port", "65536"], "port is 65536, expected 0 to 65535"),
    "port not a number": (["--port", "http"], "--port: 'http' is not a whole number"),
    "metrics port": (["--metrics-port=-1"], "metrics_port is -1, expected 0 to 65535"),
    "host": (["--host", ""], "host is '', expected an address"),
    "grace": (["--grace=-1"], "grace is -1.0, expected seconds, 0 or more"),
    "endless grace": (["--grace", "inf"], "grace is inf, expected seconds, 0 or more"),
    "stall": (["--stall-seconds", "0"], "stall_seconds is 0.0, expected seconds above 0"),
    "seconds": (["--max-seconds", "nan"], "max_seconds is nan, expected seconds above 0"),
    "batch": (["--max-batch", "0"], "max_batch is 0, expected at least 1"),
    "prefill": (["--prefill-tokens", "100"], "prefill_tokens is 100, expected a positive multiple of 128"),
    "dtype": (["--dtype", "float16"], "--dtype: invalid choice: 'float16'"),
    "logprobs": (["--num-logprobs", "21"], "num_logprobs is 21, expected between 0 and 20"),
    "unknown": (["--workers", "3"], "--workers"),
}


@pytest.mark.parametrize("arguments, message", SERVER_MISTAKES.values(), ids=SERVER_MISTAKES)
def test_mistakes_of_the_server_give_one_line(arguments, message, capsys):
    assert server_main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("k3jax: error: ") and message in err


CLIENT_MISTAKES = {
    "unreachable": (["--address", "127.0.0.1:1", "--prompt", "x"], "cannot reach a server at 127.0.0.1:1"),
    "unknown host": (["--address", "no-such-host.invalid:1", "--stats"], "cannot reach a server at no-such-host.inv"),
    "no port": (["--address", "127.0.0.1", "--prompt", "x"], "address is '127.0.0.1', expected HOST:PORT"),
    "port": (["--address", "127.0.0.1:99999", "--prompt", "x"], "expected HOST:PORT"),
    "bare IPv6": (["--address", "::1:50051", "--prompt", "x"], "expected HOST:PORT"),
    "URL": (["--address", "http://127.0.0.1:50051", "--prompt", "x"], "expected HOST:PORT"),
    "no prompt": (["--address", "127.0.0.1:1"], "no prompt; give --prompt"),
    "empty prompt": (["--prompt", ""], "the prompt is empty"),
    "limit": (["--prompt", "x", "--max-new-tokens", "0"], "'0' is not a whole number of at least 1"),
    "id too large for a message": (["--prompt-ids", str(2**40)], "the request cannot be sent"),
    "prompt and stats": (["--prompt", "x", "--stats", "--info"], "not allowed with argument"),
}


@pytest.mark.parametrize("arguments, message", CLIENT_MISTAKES.values(), ids=CLIENT_MISTAKES)
def test_mistakes_of_the_client_give_one_line(arguments, message, capsys, monkeypatch):
    with open(os.devnull) as null:
        monkeypatch.setattr(sys, "stdin", null)
        assert client_main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("k3jax: error: ") and message in err


def test_jax_is_not_imported_before_a_mistake_is_found():
    code = "import sys; from serving.server.command import main; print(main(sys.argv[1:]), 'jax' in sys.modules)"
    for flags in (["--port", "70000"], ["--checkpoint", "nowhere"]):
        command = [sys.executable, "-c", code, *flags]
        assert subprocess.check_output(command, cwd=ROOT, text=True, timeout=60) == "2 False\n"


def test_every_setting_is_a_flag_and_the_engines_are_among_them(capsys):
    with pytest.raises(SystemExit):
        server_main(["--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(ServerConfig):
        assert "--" + field.name.replace("_", "-") in text
        assert field.metadata["help"]
    for field in dataclasses.fields(EngineConfig):
        assert getattr(ServerConfig(), field.name) == field.default
    config = ServerConfig(max_batch=3, cache=False, deterministic=True, num_pages=9)
    assert config.engine() == EngineConfig(max_batch=3, cache=False, deterministic=True, num_pages=9)
