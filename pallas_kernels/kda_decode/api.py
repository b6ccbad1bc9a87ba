"""Public entry of KDA decode: argument checks and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels import checks, dispatch
from pallas_kernels.kda_checks import check_lower_bound, check_places, check_shapes, place_checks
from pallas_kernels.kda_decode import mosaic_gpu, reference, xla
from pallas_kernels.kda_decode.reference import KdaDecodeOutput

OP = "kda_decode"
IMPLEMENTATIONS = {
    "mosaic_gpu": mosaic_gpu.kda_decode,
    "xla": xla.kda_decode,
    "reference": reference.kda_decode,
}
FLOATS = (jnp.float32, jnp.bfloat16)


def kda_decode(
    qkv: jax.Array,
    gate: jax.Array,
    beta: jax.Array,
    output_gate: jax.Array,
    conv_weight: jax.Array,
    norm_weight: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    conv_pool: jax.Array,
    state_pool: jax.Array,
    layer: jax.Array,
    slots: jax.Array,
    *,
    lower_bound: float | None,
    norm_eps: float,
    backend: str | None = None,
) -> KdaDecodeOutput:
    """One token a row: short convolution, KDA recurrence and gated RMSNorm (Kimi K3 technical report, section 2.1.1).

    Does for one token what `short_conv`, `kda_prefill` and the layer's output norm do for many, with the same
    roundings: to qkv's dtype after the convolution's SiLU and before the norm; the rest is float32.

    Args:
      qkv: [B, 3, H, K] float32 or bfloat16, raw q, k and v projections.
      gate: [B, H, K] float32 or bfloat16, raw decay logits.
      beta: [B, H] float32 or bfloat16, raw logits.
      output_gate: [B, H, V] float32 or bfloat16, raw logits; V = K.
      conv_weight: [3, H, K, W] float32 or bfloat16; the last tap multiplies the current token.
      norm_weight: [V] float32 or bfloat16, shared by the heads.
      A_log: [H] float32.
      dt_bias: [H, K] float32.
      conv_pool: [L, S, 3, H, K, W - 1] in qkv's dtype or float32, the previous inputs, oldest first; donate it.
      state_pool: [L, S, H, V, K] float32, value-major; donate it.
      layer: int32 scalar, which of the L layers.
      slots: [B] int32, each row's slot; a row with slot 0 is unused: it writes nothing and its output is zero.
      lower_bound: static bound of the log decay (Kimi K3: -5.0); None for the softplus decay of Kimi-Linear.
      norm_eps: static epsilon of the RMSNorm.
      backend: name of an implementation; None chooses.

    Returns:
      `KdaDecodeOutput(out, conv_pool, state_pool)`.

    Raises:
      ValueError: a shape, dtype or `lower_bound` does not fit.
    """
    inputs = (qkv, gate, beta, output_gate, conv_weight, norm_weight, A_log, dt_bias, conv_pool, state_pool)
    _check_arguments(*inputs, layer, slots, lower_bound)
    checks.guard(OP, lambda: place_checks(layer, slots, slots > 0, state_pool))
    return dispatch.run(
        OP, IMPLEMENTATIONS, backend, *inputs, layer, slots, lower_bound=lower_bound, norm_eps=norm_eps
    )


def validate(
    qkv,
    gate,
    beta,
    output_gate,
    conv_weight,
    norm_weight,
    A_log,
    dt_bias,
    conv_pool,
    state_pool,
    layer,
    slots,
    *,
    lower_bound,
    norm_eps,
) -> None:
    """Checks the arguments of `kda_decode`, their values included; needs concrete arrays.

    Raises:
      ValueError: what does not fit, and what was expected.
    """
    inputs = (qkv, gate, beta, output_gate, conv_weight, norm_weight, A_log, dt_bias, conv_pool, state_pool)
    _check_arguments(*inputs, layer, slots, lower_bound)
    checks.enforce(OP, place_checks(layer, slots, slots > 0, state_pool))


def _check_arguments(
    qkv,
    gate,
    beta,
    output_gate,
    conv_weight,
    norm_weight,
    A_log,
    dt_bias,
    conv_pool,
    state_pool,
    layer,
    slots,
    lower_bound,
) -> None:
    check_lower_bound(OP, lower_bound)
    check_places(OP, layer, slots)
    sizes = check_shapes(
        OP,
        qkv=(qkv, "B 3 H K"),
        gate=(gate, "B H K"),
        beta=(beta, "B H"),
        output_gate=(output_gate, "B H K"),
        conv_weight=(conv_weight, "3 H K W"),
        norm_weight=(norm_weight, "K"),
        A_log=(A_log, "H"),
        dt_bias=(dt_bias, "H K"),
        conv_pool=(conv_pool, "L S 3 H K W-1"),
        state_pool=(state_pool, "L S H K K"),
        slots=(slots, "B"),
    )
    if sizes["W-1"] != sizes["W"] - 1:
        raise ValueError(
            f"{OP}: conv_pool keeps {sizes['W-1']} inputs for {sizes['W']} taps, expected {sizes['W'] - 1}"
        )
    for name, array in {
        "qkv": qkv,
        "gate": gate,
        "beta": beta,
        "output_gate": output_gate,
        "conv_weight": conv_weight,
        "norm_weight": norm_weight,
    }.items():
        checks.require_dtype(OP, name, array, *FLOATS)
    for name, array in {"A_log": A_log, "dt_bias": dt_bias, "state_pool": state_pool}.items():
        checks.require_dtype(OP, name, array, jnp.float32)
    checks.require_dtype(OP, "conv_pool", conv_pool, qkv.dtype, jnp.float32)
