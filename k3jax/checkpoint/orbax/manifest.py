"""The manifest of a converted checkpoint: `k3jax.json`, whose presence says that the checkpoint is complete."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Literal

from k3jax.errors import UserError

MANIFEST = "k3jax.json"
LAYERS = "layers"
"""The folder that every conversion begins with."""

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a converted checkpoint holds.

    Attributes:
      layers: how many of the layers that config.json describes, from the first on.
      expert_format: as in `K3Config`.
      files: size in bytes of every other file, by its path in the directory.
    """

    layers: int
    expert_format: Literal["mxfp4", "dense"]
    files: Mapping[str, int]

    @classmethod
    def of_files(cls, directory: pathlib.Path, layers: int, expert_format: Literal["mxfp4", "dense"]) -> "Manifest":
        """Of what lies in a directory now."""
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        return cls(layers, expert_format, {str(path.relative_to(directory)): path.stat().st_size for path in paths})

    @classmethod
    def read(cls, directory: pathlib.Path) -> "Manifest":
        """Reads the manifest and checks that every file is there with its size.

        Raises:
          UserError: the conversion was not finished, or files have changed since.
        """
        path = directory / MANIFEST
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise UserError(
                f"{directory} has no {MANIFEST}: its conversion or its copy was not finished; do it again"
            ) from None
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise UserError(f"{path} is not JSON; convert the checkpoint again") from None
        version = values.get("format_version") if isinstance(values, dict) else None
        if version != FORMAT_VERSION:
            raise UserError(f"{path}: format_version is {version!r}, expected {FORMAT_VERSION}; convert it again")
        manifest = cls(values.get("layers"), values.get("expert_format"), values.get("files"))
        manifest._check(path)
        return manifest

    def write(self, directory: pathlib.Path) -> None:
        """Writes the manifest; the last thing that a conversion does.

        Raises:
          OSError: it cannot be written.
        """
        values = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        (directory / MANIFEST).write_text(json.dumps(values, indent=1), encoding="utf-8")

    def _check(self, path: pathlib.Path) -> None:
        if type(self.layers) is not int or self.expert_format not in ("mxfp4", "dense") or not isinstance(
            self.files, dict
        ):
            raise UserError(f"{path} lacks valid layers, expert_format and files; convert the checkpoint again")
        for name, size in self.files.items():
            file = path.parent / name
            if not file.is_file():
                raise UserError(f"{path.parent} has no {name}, which its {MANIFEST} lists; copy or convert it again")
            found = file.stat().st_size
            if found != size:
                raise UserError(f"{file} has {found} bytes, expected {size}; copy or convert it again")


def is_converted(directory: pathlib.Path) -> bool:
    """Whether a directory is a converted checkpoint, finished or not."""
    return (directory / MANIFEST).exists() or (directory / LAYERS).is_dir()
