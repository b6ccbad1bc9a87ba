"""Compares a converted checkpoint with the Hugging Face directory that it came from, byte by byte."""

import pathlib
from collections.abc import Callable, Mapping

import numpy as np

from k3jax.checkpoint.orbax import store
from k3jax.checkpoint.orbax.items import Item, Path
from k3jax.checkpoint.plan import PlannedWeight
from k3jax.checkpoint.reading import DTYPES, SCRATCH_BYTES, ShardReader
from k3jax.checkpoint.safetensors import TensorInfo
from k3jax.errors import UserError


def verify_item(directory: pathlib.Path, item: Item, planned: Mapping[Path, PlannedWeight], reader: ShardReader,
                advance: Callable[[int], None] = lambda count: None) -> None:
    """Reads an item and its tensors, one array at a time.

    Args:
      directory: the converted checkpoint.
      item: of it.
      planned: the tensors of every weight.
      reader: of the shards.
      advance: is told the bytes of every tensor.

    Raises:
      UserError: an array differs from its tensors, or cannot be read.
    """
    stored = store.declared(directory / item.name)
    for path, part in item.parts.items():
        array = store.restore(directory / item.name, {path: stored[path]})[path]
        stacked = array.shape[: len(part.weight.source.stack)]
        for position, tensor in zip(np.ndindex(stacked), planned[path].layers[part.index or 0]):
            if not _same(array[position], tensor, reader):
                raise UserError(
                    f"array {'/'.join(path)} in {item.name} differs from tensor {tensor.name} in {tensor.file}: one of "
                    "them changed during the conversion, or the disk or the memory is faulty"
                )
            advance(tensor.nbytes)


def _same(array: np.ndarray, tensor: TensorInfo, reader: ShardReader) -> bool:
    """Whether an array's bytes are the tensor's first ones."""
    # Tensors of several dtypes are stacked in one that holds all exactly: this is the way back.
    values = np.ascontiguousarray(array, DTYPES[tensor.dtype]).reshape(-1).view(np.uint8)
    for start in range(0, values.size, SCRATCH_BYTES):
        part = values[start : start + SCRATCH_BYTES]
        raw = np.empty_like(part)
        reader.read(tensor.file, tensor.offset + start, memoryview(raw))
        if not np.array_equal(part, raw):
            return False
    return True
