"""From a converted checkpoint to parameters on devices, one layer of the model at a time."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from k3jax.checkpoint import loading
from k3jax.checkpoint.orbax import store
from k3jax.checkpoint.orbax.items import Item, Path, items_of
from k3jax.checkpoint.plan import is_quantised
from k3jax.checkpoint.stacks import abstract_params, empty_stack, layer_sharding, write_layer
from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.model import K3ForCausalLM
from k3jax.progress import reporting
from sharding import ONE_DEVICE, Layout


def load_converted(config: K3Config, directory: pathlib.Path, dtype: Any, *, layout: Layout = ONE_DEVICE,
                   progress: bool = False) -> dict[str, Any]:
    """Loads a converted checkpoint; each process reads what its devices hold.

    Args:
      config: the architecture, as the manifest completes it.
      directory: the checkpoint; its manifest has been checked.
      dtype: of the weights that have no dtype of their own; they are converted. Quantised bytes stay as they are.
      layout: where the weights lie; without a mesh, on the default device.
      progress: report bytes and the time left on standard error.

    Returns:
      Nested dict of arrays as `K3ForCausalLM.abstract_params(config, dtype)` says.

    Raises:
      UserError: the checkpoint does not fit the config or the memory, or is damaged.
    """
    # Orbax takes absolute paths only.
    directory, weights = directory.absolute(), K3ForCausalLM.weights(config)
    model, *layers = items_of(weights)
    for item in (model, *layers):
        _check_item(directory, item)
    abstract = abstract_params(weights, dtype, layout)
    loading.check_room(abstract.values())
    with reporting(progress, sum(map(_local_bytes, abstract.values())), "loading weights") as advance:
        params = store.restore(directory / model.name, {path: abstract[path] for path in model.parts})
        advance(sum(map(_local_bytes, params.values())))
        stacks = {path: _Stack(array) for path, array in abstract.items() if path not in params}
        for item in layers:
            for paths in _groups(item, stacks):
                layer = store.restore(directory / item.name, {path: stacks[path].layer for path in paths})
                for path in paths:
                    stacks[path].write(item.parts[path].index, layer.pop(path))
                    advance(_local_bytes(abstract[path]) // abstract[path].shape[0])
        return unflatten_dict({path: params[path] if path in params else stacks[path].finish() for path in abstract})


class _Stack:
    """A weight that is filled layer by layer: a small one in host memory, which compiles nothing, others in place.

    Attributes:
      on_host: where it is until it is complete.
      layer: shape, dtype and sharding of a layer; without sharding it is taken from host memory.
    """

    def __init__(self, abstract: jax.ShapeDtypeStruct):
        self._abstract = abstract
        self.on_host = math.prod(abstract.shape) * abstract.dtype.itemsize <= loading.WHOLE_STACK_BYTES
        self._array = np.empty(abstract.shape, abstract.dtype) if self.on_host else empty_stack(abstract)
        sharding = None if self.on_host else layer_sharding(abstract.sharding)
        self.layer = jax.ShapeDtypeStruct(abstract.shape[1:], abstract.dtype, sharding=sharding)

    def write(self, index: int, layer: jax.Array | np.ndarray) -> None:
        """Puts a layer into its place."""
        if self.on_host:
            self._array[index] = layer
        else:
            self._array = write_layer(self._array, layer, index)

    def finish(self) -> jax.Array:
        """The whole stack on its devices."""
        if not self.on_host:
            return self._array
        return jax.make_array_from_callback(self._array.shape, self._abstract.sharding, self._array.__getitem__)


def _groups(item: Item, stacks: Mapping[Path, _Stack]) -> list[list[Path]]:
    """The arrays of an item that are read together: the small ones, and each of the others alone, to save memory."""
    small = [path for path in item.parts if stacks[path].on_host]
    groups = [small, *([path] for path in item.parts if path not in small)]
    return list(filter(None, groups))


def _check_item(directory: pathlib.Path, item: Item) -> None:
    """Refuses an item whose arrays are not those of the config."""
    stored = store.declared(directory / item.name)
    for path in {**item.parts, **stored}:
        name = f"{directory / item.name}: array {'/'.join(path)}"
        if path not in stored:
            raise UserError(f"{name} is missing; config.json describes another model than was converted")
        if path not in item.parts:
            raise UserError(f"{name} has no place in the model that config.json describes")
        part, found = item.parts[path], stored[path]
        if found.shape != part.shape:
            raise UserError(f"{name} has shape {list(found.shape)}, config.json asks for {list(part.shape)}")
        if is_quantised(part.weight) != jnp.issubdtype(found.dtype, jnp.integer):
            raise UserError(f"{name} has dtype {found.dtype}, which is not what config.json asks for")


def _local_bytes(array: jax.ShapeDtypeStruct | jax.Array) -> int:
    """How much of an array this process reads."""
    return loading.local_elements(array.shape, array.sharding) * array.dtype.itemsize
