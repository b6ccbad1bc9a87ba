"""The routed experts against a loop in double precision, golden blocks, and properties of the sum."""

import functools
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.router import route
from pallas_kernels.activations import Silu
from pallas_kernels.moe_mlp import moe_mlp, xla
from pallas_kernels.moe_mlp.plan import plan_tiles, rows_per_tile
from tests.ops.moe_oracle import SITU, D, E, K, banks, inputs, oracle, silu, situ

DATA = Path(__file__).parents[1] / "data/ops"


@functools.partial(jax.jit, static_argnames=("activation", "backend"))
def run(x, ids, weights, gate_up, down, layer=1, first_expert=0, activation=SITU, backend=None):
    return moe_mlp(
        x, ids, weights, gate_up, down, layer, activation=activation, first_expert=first_expert, backend=backend
    )


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("float32", "float32", 1e-6),
        ("mxfp4", "float32", 1e-6),
        ("bfloat16", "bfloat16", 8e-3),
        ("mxfp4", "bfloat16", 8e-3),
        ("bfloat16", "float32", 1e-6),
    ],
)
@pytest.mark.parametrize("tokens", [1, 13, 50])
def test_oracle(kind, dtype, tolerance, tokens, backend):
    (gate_up, down), (gate_up64, down64) = banks(kind)
    x, ids, weights = inputs(tokens, dtype, low=-1, high=E + 2)
    out = run(x, ids, weights, gate_up, down, backend=backend)
    expected = oracle(x, ids, weights, gate_up64[1], down64[1], dtype=jnp.dtype(dtype))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_rounds_every_stage_to_the_activation_dtype():
    """With weights that make each stage inexact, an unrounded stage would show."""
    (gate_up, down), (gate_up64, down64) = banks("bfloat16")
    x, ids, weights = inputs(40, jnp.bfloat16)
    out = np.asarray(run(x, ids, weights, gate_up, down))
    unrounded = oracle(x, ids, weights, gate_up64[1], down64[1])
    rounded = oracle(x, ids, weights, gate_up64[1], down64[1], dtype=jnp.bfloat16)
    assert np.abs(out - rounded).mean() < 0.1 * np.abs(out - unrounded).mean()


