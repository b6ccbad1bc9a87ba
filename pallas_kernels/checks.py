"""Checks of op arguments: shapes and dtypes at trace time, values eagerly or by checkify.

An op lists its conditions on values once, as `Check`s. `enforce` evaluates them on concrete arrays; `guard` puts the
same list into a traced program when `K3JAX_DEBUG=1`, for callers that wrap it in `jax.experimental.checkify`.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import checkify


class Check(NamedTuple):
    """A condition on values: `message` may name `values` as format fields."""

    ok: jax.Array
    message: str
    values: Mapping[str, jax.Array] = {}


def enforce(op: str, checks: Iterable[Check]) -> None:
    """Raises ValueError with the first condition that does not hold; needs concrete arrays."""
    for check in checks:
        if not bool(check.ok):
            values = {name: jnp.asarray(value).tolist() for name, value in check.values.items()}
            raise ValueError(f"{op}: {check.message.format(**values)}")


def guard(op: str, checks: Callable[[], Iterable[Check]]) -> None:
    """In debug mode adds the conditions to the traced program; otherwise does nothing."""
    if os.environ.get("K3JAX_DEBUG") != "1":
        return
    for check in checks():
        checkify.check(check.ok, f"{op}: {check.message}", **check.values)


def first_bad(ok: jax.Array, values: jax.Array) -> jax.Array:
    """The first element of `values` where `ok` is false, for a message; both one-dimensional."""
    return values[jnp.argmin(ok)]


def bind_shapes(op: str, **arrays: tuple[Any, str]) -> dict[str, int]:
    """Matches shapes against patterns such as `"T H K"` or `"3 H K"` and returns the sizes bound to the names.

    A name binds on its first use; a number must equal the size. None as array is skipped.

    Raises:
      ValueError: an array does not fit; the message names it, its shape and the expected one.
    """
    sizes: dict[str, int] = {}
    for name, (array, pattern) in arrays.items():
        if array is None:
            continue
        axes = pattern.split()
        expected = [int(axis) if axis.isdigit() else sizes.get(axis) for axis in axes]
        shape = tuple(array.shape)
        if len(shape) != len(axes) or any(want not in (None, got) for want, got in zip(expected, shape)):
            wanted = ", ".join(
                axis if axis.isdigit() or axis not in sizes else f"{axis}={sizes[axis]}" for axis in axes
            )
            raise ValueError(f"{op}: {name} has shape {shape}, expected [{wanted}]")
        sizes.update((axis, got) for axis, got in zip(axes, shape) if not axis.isdigit())
    return sizes


def require_dtype(op: str, name: str, array: Any, *dtypes: Any) -> None:
    """Raises ValueError unless the array's dtype is one of `dtypes`."""
    names = [str(jnp.dtype(dtype)) for dtype in dtypes]
    if str(array.dtype) not in names:
        wanted = " or ".join(dict.fromkeys(names))
        raise ValueError(f"{op}: {name} has dtype {array.dtype}, expected {wanted}")


def cu_seqlens_checks(cu_seqlens: jax.Array, num_tokens: int) -> list[Check]:
    """Packed sequences start at 0, do not run backwards and fit into the tokens."""
    return [
        Check(cu_seqlens[0] == 0, "cu_seqlens[0] is {value}, expected 0", {"value": cu_seqlens[0]}),
        Check(jnp.all(jnp.diff(cu_seqlens) >= 0), "cu_seqlens decreases; it must be a running sum of lengths"),
        Check(
            cu_seqlens[-1] <= num_tokens,
            f"cu_seqlens ends at {{value}}, beyond the {num_tokens} packed tokens",
            {"value": cu_seqlens[-1]},
        ),
    ]


def slot_checks(slots: jax.Array, used: jax.Array, num_slots: int) -> list[Check]:
    """Slots lie in the pool, and the used ones differ from each other and from the dummy slot 0.

    Args:
      slots: [N] int32.
      used: [N] bool, rows that own a slot.
      num_slots: size of the pool, the dummy included.
    """
    inside = (slots >= 0) & (slots < num_slots)
    real = ~used | (slots > 0)
    order = jnp.sort(jnp.where(used, slots, -1 - jnp.arange(slots.shape[0])))
    twice = jnp.concatenate([order[1:] == order[:-1], jnp.zeros((1,), bool)])
    return [
        Check(
            jnp.all(inside),
            f"slot {{value}} lies outside the pool of {num_slots}",
            {"value": first_bad(inside, slots)},
        ),
        Check(jnp.all(real), "a sequence with tokens has slot 0, which is the dummy; give it a slot of its own"),
        Check(
            ~jnp.any(twice),
            "slot {value} belongs to two sequences of one call",
            {"value": first_bad(~twice, order)},
        ),
    ]


def snapshot_checks(positions: jax.Array, cu_seqlens: jax.Array, stride: int) -> list[Check]:
    """Snapshot positions are -1, or `stride` multiples after a sequence's first token, or a sequence's end."""
    sequence = jnp.clip(jnp.searchsorted(cu_seqlens, positions, side="left") - 1, 0, cu_seqlens.shape[0] - 2)
    start, end = cu_seqlens[sequence], cu_seqlens[sequence + 1]
    inside = (positions > start) & (positions <= end)
    ok = (positions == -1) | (inside & (((positions - start) % stride == 0) | (positions == end)))
    return [
        Check(
            jnp.all(ok),
            f"snapshot position {{value}} is neither a multiple of {stride} tokens into its sequence nor its end "
            "(-1 = unused)",
            {"value": first_bad(ok, positions)},
        )
    ] if positions.shape[0] else []
