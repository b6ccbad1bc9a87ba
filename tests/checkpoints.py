"""Checkpoints for tests: the golden ones, and small ones made by hand."""

import atexit
import functools
import json
import lzma
import math
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

DATA = pathlib.Path(__file__).parent / "data"
TINY = ("k3-tiny", "kimi-linear-tiny")
DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "uint8": "U8", "int64": "I64"}
DTYPES = {name: np.dtype(getattr(ml_dtypes, dtype, dtype)) for dtype, name in DTYPE_NAMES.items()}


@functools.cache
def tiny_checkpoint(name: str) -> pathlib.Path:
    """The directory of an unpacked golden checkpoint, which lasts as long as the process."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for file in (DATA / name).iterdir():
        if file.suffix == ".xz":
            (directory / file.stem).write_bytes(lzma.decompress(file.read_bytes()))
        elif file.suffix != ".npz":
            shutil.copy(file, directory)
    return directory


def write_shard(path: pathlib.Path, tensors: Mapping[str, np.ndarray], **metadata: str) -> None:
    """A safetensors file of these arrays."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": DTYPE_NAMES[array.dtype.name], "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    write_raw_shard(path, header, b"".join(array.tobytes() for array in tensors.values()))


def write_raw_shard(path: pathlib.Path, header: Any, data: bytes = b"", size: int | None = None) -> None:
    """A file with this header, true or not; with `size` the data are a hole of so many bytes."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)
        if size is not None:
            file.truncate(8 + len(text) + size)


def write_index(directory: pathlib.Path, weight_map: Mapping[str, str]) -> None:
    """`model.safetensors.index.json`."""
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_shards(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint, by a reader of its own: offsets of the header and `numpy.frombuffer`."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            if name != "__metadata__":
                begin, _ = entry["data_offsets"]
                tensors[name] = np.frombuffer(
                    content, DTYPES[entry["dtype"]], math.prod(entry["shape"]), start + begin
                ).reshape(entry["shape"])
    return tensors


def copy_checkpoint(name: str, directory: pathlib.Path, changes: Mapping[str, Any]) -> pathlib.Path:
    """A golden checkpoint as one file, in which some tensors are replaced, or removed where the change is None."""
    tensors = {**read_shards(tiny_checkpoint(name)), **changes}
    shutil.copy(tiny_checkpoint(name) / "config.json", directory)
    write_shard(directory / "model.safetensors", {key: array for key, array in tensors.items() if array is not None})
    return directory
