"""Argument checks that the KDA ops share."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checks import (
    Check,
    bind_shapes,
    cu_seqlens_checks,
    require_dtype,
    slot_checks,
    snapshot_checks,
)

# Snapshots lie at multiples of this many tokens after a sequence's first token in the call, or at its end.
SNAPSHOT_STRIDE = 64


def check_shapes(op: str, **arrays: tuple[Any, str]) -> Mapping[str, int]:
    """`bind_shapes` that also refuses empty axes other than the snapshots' `M`.

    Raises:
      ValueError: an array does not fit, or an axis is empty.
    """
    sizes = bind_shapes(op, **arrays)
    for axis, size in sizes.items():
        if size == 0 and axis != "M":
            raise ValueError(f"{op}: axis {axis} is empty, expected at least one element; skip the call instead")
    return sizes


def check_places(op: str, layer: Any, slots: Any) -> None:
    """Raises ValueError unless `layer` is an int32 scalar (or Python int) and `slots` is int32."""
    if not isinstance(layer, int):
        check_shapes(op, layer=(layer, ""))
        require_dtype(op, "layer", layer, jnp.int32)
    require_dtype(op, "slots", slots, jnp.int32)


def check_packing(op: str, layer: Any, slots: Any, has_initial_state: Any, cu_seqlens: Any, snapshots: Any) -> None:
    """Raises ValueError unless the arrays that describe packed sequences have their shapes and dtypes."""
    check_places(op, layer, slots)
    sizes = check_shapes(
        op,
        slots=(slots, "N"),
        has_initial_state=(has_initial_state, "N"),
        cu_seqlens=(cu_seqlens, "N+1"),
        snapshot_positions=(snapshots, "M"),
    )
    if sizes["N+1"] != sizes["N"] + 1:
        raise ValueError(
            f"{op}: cu_seqlens has {sizes['N+1']} entries for {sizes['N']} slots, expected {sizes['N'] + 1}"
        )
    require_dtype(op, "has_initial_state", has_initial_state, jnp.bool_)
    require_dtype(op, "cu_seqlens", cu_seqlens, jnp.int32)
    require_dtype(op, "snapshot_positions", snapshots, jnp.int32)


def check_lower_bound(op: str, lower_bound: Any) -> None:
    """Raises ValueError unless `lower_bound` is None or a negative Python number."""
    if lower_bound is not None and not (isinstance(lower_bound, int | float) and lower_bound < 0):
        raise ValueError(
            f"{op}: lower_bound is {lower_bound!r}, expected a negative Python number, or None for the softplus decay"
        )


def place_checks(layer: jax.Array, slots: jax.Array, used: jax.Array, pool: jax.Array) -> list[Check]:
    """The layer and the slots lie in the pool; used slots are real and differ."""
    num_layers, num_slots = pool.shape[:2]
    layer = jnp.asarray(layer)
    inside = (layer >= 0) & (layer < num_layers)
    return [
        Check(inside, f"layer {{value}} lies outside the pool of {num_layers} layers", {"value": layer}),
        *slot_checks(slots, used, num_slots),
    ]


def packing_checks(
    num_tokens: int,
    layer: jax.Array,
    slots: jax.Array,
    cu_seqlens: jax.Array,
    snapshots: jax.Array,
    pool: jax.Array,
) -> list[Check]:
    """Conditions on the values that describe packed sequences."""
    return [
        *cu_seqlens_checks(cu_seqlens, num_tokens),
        *place_checks(layer, slots, jnp.diff(cu_seqlens) > 0, pool),
        *snapshot_checks(snapshots, cu_seqlens, SNAPSHOT_STRIDE),
    ]
