"""The prompt of a command line."""

import argparse
import os
import pathlib
import stat
import sys

from k3jax.errors import UserError

DEMO_PROMPT = "Kimi Delta Attention keeps a state of constant size, so"


def read_prompt(args: argparse.Namespace, default: str | None = None) -> str | list[int]:
    """The prompt from `--prompt`, `--prompt-file`, `--prompt-ids` or standard input; without one, the default.

    Raises:
      UserError: there is none, it is empty, its bytes are not UTF-8, or it is ids with `--markup`.
    """
    if args.prompt_ids is not None:
        if args.markup:
            raise UserError("--markup is about text, but the prompt is given as --prompt-ids; leave one out")
        return args.prompt_ids
    if args.prompt is not None:
        # Bytes of the command line that are not UTF-8 arrive as lone surrogates.
        text = _decode(args.prompt.encode("utf-8", "surrogateescape"), "--prompt")
    elif args.prompt_file is not None:
        text = _decode(_read_file(args.prompt_file), args.prompt_file)
    elif _stdin_is_given():
        text = _decode(sys.stdin.buffer.read(), "standard input")
    elif default is not None:
        text = default
    else:
        raise UserError("no prompt; give --prompt, --prompt-file or --prompt-ids, or pipe text into standard input")
    if not text:
        raise UserError("the prompt is empty; give at least one character")
    return text


def _stdin_is_given() -> bool:
    """Whether standard input is a pipe or a file; a terminal or the null device says nothing."""
    try:
        return not stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode)
    except (AttributeError, OSError):  # standard input is closed
        return False


def _read_file(path: str) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read --prompt-file {path}: {error.strerror}") from error


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise UserError(f"{source} is not valid UTF-8: byte {byte:#04x} at offset {error.start}") from error
