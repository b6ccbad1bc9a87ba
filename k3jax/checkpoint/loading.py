"""From a repository to parameters on devices, one layer of a weight at a time.

Each process reads just what its own devices hold, straight into the buffers that are handed to them.
"""

import concurrent.futures
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from k3jax.checkpoint.boxes import Box, box_of, extents, volume
from k3jax.checkpoint.gathering import Gatherer
from k3jax.checkpoint.plan import LoadingPlan, PlannedWeight, plan_loading
from k3jax.checkpoint.reading import ShardReader, empty
from k3jax.checkpoint.repository import Repository
from k3jax.checkpoint.safetensors import TensorInfo
from k3jax.checkpoint.stacks import abstract_params, fill_stack, layer_sharding
from k3jax.config import K3Config
from k3jax.memory import check_fits, required_bytes
from k3jax.model import K3ForCausalLM
from k3jax.progress import reporting
from sharding import ONE_DEVICE, Layout

WHOLE_STACK_BYTES = 64 * 2**20
"""A stack up to this size is read at once: small stacks would spend their time on compiling the updates."""

_THREADS = 4


def load_params(config: K3Config, repository: Repository, dtype: Any, *, layout: Layout = ONE_DEVICE,
                progress: bool = False) -> dict[str, Any]:
    """Loads a checkpoint.

    Args:
      config: the architecture; its `expert_format` must be the checkpoint's (`detect_expert_format`).
      repository: the checkpoint.
      dtype: of the weights that have no dtype of their own; they are converted. Quantised bytes stay as they are.
      layout: where the weights lie; without a mesh, on the default device.
      progress: report bytes and the time left on standard error.

    Returns:
      Nested dict of arrays as `K3ForCausalLM.abstract_params(config, dtype)` says.

    Raises:
      UserError: the checkpoint does not fit the config or the memory, or holds values that are refused.
    """
    weights = K3ForCausalLM.weights(config)
    plan = plan_loading(weights, config, repository)
    abstract = abstract_params(weights, dtype, layout)
    check_room(abstract.values())
    shardings = [abstract[planned.path].sharding for planned in plan.weights]
    total_bytes = sum(map(_local_bytes, plan.weights, shardings))
    with ShardReader() as reader, reporting(progress, total_bytes, "loading weights") as advance:
        return read_params(plan, shardings, dtype, reader, advance)


def read_params(plan: LoadingPlan, shardings: Sequence[Sharding], dtype: Any, reader: ShardReader,
                advance: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    """Reads all weights of a plan.

    Args:
      plan: what to read.
      shardings: where each weight of the plan goes.
      dtype: of the weights that have no dtype of their own.
      reader: of the shards; counts what it reads.
      advance: is told the bytes of every tensor.
    """
    params: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        gatherer = Gatherer(reader, threads, advance)
        for planned, sharding in zip(plan.weights, shardings):
            set_path(params, planned.path, _load(planned, dtype, sharding, gatherer))
    return params


def _load(planned: PlannedWeight, dtype: Any, sharding: Sharding, gatherer: Gatherer) -> jax.Array:
    """One weight, all its layers."""
    weight = planned.weight
    dtype = np.dtype(weight.dtype or dtype)
    stacked_axes = len(weight.source.stack)

    if weight.layers is None:
        return _Placer(weight.shape, stacked_axes, dtype, sharding, gatherer).place(planned.layers[0])
    if math.prod(weight.shape) * dtype.itemsize <= WHOLE_STACK_BYTES:
        tensors = tuple(tensor for layer in planned.layers for tensor in layer)
        return _Placer(weight.shape, 1 + stacked_axes, dtype, sharding, gatherer).place(tensors)
    placer = _Placer(weight.shape[1:], stacked_axes, dtype, layer_sharding(sharding), gatherer)
    stack = jax.ShapeDtypeStruct(weight.shape, dtype, sharding=sharding)
    return fill_stack(stack, lambda index: placer.place(planned.layers[index]))


class _Placer:
    """Makes arrays of one shape out of tensors, in buffers that it uses again for each.

    On CPU an array may be its buffer: it must no longer be needed when the next one is made.
    """

    def __init__(self, shape: tuple[int, ...], stacked_axes: int, dtype: np.dtype, sharding: Sharding,
                 gatherer: Gatherer):
        self._shape, self._stacked_axes, self._sharding, self._gatherer = shape, stacked_axes, sharding, gatherer
        self._boxes = local_boxes(shape, sharding)
        self._parts = {box: empty(extents(box), dtype) for box in self._boxes.values()}

    def place(self, tensors: Sequence[TensorInfo]) -> jax.Array:
        """An array made of one tensor for each position of its first `stacked_axes` axes."""
        self._gatherer.fill(self._parts, tensors, self._shape, self._stacked_axes)
        arrays = [jax.device_put(self._parts[box], device) for device, box in self._boxes.items()]
        # Transfers go on after device_put returns, and would keep buffers alive beside the next ones.
        jax.block_until_ready(arrays)
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, arrays)


def local_boxes(shape: tuple[int, ...], sharding: Sharding) -> dict[jax.Device, Box]:
    """The part of an array that each device of this process holds."""
    return {device: box_of(index, shape) for device, index in sharding.addressable_devices_indices_map(shape).items()}


def local_elements(shape: tuple[int, ...], sharding: Sharding) -> int:
    """How many elements of an array this process holds, each counted once."""
    return sum(volume(box) for box in set(local_boxes(shape, sharding).values()))


def set_path(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Puts a leaf into a nested dict."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def check_room(abstract: Iterable[jax.ShapeDtypeStruct]) -> None:
    """Refuses parameters, with shardings, that their devices have no room for."""
    abstract = list(abstract)
    devices = abstract[0].sharding.device_set
    check_fits(required_bytes(abstract) * len(devices), "the weights", devices)


def _local_bytes(planned: PlannedWeight, sharding: Sharding) -> int:
    """How much of a weight this process reads."""
    shape = planned.weight.shape
    total = sum(tensor.nbytes for layer in planned.layers for tensor in layer)
    return total * local_elements(shape, sharding) // max(1, math.prod(shape))
