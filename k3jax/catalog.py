"""What a checkpoint's name stands for, before any weight is read."""

import dataclasses
import pathlib
from typing import NamedTuple

from k3jax.checkpoint.orbax.manifest import Manifest, is_converted
from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.presets import preset
from k3jax.sampling.defaults import GenerationDefaults
from k3jax.tokenizer import ByteTokenizer, TiktokenTokenizer, Tokenizer, check_tokenizer


class Description(NamedTuple):
    """A checkpoint without its weights.

    Attributes:
      config: the architecture.
      tokenizer: None without tokenizer files.
      directory: where the weights lie; None for random ones.
      defaults: settings for generation.
    """

    config: K3Config
    tokenizer: Tokenizer | None
    directory: pathlib.Path | None
    defaults: GenerationDefaults


def describe(checkpoint: str | pathlib.Path) -> Description:
    """Architecture, tokenizer and defaults of a directory, of `demo`, or of `random:PRESET[:layers]`.

    Raises:
      UserError: there is no such checkpoint, its configuration or tokenizer cannot be read, or they do not belong
        together.
    """
    name = str(checkpoint)
    if name == "demo":
        config = preset("demo")
        return Description(config, ByteTokenizer(), None, GenerationDefaults.of_model(config))
    if name.startswith("random:"):
        config = _random_config(name)
        return Description(config, None, None, GenerationDefaults.of_model(config))
    directory = pathlib.Path(checkpoint)
    if not directory.is_dir():
        raise UserError(f"no checkpoint {name!r}; expected a directory, demo, or random:PRESET[:layers]")
    config = _directory_config(directory)
    defaults = GenerationDefaults.from_directory(directory, config)
    if not (directory / "tiktoken.model").exists():
        return Description(config, None, directory, defaults)
    tokenizer = TiktokenTokenizer.from_directory(directory)
    check_tokenizer(tokenizer, config)
    return Description(config, tokenizer, directory, defaults)


def _directory_config(directory: pathlib.Path) -> K3Config:
    """The architecture of a directory: a converted checkpoint's manifest completes its config.json."""
    if not is_converted(directory):
        return K3Config.from_file(directory / "config.json")
    manifest = Manifest.read(directory)
    config = K3Config.from_file(directory / "config.json").first_layers(manifest.layers)
    return dataclasses.replace(config, expert_format=manifest.expert_format)


def _random_config(name: str) -> K3Config:
    """The architecture of `random:PRESET[:layers]`."""
    _, preset_name, *layers = name.split(":")
    config = preset(preset_name)
    if not layers:
        return config
    if len(layers) > 1 or not layers[0].isdecimal():
        raise UserError(f"checkpoint is {name!r}, expected random:PRESET[:LAYERS], e.g. random:kimi-k3:4")
    return config.first_layers(int(layers[0]))
