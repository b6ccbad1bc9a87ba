"""Block attention residuals against published vectors and a float64 oracle with explicit roundings."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify

from pallas_kernels.attn_res import attn_res, validate, xla
from pallas_kernels.attn_res.reference import source_weights

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "data" / "ops" / "attn_res.npz")
EPS = float(GOLDEN["eps"])
N_MAX, TOKENS, WIDTH = 8, 5, 32

op = jax.jit(attn_res, static_argnames=("eps", "backend"))
BACKENDS = ["xla", "reference"]


def golden(n: int) -> dict[str, np.ndarray]:
    """Inputs with NaN in the unfilled blocks."""
    blocks = np.full((N_MAX, TOKENS, WIDTH), np.nan, np.float32)
    blocks[:n] = GOLDEN[f"n{n}_blocks"]
    return {
        "blocks": blocks,
        "num_blocks": np.int32(n),
        "prefix": GOLDEN[f"n{n}_prefix"],
        "norm_weight": GOLDEN[f"n{n}_norm_weight"],
        "proj_weight": GOLDEN[f"n{n}_proj_weight"][0],
    }


def random_inputs(seed: int, dtype) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "blocks": rng.normal(size=(N_MAX, TOKENS, WIDTH)).astype(dtype),
        "prefix": rng.normal(size=(TOKENS, WIDTH)).astype(dtype),
        "delta": rng.normal(size=(TOKENS, WIDTH)).astype(dtype),
        "norm_weight": rng.normal(size=WIDTH).astype(np.float32),
        "proj_weight": rng.normal(size=WIDTH).astype(np.float32) / 4,
    }


def float64_mix(blocks, prefix, norm_weight, proj_weight) -> np.ndarray:
    sources = np.concatenate([blocks, prefix[None]]).astype(np.float64)
    weight = norm_weight.astype(np.float64) * proj_weight.astype(np.float64)
    scores = (sources / np.sqrt(np.mean(sources**2, axis=-1, keepdims=True) + EPS)) @ weight
    probabilities = np.exp(scores - scores.max(axis=0))
    return np.einsum("nt,ntd->td", probabilities / probabilities.sum(axis=0), sources)


def bfloat16_bits(x) -> np.ndarray:
    """Integers whose difference counts representable values between two bfloat16 numbers of one sign."""
    return np.asarray(x, jnp.bfloat16).view(np.int16).astype(np.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", range(1, N_MAX + 1))
def test_golden_mix_reads_only_the_filled_blocks(n, backend):
    inputs = golden(n)
    out, prefix = op(**inputs, delta=None, eps=EPS, backend=backend)
    np.testing.assert_allclose(out, GOLDEN[f"n{n}_out"], rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(prefix, inputs["prefix"])


@pytest.mark.parametrize("n", range(1, N_MAX + 1))
def test_golden_mix_by_branches(n):
    """The form for large inputs, which has a branch for each number of filled blocks."""
    branched = jax.jit(functools.partial(xla.attn_res, eps=EPS, branch_elements=0))
    out, _ = branched(**golden(n), delta=None)
    np.testing.assert_allclose(out, GOLDEN[f"n{n}_out"], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", range(1, N_MAX + 1))
def test_golden_probabilities(n, backend):
    """One-hot channels, added to the sources and ignored by the weights, read out the probabilities."""
    inputs = golden(n)
    # Small next to the sources, so that their norms stay as they are; `stretch` undoes the wider mean.
    scale = 1e-3
    probe = np.zeros((N_MAX + 1, TOKENS, N_MAX + 1), np.float32)
    probe[range(N_MAX + 1), :, range(N_MAX + 1)] = scale
    width = WIDTH + N_MAX + 1
    stretch = np.sqrt(WIDTH / width)
    out, _ = op(
        blocks=np.concatenate([inputs["blocks"], probe[:-1]], axis=-1),
        num_blocks=inputs["num_blocks"],
        prefix=np.concatenate([inputs["prefix"], probe[-1]], axis=-1),
        delta=None,
        norm_weight=np.pad(inputs["norm_weight"] * stretch, (0, N_MAX + 1)).astype(np.float32),
        proj_weight=np.pad(inputs["proj_weight"], (0, N_MAX + 1)),
        eps=EPS * WIDTH / width,
        backend=backend,
    )
    read = np.asarray(out)[:, WIDTH:].T / scale
    np.testing.assert_allclose(read[[*range(n), N_MAX]], GOLDEN[f"n{n}_probs"], atol=1e-5)
    np.testing.assert_array_equal(read[n:N_MAX], 0)


@pytest.mark.parametrize("n", range(1, N_MAX + 1))
def test_golden_source_weights(n):
    weights = np.asarray(source_weights(**golden(n), eps=EPS))
    np.testing.assert_allclose(weights[[*range(n), N_MAX]], GOLDEN[f"n{n}_probs"], atol=1e-6)
    np.testing.assert_array_equal(weights[n:N_MAX], 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_blocks_the_mix_is_the_updated_prefix(dtype, backend):
    inputs = random_inputs(0, dtype)
    inputs["blocks"] = np.full_like(inputs["blocks"], np.nan)
    out, prefix = op(**inputs, num_blocks=jnp.int32(0), eps=EPS, backend=backend)
    exact = inputs["prefix"].astype(np.float64) + inputs["delta"].astype(np.float64)
    np.testing.assert_array_equal(prefix, exact.astype(dtype))
    np.testing.assert_array_equal(out, prefix)
    assert out.dtype == prefix.dtype == dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_rounds_prefix_and_norm_but_not_the_mix_between(backend):
    inputs = random_inputs(1, jnp.bfloat16)
    output_norm_weight = np.linspace(0.5, 2, WIDTH).astype(jnp.bfloat16)
    n = 5
    mixed, prefix = op(**inputs, num_blocks=jnp.int32(n), eps=EPS, backend=backend)
    exact = inputs["prefix"].astype(np.float64) + inputs["delta"].astype(np.float64)
    np.testing.assert_array_equal(prefix, exact.astype(jnp.bfloat16))
    expected = float64_mix(inputs["blocks"][:n], np.asarray(prefix), inputs["norm_weight"], inputs["proj_weight"])
    # A float32 result next to a rounding boundary may fall on the other side of it.
    assert np.mean(bfloat16_bits(mixed) != bfloat16_bits(expected)) < 0.02
    np.testing.assert_allclose(np.asarray(mixed, np.float64), expected, rtol=2**-8, atol=1e-6)

    normed, _ = op(
        **inputs, num_blocks=jnp.int32(n), eps=EPS, output_norm_weight=output_norm_weight, backend=backend
    )
    unit = (expected / np.sqrt(np.mean(expected**2, axis=-1, keepdims=True) + EPS)).astype(jnp.bfloat16)
    twice_rounded = (unit.astype(np.float64) * output_norm_weight.astype(np.float64)).astype(jnp.bfloat16)
    assert np.mean(bfloat16_bits(normed) != bfloat16_bits(twice_rounded)) < 0.02


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_mix_reads_the_rounded_prefix(backend):
    """256 + 1 is 256 in bfloat16, so that its mean with -256 is 0, not 1/2."""
    full = np.ones((TOKENS, WIDTH), jnp.bfloat16)
    blocks = np.broadcast_to(-256 * full, (N_MAX, TOKENS, WIDTH))
    zero = np.zeros(WIDTH, np.float32)
    out, prefix = op(blocks, jnp.int32(1), 256 * full, full, zero, zero, eps=EPS, backend=backend)
    np.testing.assert_array_equal(prefix, 256)
    np.testing.assert_array_equal(out, 0)


@given(seed=st.integers(0, 2**16), n=st.integers(0, N_MAX), scale=st.sampled_from([1e-3, 1.0, 1e3]))
@settings(deadline=None, max_examples=25)
def test_float32_matches_float64_definition(seed, n, scale):
    inputs = random_inputs(seed, np.float32)
    inputs["blocks"] *= np.float32(scale)
    output_norm_weight = np.linspace(0.5, 2, WIDTH).astype(np.float32)
    out, prefix = op(**inputs, num_blocks=jnp.int32(n), eps=EPS)
    expected = float64_mix(inputs["blocks"][:n], np.asarray(prefix), inputs["norm_weight"], inputs["proj_weight"])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5 * max(1, scale))
    normed, _ = op(**inputs, num_blocks=jnp.int32(n), eps=EPS, output_norm_weight=output_norm_weight)
    unit = expected / np.sqrt(np.mean(expected**2, axis=-1, keepdims=True) + EPS)
    np.testing.assert_allclose(normed, unit * output_norm_weight, atol=2e-5)


@given(order=st.permutations(range(N_MAX)))
@settings(deadline=None, max_examples=10)
def test_order_of_blocks_does_not_matter(order):
    inputs = random_inputs(2, np.float32)
    out, _ = op(**inputs, num_blocks=jnp.int32(N_MAX), eps=EPS)
    inputs["blocks"] = inputs["blocks"][list(order)]
    shuffled, _ = op(**inputs, num_blocks=jnp.int32(N_MAX), eps=EPS)
    np.testing.assert_allclose(shuffled, out, atol=2e-6)


def test_float32_makes_no_copy_of_the_blocks():
    n_max, tokens, width = 8, 64, 256

    def step(blocks, prefix, weight):
        def body(prefix, n):
            return tuple(attn_res(blocks, n, prefix, prefix, weight, weight, eps=EPS))

        return jax.lax.scan(body, prefix, jnp.arange(n_max, dtype=jnp.int32))

    shapes = ((n_max, tokens, width), (tokens, width), (width,))
    compiled = jax.jit(step).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < n_max * tokens * width * 4 / 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"blocks": np.zeros((N_MAX, 4, WIDTH), np.float32)}, r"blocks has shape \(8, 4, 32\)"),
        ({"delta": np.zeros((TOKENS, WIDTH), jnp.bfloat16)}, "delta has dtype bfloat16, expected float32"),
        ({"num_blocks": np.float32(2)}, "num_blocks has dtype float32, expected int32"),
        ({"proj_weight": np.zeros((1, WIDTH), np.float32)}, r"proj_weight has shape \(1, 32\), expected \[D=32\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_while_tracing(change, message):
    arguments = {**random_inputs(3, np.float32), "num_blocks": np.int32(2), **change}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(attn_res, eps=EPS), **arguments)


@pytest.mark.parametrize("num_blocks", [-1, N_MAX + 1])
def test_number_of_blocks_is_checked_by_value(num_blocks, monkeypatch):
    inputs = random_inputs(4, np.float32)
    validate(**inputs, num_blocks=N_MAX)
    with pytest.raises(ValueError, match=f"attn_res: num_blocks is {num_blocks}, expected 0 .. 8"):
        validate(**inputs, num_blocks=num_blocks)
    monkeypatch.setenv("K3JAX_DEBUG", "1")
    checked = jax.jit(checkify.checkify(functools.partial(attn_res, eps=EPS)))
    error, _ = checked(**inputs, num_blocks=jnp.int32(N_MAX))
    error.throw()
    error, _ = checked(**inputs, num_blocks=jnp.int32(num_blocks))
    with pytest.raises(checkify.JaxRuntimeError, match=f"num_blocks is {num_blocks}"):
        error.throw()
