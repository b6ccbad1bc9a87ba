"""The shared KDA functions against golden vectors and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda_math
from pallas_kernels.rounding import round_to
from tests.ops import kda_oracle as oracle


def test_l2_normalize_matches_golden_rows_of_all_magnitudes():
    data = oracle.golden("l2norm")
    np.testing.assert_allclose(kda_math.l2_normalize(data["x"]), data["y"], atol=2e-7)


def test_decay_gate_matches_golden():
    data = oracle.golden("decay_gate")
    args = data["raw"], data["A_log"], data["dt_bias"].reshape(3, 8)
    bounded = kda_math.decay_gate(*args, float(data["lower_bound"]))
    softplus = kda_math.decay_gate(*args, None)
    np.testing.assert_allclose(bounded, data["g_bounded"], atol=2e-6)
    np.testing.assert_allclose(softplus, data["g_softplus"], atol=2e-6, rtol=3e-7)
    np.testing.assert_allclose(jnp.exp(bounded), data["alpha_bounded"], atol=1e-6)
    np.testing.assert_allclose(jnp.exp(softplus), data["alpha_softplus"], atol=1e-6)


@pytest.mark.parametrize(
    "logit, A_log, bounded, softplus",
    [
        (0.0, 0.0, -2.5, -0.693147),
        (1.0, 0.0, -3.655293, -1.313262),
        (-2.0, 0.5, -0.178295, -0.209269),
        (3.0, -0.4684, -4.336911, -1.908425),
        (-4.0, 1.0066, -8.8217e-5, -0.0496633),
        (10.0, 0.0, -4.999773, -10.0000454),
    ],
)
def test_decay_gate_matches_published_values(logit, A_log, bounded, softplus):
    args = jnp.full((1, 1), logit), jnp.full((1,), A_log), jnp.zeros((1, 1))
    np.testing.assert_allclose(kda_math.decay_gate(*args, -5.0), [[bounded]], rtol=2e-5)
    np.testing.assert_allclose(kda_math.decay_gate(*args, None), [[softplus]], rtol=2e-5)


def test_gated_rms_norm_matches_golden():
    data = oracle.golden("gated_rmsnorm")
    y = kda_math.gated_rms_norm(data["x"], data["gate"], data["weight"], float(data["eps"]))
    np.testing.assert_allclose(y, data["y"], atol=1e-6)


def test_round_to_has_the_values_of_a_cast():
    x = jnp.float32(1.0) + jnp.float32(2.0**-9)
    rounded = jax.jit(lambda x: round_to(x, jnp.bfloat16))(x)
    assert rounded.dtype == jnp.float32 and float(rounded) == float(x.astype(jnp.bfloat16)) != float(x)


def test_round_to_float32_is_the_identity():
    x = np.random.default_rng(0).normal(size=100).astype(np.float32)
    np.testing.assert_array_equal(round_to(x, jnp.float32), x)


@pytest.mark.parametrize("noise", [0.1, 0.25, 1.0, 10.0])
@pytest.mark.parametrize("beta", [0.5, 0.98])
def test_inverse_stays_accurate_for_correlated_keys(noise, beta):
    """The case that breaks a power series: relative error 1 or more there, bounded entries here."""
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(20, 1, 128)) + noise * rng.normal(size=(20, 64, 128))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    lower = np.tril(beta * keys @ keys.transpose(0, 2, 1), -1).astype(np.float32)
    exact = np.linalg.inv(np.eye(64) + lower.astype(np.float64))
    inverse = np.asarray(kda_math.unit_lower_inverse(jnp.asarray(lower)))
    assert np.abs(inverse).max() <= 1.5
    assert np.abs(inverse - exact).max() <= 3e-6
    assert not np.triu(inverse, 1).any()


def test_inverse_is_exact_for_identical_keys():
    lower = jnp.tril(jnp.ones((64, 64)), -1)
    np.testing.assert_array_equal(kda_math.unit_lower_inverse(lower), np.eye(64) - np.eye(64, k=-1))
