"""Reads and writes of stacks: the right parts, and no copy of the stack inside a loop over layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import stacks

DTYPES = (jnp.float32, jnp.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_touches_used_rows_only(dtype):
    pool = jnp.arange(2 * 4 * 5 * 3).reshape(2, 4, 5, 3).astype(dtype)
    rows = -jnp.ones((3, 3))
    index = (jnp.array([3, 0, 2]), jnp.array([4, 0, 1]))
    written = jax.jit(stacks.write)(pool, 1, index, rows, jnp.array([True, False, True]))
    expected = np.array(pool)
    expected[1, 3, 4] = expected[1, 2, 1] = -1
    np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_read(dtype):
    stack = jnp.arange(2 * 4 * 3).reshape(2, 4, 3).astype(dtype)
    np.testing.assert_array_equal(stacks.read(stack, 1), stack[1])
    np.testing.assert_array_equal(stacks.read(stack, jnp.int32(1), jnp.int32(2)), stack[1, 2])
    np.testing.assert_array_equal(stacks.read(stack, 1, jnp.array([3, 0])), np.asarray(stack)[1, [3, 0]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loop_over_layers_copies_neither_weights_nor_pool(dtype):
    layers, rows, width, slots = 8, 2, 256, 64

    def step(x, weights, pool, slot):
        def layer(carry, number):
            x, pool = carry
            x = jnp.einsum("td,fd->tf", x, stacks.read(weights, number), preferred_element_type=jnp.float32)
            kept = stacks.read(pool, number, slot).astype(jnp.float32)
            pool = stacks.write(pool, number, (slot,), kept + x[:, None], slot > 0)
            return (x.astype(dtype), pool), None

        return jax.lax.scan(layer, (x, pool), jnp.arange(layers))[0]

    shapes = (rows, width), (layers, width, width), (layers, slots, width, width)
    # On CPUs pools are float32, whatever the weights are.
    dtypes = dtype, dtype, jnp.float32
    arguments = [jax.ShapeDtypeStruct(*array) for array in zip(shapes, dtypes)]
    arguments.append(jax.ShapeDtypeStruct((rows,), jnp.int32))
    analysis = jax.jit(step, donate_argnums=2).lower(*arguments).compile().memory_analysis()
    one_layer, one_slot = width * width * 4, width * width * 4 * rows
    assert analysis.temp_size_in_bytes < 2 * one_layer + 3 * one_slot
