"""What a conversion is asked to do, checked before JAX is imported and before any weight is read."""

import dataclasses
import pathlib
import re

from k3jax.catalog import describe
from k3jax.checkpoint.orbax.manifest import is_converted
from k3jax.checkpoint.orbax.staging import check_destination
from k3jax.checkpoint.repository import Repository, detect_expert_format
from k3jax.config import K3Config
from k3jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class ConversionRequest:
    """A checked request; make one with `check_request`.

    Attributes:
      repository: the checkpoint, with the tensors of the wanted layers.
      config: its architecture, with the wanted layers.
      destination: the directory to make; absolute.
      has_tokenizer: whether tokenizer files will be there.
    """

    repository: Repository
    config: K3Config
    destination: pathlib.Path
    has_tokenizer: bool


def check_request(source: str | pathlib.Path, destination: str | pathlib.Path,
                  layers: int | None = None) -> ConversionRequest:
    """Looks at both directories and at the headers of all shards.

    Args:
      source: a Hugging Face checkpoint directory.
      destination: the directory to make; may exist if it is empty.
      layers: take the first so many layers; None takes all.

    Raises:
      UserError: no conversion is possible.
    """
    source, destination = pathlib.Path(source), pathlib.Path(destination).resolve()
    if not source.is_dir():
        raise UserError(f"no directory {str(source)!r}; expected a Hugging Face checkpoint directory")
    if destination.is_relative_to(source.resolve()):
        raise UserError(f"{destination} lies inside {source}; choose a place outside the checkpoint")
    check_destination(destination)
    if is_converted(source):
        raise UserError(f"{source} is a converted checkpoint already; give the Hugging Face directory")
    config, tokenizer = describe(source)[:2]
    repository = Repository.open(source)
    config = dataclasses.replace(config, expert_format=detect_expert_format(repository))
    if layers is not None:
        repository, config = _without_later_layers(repository, config, layers), config.first_layers(layers)
    return ConversionRequest(repository, config, destination, tokenizer is not None)


def _without_later_layers(repository: Repository, config: K3Config, layers: int) -> Repository:
    """The repository without the tensors of the model's layers from number `layers` on."""
    in_layer = re.compile(rf"{re.escape(config.tensor_prefix)}model\.layers\.(\d+)\.")
    later = range(layers, config.num_hidden_layers)

    def wanted(name: str) -> bool:
        match = in_layer.match(name)
        return not match or int(match[1]) not in later

    return Repository(repository.directory, {
        name: tensor for name, tensor in repository.tensors.items() if wanted(name)
    })
