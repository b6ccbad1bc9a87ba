"""What goes into and comes out of a step beside the tokens: decode state, batches and snapshots.

On a mesh that splits sequences, each part has slots, pages, rows and sequences of its own: an array here is those of
all parts, one after another, and every number in it counts within its part. `cu_seqlens` then has N + 1 entries a part.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as DeviceLayout
from jax.sharding import Mesh, NamedSharding

from k3jax.config import K3Config
from k3jax.errors import users_mistake
from sharding import ONE_DEVICE, Layout

PAGE_SIZE = 128
"""Tokens in an MLA page."""


def pool_dtype(dtype: Any, platform: str | None = None) -> Any:
    """In what conv tails and MLA pages of a model with activations of this dtype are best kept.

    Args:
      dtype: float32 or bfloat16.
      platform: "cpu", "gpu" or "tpu"; None = the default backend's.
    """
    # XLA's CPU backend cannot write rows of a bfloat16 array in place (see pallas_kernels/stacks.py).
    return jnp.float32 if (platform or jax.default_backend()) == "cpu" else dtype


@flax.struct.dataclass
class DecodeState:
    """Pools of everything the model remembers. Slot 0 and page 0 are dummies.

    Attributes:
      kda_state: [KDA layers, slots, H, V, K] float32, value-major.
      conv_tail: [KDA layers, slots, 3, H, K, taps - 1] in the pools' dtype: inputs of the q, k and v convolutions,
        oldest first.
      mla_pages: [MLA layers, pages, page size, R + Dr] in the pools' dtype: normed latent, raw shared key.
    """

    kda_state: jax.Array
    conv_tail: jax.Array
    mla_pages: jax.Array

    @classmethod
    def create(cls, config: K3Config, *, num_slots: int, num_pages: int, dtype: Any, page_size: int = PAGE_SIZE,
               layout: Layout = ONE_DEVICE) -> "DecodeState":
        """Zeroed pools.

        Args:
          config: the architecture.
          num_slots, num_pages: of all parts of the mesh together, their dummies included.
          dtype: as in `pool_dtype`.
          page_size: tokens in a page.
          layout: where the pools lie.

        Raises:
          UserError: the mesh does not divide the pools.
        """
        pools = cls.abstract(
            config, num_slots=num_slots, num_pages=num_pages, dtype=dtype, page_size=page_size, layout=layout
        )
        if layout.mesh is None:
            return jax.tree.map(lambda pool: jnp.zeros(pool.shape, pool.dtype), pools)
        formats = jax.tree.map(lambda pool: pool.format, pools)
        return jax.jit(
            lambda: jax.tree.map(lambda pool: jnp.zeros(pool.shape, pool.dtype), pools), out_shardings=formats
        )()

    @classmethod
    def abstract(cls, config: K3Config, *, num_slots: int, num_pages: int, dtype: Any, page_size: int = PAGE_SIZE,
                 layout: Layout = ONE_DEVICE) -> "DecodeState":
        """Shapes, dtypes and, on a mesh, placements of the pools that `create` makes."""
        kda, mla = len(config.layers_of("kda")), len(config.layers_of("mla"))
        heads, width = config.kda_num_heads, config.kda_head_dim
        taps = config.short_conv_kernel_size
        shapes = {
            "kda_state": (kda, num_slots, heads, width, width),
            "conv_tail": (kda, num_slots, 3, heads, width, taps - 1),
            "mla_pages": (mla, num_pages, page_size, config.mla_latent_size),
        }
        axes = cls.axes()
        with users_mistake():
            shardings = layout.placements({name: (getattr(axes, name), shape) for name, shape in shapes.items()})
        dtypes = {"kda_state": jnp.float32, "conv_tail": dtype, "mla_pages": dtype}
        places = shardings | {"mla_pages": _row_major(shardings["mla_pages"])}
        return cls(**{
            name: jax.ShapeDtypeStruct(shape, dtypes[name], sharding=places[name]) for name, shape in shapes.items()
        })

    @staticmethod
    def axes() -> "DecodeState":
        """Logical axis names of the pools, for `sharding`."""
        return DecodeState(
            kda_state=("layers", "slots", "kda_heads", "value_dim", "key_dim"),
            conv_tail=("layers", "slots", "qkv", "kda_heads", "key_dim", "taps"),
            mla_pages=("layers", "pages", "page_tokens", "latent"),
        )


def _row_major(sharding: NamedSharding | None) -> NamedSharding | Format | None:
    """The placement of the MLA pages, on TPUs with their axes in order.

    Left to itself the compiler keeps an array whose last axis is no multiple of 128 in another order there, and would
    copy all pages into this one and back at every step.
    """
    if sharding is None or not isinstance(sharding.mesh, Mesh) or sharding.mesh.devices.flat[0].platform != "tpu":
        return sharding
    return Format(DeviceLayout((0, 1, 2, 3)), sharding)


@flax.struct.dataclass
class PrefillBatch:
    """Packed sequences of any length; rows from `cu_seqlens[-1]` on are padding.

    Attributes:
      cu_seqlens: [N + 1] int32, where each sequence's rows begin and end.
      slots: [N] int32 KDA slot of each sequence; 0 only for an empty one.
      context_lens: [N] int32 tokens processed by earlier calls. At 0 the slot's contents are ignored.
      page_table: [N, max pages] int32 MLA pages of each sequence; 0 where none.
      snapshot_positions: [M] int32 packed positions to keep the state of: a multiple of 64 tokens after a sequence's
        first row, or its end; -1 = unused.
    """

    cu_seqlens: jax.Array
    slots: jax.Array
    context_lens: jax.Array
    page_table: jax.Array
    snapshot_positions: jax.Array

    row_axis = "tokens"
    """Logical axis of a step's rows."""

    @staticmethod
    def axes() -> "PrefillBatch":
        """Logical axis names, for `sharding`."""
        each = ("sequences",)
        return PrefillBatch(each, each, each, ("sequences", "page_slots"), each)

    def used_rows(self, num_tokens: int, layout: Layout = ONE_DEVICE) -> jax.Array:
        """[T] bool, false for padding."""
        count = num_tokens // layout.parts("tokens")
        split = layout.beyond("tokens", "sequences")

        def local(cu_seqlens):
            rows = jnp.arange(count)
            if split:
                rows += jax.lax.axis_index(split) * count
            return rows < cu_seqlens[-1]

        return layout.local(local, (("sequences",),), ("tokens",))(self.cu_seqlens)

    def last_rows(self, layout: Layout = ONE_DEVICE) -> jax.Array:
        """[N] int32 row of each sequence's last token; 0 for an empty sequence."""

        def local(cu_seqlens):
            return jnp.maximum(cu_seqlens[1:] - 1, 0)

        return layout.local(local, (("sequences",),), ("sequences",))(self.cu_seqlens)


