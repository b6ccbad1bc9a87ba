"""The start of the commands: what the server says about itself is true; and what they say where gRPC is missing."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

from serving import prefix_cache
from serving.client import Client, Sampling
from tests.checkpoints import tiny_checkpoint
from tests.serving import engine_harness

ROOT = pathlib.Path(__file__).parents[2]
INSTALL = 'in the folder of k3jax: pip install ".[serve]"'


def snapshot_bytes(checkpoint: pathlib.Path) -> int:
    """Of a sequence's KDA states and convolution tails in float32, from the checkpoint's own configuration."""
    config = json.loads((checkpoint / "config.json").read_text())
    config = config.get("text_config", config)
    linear = config["linear_attn_config"]
    heads, width, taps = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    return len(linear["kda_layers"]) * 4 * (heads * width * width + 3 * heads * width * (taps - 1))


def test_what_is_printed_is_true(tmp_path):
    checkpoint = tiny_checkpoint("kimi-linear-tiny")
    size, room = snapshot_bytes(checkpoint), 3
    flags = ["--checkpoint", str(checkpoint), "--dtype", "float32", "--port", "0", "--max-batch", "1",
             "--prefill-tokens", "128", "--context", "1024", "--cache-bytes", str(room * 2 * size)]
    errors = tmp_path / "errors"
    with open(errors, "w") as out:
        process = subprocess.Popen([sys.executable, "-m", "serving.server", *flags], cwd=ROOT, stderr=out)
    try:
        said = wait_for(errors, process, r"serving on (\S+)\n")
        unit, told_size, mib, told_room, shortest, policy = re.search(
            r"cache: match unit (\d+) tokens, (\d+) bytes \(([\d.]+) MiB\) a snapshot, room for (\d+) of them with a "
            r"page each, shortest cacheable prompt (\d+) tokens, policy (\w+)\n", errors.read_text()
        ).groups()
        with Client(said) as client:
            stats = client.cache_stats()
            assert int(told_size) == size == stats.snapshot_bytes and float(mib) == round(size / 2**20, 2)
            assert int(unit) == client.model_info().match_unit

            def cached(length, seed):
                *_, done = client.generate(
                    engine_harness.prompt(length, seed=seed).tolist(), max_new_tokens=1, ignore_eos=True,
                    sampling=Sampling(temperature=0.0),
                )
                return done.usage.cached_tokens

            shortest = int(shortest)
            assert [cached(shortest - 1, 1) for _ in range(2)] == [0, 0] and client.cache_stats().snapshots == 0
            assert [cached(shortest, 2) for _ in range(2)] == [0, int(unit)]
            for seed in range(3, 3 + int(told_room) + 2):
                cached(shortest, seed)
            assert client.cache_stats().snapshots == int(told_room)
            assert int(told_room) == room * 2 * size // (size + stats.page_bytes)
        assert getattr(prefix_cache, policy) is prefix_cache.LearnedReuse
    finally:
        process.terminate()
    assert process.wait(60) == 0


def wait_for(file: pathlib.Path, process: subprocess.Popen, pattern: str) -> str:
    end = time.monotonic() + 300
    while not (found := re.search(pattern, file.read_text())):
        assert process.poll() is None and time.monotonic() < end, file.read_text()
        time.sleep(0.05)
    return found[1]


def run(folder: pathlib.Path, setup: str, *command: str) -> subprocess.CompletedProcess:
    """A command in a Python that runs this first."""
    (folder / "sitecustomize.py").write_text(setup)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
        stdin=subprocess.DEVNULL,
    )


def without(*modules: str) -> str:
    """As if these were not installed."""
    return f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {modules!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


NONE = without("grpc", "google.protobuf", "grpc_health", "grpc_reflection", "prometheus_client")


@pytest.mark.parametrize("command", ["server", "client", "demo"])
@pytest.mark.parametrize("flags", [[], ["--help"]], ids=["plain", "help"])
def test_without_the_extra_a_command_says_what_is_missing(tmp_path, command, flags):
    done = run(tmp_path, NONE, "-m", f"serving.{command}", *flags)
    packages = "grpcio, protobuf, grpcio-health-checking"
    if command != "client":
        packages += ", grpcio-reflection, prometheus-client"
    expected = f"k3jax: error: the service needs {packages}; install what is missing {INSTALL}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_the_client_does_not_need_what_only_the_server_does(tmp_path):
    setup = without("grpc_reflection", "prometheus_client")
    done = run(tmp_path, setup, "-m", "serving.server", "--checkpoint", "demo")
    assert done.returncode == 2
    assert done.stderr.startswith("k3jax: error: the service needs grpcio-reflection, prometheus-client; install")
    done = run(tmp_path, setup, "-m", "serving.client", "--address", "127.0.0.1:1", "--stats")
    assert done.returncode == 2 and done.stderr.startswith("k3jax: error: cannot reach a server at 127.0.0.1:1")


def test_packages_that_are_too_old(tmp_path):
    done = run(tmp_path, "import grpc\ngrpc.__version__ = '1.60.0'\n", "-m", "serving.client", "--stats")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("k3jax: error: gRPC or protobuf is too old (") and INSTALL in done.stderr
    assert "1.60.0" in done.stderr


def test_the_library_needs_no_grpc_and_says_so_where_it_does(tmp_path):
    code = (
        "import serving.client, serving.engine.config, serving.prefix_cache\n"
        "try:\n    serving.client.Client\nexcept ModuleNotFoundError as error:\n    print(error.name)\n"
        "try:\n    serving.client.Clients\nexcept AttributeError as error:\n    print(error)\n"
    )
    done = run(tmp_path, NONE, "-c", code)
    assert done.stdout == "grpc\nmodule 'serving.client' has no attribute 'Clients'\n", done.stderr


def test_public_names_of_the_client_resolve():
    from serving import client

    assert all(getattr(client, name) is not None and name in dir(client) for name in client.__all__)
