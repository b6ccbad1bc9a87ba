"""Reading and writing parts of large stacks, whole pools or weights of all layers, without copying them.

XLA's CPU backend has no bfloat16 gather, scatter or slice of its own: it converts the *operand* to float32, and moves
that conversion out of the enclosing loop, which copies the whole stack. The CPU form of `read` keeps it small;
elsewhere the plain one is right, and the barrier would itself copy a pool. For `write` no such form was found: give it
float32 pools on CPUs.
"""

import jax
import jax.numpy as jnp


def read(stack: jax.Array, *index: jax.Array) -> jax.Array:
    """`stack[index]`, out-of-range indices clipped.

    Args:
      stack: [...].
      *index: int32 arrays for the leading axes, of shapes that broadcast.
    """
    index = tuple(jnp.asarray(i, jnp.int32) for i in index)

    def plain(stack, *index):
        if all(i.ndim == 0 for i in index):
            rest = stack.ndim - len(index)
            part = jax.lax.dynamic_slice(stack, (*index, *[0] * rest), (*[1] * len(index), *stack.shape[len(index):]))
            return part.reshape(stack.shape[len(index):])
        return stack.at[index].get(mode="clip")

    def tied(stack, *index):
        # Ties the stack to the index, which changes with every turn of a loop over layers: what XLA does with the stack
        # can then not move out of the loop.
        stack, index = jax.lax.optimization_barrier((stack, index))
        return plain(stack, *index)

    if stack.dtype == jnp.float32:
        return plain(stack, *index)
    return jax.lax.platform_dependent(stack, *index, cpu=tied, default=plain)


def write(pool: jax.Array, layer: jax.Array, index: tuple[jax.Array, ...], rows: jax.Array,
          used: jax.Array) -> jax.Array:
    """`pool[layer, index[n]] = rows[n]` where `used[n]`; nothing else is touched.

    In place when the pool is donated, but for bfloat16 on a CPU, where it copies the pool.

    Args:
      pool: [L, ...].
      layer: int32 scalar.
      index: [N] int32 arrays for the axes after the first. Used rows differ in their index.
      rows: [N, ...] of any dtype.
      used: [N] bool.
    """
    # Unused rows get indices beyond the pool, all different, and are dropped.
    outside = pool.shape[1] + jnp.arange(used.shape[0], dtype=jnp.int32)
    index = (jnp.where(used, index[0], outside), *index[1:])
    return pool.at[(layer, *index)].set(rows.astype(pool.dtype), mode="drop", unique_indices=True)
