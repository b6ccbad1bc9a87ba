"""Progress of long work on a stream: drawn on a terminal, plain lines elsewhere, nothing for short work."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from k3jax.memory import human_bytes

QUIET_SECONDS = 2.0
"""Work that takes less is not worth a report."""

LINE_SECONDS = 5.0
"""Between two plain lines."""


def human_tokens(count: float) -> str:
    """A number of tokens, such as "1,024 tokens"."""
    return f"{count:,.0f} tokens"


@contextlib.contextmanager
def reporting(wanted: bool, total: int, label: str, say: Callable[[float], str] = human_bytes,
              stream: TextIO | None = None) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with each amount of work that is done.

    Args:
      wanted: without it nothing is reported.
      total: how much there is to do.
      label: what is being done, such as "loading weights".
      say: an amount in words.
      stream: None is standard error.
    """
    if not wanted:
        yield lambda count: None
        return
    stream = sys.stderr if stream is None else stream
    with (_BarProgress if stream.isatty() else _LineProgress)(total, label, say, stream) as report:
        yield report.advance


@contextlib.contextmanager
def waiting(wanted: bool, label: str, stream: TextIO | None = None) -> Iterator[None]:
    """Says that something is going on whose end nobody can foresee.

    Args:
      wanted: without it nothing is reported.
      label: what is going on, such as "compiling".
      stream: None is standard error.
    """
    if not wanted:
        yield
        return
    stream = sys.stderr if stream is None else stream
    notice = (_Spinner if stream.isatty() else _LineNotice)(label, stream)
    timer = threading.Timer(QUIET_SECONDS, notice.begin)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        notice.end()


class _LineProgress:
    """Plain lines, for logs."""

    def __init__(self, total: int, label: str, say: Callable[[float], str], stream: TextIO):
        self._total, self._label, self._say, self._stream = total, label, say, stream
        self._done, self._last_line = 0, None

    def __enter__(self) -> "_LineProgress":
        self._start = time.monotonic()
        return self

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        due = self._start + QUIET_SECONDS if self._last_line is None else self._last_line + LINE_SECONDS
        if now < due:
            return
        self._last_line = now
        rate = self._done / (now - self._start)
        left = max(0, self._total - self._done) / rate if rate else 0
        self._write(f"{self._say(self._done)} of {self._say(self._total)}, {self._say(rate)}/s, {_duration(left)} left")

    def __exit__(self, error: Any, *_: Any) -> None:
        if error is None and self._last_line is not None:
            seconds = time.monotonic() - self._start
            self._write(f"{self._say(self._done)} in {_duration(seconds)}, {self._say(self._done / seconds)}/s")

    def _write(self, text: str) -> None:
        print(f"{self._label}: {text}", file=self._stream, flush=True)


class _BarProgress:
    """A bar, drawn from the moment on when the work proves to be long."""

    def __init__(self, total: int, label: str, say: Callable[[float], str], stream: TextIO):
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"), TimeRemainingColumn(),
            console=Console(file=stream),
        )
        self._task = self._bar.add_task(label, total=total, done="")
        self._total, self._say = total, say
        self._done, self._drawn = 0, False

    def __enter__(self) -> "_BarProgress":
        self._start = time.monotonic()
        return self

    def advance(self, count: int) -> None:
        self._done += count
        seconds = time.monotonic() - self._start
        rate = f", {self._say(self._done / seconds)}/s" if seconds else ""
        done = f"{self._say(self._done)} of {self._say(self._total)}{rate}"
        self._bar.update(self._task, advance=count, done=done)
        if not self._drawn and seconds >= QUIET_SECONDS:
            self._drawn = True
            self._bar.start()

    def __exit__(self, *_: Any) -> None:
        if self._drawn:
            self._bar.stop()


class _LineNotice:
    """A line when the work proves to be long, and one at its end."""

    def __init__(self, label: str, stream: TextIO):
        self._label, self._stream, self._start = label, stream, time.monotonic()
        self._begun = False

    def begin(self) -> None:
        self._begun = True
        print(f"{self._label} ...", file=self._stream, flush=True)

    def end(self) -> None:
        if self._begun:
            print(f"{self._label}: {_duration(time.monotonic() - self._start)}", file=self._stream, flush=True)


class _Spinner:
    """Something that turns, and the time so far, for as long as the work lasts."""

    def __init__(self, label: str, stream: TextIO):
        self._spinner = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
            console=Console(file=stream), transient=True,
        )
        self._spinner.add_task(label, total=None)
        self._begun = False

    def begin(self) -> None:
        self._begun = True
        self._spinner.start()

    def end(self) -> None:
        if self._begun:
            self._spinner.stop()


def _duration(seconds: float) -> str:
    """Seconds in words, such as "1 min 5 s"."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
