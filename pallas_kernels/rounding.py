"""Rounding that XLA keeps."""

import jax
import jax.numpy as jnp


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds float32 `x` to the values of `dtype` and stays in float32.

    XLA may drop a cast there and back as excess precision; it keeps this.
    """
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=info.nexp, mantissa_bits=info.nmant)
