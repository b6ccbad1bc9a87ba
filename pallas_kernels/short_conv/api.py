"""Public entry of the short convolution: argument checks and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels import checks, dispatch
from pallas_kernels.kda_checks import check_packing, check_shapes, packing_checks
from pallas_kernels.short_conv import reference, xla
from pallas_kernels.short_conv.reference import ShortConvOutput

OP = "short_conv"
IMPLEMENTATIONS = {"xla": xla.short_conv, "reference": reference.short_conv}
FLOATS = (jnp.float32, jnp.bfloat16)


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    conv_pool: jax.Array,
    layer: jax.Array,
    slots: jax.Array,
    has_initial_state: jax.Array,
    cu_seqlens: jax.Array,
    *,
    snapshot_positions: jax.Array | None = None,
    backend: str | None = None,
) -> ShortConvOutput:
    """SiLU of the causal depthwise convolution of q, k and v (Kimi Linear technical report, section 4).

    Sums and SiLU are float32; the output is rounded once.

    Args:
      x: [T, 3, H, K] float32 or bfloat16, raw q, k and v projections of packed sequences.
      weight: [3, H, K, W] float32 or bfloat16; the last tap multiplies the current token.
      conv_pool: [L, S, 3, H, K, W - 1] in x's dtype or float32, inputs before each sequence, oldest first; donate it.
      layer: int32 scalar, which of the L layers.
      slots: [N] int32, each sequence's slot; 0 only for empty sequences.
      has_initial_state: [N] bool; where False the sequence starts from zeros, whatever its slot holds.
      cu_seqlens: [N + 1] int32; sequence n owns rows `cu_seqlens[n]:cu_seqlens[n + 1]`, later rows are padding.
      snapshot_positions: [M] int32 as in docs/design.md, -1 = unused; None for no snapshots.
      backend: name of an implementation; None chooses.

    Returns:
      `ShortConvOutput(out, conv_pool, snapshots)`.

    Raises:
      ValueError: a shape or dtype does not fit.
    """
    snapshot_positions = _no_snapshots() if snapshot_positions is None else snapshot_positions
    packing = (layer, slots, has_initial_state, cu_seqlens)
    _check_arrays(x, weight, conv_pool, *packing, snapshot_positions)
    checks.guard(OP, lambda: packing_checks(x.shape[0], layer, slots, cu_seqlens, snapshot_positions, conv_pool))
    return dispatch.run(
        OP, IMPLEMENTATIONS, backend, x, weight, conv_pool, *packing, snapshot_positions=snapshot_positions
    )


def validate(x, weight, conv_pool, layer, slots, has_initial_state, cu_seqlens, *, snapshot_positions=None) -> None:
    """Checks the arguments of `short_conv`, their values included; needs concrete arrays.

    Raises:
      ValueError: what does not fit, and what was expected.
    """
    snapshot_positions = _no_snapshots() if snapshot_positions is None else snapshot_positions
    _check_arrays(x, weight, conv_pool, layer, slots, has_initial_state, cu_seqlens, snapshot_positions)
    checks.enforce(OP, packing_checks(x.shape[0], layer, slots, cu_seqlens, snapshot_positions, conv_pool))


def _no_snapshots() -> jax.Array:
    return jnp.zeros((0,), jnp.int32)


def _check_arrays(x, weight, conv_pool, layer, slots, has_initial_state, cu_seqlens, snapshot_positions) -> None:
    check_packing(OP, layer, slots, has_initial_state, cu_seqlens, snapshot_positions)
    sizes = check_shapes(
        OP,
        x=(x, "T 3 H K"),
        weight=(weight, "3 H K W"),
        conv_pool=(conv_pool, "L S 3 H K W-1"),
    )
    if sizes["W-1"] != sizes["W"] - 1:
        raise ValueError(
            f"{OP}: conv_pool keeps {sizes['W-1']} inputs for {sizes['W']} taps, expected {sizes['W'] - 1}"
        )
    checks.require_dtype(OP, "x", x, *FLOATS)
    checks.require_dtype(OP, "weight", weight, *FLOATS)
    checks.require_dtype(OP, "conv_pool", conv_pool, x.dtype, jnp.float32)
