"""Random weights, made on the devices that hold them."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.checkpoint.hash_random import random_key
from k3jax.checkpoint.loading import check_room, set_path
from k3jax.checkpoint.stacks import abstract_params
from k3jax.config import K3Config
from k3jax.memory import required_bytes
from k3jax.model import K3ForCausalLM
from k3jax.progress import reporting
from k3jax.weights import Weight, leaves
from sharding import ONE_DEVICE, Layout

SMALL_BYTES = 64 * 2**20
"""Weights up to this size are made by one program: compiling one for each takes longer than making them."""


def random_params(config: K3Config, dtype: Any, seed: int, *, layout: Layout = ONE_DEVICE,
                  progress: bool = False) -> dict[str, Any]:
    """Random weights in the layout and the dtypes of a checkpoint.

    A value depends on the seed, the name of its weight, its model layer and its position alone: neither on the mesh
    nor on the number of layers.

    Args:
      config: the architecture.
      dtype: of the weights that have no dtype of their own.
      seed: a whole number from 0 to 2**32 - 1.
      layout: where the weights lie; without a mesh, on the default device.
      progress: report bytes and the time left on standard error.

    Returns:
      Nested dict of arrays as `K3ForCausalLM.abstract_params(config, dtype)` says.

    Raises:
      UserError: the devices have too little memory, or the mesh does not divide an axis.
    """
    tree = K3ForCausalLM.weights(config)
    weights, abstract = dict(leaves(tree)), abstract_params(tree, dtype, layout)
    check_room(abstract.values())
    large = [path for path in weights if required_bytes(abstract[path]) > SMALL_BYTES]
    groups = [[path for path in weights if path not in large], *([path] for path in large)]
    key = random_key(seed)
    params: dict[str, Any] = {}
    with reporting(progress, required_bytes(abstract), "making weights") as advance:
        for group in filter(None, groups):
            made = _make(key, {path: weights[path] for path in group}, {path: abstract[path] for path in group})
            for path, array in jax.block_until_ready(made).items():
                set_path(params, path, array)
            advance(required_bytes(made))
    return params


def _make(key: jax.Array, weights: dict[tuple[str, ...], Weight],
          abstract: dict[tuple[str, ...], jax.ShapeDtypeStruct]) -> dict[tuple[str, ...], jax.Array]:
    """Some weights, by one program."""

    def make(key: jax.Array) -> list[jax.Array]:
        return [
            random_weight(weight, abstract[path].dtype, jax.random.fold_in(key, zlib.crc32("/".join(path).encode())))
            for path, weight in weights.items()
        ]

    shardings = [abstract[path].sharding for path in weights]
    return dict(zip(weights, jax.jit(make, out_shardings=shardings)(key)))


def random_weight(weight: Weight, dtype: Any, key: jax.Array) -> jax.Array:
    """All layers of a weight, one after the other: what an initialiser needs in between is one layer's."""
    if weight.layers is None:
        return weight.init(key, weight.shape, dtype)
    layers = jnp.array(weight.layers, jnp.uint32)
    return jax.lax.map(lambda layer: weight.init(jax.random.fold_in(key, layer), weight.shape[1:], dtype), layers)
