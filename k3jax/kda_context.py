"""Kimi Delta Attention with the rows of a block split over devices: context parallelism for long prompts.

`short_conv` and `kda_prefill` are here the ops of these names on one device's rows. They run inside `Layout.local`;
`axes` names the mesh axes that split the rows, and without any they are the ops themselves.

A sequence that goes on from one device to the next hands over two things. The convolution needs the last inputs before
the cut. The scan needs the state there, which is known only when all earlier devices are done. But the scan is affine
in it: over one device's rows the state S becomes S M + Z, and since value channels never meet, one scan of the values
[v | 0] from the state [0 | I] gives Z and M, and outputs that need only a product with S. Devices exchange Z and M,
128 KiB a head whatever the length, and each composes those before its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import checks, stacks
from pallas_kernels import kda_prefill as scan
from pallas_kernels import short_conv as conv
from pallas_kernels.kda_checks import SNAPSHOT_STRIDE
from pallas_kernels.kda_math import matmul

OP = "kda_context"


class _Share(NamedTuple):
    """What one device has of a block's packed sequences.

    The ops run on a pool of their own, with sequence n in slot n + 1.

    Attributes:
      device: int32 scalar, its number among those that split the rows.
      start: int32 scalar, its first row in the block.
      before: [N] int32, rows of each sequence on earlier devices.
      cu_seqlens: [N + 1] int32, in its rows.
      slots: [N] int32 in the ops' pool.
      continued: [N] bool, sequences with rows here and on the device before: one at most.
      crossing: [N] bool, sequences with rows here and on the next device: one at most.
      ending: [N] bool, sequences whose last row is here.
      snapshot_positions: [M] int32, in its rows; -1 = unused, or not here.
    """

    device: jax.Array
    start: jax.Array
    before: jax.Array
    cu_seqlens: jax.Array
    slots: jax.Array
    continued: jax.Array
    crossing: jax.Array
    ending: jax.Array
    snapshot_positions: jax.Array

    @classmethod
    def of(cls, device: jax.Array, rows: int, cu_seqlens: jax.Array, snapshot_positions: jax.Array) -> "_Share":
        """The share of a device that has `rows` rows."""
        start, stop = device * rows, (device + 1) * rows
        first, last = cu_seqlens[:-1], cu_seqlens[1:]
        here = (first < stop) & (last > start) & (last > first)
        wanted = (snapshot_positions > start) & (snapshot_positions <= stop)
        return cls(
            device=device,
            start=start,
            before=jnp.maximum(start - first, 0),
            cu_seqlens=jnp.clip(cu_seqlens - start, 0, rows),
            slots=jnp.where(here, 1 + jnp.arange(first.shape[0], dtype=jnp.int32), 0),
            continued=here & (first < start),
            crossing=here & (last > stop),
            ending=here & (last <= stop),
            snapshot_positions=jnp.where(wanted, snapshot_positions - start, -1),
        )

    def arguments(self, initial: jax.Array) -> tuple:
        """What the ops take behind their inputs; `initial` [N, ...] are the states before the rows here."""
        pool = jnp.pad(initial, ((1, 0), *[(0, 0)] * (initial.ndim - 1)))[None]
        has_initial_state = jnp.ones(self.slots.shape, bool)
        return pool, jnp.int32(0), self.slots, has_initial_state, self.cu_seqlens


def short_conv(x, weight, conv_pool, layer, slots, has_initial_state, cu_seqlens, *, snapshot_positions,
               axes: tuple[str, ...]) -> conv.ShortConvOutput:
    """The op on rows split over `axes`.

    Args:
      x: [T, 3, H, K], the rows of this device.
      weight, conv_pool, layer: as for the op; the pool is the same on all devices.
      slots, has_initial_state, cu_seqlens, snapshot_positions: of the block, the same on all devices.
      axes: mesh axes.

    Raises:
      ValueError: fewer rows than the convolution reaches back.
    """
    if not axes:
        return conv.short_conv(x, weight, conv_pool, layer, slots, has_initial_state, cu_seqlens,
                               snapshot_positions=snapshot_positions)
    rows, reach = x.shape[0], conv_pool.shape[-1]
    if rows < reach:
        raise ValueError(f"{OP}: {rows} rows on a device, expected at least {reach}, as far as the convolution reaches")
    share = _Share.of(jax.lax.axis_index(axes), rows, cu_seqlens, snapshot_positions)
    initial = stacks.read(conv_pool, layer, slots)
    initial = jnp.where(_over(has_initial_state, initial), initial, 0)

    # The inputs before the rows here: those of the device before, as far as the sequence had begun there.
    devices = jax.lax.axis_size(axes)
    halo = jax.lax.ppermute(x[rows - reach :], axes, [(device, device + 1) for device in range(devices - 1)])
    tap = jnp.arange(reach, dtype=jnp.int32)
    from_halo = share.before[:, None] >= reach - tap
    own = jnp.minimum(share.before[:, None] + tap, reach - 1)
    tails = jnp.where(
        from_halo[:, None, None, None],
        jnp.moveaxis(halo, 0, -1).astype(initial.dtype),
        jnp.take_along_axis(initial, own[:, None, None, None], axis=-1),
    )
    out, pool, snapshots = conv.short_conv(
        x, weight, *share.arguments(tails), snapshot_positions=share.snapshot_positions
    )
    tails, snapshots = _from_their_devices(share, pool[0, 1:], snapshots, axes)
    return conv.ShortConvOutput(out, _write(conv_pool, layer, slots, cu_seqlens, tails), snapshots)


def kda_prefill(q, k, v, gate, beta, A_log, dt_bias, state_pool, layer, slots, has_initial_state, cu_seqlens, *,
                lower_bound: float | None, snapshot_positions, axes: tuple[str, ...]) -> scan.KdaPrefillOutput:
    """The op on rows split over `axes`.

    Args:
      q, k, v, gate, beta: [T, H, ...], the rows of this device.
      A_log, dt_bias, state_pool, layer, lower_bound: as for the op; the pool is the same on all devices.
      slots, has_initial_state, cu_seqlens, snapshot_positions: of the block, the same on all devices. Snapshots lie as
        `validate` wants them.
      axes: mesh axes.

    Raises:
      ValueError: there are snapshots, and the rows are no multiple of the tokens between them.
    """
    packing = (layer, slots, has_initial_state, cu_seqlens)
    if not axes:
        return scan.kda_prefill(q, k, v, gate, beta, A_log, dt_bias, state_pool, *packing, lower_bound=lower_bound,
                                snapshot_positions=snapshot_positions)
    rows, heads, width = v.shape
    devices = jax.lax.axis_size(axes)
    if snapshot_positions.shape[0]:
        _require_stride(rows)
        checks.guard(OP, lambda: _checks(cu_seqlens, snapshot_positions, rows, devices))
    share = _Share.of(jax.lax.axis_index(axes), rows, cu_seqlens, snapshot_positions)
    initial = stacks.read(state_pool, layer, slots)
    initial = jnp.where(_over(has_initial_state & (share.before == 0), initial), initial, 0)

    keys = q.shape[-1]
    identity = jnp.broadcast_to(jnp.eye(keys), (initial.shape[0], heads, keys, keys))
    wide = scan.kda_prefill(
        q, k, jnp.pad(v.astype(jnp.float32), ((0, 0), (0, 0), (0, keys))), gate, beta, A_log, dt_bias,
        *share.arguments(jnp.concatenate([initial, identity], axis=2)), lower_bound=lower_bound,
        snapshot_positions=share.snapshot_positions,
    )
    states = wide.state_pool[0, 1:]

    def after(wide, before):
        """The states S M + Z [..., H, V, K] out of [Z | M] and S."""
        return wide[..., :width, :] + matmul("hvk,...hkj->...hvj", before, wide[..., width:, :])

    # Every device hands on one state; where no sequence crosses to the next device, nobody reads it. The loop begins
    # where the sequence does: what devices before that hand on belongs to others.
    handed = jax.lax.all_gather(states[jnp.argmax(share.crossing)], axes)
    begun = (share.start - share.before[jnp.argmax(share.continued)]) // rows
    incoming = jax.lax.fori_loop(
        begun, share.device, lambda device, state: after(handed[device], state),
        jnp.zeros((heads, width, keys), jnp.float32),
    )

    # It concerns the continued sequence alone, whose rows are the first; not even a NaN may pass to others.
    continued_rows = jnp.max(jnp.where(share.continued, share.cu_seqlens[1:], 0))
    passed = matmul("thk,hvk->thv", wide.out[..., width:], incoming)
    out = wide.out[..., :width] + jnp.where((jnp.arange(rows) < continued_rows)[:, None, None], passed, 0)
    states = jnp.where(_over(share.continued, states), after(states, incoming), states[..., :width, :])
    snapshots = jnp.where(
        _over(share.snapshot_positions <= continued_rows, wide.snapshots),
        after(wide.snapshots, incoming), wide.snapshots[..., :width, :],
    )
    states, snapshots = _from_their_devices(share, states, snapshots, axes)
    return scan.KdaPrefillOutput(out.astype(v.dtype), _write(state_pool, layer, slots, cu_seqlens, states), snapshots)


def validate(cu_seqlens, snapshot_positions, rows: int, devices: int) -> None:
    """Checks the snapshots of a block with `rows` rows on each of several devices; needs concrete arrays.

    States exist at multiples of 64 tokens after a cut as well as after a sequence's beginning. Those of a sequence that
    begins at a multiple of 64 rows are the same, as are those of a prompt alone.

    Raises:
      ValueError: a snapshot lies elsewhere, or `rows` is no multiple of 64.
    """
    _require_stride(rows)
    checks.enforce(OP, _checks(jnp.asarray(cu_seqlens), jnp.asarray(snapshot_positions), rows, devices))


def _require_stride(rows: int) -> None:
    if rows % SNAPSHOT_STRIDE:
        raise ValueError(f"{OP}: {rows} rows on a device, expected a multiple of {SNAPSHOT_STRIDE} for snapshots")


def _checks(cu_seqlens, snapshot_positions, rows: int, devices: int) -> list[checks.Check]:
    shares = [_Share.of(device, rows, cu_seqlens, snapshot_positions) for device in range(devices)]
    return [
        check._replace(
            message=f"a snapshot {{value}} rows into device {device} is neither a multiple of {SNAPSHOT_STRIDE} rows "
            "after the cut before it nor its sequence's end; begin sequences at such multiples"
        )
        for device, share in enumerate(shares)
        for check in checks.snapshot_checks(share.snapshot_positions, share.cu_seqlens, SNAPSHOT_STRIDE)
    ]


def _over(mask: jax.Array, x: jax.Array) -> jax.Array:
    """A mask [N] with the rank of `x` [N, ...]."""
    return mask.reshape(-1, *[1] * (x.ndim - 1))


def _from_their_devices(share: _Share, states: jax.Array, snapshots: jax.Array, axes: tuple[str, ...]):
    """The states [N, ...] after each sequence and its snapshots, from the devices that have them to all."""
    wanted = share.snapshot_positions > 0
    return jax.lax.psum(
        (jnp.where(_over(share.ending, states), states, 0), jnp.where(_over(wanted, snapshots), snapshots, 0)), axes
    )


def _write(pool: jax.Array, layer: jax.Array, slots: jax.Array, cu_seqlens: jax.Array, states: jax.Array) -> jax.Array:
    used = (jnp.diff(cu_seqlens) > 0) & (slots > 0)
    return stacks.write(pool, layer, (slots,), states, used)
