"""What the MLA ops refuse: shapes and dtypes while tracing, values in `validate` and in debug mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from pallas_kernels import mla_decode as decode_package
from pallas_kernels import mla_prefill as prefill_package
from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.mla_prefill import mla_prefill
from tests.ops.mla_oracle import decode_arguments, make_batch, oracle

BAD_VALUES = {
    "decreases": lambda b: b._replace(cu_seqlens=np.array([0, 9, 4], np.int32)),
    "context_lens has -1": lambda b: b._replace(context_lens=np.array([3, -1], np.int32)),
    "grows to 50 tokens": lambda b: b._replace(context_lens=np.array([3, 46], np.int32)),
    "names page 24": lambda b: b._replace(page_table=np.where(b.page_table == 0, 24, b.page_table)),
    "row 1 has page 0": lambda b: b._replace(page_table=b.page_table * np.array([[1], [0]], np.int32)),
    "would be written for two": lambda b: b._replace(page_table=b.page_table[[0, 0]]),
}


@pytest.mark.parametrize("message", BAD_VALUES)
def test_prefill_validate_names_bad_values(message):
    batch = make_batch(8, contexts=[3, 10], lengths=[9, 4], padding=1)
    prefill_package.validate(*batch)
    with pytest.raises(ValueError, match=f"mla_prefill: .*{message}"):
        prefill_package.validate(*BAD_VALUES[message](batch))


def test_shared_prefix_pages_are_allowed_but_not_written():
    batch = make_batch(9, contexts=[8, 8], lengths=[3, 3])
    batch.page_table[1, 0] = batch.page_table[0, 0]
    prefill_package.validate(*batch)
    batch.page_table[1, 1] = batch.page_table[0, 1]
    with pytest.raises(ValueError, match="would be written for two"):
        prefill_package.validate(*batch)


@pytest.mark.parametrize(
    "message, context, page",
    [("grows to 49", 48, 0), ("names page -2", 5, -2), ("row 2 has page 0", 13, 0)],
)
def test_decode_validate_names_bad_values(message, context, page):
    batch = make_batch(10, contexts=[4, 12, 13], lengths=[1] * 3)
    batch.page_table[0, 0] = 0
    decode_package.validate(*decode_arguments(batch))
    batch.context_lens[2] = context
    batch.page_table[2, 0] = page
    with pytest.raises(ValueError, match=f"mla_decode: .*{message}"):
        decode_package.validate(*decode_arguments(batch))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"latent": np.zeros((7, 20), np.float32)}, r"latent has shape \(7, 20\)"),
        ({"cu_seqlens": np.zeros(5, np.int32)}, r"cu_seqlens has shape \(5,\), expected \[3\]"),
        ({"pages": np.zeros((2, 4, 8, 20), jnp.bfloat16)}, "pages has dtype bfloat16, expected float32"),
        ({"context_lens": np.zeros(2, np.float32)}, "context_lens has dtype float32, expected int32"),
        ({"kv_b_proj": np.zeros((2, 2, 8, 16), np.float32)}, "do not fit"),
        ({"kv_b_proj": np.zeros((2, 2, 14, 21), np.float32)}, "do not fit"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_while_tracing(change, message):
    batch = make_batch(11, contexts=[3, 10], lengths=[9, 4])._replace(**change)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mla_prefill, *batch)


def test_debug_mode_checks_inside_the_program(monkeypatch):
    monkeypatch.setenv("K3JAX_DEBUG", "1")
    batch = make_batch(12, contexts=[3, 10], lengths=[9, 4])
    prefill = jax.jit(checkify.checkify(mla_prefill))
    error, result = prefill(*batch)
    error.throw()
    np.testing.assert_allclose(result.out, oracle(batch)[0], atol=2e-6, rtol=1e-5)
    error, _ = prefill(*batch._replace(context_lens=np.array([3, -1], np.int32)))
    with pytest.raises(checkify.JaxRuntimeError, match="mla_prefill: context_lens has -1"):
        error.throw()
    step = make_batch(13, contexts=[3, 10], lengths=[1, 1])
    step.page_table[1] = step.page_table[0]
    step.context_lens[1] = 2
    error, _ = jax.jit(checkify.checkify(mla_decode))(*decode_arguments(step))
    with pytest.raises(checkify.JaxRuntimeError, match="mla_decode: page .* would be written for two"):
        error.throw()
