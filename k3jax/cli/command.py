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


def say(message: str) -> None:
    """One line on standard error."""
    print(f"k3jax: {message}", file=sys.stderr, flush=True)


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