@pytest.mark.parametrize("name", ["moe_k3", "moe_kimi_linear"])
@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_golden_block(name, backend):
    golden = np.load(DATA / f"{name}.npz")
    weight = {key[2:]: golden[key].astype(np.float64) for key in golden if key.startswith("w.")}
    x = golden["x"].astype(np.float64)
    routing = route(
        golden["x"], golden["w.gate.weight"], golden["w.gate.e_score_correction_bias"], top_k=int(golden["top_k"]),
        renormalize=True, scaling_factor=float(golden["routed_scaling_factor"]),
    )
    np.testing.assert_array_equal(routing.ids, golden["topk_ids"])
    np.testing.assert_allclose(routing.weights, golden["topk_weights"], rtol=1e-6)

    latent = "routed_expert_norm.weight" in weight
    inner = x @ weight["routed_expert_down_proj.weight"].T if latent else x
    w1, w2, w3 = (
        np.stack([golden[f"w.experts.{e}.{part}.weight"] for e in range(len(weight["gate.weight"]))])
        for part in ("w1", "w2", "w3")
    )
    out = np.asarray(
        run(
            inner.astype(np.float32), routing.ids, routing.weights, np.stack([w1, w3], 1)[None], w2[None], 0,
            activation=SITU if latent else Silu(), backend=backend,
        ),
        np.float64,
    )
    if latent:
        out = out / np.sqrt((out**2).mean(axis=1, keepdims=True) + 1e-5) * weight["routed_expert_norm.weight"]
        out = out @ weight["routed_expert_up_proj.weight"].T
    shared = (x @ weight[f"shared_experts.{part}_proj.weight"].T for part in ("gate", "up"))
    out += (situ if latent else silu)(*shared) @ weight["shared_experts.down_proj.weight"].T
    np.testing.assert_allclose(out, golden["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("pattern", ["one expert", "none", "one row each", "same expert twice", "far ids"])
def test_patterns(pattern, backend):
    (gate_up, down), (gate_up64, down64) = banks("float32")
    x, ids, weights = inputs(20)
    ids = {
        "one expert": jnp.full_like(ids, -1).at[:, 1].set(4),
        "none": jnp.full_like(ids, -1),
        "one row each": jnp.full_like(ids, -1).at[:E, 0].set(jnp.arange(E)[::-1]),
        "same expert twice": ids.at[:, 1].set(ids[:, 0]),
        "far ids": ids.at[::2].set(2**31 - 1).at[1, 1].set(-(2**31)),
    }[pattern]
    expected = oracle(x, ids, weights, gate_up64[1], down64[1])
    np.testing.assert_allclose(run(x, ids, weights, gate_up, down, backend=backend), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize(("tokens", "chosen"), [(0, K), (4, 0)])
def test_no_pairs(tokens, chosen, backend):
    x, ids, weights = inputs(tokens)
    out = run(x, ids[:, :chosen], weights[:, :chosen], *banks("float32")[0], backend=backend)
    np.testing.assert_array_equal(out, np.zeros((tokens, D)))


def test_values_of_padding_never_matter():
    (gate_up, down), _ = banks("float32")
    x, ids, weights = inputs(20)
    ids = ids.at[5].set(-1)
    out = run(x, ids, weights, gate_up, down)
    poisoned = run(x.at[5].set(jnp.nan), ids, weights.at[5].set(jnp.nan), gate_up, down)
    np.testing.assert_array_equal(out, poisoned)
    np.testing.assert_array_equal(out[5], 0.0)


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("kind", ["float32", "mxfp4"])
def test_parts_add_up(kind, backend):
    (gate_up, down), _ = banks(kind)
    x, ids, weights = inputs(21)

    def part(first, last):
        local = jax.tree.map(lambda leaf: leaf[:, first:last], (gate_up, down))
        return run(x, ids, weights, *local, 1, jnp.int32(first), backend=backend)

    parts = part(0, 3), part(3, E)
    assert all(jnp.abs(part).max() > 0.1 for part in parts)
    np.testing.assert_allclose(
        sum(parts), run(x, ids, weights, gate_up, down, backend=backend), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("block", [1200, 600])
@pytest.mark.parametrize("kind", ["float32", "mxfp4"])
def test_large_matrices_are_taken_in_blocks(kind, block, monkeypatch):
    """1200 weights cut 64 rows of 64 into 4 equal blocks; 600 into 7 of 10, the last overlapping its neighbour."""
    (gate_up, down), (gate_up64, down64) = banks(kind)
    x, ids, weights = inputs(9)
    monkeypatch.setattr(xla, "_CPU_BLOCK", block)
    out = jax.jit(functools.partial(moe_mlp, activation=SITU))(x, ids, weights, gate_up, down, 1)
    expected = oracle(x, ids, weights, gate_up64[1], down64[1])
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("tokens", [2, 30])
def test_rows_do_not_depend_on_their_neighbours(tokens):
    """Other tokens' values, ids and weights change no bit of a row, nor does a repetition."""
    (gate_up, down), _ = banks("mxfp4")
    x, ids, weights = inputs(tokens)
    others = inputs(tokens, seed=1, low=-1)
    kept = tokens // 2
    mixed = [other.at[kept:].set(own[kept:]) for own, other in zip((x, ids, weights), others)]
    out, again, neighbours = (np.asarray(run(*args, gate_up, down)) for args in ((x, ids, weights),) * 2 + (mixed,))
    np.testing.assert_array_equal(out, again)
    np.testing.assert_array_equal(out[kept:], neighbours[kept:])
    assert (out[:kept] != neighbours[:kept]).any()


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(st.lists(st.integers(-1, E + 1), min_size=14 * K, max_size=14 * K))
def test_any_routing(ids):
    (gate_up, down), (gate_up64, down64) = banks("float32")
    x, _, weights = inputs(14)
    ids = np.array(ids, np.int32).reshape(14, K)
    expected = oracle(x, ids, weights, gate_up64[0], down64[0], silu, first_expert=1)
    out = run(x, ids, weights, gate_up, down, 0, 1, activation=Silu())
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(st.lists(st.integers(-1, E), min_size=24, max_size=24), st.sampled_from([1, 4]))
def test_plan_covers_each_local_pair_once(ids, tile):
    ids = np.array(ids, np.int32).reshape(8, 3)
    plan = jax.jit(plan_tiles, static_argnums=(2, 3))(ids, 0, E, tile)
    covered = []
    for expert, row0, rows in zip(plan.tiles.sequence, plan.tiles.row0, plan.tiles.rows):
        for row in range(int(row0), int(row0 + rows)):
            [(t, j)] = np.argwhere(np.asarray(plan.position) == row)
            assert (ids[t, j], t) == (expert, plan.token[row])
            covered.append((t, j))
    assert sorted(covered) == sorted(map(tuple, np.argwhere((ids >= 0) & (ids < E))))
    assert plan.num_tiles == (plan.tiles.rows > 0).sum()
    assert (np.diff(plan.tiles.row0[: int(plan.num_tiles)]) > 0).all()


@pytest.mark.parametrize(
    ("pairs", "experts", "rows"), [(8, 256, 1), (512, 256, 1), (513, 256, 8), (3072, 256, 16), (10**6, 256, 128)]
)
def test_rows_per_tile(pairs, experts, rows):
    assert rows_per_tile(pairs, experts) == rows


def test_reference_is_differentiable():
    (gate_up, down), _ = banks("float32")
    x, ids, weights = inputs(7)

    def direct(x, weights, gate_up, down):
        gate, up = jnp.moveaxis(jnp.einsum("tkcid,td->tkci", gate_up[1][ids], x), 2, 0)
        return jnp.einsum("tk,tkdi,tki->td", weights, down[1][ids], jax.nn.silu(gate) * up)

    def op(x, weights, gate_up, down):
        return moe_mlp(x, ids, weights, gate_up, down, 1, activation=Silu(), backend="reference")

    grads, expected = (
        jax.jit(jax.grad(lambda args, f=f: jnp.sum(jnp.sin(f(*args)))))((x, weights, gate_up, down))
        for f in (op, direct)
    )
    for got, want in zip(grads, expected):
        assert jnp.isfinite(got).all() and jnp.abs(got).max() > 0
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
