"""A Hugging Face model directory: configuration, index and shards."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Literal

from k3jax.checkpoint.safetensors import TensorInfo, read_header
from k3jax.errors import UserError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Repository:
    """All tensors of a model directory; make one with `Repository.open`.

    Attributes:
      directory: where it lies.
      tensors: every tensor, by name.
    """

    directory: pathlib.Path
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, directory: str | pathlib.Path) -> "Repository":
        """Reads the index and the headers of all shards, and checks that they agree; no weight is read.

        Args:
          directory: holds `config.json` and either `model.safetensors.index.json` with its shards, or one
            `model.safetensors`.

        Raises:
          UserError: something is missing, damaged or contradicts the rest; the message names the file or the tensor.
        """
        directory = pathlib.Path(directory)
        if not directory.is_dir():
            raise UserError(f"no directory {directory}; expected a Hugging Face model directory")
        if not (directory / CONFIG).is_file():
            raise UserError(f"{directory} has no {CONFIG}; expected a Hugging Face model directory")
        if (directory / INDEX).is_file():
            return cls(directory, _indexed_tensors(directory))
        if (directory / SINGLE_FILE).is_file():
            return cls(directory, read_header(directory / SINGLE_FILE))
        raise UserError(f"{directory} has neither {INDEX} nor {SINGLE_FILE}; fetch the weights")


def detect_expert_format(repository: Repository) -> Literal["mxfp4", "dense"]:
    """How the routed experts are stored.

    Names decide, not the quantisation config: K3's lists of what is quantised are incomplete.
    """
    packed = any(name.endswith(".weight_packed") for name in repository.tensors)
    return "mxfp4" if packed else "dense"


def _indexed_tensors(directory: pathlib.Path) -> dict[str, TensorInfo]:
    """The tensors of all shards, where index and headers agree."""
    index = _read_index(directory / INDEX)
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(set(index.values())):
        path = directory / file
        if not path.is_file():
            raise UserError(f"{directory} has no {file}, which {INDEX} names; fetch the missing shard")
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise UserError(f"tensor {name} lies in two shards, {tensors[name].file.name} and {file}")
            if index.get(name) != file:
                expected = index.get(name, "no shard")
                raise UserError(f"tensor {name} lies in {file}, but {INDEX} expects it in {expected}")
            tensors[name] = tensor
    for name, file in index.items():
        if name not in tensors:
            raise UserError(f"{INDEX} names tensor {name}, which {file} does not hold; fetch index and shard again")
    return tensors


def _read_index(path: pathlib.Path) -> dict[str, str]:
    """Tensor name to shard name."""
    try:
        index = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not JSON; fetch it again") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path} has no weight_map from tensor names to shard names")
    for name, file in weight_map.items():
        if not isinstance(file, str) or pathlib.PurePath(file).name != file:
            raise UserError(f"{path}: the shard of tensor {name} is {file!r}, expected the name of a file beside it")
    return weight_map
