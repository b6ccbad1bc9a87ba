"""K3ForCausalLM: Kimi K3 and Kimi-Linear as one functional Flax model."""

from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from k3jax.config import K3Config
from k3jax.errors import users_mistake
from k3jax.kda import KimiDeltaAttention
from k3jax.layers import project
from k3jax.mla import MultiHeadLatentAttention
from k3jax.mlp import DenseMlp
from k3jax.modules import DeclaredModule
from k3jax.moe import MixtureOfExperts
from k3jax.residual import LayerInputs, OutputMix, Residual
from k3jax.schedule import Segment, schedule
from k3jax.state import Batch, DecodeState, PrefillBatch, Snapshots
from k3jax.weights import WeightTree, leaves, linear, placements
from sharding import ONE_DEVICE, Layout


class ModelOutput(NamedTuple):
    """What a step returns.

    Attributes:
      logits: [rows, vocabulary] float32.
      state: the pools after the step.
      snapshots: states at `batch.snapshot_positions`; none after a decode step.
      intermediates: what `capture=True` asks for, each stacked over the layers that have it: `attention_input`,
        `attention_output`, `mlp_input`, `mlp_output` [L, T, D], `router_scores`, `router_ids`, `router_weights`,
        `kda_decay`, `kda_beta`. With AttnRes also `attention_sources`, `mlp_sources` [L, T, blocks + 1] and
        `output_sources` [rows, blocks + 1], the softmax weights over the blocks and, last, the running sum; and
        `block_residuals` [blocks, T, D].
    """

    logits: jax.Array
    state: DecodeState
    snapshots: Snapshots
    intermediates: dict[str, jax.Array]


@flax.struct.dataclass
class _Carry:
    """What flows from layer to layer."""

    stream: Residual
    state: DecodeState
    snapshots: Snapshots


class Embeddings(DeclaredModule):
    """Token embeddings and the head, which is a matrix of its own."""

    @classmethod
    def weights(cls, config: K3Config):
        shape, axes = (config.vocab_size, config.hidden_size), ("vocab", "embed")
        return {
            "embed_tokens": linear("model.embed_tokens.weight", shape, axes, config, outputs=1),
            "lm_head": linear("lm_head.weight", shape, axes, config, outputs=1),
        }

    def embed(self, tokens: jax.Array, rows: str) -> jax.Array:
        """[T] -> [T, D]; not scaled. `rows` is the logical axis of T."""
        return self.layout.constrain(self.params["embed_tokens"][tokens].astype(self.dtype), (rows, "width"))

    def logits(self, x: jax.Array) -> jax.Array:
        """[sequences, D] -> [sequences, vocabulary] float32."""
        return self.layout.constrain(project(x, self.params["lm_head"], dtype=jnp.float32), ("sequences", "vocab"))