@flax.struct.dataclass
class DecodeBatch:
    """One token for each row.

    Attributes:
      slots: [B] int32 KDA slot of each row; 0 = unused row.
      context_lens: [B] int32 tokens processed by earlier calls.
      page_table: [B, max pages] int32 MLA pages; 0 where none.
    """

    slots: jax.Array
    context_lens: jax.Array
    page_table: jax.Array

    row_axis = "sequences"
    """Logical axis of a step's rows."""

    @staticmethod
    def axes() -> "DecodeBatch":
        """Logical axis names, for `sharding`."""
        return DecodeBatch(("sequences",), ("sequences",), ("sequences", "page_slots"))

    def used_rows(self, num_tokens: int, layout: Layout = ONE_DEVICE) -> jax.Array:
        """[B] bool."""
        del num_tokens, layout
        return self.slots > 0

    def last_rows(self, layout: Layout = ONE_DEVICE) -> jax.Array:
        """[B] int32: every row is its sequence's last."""

        def local(slots):
            return jnp.arange(slots.shape[0], dtype=jnp.int32)

        return layout.local(local, (("sequences",),), ("sequences",))(self.slots)


Batch = PrefillBatch | DecodeBatch


@flax.struct.dataclass
class Snapshots:
    """States kept at the positions a prefill was asked for: fresh arrays, independent of the pools.

    Attributes:
      kda_state: [KDA layers, M, H, V, K] float32.
      conv_tail: [KDA layers, M, 3, H, K, taps - 1].
    """

    kda_state: jax.Array
    conv_tail: jax.Array

    @staticmethod
    def axes() -> "Snapshots":
        """Logical axis names, for `sharding`."""
        pools = DecodeState.axes()
        return Snapshots(
            kda_state=("layers", "snapshots", *pools.kda_state[2:]),
            conv_tail=("layers", "snapshots", *pools.conv_tail[2:]),
        )
