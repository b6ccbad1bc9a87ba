"""Arrays on devices that are filled layer by layer, in place."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from k3jax.weights import WeightTree, leaves, placements
from sharding import Layout


def abstract_params(weights: WeightTree, dtype: Any, layout: Layout) -> dict[tuple[str, ...], jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of every weight, by path.

    Args:
      weights: the declarations.
      dtype: of the weights that have no dtype of their own.
      layout: where they lie; without a mesh, on the default device.

    Raises:
      UserError: the mesh does not divide an axis.
    """
    shardings = placements(weights, layout)
    default = jnp.zeros(()).sharding
    return {path: weight.abstract(dtype, shardings[path] or default) for path, weight in leaves(weights)}


def layer_sharding(sharding: Sharding) -> Sharding:
    """The sharding of one layer of a stack."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


def empty_stack(abstract: jax.ShapeDtypeStruct) -> jax.Array:
    """A stack of zeros, of this shape, dtype and sharding."""
    return jax.jit(lambda: jnp.zeros(abstract.shape, abstract.dtype), out_shardings=abstract.sharding)()


def write_layer(stack: jax.Array, layer: jax.Array, index: int) -> jax.Array:
    """Puts one layer into a stack, in place, and waits until it is there.

    Args:
      stack: is used up.
      layer: placed as `layer_sharding` says.
      index: of axis 0.
    """
    write = jax.jit(_write, donate_argnums=0, out_shardings=stack.sharding)
    return write(stack, layer, jnp.int32(index)).block_until_ready()


def fill_stack(abstract: jax.ShapeDtypeStruct, layer: Callable[[int], jax.Array]) -> jax.Array:
    """A stack whose layers are made one by one, so that memory beyond it is one layer's.

    Args:
      abstract: shape, dtype and sharding of the stack.
      layer: makes the layer of an index of axis 0, placed as `layer_sharding` says. By the next call the layer before
        has been copied and dropped.
    """
    stack = empty_stack(abstract)
    for index in range(abstract.shape[0]):
        stack = write_layer(stack, layer(index), index)
    return stack


def _write(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)
