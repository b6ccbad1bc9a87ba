"""How layers are joined: Block Attention Residuals (K3 technical report, section 2.2) or the ordinary stream."""

from collections.abc import Mapping

import flax.struct
import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.layers import rms_norm
from k3jax.modules import DeclaredModule
from k3jax.weights import Source, Weight, norm, normal, stacked
from pallas_kernels.attn_res import attn_res
from pallas_kernels.attn_res.reference import source_weights as attn_res_weights
from sharding import ONE_DEVICE, Layout


@flax.struct.dataclass
class Residual:
    """The residual stream between two sublayers.

    A sublayer's output waits in `delta` until the next sublayer mixes its input, so that one kernel can add and mix.

    Attributes:
      prefix: [T, D] running sum; with AttnRes the sum since the block began.
      delta: [T, D] output of the last sublayer, not yet added.
      blocks: [blocks + 1, T, D] sums of the finished blocks (block 0 is the embedding), then one row for scratch;
        without AttnRes there are none.
      num_blocks: int32 scalar, how many blocks are filled.
    """

    prefix: jax.Array
    delta: jax.Array
    blocks: jax.Array
    num_blocks: jax.Array

    @classmethod
    def create(cls, embeddings: jax.Array, config: K3Config) -> "Residual":
        """The stream before the first layer, from embeddings [T, D]."""
        rows = config.num_attn_res_blocks + 1 if config.attn_res_block_size else 0
        return cls(
            prefix=embeddings,
            delta=jnp.zeros_like(embeddings),
            blocks=jnp.zeros((rows, *embeddings.shape), embeddings.dtype),
            num_blocks=jnp.zeros((), jnp.int32),
        )

    def take(self, rows: jax.Array, layout: Layout = ONE_DEVICE, axis: str = "tokens") -> "Residual":
        """The stream of some tokens.

        Args:
          rows: [R] int32, split like sequences; each part counts its own rows from 0.
          layout: where the stream lies.
          axis: logical axis of the stream's rows.
        """
        split = layout.beyond(axis, "sequences")

        def local(prefix, delta, blocks, rows):
            if not split:
                return prefix[rows], delta[rows], blocks[:, rows]
            # The devices of `split` each hold some of the rows: who has a row gives it to the others.
            rows = rows - jax.lax.axis_index(split) * prefix.shape[0]
            mine = (rows >= 0) & (rows < prefix.shape[0])
            rows = jnp.where(mine, rows, 0)
            taken = prefix[rows], delta[rows], blocks[:, rows]
            return tuple(layout.sum(jnp.where(mine[:, None], part, 0), split) for part in taken)

        before, after = (((name, "width"), (name, "width"), ("blocks", name, "width")) for name in (axis, "sequences"))
        prefix, delta, blocks = layout.local(local, (*before, ("sequences",)), after)(
            self.prefix, self.delta, self.blocks, rows
        )
        return self.replace(prefix=prefix, delta=delta, blocks=blocks)

    def start_block(self, starts: jax.Array) -> "Residual":
        """Where `starts` (bool scalar) holds, the prefix becomes a finished block and the sum begins anew."""
        # Written every time: where no block starts, the row lies beyond num_blocks and is never read.
        blocks = jax.lax.dynamic_update_index_in_dim(self.blocks, self.prefix, self.num_blocks, 0)
        return self.replace(
            prefix=jnp.where(starts, jnp.zeros_like(self.prefix), self.prefix),
            blocks=blocks,
            num_blocks=self.num_blocks + starts.astype(jnp.int32),
        )


def _mix_weights(config: K3Config, mix: str) -> dict[str, Weight]:
    """The query of one mix: the weights of its norm and of its projection."""
    if not config.attn_res_block_size:
        return {}
    hidden = config.hidden_size
    return {
        f"{mix}_res_norm": norm(f"{mix}_res_norm.weight", hidden, "embed"),
        f"{mix}_res_proj": Weight(
            (hidden,), ("embed",), Source(f"{mix}_res_proj.weight", ((1, hidden),)), normal(config.initializer_range)
        ),
    }


