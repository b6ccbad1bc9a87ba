"""Public entry of KDA prefill: argument checks and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels import checks, dispatch
from pallas_kernels.kda_checks import check_lower_bound, check_packing, check_shapes, packing_checks
from pallas_kernels.kda_prefill import reference, xla
from pallas_kernels.kda_prefill.reference import KdaPrefillOutput

OP = "kda_prefill"
IMPLEMENTATIONS = {"xla": xla.kda_prefill, "reference": reference.kda_prefill}
FLOATS = (jnp.float32, jnp.bfloat16)


def kda_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    beta: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    state_pool: jax.Array,
    layer: jax.Array,
    slots: jax.Array,
    has_initial_state: jax.Array,
    cu_seqlens: jax.Array,
    *,
    lower_bound: float | None,
    snapshot_positions: jax.Array | None = None,
    backend: str | None = None,
) -> KdaPrefillOutput:
    """Kimi Delta Attention over packed sequences (Kimi K3 technical report, section 2.1.1).

    L2-normalises q and k, turns gate and beta logits into decay and step size, and runs per head, from the state S of
    each sequence's slot: `S <- diag(exp(g)) S; S <- S + beta k (v - S^T k)^T; out = S^T q / sqrt(K)`. All in float32.
    Outputs do not depend, by a single bit, on later tokens, on other sequences or on padding.

    Args:
      q, k: [T, H, K] float32 or bfloat16, after convolution and SiLU, not normalised.
      v: [T, H, V] float32 or bfloat16.
      gate: [T, H, K] float32 or bfloat16, raw decay logits.
      beta: [T, H] float32 or bfloat16, raw logits.
      A_log: [H] float32.
      dt_bias: [H, K] float32.
      state_pool: [L, S, H, V, K] float32, value-major; donate it.
      layer: int32 scalar, which of the L layers.
      slots: [N] int32, each sequence's slot; 0 only for empty sequences.
      has_initial_state: [N] bool; where False the sequence starts from zeros, whatever its slot holds.
      cu_seqlens: [N + 1] int32; sequence n owns rows `cu_seqlens[n]:cu_seqlens[n + 1]`, later rows are padding.
      lower_bound: static bound of the log decay (Kimi K3: -5.0); None for the softplus decay of Kimi-Linear.
      snapshot_positions: [M] int32 as in docs/design.md, -1 = unused; None for no snapshots.
      backend: name of an implementation; None chooses.

    Returns:
      `KdaPrefillOutput(out, state_pool, snapshots)`.

    Raises:
      ValueError: a shape, dtype or `lower_bound` does not fit.
    """
    snapshot_positions = _no_snapshots() if snapshot_positions is None else snapshot_positions
    inputs = (q, k, v, gate, beta, A_log, dt_bias, state_pool)
    packing = (layer, slots, has_initial_state, cu_seqlens)
    _check_arguments(*inputs, *packing, lower_bound, snapshot_positions)
    checks.guard(OP, lambda: packing_checks(q.shape[0], layer, slots, cu_seqlens, snapshot_positions, state_pool))
    return dispatch.run(
        OP,
        IMPLEMENTATIONS,
        backend,
        *inputs,
        *packing,
        lower_bound=lower_bound,
        snapshot_positions=snapshot_positions,
    )


def validate(
    q,
    k,
    v,
    gate,
    beta,
    A_log,
    dt_bias,
    state_pool,
    layer,
    slots,
    has_initial_state,
    cu_seqlens,
    *,
    lower_bound,
    snapshot_positions=None,
) -> None:
    """Checks the arguments of `kda_prefill`, their values included; needs concrete arrays.

    Raises:
      ValueError: what does not fit, and what was expected.
    """
    snapshot_positions = _no_snapshots() if snapshot_positions is None else snapshot_positions
    inputs = (q, k, v, gate, beta, A_log, dt_bias, state_pool)
    _check_arguments(*inputs, layer, slots, has_initial_state, cu_seqlens, lower_bound, snapshot_positions)
    checks.enforce(OP, packing_checks(q.shape[0], layer, slots, cu_seqlens, snapshot_positions, state_pool))


def _no_snapshots() -> jax.Array:
    return jnp.zeros((0,), jnp.int32)


def _check_arguments(
    q,
    k,
    v,
    gate,
    beta,
    A_log,
    dt_bias,
    state_pool,
    layer,
    slots,
    has_initial_state,
    cu_seqlens,
    lower_bound,
    snapshot_positions,
) -> None:
    check_lower_bound(OP, lower_bound)
    check_packing(OP, layer, slots, has_initial_state, cu_seqlens, snapshot_positions)
    check_shapes(
        OP,
        q=(q, "T H K"),
        k=(k, "T H K"),
        v=(v, "T H V"),
        gate=(gate, "T H K"),
        beta=(beta, "T H"),
        A_log=(A_log, "H"),
        dt_bias=(dt_bias, "H K"),
        state_pool=(state_pool, "L S H V K"),
    )
    for name, array in {"q": q, "k": k, "v": v, "gate": gate, "beta": beta}.items():
        checks.require_dtype(OP, name, array, *FLOATS)
    for name, array in {"A_log": A_log, "dt_bias": dt_bias, "state_pool": state_pool}.items():
        checks.require_dtype(OP, name, array, jnp.float32)
