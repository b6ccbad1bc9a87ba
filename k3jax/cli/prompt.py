"""The prompt of a command line, checked before any weights are read: those can take many minutes."""

import argparse
import os
import pathlib
import stat
import sys
import warnings

from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.presets import preset
from k3jax.tokenizer import ByteTokenizer, TiktokenTokenizer, Tokenizer

DEMO_PROMPT = "Kimi Delta Attention keeps a state of constant size, so"


def read_prompt(args: argparse.Namespace) -> str | list[int]:
    """The prompt from `--prompt`, `--prompt-file`, `--prompt-ids` or standard input.

    Raises:
      UserError: there is none, it is empty, or its bytes are not UTF-8.
    """
    if args.prompt_ids is not None:
        return args.prompt_ids
    if args.prompt is not None:
        # Bytes of the command line that are not UTF-8 arrive as lone surrogates.
        text = _decode(args.prompt.encode("utf-8", "surrogateescape"), "--prompt")
    elif args.prompt_file is not None:
        text = _decode(_read_file(args.prompt_file), args.prompt_file)
    elif _stdin_is_given():
        text = _decode(sys.stdin.buffer.read(), "standard input")
    elif args.checkpoint == "demo":
        text = DEMO_PROMPT
    else:
        raise UserError("no prompt; give --prompt, --prompt-file or --prompt-ids, or pipe text into standard input")
    if not text:
        raise UserError("the prompt is empty; give at least one character")
    return text


def tokenize(prompt: str | list[int], checkpoint: str, max_new_tokens: int) -> list[int]:
    """Token ids of the prompt, checked against the vocabulary and the context of the checkpoint.

    Raises:
      UserError: no such checkpoint, no tokenizer for text, an unknown id, or more tokens than the context.
    """
    config, tokenizer = _describe(checkpoint)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError(f"{checkpoint} has no tokenizer files (tiktoken.model); give the prompt by --prompt-ids")
        prompt = tokenizer.encode(prompt)
    for token in prompt:
        if not 0 <= token < config.vocab_size:
            raise UserError(f"token id {token} is outside the vocabulary, 0..{config.vocab_size - 1}")
    total, limit = len(prompt) + max_new_tokens, config.max_position_embeddings
    if total > limit:
        raise UserError(f"{len(prompt)} prompt tokens and {max_new_tokens} new ones are {total}, beyond the context of "
                        f"{limit}; shorten the prompt or lower --max-new-tokens")
    return prompt


def _describe(checkpoint: str) -> tuple[K3Config, Tokenizer | None]:
    """Architecture and tokenizer of a checkpoint, without its weights."""
    if checkpoint == "demo":
        return preset("demo"), ByteTokenizer()
    if checkpoint.startswith("random:"):
        return preset(checkpoint.split(":")[1]), None
    directory = pathlib.Path(checkpoint)
    if not directory.is_dir():
        raise UserError(f"no checkpoint {checkpoint!r}; expected a directory, demo, or random:PRESET[:layers]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading gives the same ones
        config = K3Config.from_file(directory / "config.json")
    return config, TiktokenTokenizer.from_directory(directory) if (directory / "tiktoken.model").exists() else None


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
