"""Reads the tokenizer files of a checkpoint: `tiktoken.model` and `tokenizer_config.json`."""

import base64
import binascii
import json
import pathlib

from k3jax.errors import UserError


def read_ranks(path: pathlib.Path) -> dict[bytes, int]:
    """Base tokens of a `tiktoken.model`: a line for each, `base64(bytes) rank`, ranks 0 and up.

    Raises:
      UserError: the file cannot be read, a line is not that, or a single byte has no token.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            if not token or token in ranks or int(rank) != number - 1:
                raise ValueError
            ranks[token] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(
                f"{path} line {number} is {line[:40]!r}, expected the base64 of a new token and its rank {number - 1}"
            ) from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(f"{path} has no token for byte {missing[0]:#04x}; all 256 single bytes must be there")
    return ranks


def read_special_names(path: pathlib.Path, slots: range) -> dict[int, str]:
    """Names of special tokens by id, from `added_tokens_decoder` of a `tokenizer_config.json`.

    Raises:
      UserError: the file cannot be read, or names ids outside `slots`, or two tokens alike.
    """
    data = _read(path)
    try:
        entries = json.loads(data)["added_tokens_decoder"]
        names = {int(token_id): entry["content"] for token_id, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} has no readable added_tokens_decoder; expected {{id: {{content: name}}}}") from None
    owner = {reserved_name(slot): slot for slot in slots}
    for token_id, name in names.items():
        if token_id not in slots:
            raise UserError(f"{path} names special token {token_id}, outside the slots {slots[0]}..{slots[-1]}")
        if not isinstance(name, str) or not name or owner.setdefault(name, token_id) != token_id:
            raise UserError(f"{path} calls special token {token_id} {name!r}; each needs a name of its own")
    return names


def reserved_name(slot: int) -> str:
    """The name of a special token that has none."""
    return f"<|reserved_token_{slot}|>"


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; a tokenizer needs this file") from error
