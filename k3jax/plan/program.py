"""The two steps of a model on shapes alone: what a plan counts and a compiler is given."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from k3jax.config import K3Config
from k3jax.model import K3ForCausalLM
from k3jax.plan.workload import Kind, Workload
from k3jax.state import PAGE_SIZE, DecodeBatch, DecodeState, PrefillBatch, Snapshots, pool_dtype
from pallas_kernels.dispatch import platform
from sharding import MESH_AXES, STRATEGIES, Layout


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh of devices that need not exist: enough for shapes and traces."""
    return AbstractMesh(tuple(sizes[axis] for axis in MESH_AXES), MESH_AXES)


@dataclasses.dataclass(frozen=True)
class Program:
    """A decode or prefill step on a mesh.

    Blocks, the parts that `data` and `expert` make of the sequences, each have slots and pages of their own with a
    dummy, so that sequences are rounded up to a multiple of them. A prefill step has one sequence a block.

    Attributes:
      kind: "decode" or "prefill".
      strategy: the table, "decode" or "prefill"; a prefill step may run with either.
      config: the architecture.
      mesh: its devices, real or not.
      workload: how many sequences, how long, and the tokens of a chunk.
      platform: "tpu", "gpu" or "cpu", which decides in what dtype pools are kept.
      dtype: of activations.
    """

    kind: Kind
    strategy: str
    config: K3Config
    mesh: Mesh | AbstractMesh
    workload: Workload
    platform: str
    dtype: Any = jnp.bfloat16

    @functools.cached_property
    def layout(self) -> Layout:
        return Layout(self.mesh, STRATEGIES[self.strategy])

    @property
    def blocks(self) -> int:
        """Parts that sequences are split into."""
        return self.layout.parts("sequences")

    @property
    def sequences(self) -> int:
        """Of the workload, rounded up to whole blocks."""
        return _rounded_up(self.workload.sequences, self.blocks)

    @property
    def tokens(self) -> int:
        """Rows of the step: one a sequence, or the chunk rounded up so that each device has whole groups of 64."""
        if self.kind == "decode":
            return self.sequences
        return _rounded_up(self.workload.chunk, 64 * self.layout.parts("tokens"))

    @functools.cached_property
    def model(self) -> K3ForCausalLM:
        return K3ForCausalLM(self.config, self.dtype, self.layout)

    @functools.cached_property
    def params(self) -> dict[str, Any]:
        """Shapes, dtypes and placements of the weights.

        Raises:
          UserError: the mesh does not divide one of them.
        """
        return K3ForCausalLM.abstract_params(self.config, self.dtype, self.layout)

    @functools.cached_property
    def state(self) -> DecodeState:
        """The same of the pools.

        Raises:
          UserError: the mesh does not divide the tokens of a page, or the heads.
        """
        pages = -(-self.workload.context // PAGE_SIZE) * self.sequences
        return DecodeState.abstract(
            self.config, num_slots=self.sequences + self.blocks, num_pages=pages + self.blocks,
            dtype=pool_dtype(self.dtype, self.platform), layout=self.layout,
        )

    @functools.cached_property
    def inputs(self) -> tuple[jax.ShapeDtypeStruct, DecodeBatch | PrefillBatch]:
        """Tokens and batch."""
        pages = -(-self.workload.context // PAGE_SIZE)
        if self.kind == "decode":
            rows = self.sequences
            batch = DecodeBatch(self._ids(rows), self._ids(rows), self._ids(rows, pages))
            return self._ids(rows), batch
        count = self.blocks
        batch = PrefillBatch(
            cu_seqlens=self._ids(2 * count), slots=self._ids(count), context_lens=self._ids(count),
            page_table=self._ids(count, pages), snapshot_positions=self._ids(count),
        )
        return self._ids(self.tokens, axis="tokens"), batch

    def _ids(self, *shape: int, axis: str = "sequences") -> jax.ShapeDtypeStruct:
        """Whole numbers, split along their first axis."""
        sharding = self.layout.sharding((axis, *[""] * (len(shape) - 1)))
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of `step`."""
        tokens, batch = self.inputs
        return self.params, tokens, self.state, batch

    def step(self, params, tokens, state, batch) -> tuple[jax.Array, DecodeState, Snapshots]:
        """Logits after the last token of each sequence, the pools, and snapshots."""
        out = self.model.apply({"params": params}, tokens, state, batch)
        return out.logits, out.state, out.snapshots

    @functools.cached_property
    def jitted(self) -> Any:
        """`step` as it would be served: the state is taken over, and comes out where it lay."""
        snapshots = jax.tree.map(self.layout.sharding, Snapshots.axes(), is_leaf=lambda axes: type(axes) is tuple)
        places = jax.tree.map(lambda pool: pool.format or pool.sharding, self.state)
        return jax.jit(
            self.step, donate_argnums=2,
            out_shardings=(self.layout.sharding(("sequences", "vocab")), places, snapshots),
        )

    @functools.cached_property
    def traced(self) -> Any:
        """`jitted`, traced for the platform."""
        with platform(self.platform):
            return self.jitted.trace(*self.arguments)

    @property
    def outputs(self) -> Any:
        """Shapes, dtypes and placements of the logits and the snapshots."""
        logits, _, snapshots = self.traced.out_info
        return logits, snapshots


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
