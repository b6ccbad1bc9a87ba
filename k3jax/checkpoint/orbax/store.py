"""One item: a tree of arrays in a directory of its own, written and read with Orbax.

Items are what any Orbax program reads: OCDBT and zarr3. They are not compressed: weights hardly shrink, and reading
stays as fast as the disk.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from k3jax.errors import UserError

CHUNK_BYTES = 16 * 2**20
"""Of a zarr chunk, at most: a device that needs some of it reads all of it."""

BLOCK_BYTES = 256 * 2**20
"""Written at a time: tensorstore copies what is on its way to the disk."""

Path = tuple[str, ...]


def save(directory: pathlib.Path, arrays: Mapping[Path, np.ndarray], split_axes: Mapping[Path, tuple[int, ...]],
         advance: Callable[[int], None] = lambda count: None) -> None:
    """Writes an item.

    Args:
      directory: of the item; must not exist.
      arrays: by path in the tree.
      split_axes: for each array the axes on which a chunk has size 1, if the array needs more than one chunk.
      advance: is told the bytes of every block that has been written, by another thread.

    Raises:
      OSError: the file system refuses, for example because the disk is full.
    """
    chunking = {
        path: ocp.SaveArgs(
            chunk_byte_size=CHUNK_BYTES, shard_axes=split_axes[path] if array.nbytes > CHUNK_BYTES else ()
        )
        for path, array in arrays.items()
    }
    args = ocp.args.PyTreeSave(unflatten_dict(arrays), unflatten_dict(chunking))
    numpy_handler = _NumpyHandler(advance)
    with _checkpointer(numpy_handler) as checkpointer, _thread() as call:
        try:
            call(checkpointer.save, directory, args=args)
        except ValueError as error:
            os_error = _os_error(error)
            if os_error is None:
                raise
            raise os_error from error
        finally:
            # Ends what goes on after Ctrl-C.
            numpy_handler.stop()


def declared(directory: pathlib.Path) -> dict[Path, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of an item's arrays.

    Raises:
      UserError: it is damaged.
    """
    with _reading(directory), _checkpointer() as checkpointer, _thread() as call:
        tree = call(checkpointer.handler.metadata, epath.Path(directory)).tree
    return {path: jax.ShapeDtypeStruct(array.shape, array.dtype) for path, array in flatten_dict(tree).items()}


def restore(directory: pathlib.Path,
            abstract: Mapping[Path, jax.ShapeDtypeStruct]) -> dict[Path, jax.Array | np.ndarray]:
    """Reads arrays of an item, each process what its devices hold.

    Args:
      directory: of the item.
      abstract: of every wanted array its shape, the dtype that it is converted to, and the sharding; those without one
        are read into host memory.

    Raises:
      UserError: it is damaged.
    """
    tree = unflatten_dict(abstract)
    args = ocp.args.PyTreeRestore(tree, ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True)
    with _reading(directory), _checkpointer() as checkpointer, _thread() as call:
        return flatten_dict(call(checkpointer.restore, directory, args=args))


class _OneByOne:
    """Reads one array after the other, each in parallel.

    Orbax's own handlers begin all reads together. That takes more memory, and after the first failure they close the
    event loop, so that tensorstore prints a traceback for each of the others.
    """

    async def metadata(self, infos):
        found = []
        for info in infos:
            found += await super().metadata([info])
        return found

    async def deserialize(self, infos, args):
        values = []
        for info, arg in zip(infos, args):
            values += await super().deserialize([info], [arg])
        return values


class _ArrayHandler(_OneByOne, ocp.type_handlers.ArrayHandler):
    """For arrays on devices."""


class _NumpyHandler(_OneByOne, ocp.type_handlers.NumpyHandler):
    """For arrays in host memory, which are also written block by block.

    The method for writing is a private one of Orbax: if it is renamed one day, writing takes more memory.
    """

    def __init__(self, advance: Callable[[int], None] = lambda count: None):
        super().__init__(deepcopy_host_arrays=False)
        self._advance, self._stopped = advance, False

    def stop(self) -> None:
        """Lets a save end before its next block, leaving the item incomplete."""
        self._stopped = True

    async def _open_and_write(self, value: np.ndarray, tspec: dict[str, Any], ts_context: Any) -> None:
        opening = tensorstore.open(tensorstore.Spec(tspec), create=True, open=True, context=ts_context)
        # Each wait is one for the disk, so arrays open together, and small ones are written together.
        await asyncio.sleep(0)
        store = self._finish(opening)
        chunk_rows = store.chunk_layout.write_chunk.shape[0]
        rows = max(1, BLOCK_BYTES // (chunk_rows * value[0].nbytes)) * chunk_rows
        for start in range(0, len(value), rows):
            if self._stopped:
                return
            block = value[start : start + rows]
            write = store[start : start + len(block)].write(block, can_reference_source_data_indefinitely=True)
            if len(block) == len(value):
                await asyncio.sleep(0)
            self._finish(write)
            self._advance(block.nbytes)

    def _finish(self, future: Any) -> Any:
        """The result, for which the event loop and the other arrays wait."""
        try:
            return future.result()
        except BaseException:
            self.stop()
            raise


@contextlib.contextmanager
def _checkpointer(numpy_handler: _NumpyHandler | None = None) -> Iterator[ocp.Checkpointer]:
    """Orbax, set up for items, without its log messages: what goes wrong it also raises."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, numpy_handler or _NumpyHandler()), (jax.Array, _ArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False, type_handler_registry=registry)
    logger = logging.getLogger("absl")
    logger.addFilter(_not_orbax)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            yield checkpointer
    finally:
        logger.removeFilter(_not_orbax)


def _not_orbax(record: logging.LogRecord) -> bool:
    return os.path.join("orbax", "checkpoint", "") not in record.pathname


@contextlib.contextmanager
def _thread() -> Iterator[Callable[..., Any]]:
    """Gives a function that calls another one in a thread, which has ended at the end, after Ctrl-C too.

    Orbax runs an event loop, which is not possible in a thread that runs one, as in a notebook.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        yield lambda function, *args, **options: thread.submit(function, *args, **options).result()


@contextlib.contextmanager
def _reading(directory: pathlib.Path) -> Iterator[None]:
    """Reports a damaged item as a mistake of the user."""
    try:
        yield
    except Exception as error:
        # Some errors of tensorstore come wrapped in a bare Exception.
        cause = error.__cause__ if type(error) is Exception else error
        if not isinstance(cause, (ValueError, OSError)):
            raise
        # Messages of tensorstore end with the whole specification: " [tensorstore_spec='...']".
        reason = re.split(r" \[\w+='|\n", str(_os_error(cause) or cause))[0]
        raise UserError(f"cannot read {directory}, convert the checkpoint again: {reason}") from error


def _os_error(error: ValueError) -> OSError | None:
    """What the operating system said, if it was the one to refuse."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return OSError(int(code[1]), os.strerror(int(code[1]))) if code else None