class K3ForCausalLM(nn.Module):
    """The language model of Kimi K3 or Kimi-Linear, by configuration.

    Parameters and state go in and come out:

    >>> model = K3ForCausalLM(preset("demo"), jnp.float32)
    >>> output = model.apply({"params": params}, tokens, state, batch)

    Attributes:
      config: the architecture.
      dtype: float32 or bfloat16, of activations and of the weights that have no dtype of their own.
      layout: how parameters, state and batches lie on devices.
    """

    config: K3Config
    dtype: Any = jnp.bfloat16
    layout: Layout = ONE_DEVICE

    MODULES = {
        "embeddings": Embeddings,
        "layer_inputs": LayerInputs,
        "kda": KimiDeltaAttention,
        "mla": MultiHeadLatentAttention,
        "dense_mlp": DenseMlp,
        "moe": MixtureOfExperts,
        "output": OutputMix,
    }

    @classmethod
    def weights(cls, config: K3Config) -> WeightTree:
        """Declaration of the whole parameter tree."""
        trees = {name: module.weights(config) for name, module in cls.MODULES.items()}
        return {name: tree for name, tree in trees.items() if tree}

    @classmethod
    def abstract_params(cls, config: K3Config, dtype: Any, layout: Layout = ONE_DEVICE) -> dict[str, Any]:
        """Shapes, dtypes and, on a mesh, shardings of the parameters, without making any."""
        weights = cls.weights(config)
        shardings = placements(weights, layout)
        return unflatten_dict({path: weight.abstract(dtype, shardings[path]) for path, weight in leaves(weights)})

    def setup(self):
        for name, module in self.MODULES.items():
            setattr(self, name, module(self.config, self.dtype, self.layout))

    def __call__(self, tokens: jax.Array, state: DecodeState, batch: Batch, logit_rows: jax.Array | None = None, *,
                 capture: bool = False) -> ModelOutput:
        """One prefill or decode step.

        Args:
          tokens: [T] int32; packed sequences for a `PrefillBatch`, one a row for a `DecodeBatch`.
          state: pools; donate them under jit.
          batch: which tokens belong together and where their state lies.
          logit_rows: [rows] int32 packed rows to give logits for, split like sequences; None = the last of each
            sequence.
          capture: also return what happened inside the layers.

        Returns:
          See `ModelOutput`.

        Raises:
          UserError: the mesh does not divide the rows or the sequences.
        """
        self._check_rows(tokens, batch)
        used = batch.used_rows(tokens.shape[0], self.layout)
        carry = _Carry(
            Residual.create(self.embeddings.embed(tokens, batch.row_axis), self.config), state,
            self._no_snapshots(state, batch),
        )
        captured: dict[str, list[jax.Array]] = {}
        for segment in schedule(list(zip(self.config.layer_types, self.config.mlp_types))):
            carry, taken = self._segment(carry, segment, batch, used, capture)
            for name, value in taken.items():
                captured.setdefault(name, []).append(value)
        intermediates = {name: jnp.concatenate(values) for name, values in captured.items()}
        if capture and self.config.attn_res_block_size:
            intermediates["block_residuals"] = carry.stream.blocks[:-1]
        rows = batch.last_rows(self.layout) if logit_rows is None else logit_rows
        x, taken = self.output(carry.stream.take(rows, self.layout, batch.row_axis), capture)
        logits = self.embeddings.logits(x)
        return ModelOutput(logits, carry.state, carry.snapshots, {**intermediates, **taken})

    def _check_rows(self, tokens: jax.Array, batch: Batch) -> None:
        if self.layout.mesh is not None:
            with users_mistake():
                self.layout.placement((batch.row_axis,), tokens.shape, "tokens of a step")
                self.layout.placement(("sequences",), batch.slots.shape, "slots of a batch")

    def _no_snapshots(self, state: DecodeState, batch: Batch) -> Snapshots:
        """Zeros for every snapshot that the batch may ask for."""
        count = batch.snapshot_positions.shape[0] if isinstance(batch, PrefillBatch) else 0
        layers = state.kda_state.shape[0]
        zeros = Snapshots(
            kda_state=jnp.zeros((layers, count, *state.kda_state.shape[2:]), state.kda_state.dtype),
            conv_tail=jnp.zeros((layers, count, *state.conv_tail.shape[2:]), state.conv_tail.dtype),
        )
        return jax.tree.map(self.layout.constrain, zeros, Snapshots.axes()) if count else zeros

    def _segment(self, carry: _Carry, segment: Segment, batch: Batch, used: jax.Array, capture: bool):
        """All repetitions of a group of runs; returns the carry and what was captured, [layers, ...] each."""

        def repetition(carry: _Carry, number: jax.Array):
            first, taken = segment.first + number * segment.period, []
            for kind, count in segment.runs:
                carry, run = _loop(
                    lambda carry, layer, kind=kind: self._layer(carry, layer, kind, batch, used, capture),
                    carry, first, count,
                )
                first = first + count
                taken.append(run)
            names = {name for run in taken for name in run}
            return carry, {name: jnp.concatenate([run[name] for run in taken if name in run]) for name in names}

        carry, taken = _loop(repetition, carry, 0, segment.repeats)
        return carry, {name: value.reshape(-1, *value.shape[2:]) for name, value in taken.items()}

    def _layer(self, carry: _Carry, layer: jax.Array, kind: tuple[str, str], batch: Batch, used: jax.Array,
               capture: bool):
        """One layer of this (attention, MLP) kind; `layer` is its index in the model."""
        attention, mlp = kind
        captured = {}
        with jax.named_scope(attention):
            x, stream, sources = self.layer_inputs.attention(carry.stream, layer, capture)
            index = self._index(attention, layer)
            if attention == "kda":
                out, state, snapshots, taken = self.kda(x, index, carry.state, batch, carry.snapshots, capture)
            else:
                (out, state), snapshots, taken = self.mla(x, index, carry.state, batch), carry.snapshots, {}
            stream = stream.replace(delta=self._constrain(out, batch))
        captured |= {"attention_input": x, "attention_output": out, **sources, **taken}
        with jax.named_scope(mlp):
            x, stream, sources = self.layer_inputs.mlp(stream, layer, capture)
            index = self._index(mlp, layer)
            if mlp == "moe":
                out, taken = self.moe(x, index, used, batch.row_axis, capture)
            else:
                out, taken = self.dense_mlp(x, index), {}
            stream = stream.replace(delta=self._constrain(out, batch))
        captured |= {"mlp_input": x, "mlp_output": out, **sources, **taken}
        return _Carry(stream, state, snapshots), captured if capture else {}

    def _constrain(self, x: jax.Array, batch: Batch) -> jax.Array:
        """The residual stream holds whole rows."""
        return self.layout.constrain(x, (batch.row_axis, "width"))

    def _index(self, kind: str, layer: jax.Array) -> jax.Array:
        """Position of a model layer in the stack of its kind."""
        layers = self.config.layers_of(kind)
        table = [layers.index(number) if number in layers else -1 for number in range(self.config.num_hidden_layers)]
        return jnp.array(table, jnp.int32)[layer]


def _loop(body, carry, first: jax.Array | int, count: int):
    """`body` over `count` indices from `first`, as a scan unless there is just one; stacks what it returns."""
    if count == 1:
        carry, taken = body(carry, jnp.asarray(first, jnp.int32))
        return carry, jax.tree.map(lambda value: value[None], taken)
    return jax.lax.scan(body, carry, first + jnp.arange(count, dtype=jnp.int32))
