"""Reads the JSON files of a checkpoint."""

import json
import pathlib
from typing import Any

from k3jax.errors import UserError


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
      UserError: the file cannot be read, is not JSON, or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}, expected a JSON object")
    return values
