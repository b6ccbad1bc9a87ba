"""Expert choice against double precision, ties and groups included."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.router import route

GOLDEN = np.load(Path(__file__).parent / "data/ops/router.npz")
X, WEIGHT, BIAS = GOLDEN["x"], GOLDEN["gate_weight"], GOLDEN["bias"]
FACTOR = float(GOLDEN["routed_scaling_factor"])


def run(x, weight, bias, **options):
    options = {"top_k": 4, "renormalize": True, "scaling_factor": 1.0} | options
    return jax.jit(functools.partial(route, **options))(x, weight, bias)


def check(routing, ids, weights):
    assert routing.ids.dtype == jnp.int32 and routing.weights.dtype == jnp.float32
    np.testing.assert_array_equal(routing.ids, ids)
    np.testing.assert_allclose(routing.weights, weights, rtol=1e-6)


def test_scores():
    np.testing.assert_allclose(run(X, WEIGHT, BIAS).scores, GOLDEN["scores"], rtol=1e-6)


@pytest.mark.parametrize(
    ("prefix", "suffix", "bias", "options"),
    [
        ("", "", BIAS, {}),
        ("", "_scaled", BIAS, {"scaling_factor": FACTOR}),
        ("", "_nobias", np.zeros_like(BIAS), {}),
        ("group_", "", BIAS, {"scaling_factor": FACTOR, "num_groups": 4, "topk_groups": 2}),
    ],
)
def test_golden(prefix, suffix, bias, options):
    check(run(X, WEIGHT, bias, **options), GOLDEN[f"{prefix}topk_ids{suffix}"], GOLDEN[f"{prefix}topk_weights{suffix}"])


@pytest.mark.parametrize("case", "ab")
def test_ties_go_to_the_lowest_index(case):
    routing = run(GOLDEN["tie_x"], GOLDEN["tie_gate_weight"], GOLDEN[f"tie_bias_{case}"])
    check(routing, GOLDEN[f"tie_ids_{case}"], GOLDEN[f"tie_weights_{case}"])
    assert GOLDEN[f"tie_ambiguous_{case}"].any()


def test_all_groups_is_no_grouping():
    plain, grouped = run(X, WEIGHT, BIAS), run(X, WEIGHT, BIAS, num_groups=4, topk_groups=4)
    np.testing.assert_array_equal(plain.ids, grouped.ids)


def test_single_expert_keeps_its_score():
    routing = run(X, WEIGHT, BIAS, top_k=1, scaling_factor=2.0)
    best = (GOLDEN["scores"] + BIAS).argmax(axis=1)
    check(routing, best[:, None], 2 * np.take_along_axis(GOLDEN["scores"], best[:, None], axis=1))


def test_without_renormalisation():
    routing = run(X, WEIGHT, BIAS, renormalize=False)
    check(routing, GOLDEN["topk_ids"], np.take_along_axis(GOLDEN["scores"], GOLDEN["topk_ids"], axis=1))


def test_bfloat16_inputs_are_upcast_first():
    x, weight = jnp.asarray(X, jnp.bfloat16), jnp.asarray(WEIGHT, jnp.bfloat16)
    logits = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(run(x, weight, BIAS).scores, 1 / (1 + np.exp(-logits)), rtol=1e-6)


def test_vanishing_scores_give_finite_weights():
    routing = run(np.full((2, 16), 1e4, np.float32), -np.abs(WEIGHT), BIAS)
    np.testing.assert_array_equal(routing.weights, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 17}, "top_k is 17, expected 1 .. 16"),
        ({"top_k": 0}, "top_k is 0"),
        ({"num_groups": 3}, "num_groups is 3"),
        ({"num_groups": 16}, "num_groups is 16"),
        ({"num_groups": 8, "topk_groups": 1}, "cannot fill top_k 4"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        run(X, WEIGHT, BIAS, **options)


def test_bad_shapes():
    with pytest.raises(ValueError, match=r"route: bias has shape \(15,\), expected \[E=16\]"):
        run(X, WEIGHT, BIAS[:15])
    with pytest.raises(ValueError, match=r"route: weight has shape \(16, 15\)"):
        run(X, WEIGHT[:, :15], BIAS)
