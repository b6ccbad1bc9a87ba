"""SiTU and SiLU against double precision, saturation included."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.activations import Silu, Situ

GOLDEN = np.load(Path(__file__).parents[1] / "data/ops/situ.npz")
CASES = {"y": Situ(4.0, 25.0), "y_no_linear_beta": Situ(4.0), "y_silu": Silu()}


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    out = jax.jit(CASES[name])(GOLDEN["gate"], GOLDEN["up"])
    assert out.dtype == jnp.float32
    with np.errstate(over="ignore"):
        expected = GOLDEN[name].astype(np.float32)
    # Below -87 the float32 sigmoid is zero.
    np.testing.assert_allclose(out, expected, rtol=5e-7, atol=1e-13)


def test_published_values():
    gate, up = np.array([[1, 1], [-1, 1], [2, -3], [4, 10], [10, 30], [-6, 5], [100, 100]], np.float32).T
    expected = [0.71581783, -0.26333466, -4.86106655, 28.41622952, 82.24582155, -0.04417438, 99.93292997]
    np.testing.assert_allclose(Situ(4.0, 25.0)(gate, up), expected, rtol=1e-6)


@pytest.mark.parametrize("activation", CASES.values())
def test_computes_in_float32(activation):
    gate, up = (jnp.asarray(GOLDEN[name], jnp.bfloat16) for name in ("gate", "up"))
    upcast = activation(gate.astype(jnp.float32), up.astype(jnp.float32))
    np.testing.assert_array_equal(activation(gate, up), upcast)
    assert activation(gate, up).dtype == jnp.float32
