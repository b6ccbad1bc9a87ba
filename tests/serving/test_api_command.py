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

from serving.client import Client, RequestError
from serving.client.command import main as client_main
from serving.engine.config import EngineConfig
from serving.server.command import main as server_main
from serving.server.config import ServerConfig
from tests.checkpoints import tiny_checkpoint

ROOT = pathlib.Path(__file__).parents[2]
SMALL = ["--max-batch", "1", "--prefill-tokens", "128", "--context", "2048", "--cache-bytes", "50000000"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of a child process, with a compilation cache of these tests' own, so that only the first server compiles."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "JAX_PLATFORMS": "cpu"}


class Process:
    """A server process; `lines` is what it says on standard error."""

    def __init__(self, environment, *flags):
        self.child = subprocess.Popen(
            [sys.executable, "-m", "serving.server", "--port", "0", *flags], cwd=ROOT, env=environment,
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
        assert self.child.stdout.read() == "" and "Traceback" not in "".join(self.lines)
        return code


@contextlib.contextmanager
def process(environment, *flags):
    server = Process(environment, *flags)
    try:
        yield server
    finally:
        server.child.kill()
        server.child.wait()


@contextlib.contextmanager
def serving(environment, *flags):
    """A ready server process, and a client of it."""
    with process(environment, "--checkpoint", str(tiny_checkpoint("k3-tiny")), *SMALL, *flags) as server:
        with Client(server.said(r"serving on (\S+)")[1]) as client:
            yield server, client


def endless(client, **options):
    """A stream that has begun, of an answer that takes seconds at least."""
    stream = client.generate("x", max_new_tokens=2000, ignore_eos=True, **options)
    next(stream)
    return stream


def test_a_strangers_session(environment):
    with serving(environment, "--metrics-port", "0") as (server, client):
        address = client.address
        assert server.said(r"listening on (\S+)")[1] == address and address.startswith("127.0.0.1:")
        server.said(r"metrics on http://127.0.0.1:\d+/metrics")
        said = server.said(
            r"cache: match unit 128 tokens, ([\d.]+) MiB a snapshot, room for (\d+) of them with a page each, shortest "
            r"cacheable prompt 129 tokens, policy learned reuse"
        )
        stats = client.cache_stats()
        assert float(said[1]) == pytest.approx(stats.snapshot_bytes / 2**20, abs=0.01)
        assert int(said[2]) == 50_000_000 // (stats.snapshot_bytes + stats.page_bytes)
        server.said(r"model .*: \d+ layers, bfloat16, context of 2048 tokens, 1 requests at once")

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
    with serving(environment, "--grace", "30") as (server, client):
        stream = endless(client)
        server.signal(signal.SIGTERM)
        server.said("shutting down; requests have 30 s to finish")
        with pytest.raises(RequestError) as caught:
            list(client.generate("y"))
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        *deltas, done = stream
        assert done.finish_reason == "length" and sum(len(delta.token_ids) for delta in deltas) == 2000
        assert server.ended() == 0
    with serving(environment, "--grace", "0.1") as (server, client):
        stream = endless(client)
        server.signal(signal.SIGINT)
        with pytest.raises(RequestError, match="the server shut down before the answer was complete") as caught:
            list(stream)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert server.ended() == 0


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


def test_ctrl_c_ends_the_client_and_frees_its_request(environment):
    with serving(environment) as (server, client):
        arguments = ["--address", client.address, "--prompt", "x", "--max-new-tokens", "2000", "--ignore-eos"]
        # A job in the background, as these tests may be, is started with SIGINT ignored, and so are its children.
        start = (
            "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "runpy.run_module('serving.client', run_name='__main__', alter_sys=True)"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", start, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
        assert child.returncode == 130 and errors == b"k3jax: interrupted\n"
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