class LayerInputs(DeclaredModule):
    """Forms the normed input of every sublayer out of the residual stream."""

    @classmethod
    def weights(cls, config: K3Config) -> Mapping[str, Weight]:
        return stacked(tuple(range(config.num_hidden_layers)), {
            "attention_norm": norm("input_layernorm.weight", config.hidden_size, "embed"),
            "mlp_norm": norm("post_attention_layernorm.weight", config.hidden_size, "embed"),
            **_mix_weights(config, "self_attention"),
            **_mix_weights(config, "mlp"),
        })

    def attention(self, stream: Residual, layer: jax.Array,
                  capture: bool = False) -> tuple[jax.Array, Residual, dict[str, jax.Array]]:
        """[T, D] normed input of a layer's attention, the stream, and what was captured.

        A block starts after the input is formed.
        """
        x, stream, captured = self._input(stream, layer, "attention", "self_attention", capture)
        block = self.config.attn_res_block_size
        return x, stream.start_block(layer % block == 0) if block else stream, captured

    def mlp(self, stream: Residual, layer: jax.Array,
            capture: bool = False) -> tuple[jax.Array, Residual, dict[str, jax.Array]]:
        """[T, D] normed input of a layer's MLP, the stream, and what was captured."""
        return self._input(stream, layer, "mlp", "mlp", capture)

    def _input(self, stream: Residual, layer: jax.Array, sublayer: str, mix_name: str, capture: bool):
        norm_weight, *mix = self.layer_params(layer, f"{sublayer}_norm", *_mix_weights(self.config, mix_name))
        x, stream = mix_and_norm(stream, norm_weight, mix, self.config.rms_norm_eps)
        return x, stream, source_weights(stream, mix, self.config.rms_norm_eps, sublayer) if capture else {}


class OutputMix(DeclaredModule):
    """The last mix and the final norm."""

    @classmethod
    def weights(cls, config: K3Config) -> Mapping[str, Weight]:
        mix = {
            name.removeprefix("output_attn_"): _top_level(weight)
            for name, weight in _mix_weights(config, "output_attn").items()
        }
        return {"norm": norm("model.norm.weight", config.hidden_size, "embed"), **mix}

    def __call__(self, stream: Residual, capture: bool = False) -> tuple[jax.Array, dict[str, jax.Array]]:
        """[T, D] input of the head, and what was captured."""
        final_norm, *mix = self.params.values()
        x, stream = mix_and_norm(stream, final_norm, mix, self.config.rms_norm_eps)
        return x, source_weights(stream, mix, self.config.rms_norm_eps, "output") if capture else {}


def _top_level(weight: Weight) -> Weight:
    """The same weight, named as one that belongs to no layer."""
    source = weight.source
    return Weight(weight.shape, weight.axes, Source(f"model.{source.name}", source.shapes), weight.init)


def mix_and_norm(stream: Residual, norm_weight: jax.Array, mix: list[jax.Array],
                 eps: float) -> tuple[jax.Array, Residual]:
    """Adds the waiting delta, mixes the sources and norms the result.

    Args:
      stream: the residual stream.
      norm_weight: [D] of the norm after the mix.
      mix: [D] norm and [D] projection of the AttnRes query; empty without AttnRes.
      eps: of all norms.

    Returns:
      [T, D] normed input, and the stream with the delta added.
    """
    if mix:
        x, prefix = attn_res(
            stream.blocks, stream.num_blocks, stream.prefix, stream.delta, *mix, eps=eps, output_norm_weight=norm_weight
        )
    else:
        prefix = stream.prefix + stream.delta
        x = rms_norm(prefix, norm_weight, eps)
    return x, stream.replace(prefix=prefix, delta=jnp.zeros_like(prefix))


def source_weights(stream: Residual, mix: list[jax.Array], eps: float, name: str) -> dict[str, jax.Array]:
    """How much a mix took from each source: `{name}_sources` [T, blocks + 1] float32, which sum to 1 for a token.

    The last is the running sum; unfilled blocks have 0. Nothing without AttnRes.

    Args:
      stream: as `mix_and_norm` returned it, before a block starts.
      mix, eps: as given to `mix_and_norm`.
      name: of the sublayer.
    """
    if not mix:
        return {}
    # The row for scratch behind the blocks is never filled.
    weights = attn_res_weights(stream.blocks[:-1], stream.num_blocks, stream.prefix, *mix, eps=eps)
    return {f"{name}_sources": weights.T}
