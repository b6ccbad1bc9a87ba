"""Reports of long work, and accounts of memory."""

import io
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax import memory
from k3jax.errors import UserError
from k3jax.progress import human_tokens, reporting, waiting


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("k3jax.progress.time", clock)
    return clock


def run(clock, stream, total: int, steps: int, seconds: float, **options) -> None:
    with reporting(True, total, "loading", stream=stream, **options) as advance:
        for _ in range(steps):
            clock.now += seconds / steps
            advance(total // steps)


def test_short_work_is_silent(clock):
    stream = io.StringIO()
    run(clock, stream, 1000, 10, seconds=1.9)
    assert stream.getvalue() == ""


def test_lines_say_bytes_rate_and_time_left(clock):
    stream = io.StringIO()
    run(clock, stream, 1_000_000_000, 100, seconds=20)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading: 100 MB of 1 GB, 50 MB/s, 18 s left"
    assert lines[-1] == "loading: 1 GB in 20 s, 50 MB/s"
    assert 4 <= len(lines) <= 6, "one line in five seconds"


def test_failed_work_is_not_reported_as_done(clock):
    stream = io.StringIO()
    with pytest.raises(KeyError), reporting(True, 10, "loading", stream=stream) as advance:
        clock.now += 3
        advance(1)
        raise KeyError
    assert len(stream.getvalue().splitlines()) == 1


def test_tokens_are_counted_as_such(clock):
    stream = io.StringIO()
    run(clock, stream, 10_000, 4, seconds=20, say=human_tokens)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading: 2,500 tokens of 10,000 tokens, 500 tokens/s, 15 s left"
    assert lines[-1] == "loading: 10,000 tokens in 20 s, 500 tokens/s"


def test_nothing_is_said_unasked(clock):
    stream = io.StringIO()
    with reporting(False, 10, "loading", stream=stream) as advance, waiting(False, "compiling", stream):
        clock.now += 100
        advance(10)
    assert stream.getvalue() == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal(clock):
    stream = Terminal()
    run(clock, stream, 1_000_000, 10, seconds=1)
    assert stream.getvalue() == ""
    run(clock, stream, 1_000_000, 10, seconds=4)
    assert "loading" in stream.getvalue() and "1 MB of 1 MB, 250 kB/s" in stream.getvalue()


@pytest.fixture
def short_patience(monkeypatch):
    monkeypatch.setattr("k3jax.progress.QUIET_SECONDS", 0.05)


def wait_for(stream, text: str) -> None:
    """Until the other thread has written it; ten seconds at most."""
    end = time.monotonic() + 10
    while text not in stream.getvalue() and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["log", "terminal"])
def test_waiting_is_shown_while_it_lasts(stream, short_patience):
    with pytest.raises(KeyError), waiting(True, "compiling", stream):
        wait_for(stream, "compiling")
        assert "compiling" in stream.getvalue()
        raise KeyError
    if not stream.isatty():
        assert stream.getvalue() == "compiling ...\ncompiling: 0 s\n"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["log", "terminal"])
def test_a_short_wait_is_silent(stream):
    with waiting(True, "compiling", stream):
        pass
    assert stream.getvalue() == ""
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (999_600, "1 MB"), (1_560_860_324_864, "1.56 TB")]
)
def test_human_bytes(count, text):
    assert memory.human_bytes(count) == text


def test_required_bytes_counts_a_shard_of_what_is_spread():
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    spread = NamedSharding(mesh, PartitionSpec("tensor"))
    whole, part = jax.ShapeDtypeStruct((3, 5), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.float32, sharding=spread)
    assert memory.required_bytes({"whole": whole, "part": part}) == 30 + 16


def test_room(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2_000_000)
    memory.check_fits(2_000_000, "the weights")
    memory.check_fits(4_000_000, "the weights", jax.devices() * 2)
    with pytest.raises(UserError) as error:
        memory.check_fits(2_100_000, "the weights")
    assert "the weights: 2.1 MB needed" in str(error.value) and "2 MB free" in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_room_is_enough(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)
    memory.check_fits(10**18, "the weights")


def test_peaks_follow_allocation():
    before = memory.peak_rss_bytes()
    block = np.ones(before, np.uint8)
    assert before < memory.peak_rss_bytes() < before + 2 * block.nbytes
    assert memory.peak_memory_bytes() >= memory.peak_rss_bytes()
    assert memory.available_bytes(jax.devices("cpu")[0]) > 0
