"""What a checkpoint's name stands for, before any weight is read."""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.presets import preset
from k3jax.tokenizer import ByteTokenizer, TiktokenTokenizer, Tokenizer


class Description(NamedTuple):
    """A checkpoint without its weights.

    Attributes:
      config: the architecture.
      tokenizer: None without tokenizer files.
      directory: where the weights lie; None for random ones.
    """

    config: K3Config
    tokenizer: Tokenizer | None
    directory: pathlib.Path | None


def describe(checkpoint: str | pathlib.Path) -> Description:
    """Architecture and tokenizer of a directory, of `demo`, or of `random:PRESET[:layers]`.

    Raises:
      UserError: there is no such checkpoint, or its configuration or tokenizer cannot be read.
    """
    name = str(checkpoint)
    if name == "demo":
        return Description(preset("demo"), ByteTokenizer(), None)
    if name.startswith("random:"):
        return Description(_random_config(name), None, None)
    directory = pathlib.Path(checkpoint)
    if not directory.is_dir():
        raise UserError(f"no checkpoint {name!r}; expected a directory, demo, or random:PRESET[:layers]")
    config = K3Config.from_file(directory / "config.json")
    has_tokenizer = (directory / "tiktoken.model").exists()
    return Description(config, TiktokenTokenizer.from_directory(directory) if has_tokenizer else None, directory)


def _random_config(name: str) -> K3Config:
    """The architecture of `random:PRESET[:layers]`."""
    _, preset_name, *layers = name.split(":")
    config = preset(preset_name)
    if not layers:
        return config
    if len(layers) > 1 or not layers[0].isdecimal():
        raise UserError(f"checkpoint is {name!r}, expected random:PRESET[:LAYERS], e.g. random:kimi-k3:4")
    return config.first_layers(int(layers[0]))


def prompt_ids(description: Description, prompt: str | Sequence[int], max_new_tokens: int) -> list[int]:
    """Token ids of a prompt, checked against the model.

    Args:
      description: the model.
      prompt: text, or a sequence of token ids.
      max_new_tokens: how many will follow.

    Raises:
      UserError: an empty prompt, text without a tokenizer, ids outside the vocabulary, or more tokens than the context.
    """
    config, tokenizer, _ = description
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError("this checkpoint has no tokenizer files (tiktoken.model); give the prompt as token ids")
        prompt = tokenizer.encode(prompt)
    ids = list(prompt)
    if not ids:
        raise UserError("the prompt is empty; give at least one token")
    for token in ids:
        if not 0 <= token < config.vocab_size:
            raise UserError(f"token id {token} is outside the vocabulary, 0..{config.vocab_size - 1}")
    total, limit = len(ids) + max_new_tokens, config.max_position_embeddings
    if total > limit:
        raise UserError(
            f"{len(ids)} prompt tokens and {max_new_tokens} new ones are {total}, beyond the context of {limit}; "
            "shorten the prompt or ask for fewer new tokens"
        )
    return ids
