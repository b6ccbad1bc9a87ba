"""The tables from logical axes to mesh axes: one for each way of running the model."""

import dataclasses
from collections.abc import Mapping

MESH_AXES = ("data", "expert", "seq", "tensor")
"""Outermost first: devices that are neighbours share the last ones.

`data` splits sequences and copies the model. `expert` splits sequences in attention and experts in the MoE. `seq`
splits positions: of the latent cache, and of a long prompt. `tensor` splits heads and widths.
"""

_BLOCKS = ("data", "expert")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One table.

    Attributes:
      name: for messages.
      table: logical axis to mesh axes, outermost first. A logical axis that is absent is replicated, and a mesh axis
        that a mesh lacks splits nothing.
    """

    name: str
    table: Mapping[str, tuple[str, ...]] = dataclasses.field(hash=False)


DECODE = Strategy("decode", {
    # What belongs to a sequence. Each part of the mesh has slots, pages and packed rows of its own, counted from 0.
    "sequences": _BLOCKS,
    "slots": _BLOCKS,
    "pages": _BLOCKS,
    "snapshots": _BLOCKS,
    # Rows of activations in a prefill step; in a decode step rows are sequences.
    "tokens": _BLOCKS,
    # Every page is split, so page tables are the same on all devices.
    "page_tokens": ("seq",),
    # Heads, and heads with their values merged, as the output projections read them. The devices of `seq`, which share
    # a sequence's positions, share its heads too: tensor first, so that gathering over `seq` gives neighbouring heads.
    "kda_heads": ("tensor", "seq"),
    "kda_channels": ("tensor", "seq"),
    "mla_heads": ("tensor", "seq"),
    "mla_channels": ("tensor", "seq"),
    # Heads where they meet the cache: each device has its own positions there, of all these heads.
    "mla_kv_heads": ("tensor",),
    "mlp": ("tensor", "seq"),
    "shared_mlp": ("tensor", "seq"),
    "vocab": ("tensor", "seq"),
    "latent_embed": ("tensor", "seq"),
    # Routed experts: whole experts first, then the width of each, by groups of columns where MXFP4 scales them.
    "experts": ("expert", "seq"),
    "expert_mlp": ("tensor",),
    "expert_mlp_groups": ("tensor",),
})
"""One token of many sequences."""

PREFILL = Strategy("prefill", {
    **DECODE.table,
    # Rows take `seq` from the heads and widths.
    "tokens": (*_BLOCKS, "seq"),
    **dict.fromkeys(
        ("kda_heads", "kda_channels", "mla_heads", "mla_channels", "mlp", "shared_mlp", "vocab", "latent_embed"),
        ("tensor",),
    ),
})
"""Long prompts, split by position."""

TRAIN = Strategy("train", {**PREFILL.table, "embed": ("data",)})
"""As prefill, with the copies of the model split too (fully sharded data parallelism)."""

STRATEGIES = {strategy.name: strategy for strategy in (PREFILL, DECODE, TRAIN)}
