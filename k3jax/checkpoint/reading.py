"""Reads tensors, or parts of them, from shards into buffers of their own.

The files are not mapped: mapped pages would count as this process's memory beside the buffers.
"""

import os
import pathlib
import threading
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from k3jax.checkpoint.boxes import Box, blocks, extents, hull, intersection, runs, slices_within, volume
from k3jax.checkpoint.safetensors import TensorInfo
from k3jax.errors import UserError

SCRATCH_BYTES = 16 * 2**20
"""Per thread, for parts that are converted or distributed after reading."""

DTYPES = {"BF16": jnp.dtype(jnp.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32),
          "U8": np.dtype(np.uint8)}
"""Of tensors, by the header's name."""

_ALIGNMENT = 64


class ShardReader:
    """Open shards, for several threads; a context manager that closes them.

    Attributes:
      bytes_read: how much has been read so far.
    """

    def __init__(self):
        self.bytes_read = 0
        self._descriptors: dict[pathlib.Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *_: Any) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, file: pathlib.Path, offset: int, out: memoryview) -> None:
        """Fills `out`, a view of bytes, from byte `offset` of the file.

        Raises:
          UserError: the file has become unreadable or shorter since its header was read.
        """
        size = len(out)
        try:
            descriptor = self._open(file)
            while out:
                count = os.preadv(descriptor, [out], offset)
                if not count:
                    raise UserError(f"{file} ends before byte {offset + 1}: it was shortened since its header was read")
                out, offset = out[count:], offset + count
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from None
        with self._lock:
            self.bytes_read += size

    def _open(self, file: pathlib.Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY)
            return self._descriptors[file]


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array at an address that JAX takes over on CPU without a copy."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def read_tensor(reader: ShardReader, tensor: TensorInfo, shape: tuple[int, ...],
                targets: Sequence[tuple[Box, np.ndarray]]) -> None:
    """Reads parts of a tensor, each byte once, and converts them to the targets' dtype.

    Args:
      reader: of the shards.
      tensor: where it lies.
      shape: what its first elements are seen as, row-major.
      targets: boxes in `shape`, different ones apart from each other, and C-contiguous arrays of their extents.
    """
    around = hull([box for box, _ in targets])
    if sum(volume(box) for box, _ in targets) == volume(around):
        regions = [(around, targets)]  # They tile it: larger reads, scattered in memory.
    else:
        regions = [(box, [(box, out)]) for box, out in targets]
    dtype = DTYPES[tensor.dtype]
    for region, members in regions:
        if len(members) == 1 and members[0][1].dtype == dtype:
            _read_box(reader, tensor, shape, region, members[0][1])
            continue
        for block in blocks(region, SCRATCH_BYTES // dtype.itemsize):
            raw = np.empty(extents(block), dtype)
            _read_box(reader, tensor, shape, block, raw)
            for box, out in members:
                if all(low < end and begin < high for (begin, end), (low, high) in zip(box, block)):
                    shared = intersection(box, block)
                    out[slices_within(shared, box)] = raw[slices_within(shared, block)]


def check_padding(reader: ShardReader, tensor: TensorInfo, count: int) -> None:
    """Checks that a tensor is zero beyond its first `count` elements.

    Raises:
      UserError: it is not.
    """
    dtype = DTYPES[tensor.dtype]
    tail = np.empty(tensor.nbytes // dtype.itemsize - count, dtype)
    if not tail.size:
        return
    reader.read(tensor.file, tensor.offset + count * dtype.itemsize, _bytes(tail))
    if np.any(tail != 0):
        raise UserError(
            f"tensor {tensor.name} has {count + tail.size} elements and is not zero after the first {count}; expected "
            f"{count} values and zero padding"
        )


def _read_box(reader: ShardReader, tensor: TensorInfo, shape: tuple[int, ...], box: Box, out: np.ndarray) -> None:
    """Fills `out`, of the tensor's dtype, with a box."""
    length, starts = runs(box, shape)
    flat, item_size = _bytes(out), out.itemsize
    length *= item_size
    for number, start in enumerate(starts):
        reader.read(tensor.file, tensor.offset + start * item_size, flat[number * length : (number + 1) * length])


def _bytes(array: np.ndarray) -> memoryview:
    """The memory of a C-contiguous array."""
    return memoryview(array.reshape(-1).view(np.uint8))
