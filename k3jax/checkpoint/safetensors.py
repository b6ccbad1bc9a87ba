"""The safetensors container: a length, a JSON header, then the bytes of every tensor.

Only headers are read here. The format is described at https://github.com/huggingface/safetensors#format.
"""

import json
import math
import os
import pathlib
import sys
from typing import Any, NamedTuple

from k3jax.errors import UserError

ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}
"""Bytes of an element, by the header's name of its dtype."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_LENGTH_BYTES = 8


class TensorInfo(NamedTuple):
    """Where a tensor lies.

    Attributes:
      name: in the checkpoint.
      file: shard that holds it.
      dtype: as the header spells it, such as "BF16".
      shape: row-major.
      offset: of its first byte in the file.
      nbytes: how many it has.
    """

    name: str
    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: pathlib.Path) -> dict[str, TensorInfo]:
    """The tensors of one file, by name, in the order of their bytes.

    Args:
      path: a `.safetensors` file.

    Raises:
      UserError: the file cannot be read, is truncated, is no safetensors file, or contradicts its header.
    """
    text, size = _header_text(path)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{path}: the header is not JSON; the file is damaged or not safetensors") from None
    if not isinstance(header, dict):
        raise UserError(f"{path}: the header holds a {type(header).__name__}, expected a JSON object")
    header.pop("__metadata__", None)
    start = _LENGTH_BYTES + len(text)
    tensors = sorted((_tensor(path, name, value, start) for name, value in header.items()), key=_end)

    position = start
    for tensor in tensors:
        if tensor.offset != position:
            raise UserError(
                f"{path}: tensor {tensor.name} begins at byte {tensor.offset - start} of the data, expected "
                f"{position - start}: tensors overlap or leave a hole, the file is damaged"
            )
        position += tensor.nbytes
    if position != size:
        what = "truncated, fetch it again" if position > size else "damaged, fetch it again"
        raise UserError(f"{path}: the file has {size} bytes and its header describes {position}; it is {what}")
    return {tensor.name: tensor for tensor in tensors}


def _header_text(path: pathlib.Path) -> tuple[bytes, int]:
    """The header, and the size of the file."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _LENGTH_BYTES:
                raise UserError(f"{path}: {size} bytes are too few for a safetensors file; fetch it again")
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            longest = min(MAX_HEADER_BYTES, size - _LENGTH_BYTES)
            if length > longest:
                raise UserError(
                    f"{path}: the header claims {length} bytes, at most {longest} are possible in a file of {size}; it "
                    "is truncated or not safetensors"
                )
            return file.read(length), size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _tensor(path: pathlib.Path, name: str, value: Any, start: int) -> TensorInfo:
    """One entry of the header, whose data begin at byte `start` of the file."""
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        sane = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        item_size = ITEM_SIZES.get(dtype)
    except (KeyError, TypeError, ValueError):
        sane = False
    if not sane:
        raise UserError(f"{path}: tensor {name} has no valid dtype, shape and data_offsets; the file is damaged")
    if item_size is None:
        raise UserError(f"{path}: tensor {name} has dtype {dtype!r}, expected one of {', '.join(ITEM_SIZES)}")
    nbytes = math.prod(shape) * item_size
    if end - begin != nbytes:
        raise UserError(
            f"{path}: tensor {name} has {end - begin} bytes by its data_offsets, expected {nbytes} for {dtype} "
            f"{list(shape)}; the file is damaged"
        )
    return TensorInfo(name, path, sys.intern(dtype), shape, start + begin, nbytes)


def _end(tensor: TensorInfo) -> tuple[int, int]:
    """Sorts empty tensors before the one that begins at the same byte."""
    return tensor.offset, tensor.nbytes
