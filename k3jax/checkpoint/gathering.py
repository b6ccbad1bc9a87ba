"""Puts tensors together, in host memory, to the parts of a weight that this process's devices hold."""

import concurrent.futures
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from k3jax.checkpoint.boxes import Box, volume
from k3jax.checkpoint.reading import ShardReader, check_padding, read_tensor
from k3jax.checkpoint.safetensors import TensorInfo
from k3jax.errors import UserError
from pallas_kernels.mxfp4 import check_scales


class Gatherer:
    """Reads with several threads.

    Args:
      reader: of the shards.
      threads: that read.
      advance: is told the bytes of every tensor that has been read, by the caller's thread.
    """

    def __init__(self, reader: ShardReader, threads: concurrent.futures.Executor,
                 advance: Callable[[int], None] = lambda count: None):
        self._reader, self._threads, self._advance = reader, threads, advance

    def fill(self, parts: Mapping[Box, np.ndarray], tensors: Sequence[TensorInfo], shape: tuple[int, ...],
             stacked_axes: int) -> None:
        """Reads parts of an array of `shape`.

        Args:
          parts: C-contiguous arrays to fill, by the box that each is of the whole; boxes do not overlap.
          tensors: one for each position of the whole's first `stacked_axes` axes, row-major.
          shape: of the whole.
          stacked_axes: see `tensors`.

        Raises:
          UserError: a shard has become unreadable, or a tensor holds values that no checkpoint may.
        """
        inner = shape[stacked_axes:]

        def read(position: tuple[int, ...], tensor: TensorInfo) -> int:
            targets = [
                (box[stacked_axes:], part[tuple(at - begin for at, (begin, _) in zip(position, box))])
                for box, part in parts.items()
                if all(begin <= at < end for at, (begin, end) in zip(position, box))
            ]
            if not targets:
                return 0
            read_tensor(self._reader, tensor, inner, targets)
            self._check(tensor, inner, targets)
            return tensor.nbytes * sum(volume(box) for box, _ in targets) // max(1, math.prod(inner))

        for count in self._threads.map(read, np.ndindex(shape[:stacked_axes]), tensors):
            self._advance(count)

    def _check(self, tensor: TensorInfo, shape: tuple[int, ...], targets: list[tuple[Box, np.ndarray]]) -> None:
        """Refuses padding that is not zero, and scales that are no numbers."""
        check_padding(self._reader, tensor, math.prod(shape))
        if tensor.name.endswith(".weight_scale"):
            for _, part in targets:
                try:
                    check_scales(tensor.name, part)
                except ValueError as error:
                    raise UserError(str(error)) from None
