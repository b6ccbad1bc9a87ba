"""Progress of long work on a stream: a bar on a terminal, plain lines elsewhere, nothing for short work."""

import sys
import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from k3jax.memory import human_bytes

QUIET_SECONDS = 2.0
"""Work that takes less is not worth a report."""

LINE_SECONDS = 5.0
"""Between two plain lines."""


def progress(total_bytes: int, label: str, stream: TextIO | None = None) -> "_BarProgress | _LineProgress":
    """A context manager with `advance(bytes)` for work on a known number of bytes.

    Args:
      total_bytes: how much there is to do.
      label: what is being done, such as "loading weights".
      stream: None is standard error.
    """
    stream = sys.stderr if stream is None else stream
    return (_BarProgress if stream.isatty() else _LineProgress)(total_bytes, label, stream)


class _LineProgress:
    """Plain lines, for logs."""

    def __init__(self, total_bytes: int, label: str, stream: TextIO):
        self._total, self._label, self._stream = total_bytes, label, stream
        self._done, self._last_line = 0, None

    def __enter__(self) -> "_LineProgress":
        self._start = time.monotonic()
        return self

    def advance(self, count: int) -> None:
        """Reports `count` more bytes as done."""
        self._done += count
        now = time.monotonic()
        due = self._start + QUIET_SECONDS if self._last_line is None else self._last_line + LINE_SECONDS
        if now < due:
            return
        self._last_line = now
        rate = self._done / (now - self._start)
        left = max(0, self._total - self._done) / rate if rate else 0
        self._write(
            f"{human_bytes(self._done)} of {human_bytes(self._total)}, {human_bytes(rate)}/s, {_duration(left)} left"
        )

    def __exit__(self, error: Any, *_: Any) -> None:
        if error is None and self._last_line is not None:
            seconds = time.monotonic() - self._start
            rate = self._done / seconds
            self._write(f"{human_bytes(self._done)} in {_duration(seconds)}, {human_bytes(rate)}/s")

    def _write(self, text: str) -> None:
        print(f"{self._label}: {text}", file=self._stream, flush=True)


class _BarProgress:
    """A bar, drawn from the moment on when the work proves to be long."""

    def __init__(self, total_bytes: int, label: str, stream: TextIO):
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
        )
        self._task = self._bar.add_task(label, total=total_bytes)
        self._drawn = False

    def __enter__(self) -> "_BarProgress":
        self._start = time.monotonic()
        return self

    def advance(self, count: int) -> None:
        """Reports `count` more bytes as done."""
        self._bar.advance(self._task, count)
        if not self._drawn and time.monotonic() - self._start >= QUIET_SECONDS:
            self._drawn = True
            self._bar.start()

    def __exit__(self, *_: Any) -> None:
        if self._drawn:
            self._bar.stop()


def _duration(seconds: float) -> str:
    """Seconds in words, such as "1 min 5 s"."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
