"""Request traces: when each prompt came, how long it was, and which blocks of it had been seen before."""

import dataclasses
import gzip
import json
import pathlib
import zlib
from collections.abc import Iterator

from k3jax.errors import UserError

BLOCK_TOKENS = 512
"""Tokens behind one id of a trace."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    Attributes:
      now: seconds since the trace began.
      num_tokens: length of the prompt.
      blocks: an id for every block of `BLOCK_TOKENS` tokens, the last of which may be partial. Equal ids stand for
        equal prompts from the first token to the end of the block.
    """

    now: float
    num_tokens: int
    blocks: tuple[int, ...]

    @property
    def complete_blocks(self) -> tuple[int, ...]:
        """Without the partial one."""
        return self.blocks[:self.num_tokens // BLOCK_TOKENS]


def read_trace(path: str | pathlib.Path) -> list[Request]:
    """Reads a `.jsonl` or `.jsonl.gz` trace in Mooncake's format.

    Each line is an object with `timestamp` (milliseconds), `input_length`, `output_length` (tokens) and `hash_ids`.

    Raises:
      UserError: the file cannot be read, or a line is not of that form; the message names the line.
    """
    requests: list[Request] = []
    parents: dict[int, int | None] = {}
    for number, line in enumerate(_lines(pathlib.Path(path)), 1):
        try:
            request = _request(line)
            if requests and request.now < requests[-1].now:
                raise UserError(
                    f"timestamp {1e3 * request.now:.12g} comes after {1e3 * requests[-1].now:.12g}; "
                    "expected requests in order of time"
                )
            _check_chain(request.blocks, parents)
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        requests.append(request)
    if not requests:
        raise UserError(f"{path} holds no requests, expected one JSON object a line")
    return requests


def _lines(path: pathlib.Path) -> Iterator[str]:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            yield from file
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}; expected JSON lines in UTF-8, or those through gzip") from None


def _request(line: str) -> Request:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise UserError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f"a {type(fields).__name__}, expected an object")
    milliseconds = _number(fields, "timestamp", 0, (int, float))
    num_tokens = _number(fields, "input_length", 1)
    _number(fields, "output_length", 0)
    blocks = _field(fields, "hash_ids")
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise UserError(f"hash_ids is {_short(blocks)}, expected a list of whole numbers")
    expected = -(-num_tokens // BLOCK_TOKENS)
    if len(blocks) != expected:
        raise UserError(
            f"{len(blocks)} hash_ids for input_length {num_tokens}, expected {expected}: one per {BLOCK_TOKENS} tokens"
        )
    return Request(milliseconds / 1e3, num_tokens, tuple(blocks))


def _field(fields: dict, name: str):
    if name not in fields:
        raise UserError(f"no {name}; expected timestamp, input_length, output_length and hash_ids")
    return fields[name]


def _number(fields: dict, name: str, least: int, types: tuple[type, ...] = (int,)) -> float:
    value = _field(fields, name)
    # type(), since True is an int; the comparison, since JSON has NaN and Infinity.
    if type(value) not in types or not least <= value < 2**53:
        kind = "a whole number" if types == (int,) else "a number"
        raise UserError(f"{name} is {_short(value)}, expected {kind} of at least {least}")
    return value


def _check_chain(blocks: tuple[int, ...], parents: dict[int, int | None]) -> None:
    """Ids must name prefixes: what came before a block is always the same."""
    before = None
    for block in blocks:
        if parents.setdefault(block, before) != before:
            raise UserError(
                f"block {block} follows {_place(before)} here and {_place(parents[block])} earlier; "
                "expected equal ids for equal prompts from the first token on"
            )
        before = block


def _place(block: int | None) -> str:
    return "the start" if block is None else f"block {block}"


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
