"""What a checkpoint's name stands for, before any weight is read."""

import pathlib
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
