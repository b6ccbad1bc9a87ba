"""The flags that describe a request, the same for every command that takes one."""

import argparse
import dataclasses
from typing import Any

from k3jax.cli.command import number, token_ids, whole
from k3jax.sampling import SamplingParams


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Where the prompt comes from; `read_prompt` reads it."""
    group = parser.add_argument_group("prompt", "one of these, or standard input when it is a pipe or a file")
    add = group.add_mutually_exclusive_group().add_argument
    add("--prompt", metavar="TEXT", help="the prompt itself")
    add("--prompt-file", metavar="FILE", help="a UTF-8 file")
    add("--prompt-ids", type=token_ids, metavar="1,2,3",
        help="token ids; works for a checkpoint without tokenizer files")
    group.add_argument("--markup", action="store_true",
                       help="names of special tokens in the text, such as <|open|>, stand for these tokens")


def add_generation(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """How long and where to stop; returns the group, for a command's own flags."""
    group = parser.add_argument_group("generation")
    add = group.add_argument
    add("--max-new-tokens", type=whole(1), default=128, metavar="N", help="stop after N tokens (default: 128)")
    add("--ignore-eos", action="store_true", help="go on after the model's own stop tokens")
    add("--stop", action="append", metavar="TEXT", help="stop where this text comes, and leave it out; may be repeated")
    add("--stop-ids", dest="stop_token_ids", type=token_ids, metavar="1,2,3", help="stop after these tokens, too")
    return group


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How a token is chosen."""
    add = parser.add_argument_group(
        "sampling", "how a token is chosen; the default is what the checkpoint's generation_config.json says, else the "
        "value given here"
    ).add_argument
    add("--temperature", type=number, metavar="T", help="0 takes the most likely token each time (default: 1.0)")
    add("--top-k", type=whole(0), metavar="K", help="draw from the K most likely tokens; 0 = off (default: 0)")
    add("--top-p", type=number, metavar="P",
        help="draw from the most likely tokens that together have probability P; 1 = off (default: 0.95)")
    add("--min-p", type=number, metavar="P",
        help="draw from tokens at least P times as likely as the most likely one; 0 = off (default: 0)")
    add("--repetition-penalty", type=number, metavar="R",
        help="make tokens of the prompt and of the new text less likely, above 1; 1 = off (default: 1.0)")
    add("--presence-penalty", type=number, metavar="R",
        help="lower the logits of tokens of the new text by R, from -2 to 2; 0 = off (default: 0)")
    add("--seed", type=whole(0), metavar="N",
        help="draw the same tokens again (default: a fresh one, which the statistics name)")


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `SamplingParams` that the command line sets; not every command has a flag for each."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}
