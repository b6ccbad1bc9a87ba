"""Arrays on devices that are filled layer by layer, in place."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from k3jax.errors import UserError
from k3jax.weights import Weight
from sharding import placement


def weight_sharding(weight: Weight, name: str, mesh: Mesh | None, rules: Mapping[str, str]) -> Sharding:
    """Where a weight lies: by the rules on a mesh, else on the default device.

    Raises:
      UserError: the mesh does not divide an axis.
    """
    if mesh is None:
        return jnp.zeros(()).sharding
    try:
        return placement(weight.axes, weight.shape, mesh, rules, name)
    except ValueError as error:
        raise UserError(str(error)) from None


def layer_sharding(sharding: Sharding) -> Sharding:
    """The sharding of one layer of a stack."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


def fill_stack(shape: tuple[int, ...], dtype: Any, sharding: Sharding,
               layer: Callable[[int], jax.Array]) -> jax.Array:
    """A stack whose layers are made one by one, so that memory beyond it is one layer's.

    Args:
      shape, dtype, sharding: of the stack.
      layer: makes the layer of an index of axis 0, placed as `layer_sharding` says. By the next call the layer before
        has been copied and dropped.
    """
    stack = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()
    write = jax.jit(_write, donate_argnums=0, out_shardings=sharding)
    for index in range(shape[0]):
        stack = write(stack, layer(index), jnp.int32(index))
        stack.block_until_ready()
    return stack


def _write(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)
