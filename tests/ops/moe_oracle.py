"""Banks, inputs and a double-precision loop for tests of the routed experts."""

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels.activations import Situ
from pallas_kernels.mxfp4 import MxFp4, decode

L, E, D, INNER, K = 2, 6, 64, 32, 3
SITU = Situ(4.0, 25.0)


@functools.cache
def banks(kind):
    """([L, E, 2, I, D], [L, E, D, I]) of `kind`, as arrays for the op and in float64 for the oracle."""
    random = np.random.default_rng(7)
    shapes = (L, E, 2, INNER, D), (L, E, D, INNER)
    if kind == "mxfp4":
        packed = [random.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8) for shape in shapes]
        scales = [random.integers(122, 126, (*shape[:-1], shape[-1] // 32), dtype=np.uint8) for shape in shapes]
        arrays = [MxFp4(jnp.asarray(p), jnp.asarray(s)) for p, s in zip(packed, scales)]
        return arrays, [np.asarray(decode(*array, jnp.float32), np.float64) for array in arrays]
    arrays = [jnp.asarray(random.standard_normal(shape) * 0.3, kind) for shape in shapes]
    return arrays, [np.asarray(array, np.float64) for array in arrays]


def inputs(tokens, dtype=jnp.float32, seed=0, low=0, high=E):
    random = np.random.default_rng(seed)
    x = jnp.asarray(random.standard_normal((tokens, D)), dtype)
    ids = random.integers(low, high, (tokens, K)).astype(np.int32)
    return x, jnp.asarray(ids), jnp.asarray(random.random((tokens, K)), jnp.float32)


def silu(gate, up):
    return gate / (1 + np.exp(-gate)) * up


def situ(gate, up):
    return 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)


def oracle(x, ids, weights, gate_up, down, activation=situ, first_expert=0, dtype=np.float64):
    """One pair at a time, in float64 with the stages rounded to `dtype`; banks [E, 2, I, D] and [E, D, I]."""

    def rounded(value):
        return value.astype(dtype).astype(np.float64)

    x, weights = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    out = np.zeros_like(x)
    for t, j in np.ndindex(*ids.shape):
        e = int(ids[t, j]) - first_expert
        if 0 <= e < len(down):
            gate, up = gate_up[e] @ x[t]
            out[t] += weights[t, j] * (down[e] @ rounded(activation(gate, up)))
    return out
