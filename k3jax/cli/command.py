"""What the commands share: how they read numbers, report mistakes and end."""

import argparse
import functools
import os
import sys
import warnings
from collections.abc import Callable

from k3jax.errors import UserError

OK, USER_MISTAKE, INTERRUPTED, BROKEN_PIPE = 0, 2, 130, 141


class Parser(argparse.ArgumentParser):
    """Reports a mistake as every other one: in one line."""

    def error(self, message: str):
        raise UserError(f"{message} (see --help)")


def whole(least: int) -> Callable[[str], int]:
    """Reads whole numbers of at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return parse


def token_ids(text: str) -> list[int]:
    """Reads `1,2,3`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def number(text: str) -> float:
    """Reads a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def say(message: str) -> None:
    """One line on standard error."""
    print(f"k3jax: {message}", file=sys.stderr, flush=True)


def print_text(text: str) -> None:
    """A piece of a model's text on standard output, without a line break."""
    if sys.stdout.isatty():
        text = text.translate(_VISIBLE_CONTROLS)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)


# Model output must not steer the user's terminal: control characters become their pictures, C1 ones U+FFFD.
_VISIBLE_CONTROLS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x7F, 0xA0), 0xFFFD),
}


def run(command: Callable[[], int], interrupted: str) -> int:
    """Runs a command; returns its exit code.

    Args:
      command: returns its exit code. A `UserError`, each different warning and Ctrl-C are reported in one line.
      interrupted: what to say when Ctrl-C ended it.
    """
    try:
        with warnings.catch_warnings():
            # A configuration may be read twice, by the checks of a command and by the loader.
            say_once = functools.cache(say)
            warnings.showwarning = lambda message, *_: say_once(f"warning: {message}")
            return command()
    except UserError as error:
        say("error: " + " ".join(str(error).split()))
        return USER_MISTAKE
    except KeyboardInterrupt:
        say(interrupted)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
