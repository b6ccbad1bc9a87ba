"""Public entry of the routed experts: argument checks and choice of implementation."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import checks, dispatch
from pallas_kernels.checks import Check
from pallas_kernels.moe_mlp import reference, xla
from pallas_kernels.mxfp4 import GROUP, MxFp4

OP = "moe_mlp"
IMPLEMENTATIONS = {"xla": xla.moe_mlp, "reference": reference.moe_mlp}
FLOATS = (jnp.float32, jnp.bfloat16)


def moe_mlp(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate_up: jax.Array | MxFp4,
    down: jax.Array | MxFp4,
    layer: jax.Array,
    *,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    first_expert: jax.Array | int = 0,
    backend: str | None = None,
) -> jax.Array:
    """Weighted sum over each token's experts (Kimi K3 technical report, eq. 11).

    `out[t] = sum_j weights[t, j] * down_e @ activation(gate_e @ x[t], up_e @ x[t])` with `e = ids[t, j]`. Only the
    activation is rounded to x's dtype, as the input of the second product; all else is float32. The banks hold the
    experts `first_expert ..`; other ids add nothing, so the result is this device's part of the sum and can be added
    over devices before it is rounded. Use -1 for tokens that visit no expert.

    Inside `shard_map` needs `check_vma=False`, as Pallas kernels do.

    Args:
      x: [T, D] float32 or bfloat16.
      expert_ids: [T, k] int32.
      expert_weights: [T, k] float32.
      gate_up: [L, E, 2, I, D] float32 or bfloat16 (gate first), or `MxFp4` of that logical shape.
      down: [L, E, D, I] alike.
      layer: int32 scalar, which of the L layers.
      activation: `Silu()` or `Situ(...)`, or another function of (gate, up).
      first_expert: id of the banks' first expert, an int or an int32 scalar.
      backend: name of an implementation; None chooses.

    Returns:
      [T, D] float32.

    Raises:
      ValueError: a shape or dtype does not fit.
    """
    _check_arguments(x, expert_ids, expert_weights, gate_up, down)
    layer, first_expert = jnp.asarray(layer, jnp.int32), jnp.asarray(first_expert, jnp.int32)
    checks.guard(OP, lambda: _value_checks(expert_ids, expert_weights, gate_up, down, layer, None))
    return dispatch.run(
        OP, IMPLEMENTATIONS, backend, x, expert_ids, expert_weights, gate_up, down, layer,
        activation=activation, first_expert=first_expert,
    )


def validate(
    x, expert_ids, expert_weights, gate_up, down, layer, *, activation, first_expert=0, num_experts=None
) -> None:
    """Checks the arguments of `moe_mlp`, their values included; needs concrete arrays.

    Args:
      x, expert_ids, expert_weights, gate_up, down, layer, activation, first_expert: as for `moe_mlp`.
      num_experts: experts of all devices together; None means those of the banks if `first_expert` is 0, else any.

    Raises:
      ValueError: what does not fit, and what was expected.
    """
    num_local = _check_arguments(x, expert_ids, expert_weights, gate_up, down)
    if num_experts is None and int(first_expert) == 0:
        num_experts = num_local
    checks.enforce(OP, _value_checks(expert_ids, expert_weights, gate_up, down, layer, num_experts))


def _check_arguments(x, expert_ids, expert_weights, gate_up, down) -> int:
    """Raises ValueError if shapes or dtypes do not fit; returns the number of experts in the banks."""
    sizes = checks.bind_shapes(
        OP,
        x=(x, "T D"),
        expert_ids=(expert_ids, "T k"),
        expert_weights=(expert_weights, "T k"),
    )
    checks.require_dtype(OP, "x", x, *FLOATS)
    checks.require_dtype(OP, "expert_ids", expert_ids, jnp.int32)
    checks.require_dtype(OP, "expert_weights", expert_weights, jnp.float32)
    if isinstance(gate_up, MxFp4) != isinstance(down, MxFp4):
        raise ValueError(f"{OP}: gate_up and down must be both MxFp4 or both dense")
    if isinstance(down, MxFp4):
        return _check_packed(sizes["D"], gate_up, down)
    for name, bank in (("gate_up", gate_up), ("down", down)):
        checks.require_dtype(OP, name, bank, *FLOATS)
    return checks.bind_shapes(OP, x=(x, "T D"), gate_up=(gate_up, "L E 2 I D"), down=(down, "L E D I"))["E"]


def _check_packed(width: int, gate_up: MxFp4, down: MxFp4) -> int:
    inner = down.packed.shape[-1] * 2
    for name, size in (("D", width), ("I", inner)):
        if size % GROUP:
            raise ValueError(f"{OP}: {name} is {size}, expected a multiple of {GROUP}, the columns of an MXFP4 scale")
    arrays = {
        "gate_up.packed": (gate_up.packed, f"L E 2 {inner} {width // 2}"),
        "gate_up.scale": (gate_up.scale, f"L E 2 {inner} {width // GROUP}"),
        "down.packed": (down.packed, f"L E {width} {inner // 2}"),
        "down.scale": (down.scale, f"L E {width} {inner // GROUP}"),
    }
    for name, (array, _) in arrays.items():
        checks.require_dtype(OP, name, array, jnp.uint8)
    return checks.bind_shapes(OP, **arrays)["E"]


def _value_checks(expert_ids, expert_weights, gate_up, down, layer, num_experts: int | None) -> list[Check]:
    """Conditions on values; `num_experts` None leaves ids open above."""
    num_layers = jax.tree.leaves(down)[0].shape[0]
    ids, weights = expert_ids.reshape(-1), expert_weights.reshape(-1)
    known = (ids >= -1) & (ids < num_experts) if num_experts is not None else ids >= -1
    finite = jnp.isfinite(weights)
    expected = f"-1 (none) .. {num_experts - 1}" if num_experts is not None else "-1 (none) or more"
    inside = (layer >= 0) & (layer < num_layers)
    result = [Check(inside, f"layer is {{value}}, expected 0 .. {num_layers - 1}", {"value": layer})]
    if ids.size:
        result += [
            Check(jnp.all(known), f"expert id {{value}}, expected {expected}", {"value": checks.first_bad(known, ids)}),
            Check(
                jnp.all(finite),
                "expert weight {value}, expected a finite number",
                {"value": checks.first_bad(finite, weights)},
            ),
        ]
    if isinstance(down, MxFp4):
        result += [
            Check(jnp.all(bank.scale[layer] != 255), f"{name}.scale holds 255, which is no number; expected 0 .. 254")
            for name, bank in (("gate_up", gate_up), ("down", down))
        ]
    return result
