"""A random number generator that is elementwise: a hash of the key and the element's position.

The generators of JAX work on whole blocks and take temporaries several times the size of their output, which a bank of
experts leaves no room for. A hash fuses with the initialiser that uses it into one loop without temporaries, and gives
the same values on any mesh. Good enough for weights of a model that nobody trains; not for statistics.
"""

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl


def random_key(seed: int) -> jax.Array:
    """A key for `jax.random` from a whole number, 0 .. 2**32 - 1."""
    return jax.random.key(jnp.uint32(seed), impl=_HASH)


def _mix(word: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every input bit moves every output bit (Chris Wellons' lowbias32)."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B)
    return word ^ (word >> 16)


def _seed(seed: jax.Array) -> jax.Array:
    word = _mix(seed.astype(jnp.uint32))
    return jnp.stack([word, _mix(word + jnp.uint32(0x9E3779B9))])


def _fold_in(key: jax.Array, data: jax.Array) -> jax.Array:
    low = _mix(key[0] ^ _mix(data.astype(jnp.uint32)))
    return jnp.stack([low, _mix(key[1] + low)])


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    numbers = jnp.arange(jnp.prod(jnp.array(shape)), dtype=jnp.uint32)
    return jax.vmap(lambda number: _fold_in(key, number))(numbers).reshape(*shape, 2)


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    """Uniform words of 8, 16 or 32 bits."""
    *leading, columns = shape or (1,)
    rows = jnp.zeros((), jnp.uint32)
    for size in leading:
        rows = rows[..., None] * jnp.uint32(size) + jnp.arange(size, dtype=jnp.uint32)
    # Two words for a row: with one, rows whose words differ in low bits only would be permutations of each other.
    first, second = _mix(rows ^ key[0])[..., None], _mix(rows + key[1])[..., None]
    words = _mix(_mix(first ^ jnp.arange(columns, dtype=jnp.uint32)) + second)
    dtype = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bit_width]
    return (words >> (32 - bit_width)).astype(dtype).reshape(shape)


_HASH = define_prng_impl(
    key_shape=(2,), seed=_seed, split=_split, random_bits=_random_bits, fold_in=_fold_in, name="k3jax_hash", tag="k3h"
)
