"""From a Hugging Face directory to a converted checkpoint, with one layer of the model in memory at a time."""

import concurrent.futures
import dataclasses
import functools
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np

from k3jax.checkpoint.gathering import Gatherer
from k3jax.checkpoint.orbax import store
from k3jax.checkpoint.orbax.items import Item, Part, Path, items_of
from k3jax.checkpoint.orbax.manifest import LAYERS, Manifest
from k3jax.checkpoint.orbax.request import ConversionRequest
from k3jax.checkpoint.orbax.staging import staged_directory, writing
from k3jax.checkpoint.orbax.verification import verify_item
from k3jax.checkpoint.plan import LoadingPlan, PlannedWeight, plan_loading
from k3jax.checkpoint.reading import DTYPES, ShardReader, empty
from k3jax.checkpoint.safetensors import TensorInfo
from k3jax.errors import UserError
from k3jax.memory import human_bytes
from k3jax.model import K3ForCausalLM
from k3jax.progress import reporting

COPIED_FILES = ("config.json", "generation_config.json", "tiktoken.model", "tokenizer_config.json")
"""What `k3jax.catalog` reads besides weights."""

_THREADS = 4
_METADATA_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
      layers: of the model.
      arrays: that were written.
      nbytes: of all arrays.
      seconds: that it took.
    """

    layers: int
    arrays: int
    nbytes: int
    seconds: float


def convert(request: ConversionRequest, *, verify: bool = False, progress: bool = False) -> Conversion:
    """Writes the converted checkpoint.

    Args:
      request: what to convert, and where to.
      verify: read everything back and compare it with the source.
      progress: report bytes and the time left on standard error.

    Raises:
      UserError: the source is not what config.json describes, or damaged; the disk is full; or what was read back is
        not what was written. Nothing is left at the destination then.
    """
    start = time.perf_counter()
    config, repository, destination = request.config, request.repository, request.destination
    weights = K3ForCausalLM.weights(config)
    plan = plan_loading(weights, config, repository)
    items = items_of(weights)
    copied = [path for name in COPIED_FILES if (path := repository.directory / name).is_file()]
    _check_disk(destination.parent, plan, sum(path.stat().st_size for path in copied) + len(items) * _METADATA_BYTES)
    planned = {one.path: one for one in plan.weights}
    with (
        staged_directory(destination) as staging,
        ShardReader() as reader,
        concurrent.futures.ThreadPoolExecutor(_THREADS) as threads,
    ):
        with writing(destination):
            (staging / LAYERS).mkdir()
            for path in copied:
                shutil.copy(path, staging)
        with reporting(progress, plan.total_bytes, "converting weights") as advance:
            for item in items:
                with writing(destination):
                    _write_item(staging, item, planned, Gatherer(reader, threads), advance)
        if verify:
            with reporting(progress, plan.total_bytes, "verifying") as advance:
                for item in items:
                    verify_item(staging, item, planned, reader, advance)
        with writing(destination):
            Manifest.of_files(staging, config.num_hidden_layers, config.expert_format).write(staging)
    return Conversion(
        config.num_hidden_layers, sum(len(item.parts) for item in items), plan.total_bytes, time.perf_counter() - start
    )


def _write_item(directory: pathlib.Path, item: Item, planned: Mapping[Path, PlannedWeight], gatherer: Gatherer,
                advance: Callable[[int], None]) -> None:
    arrays = {path: _gather(part, planned[path].layers[part.index or 0], gatherer) for path, part in item.parts.items()}
    store.save(directory / item.name, arrays, {path: part.counted_axes for path, part in item.parts.items()}, advance)


def _gather(part: Part, tensors: tuple[TensorInfo, ...], gatherer: Gatherer) -> np.ndarray:
    """The array of a part, in the dtype of its tensors, or in one that holds all of theirs exactly."""
    dtype = functools.reduce(jnp.promote_types, (DTYPES[tensor.dtype] for tensor in tensors))
    array = empty(part.shape, dtype)
    whole = tuple((0, size) for size in part.shape)
    gatherer.fill({whole: array}, tensors, part.shape, len(part.weight.source.stack))
    return array


def _check_disk(directory: pathlib.Path, plan: LoadingPlan, extra: int) -> None:
    """Refuses a conversion that the disk has no room for."""
    needed, free = plan.total_bytes + extra, shutil.disk_usage(directory).free
    if needed > free:
        raise UserError(
            f"not enough disk space in {directory}: {human_bytes(needed)} needed, {human_bytes(free)} free; free some "
            "or choose another disk"
        )
