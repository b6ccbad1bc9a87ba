"""What goes into and comes out of a step beside the tokens: decode state, batches and snapshots."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from k3jax.config import K3Config

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
    def create(cls, config: K3Config, *, num_slots: int, num_pages: int, dtype: Any,
               page_size: int = PAGE_SIZE) -> "DecodeState":
        """Zeroed pools; `num_slots` and `num_pages` count the dummies, `dtype` is as in `pool_dtype`."""
        kda, mla = len(config.layers_of("kda")), len(config.layers_of("mla"))
        heads, width = config.kda_num_heads, config.kda_head_dim
        taps = config.short_conv_kernel_size
        return cls(
            kda_state=jnp.zeros((kda, num_slots, heads, width, width), jnp.float32),
            conv_tail=jnp.zeros((kda, num_slots, 3, heads, width, taps - 1), dtype),
            mla_pages=jnp.zeros((mla, num_pages, page_size, config.mla_latent_size), dtype),
        )

    @staticmethod
    def axes() -> "DecodeState":
        """Logical axis names of the pools, for `sharding`."""
        return DecodeState(
            kda_state=("layers", "slots", "kda_heads", "value_dim", "key_dim"),
            conv_tail=("layers", "slots", "qkv", "kda_heads", "key_dim", "taps"),
            mla_pages=("layers", "pages", "page_tokens", "latent"),
        )


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

    def used_rows(self, num_tokens: int) -> jax.Array:
        """[T] bool, false for padding."""
        return jnp.arange(num_tokens) < self.cu_seqlens[-1]

    def last_rows(self) -> jax.Array:
        """[N] int32 row of each sequence's last token; 0 for an empty sequence."""
        return jnp.maximum(self.cu_seqlens[1:] - 1, 0)


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

    def used_rows(self, num_tokens: int) -> jax.Array:
        """[B] bool."""
        del num_tokens
        return self.slots > 0

    def last_rows(self) -> jax.Array:
        """[B] int32: every row is its sequence's last."""
        return jnp.arange(self.slots.shape[0], dtype=jnp.int32)


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
