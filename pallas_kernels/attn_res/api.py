"""`attn_res`: the residual add, the mix over block sums, and the RMSNorm that follows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import checks, dispatch
from pallas_kernels.attn_res import reference, xla

OP = "attn_res"
IMPLEMENTATIONS = {"xla": xla.attn_res, "reference": reference.attn_res}


class AttnResOutput(NamedTuple):
    """Result of `attn_res`.

    Attributes:
      out: [T, D] the mix, RMS-normed where asked for.
      prefix: [T, D] the running sum of the current block, with `delta` added.
    """

    out: jax.Array
    prefix: jax.Array


def attn_res(
    blocks: jax.Array,
    num_blocks: jax.Array,
    prefix: jax.Array,
    delta: jax.Array | None,
    norm_weight: jax.Array,
    proj_weight: jax.Array,
    *,
    eps: float,
    output_norm_weight: jax.Array | None = None,
    backend: str | None = None,
) -> AttnResOutput:
    """Adds a sublayer's output to the running sum and mixes the sum with those of earlier blocks, token by token.

    Every source is scored by sum(rmsnorm(source) * norm_weight * proj_weight); the softmax of the scores weighs the
    sources themselves, not their norms. Scores, softmax and sum are float32; `prefix` and the mix are rounded to the
    activation dtype, float32 or bfloat16. Kimi K3 technical report 2.2; shapes in docs/design.md.

    Args:
      blocks: [n_max, T, D] sums of finished blocks.
      num_blocks: int32 scalar; only `blocks[:num_blocks]` take part. With 0 the mix is the running sum.
      prefix: [T, D] running sum of the current block.
      delta: [T, D] added to it first, or None.
      norm_weight: [D] float32 or bfloat16.
      proj_weight: [D] float32 or bfloat16.
      eps: of the norm inside the scores and of the output norm.
      output_norm_weight: [D], RMSNorm applied to the mix before it is rounded; None leaves the mix.
      backend: implementation to use; None chooses by platform.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: the named backend cannot take the case.
    """
    num_blocks = jnp.asarray(num_blocks)
    _require(blocks, num_blocks, prefix, delta, norm_weight, proj_weight, output_norm_weight)
    checks.guard(OP, lambda: _checks(blocks, num_blocks))
    arguments = (blocks, num_blocks, prefix, delta, norm_weight, proj_weight)
    out, prefix = dispatch.run(
        OP, IMPLEMENTATIONS, backend, *arguments, eps=eps, output_norm_weight=output_norm_weight
    )
    return AttnResOutput(out, prefix)


def validate(blocks, num_blocks, prefix, delta, norm_weight, proj_weight, *, output_norm_weight=None) -> None:
    """Raises ValueError with the first condition on the arguments' shapes, dtypes or values that does not hold."""
    num_blocks = jnp.asarray(num_blocks)
    _require(blocks, num_blocks, prefix, delta, norm_weight, proj_weight, output_norm_weight)
    checks.enforce(OP, _checks(blocks, num_blocks))


def _require(blocks, num_blocks, prefix, delta, norm_weight, proj_weight, output_norm_weight) -> None:
    checks.bind_shapes(
        OP,
        prefix=(prefix, "T D"),
        blocks=(blocks, "n_max T D"),
        num_blocks=(num_blocks, ""),
        delta=(delta, "T D"),
        norm_weight=(norm_weight, "D"),
        proj_weight=(proj_weight, "D"),
        output_norm_weight=(output_norm_weight, "D"),
    )
    checks.require_dtype(OP, "prefix", prefix, jnp.float32, jnp.bfloat16)
    checks.require_dtype(OP, "num_blocks", num_blocks, jnp.int32)
    for name, array in {"blocks": blocks, "delta": delta}.items():
        if array is not None:
            checks.require_dtype(OP, name, array, prefix.dtype)
    weights = {"norm_weight": norm_weight, "proj_weight": proj_weight, "output_norm_weight": output_norm_weight}
    for name, array in weights.items():
        if array is not None:
            checks.require_dtype(OP, name, array, jnp.float32, jnp.bfloat16)


def _checks(blocks, num_blocks) -> list[checks.Check]:
    n_max = blocks.shape[0]
    return [
        checks.Check(
            (num_blocks >= 0) & (num_blocks <= n_max),
            f"num_blocks is {{value}}, expected 0 .. {n_max}, the size of blocks",
            {"value": num_blocks},
        )
    ]
