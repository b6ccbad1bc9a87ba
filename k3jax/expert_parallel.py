"""Routed experts that are spread over devices, and the two ways in which tokens meet them.

By default the devices that share out the experts also share their rows: each works on all rows with its own experts,
and what they add is summed. With many more devices than a token has experts, most rows have nothing to do on most
devices: then a row goes only where it has an expert (all-to-all, in buffers of fixed size).
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.moe_mlp import moe_mlp
from pallas_kernels.mxfp4 import MxFp4
from sharding import Axes, Layout

LEAST_ROWS = 64
"""With fewer rows on a device their exchange costs more steps than it saves bytes."""


def routed_experts(x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, gate_up: jax.Array | MxFp4,
                   down: jax.Array | MxFp4, layer: jax.Array, *, activation: Callable, layout: Layout,
                   rows: str = "tokens", columns: str = "width", exchange: bool | None = None) -> jax.Array:
    """`moe_mlp` over all devices: its arguments and result, as whole arrays.

    Args:
      x: [T, D].
      expert_ids, expert_weights: [T, k].
      gate_up, down, layer, activation: as for `moe_mlp`.
      layout: where everything lies.
      rows: logical axis of T.
      columns: logical axis of D, in x and in the result.
      exchange: whether rows are exchanged; None chooses by their number.

    Returns:
      [T, D] float32.
    """
    if exchange is None:
        exchange = exchange_pays(x.shape[0] // layout.parts(rows), expert_ids.shape[1], layout, rows)
    experts, widths = layout.over("experts"), layout.over("expert_mlp")
    shared = tuple(name for name in experts if name in layout.over(rows))
    summed = tuple(name for name in (*experts, *widths) if name not in shared)
    # Where the next projection wants columns, a device needs no more of the sum than these.
    scattered = layout.over(columns) if set(layout.over(columns)) <= set(summed) else ()
    left = tuple(name for name in summed if name not in scattered)

    def local(x, expert_ids, expert_weights, gate_up, down, layer):
        num_experts = jax.tree.leaves(down)[0].shape[1]
        own = functools.partial(
            moe_mlp, gate_up=gate_up, down=down, layer=layer, activation=activation,
            first_expert=layout.index("experts") * num_experts,
        )
        meet = functools.partial(_meet_all, layout=layout, shared=shared)
        if exchange and shared:
            meet = functools.partial(_meet_own, layout=layout, shared=shared, num_experts=num_experts)
        partial = meet(own, x, expert_ids, expert_weights)
        return layout.sum(layout.sum_scatter(partial, scattered, 1), left)

    gate_up_axes: Axes = ("layers", "experts", "gate_up", "expert_mlp", "expert_embed")
    down_axes: Axes = ("layers", "experts", "expert_embed", "expert_mlp")
    inputs = (
        (rows, "width"), (rows, "top_k"), (rows, "top_k"), _bank(gate_up, gate_up_axes), _bank(down, down_axes), ()
    )
    outputs = (rows, columns if scattered else "width")
    # Without this the compiler would have the projection before make whole rows, and gather its weight for that.
    x = layout.constrain(x, (rows, columns))
    return layout.local(local, inputs, outputs)(x, expert_ids, expert_weights, gate_up, down, layer)


def exchange_pays(num_rows: int, top_k: int, layout: Layout, rows: str = "tokens") -> bool:
    """Whether exchanging rows moves fewer bytes than sharing all of them.

    Args:
      num_rows: on a device.
      top_k: experts of a token.
      layout, rows: as for `routed_experts`.
    """
    shared = set(layout.over("experts")) & set(layout.over(rows))
    return bool(shared) and num_rows >= LEAST_ROWS and capacity(num_rows, top_k, layout) < num_rows


def capacity(num_rows: int, top_k: int, layout: Layout) -> int:
    """Rows that a device may send to each other one: twice as many as go there when experts are chosen evenly."""
    return min(num_rows, math.ceil(2 * num_rows * top_k / layout.parts("experts")))


def _bank(bank: jax.Array | MxFp4, axes: Axes) -> Axes | MxFp4:
    """Logical axes of a bank."""
    return MxFp4(axes, (*axes[:-1], f"{axes[-1]}_groups")) if isinstance(bank, MxFp4) else axes


def _meet_all(own: Callable, x, expert_ids, expert_weights, *, layout: Layout, shared: tuple[str, ...]) -> jax.Array:
    """Every row meets the experts of every device along `shared`; [T, D], to be summed over the others."""
    everybody = (layout.gather(array, shared, 0) for array in (x, expert_ids, expert_weights))
    return layout.sum_scatter(own(*everybody), shared, 0)


def _meet_own(own: Callable, x, expert_ids, expert_weights, *, layout: Layout, shared: tuple[str, ...],
              num_experts: int) -> jax.Array:
    """The same, but a row is sent once to each device that has one of its experts.

    If anywhere more rows go to a device than there is room for, all devices share all rows instead: nothing is dropped.
    """
    num_rows, devices = x.shape[0], layout.size(shared)
    room = capacity(num_rows, expert_ids.shape[1], layout)
    target = _targets(expert_ids, num_experts, layout, shared)
    goes = jnp.any(target[:, :, None] == jnp.arange(devices), axis=1)
    place = jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1
    # Row numbers by device and place; `num_rows` where nothing is sent.
    sent = jnp.full((devices, room), num_rows, jnp.int32)
    sent = sent.at[jnp.arange(devices), jnp.where(goes, place, room)].set(
        jnp.arange(num_rows, dtype=jnp.int32)[:, None], mode="drop"
    )
    full = layout.max(place[-1].max(), layout.mesh.axis_names) >= room

    def exchanged(x, expert_ids, expert_weights):
        def exchange(array):
            return jax.lax.all_to_all(array, shared, 0, 0, tiled=True)

        def send(array, nothing):
            padded = jnp.pad(array, ((0, 1), (0, 0)), constant_values=nothing)
            return exchange(padded[sent.reshape(-1)])

        added = own(send(x, 0), send(expert_ids, -1), send(expert_weights, 0))
        returned = exchange(added).reshape(devices, room, -1)
        # A row's parts in the order of its experts: the sum does not depend on who computed them.
        first = jnp.argmax(target[:, :, None] == target[:, None, :], axis=-1) == jnp.arange(target.shape[1])
        taken = returned[target, jnp.take_along_axis(place, target, axis=1)]
        return jnp.where((first & (target >= 0))[..., None], taken, 0).sum(axis=1)

    def shared_out(*arrays):
        return _meet_all(own, *arrays, layout=layout, shared=shared)

    return jax.lax.cond(full, shared_out, exchanged, x, expert_ids, expert_weights)


def _targets(expert_ids: jax.Array, num_experts: int, layout: Layout, shared: tuple[str, ...]) -> jax.Array:
    """[T, k] int32: which device along `shared` has an expert; -1 if none, because devices elsewhere have it."""
    part = expert_ids // num_experts
    target, reached = jnp.zeros_like(part), expert_ids >= 0
    below = layout.parts("experts")
    for name in layout.over("experts"):
        size = layout.size((name,))
        below //= size
        coordinate = part // below % size
        if name in shared:
            target = target * size + coordinate
        else:
            reached &= coordinate == jax.lax.axis_index(name)
    return jnp.where(reached, target, -1)
