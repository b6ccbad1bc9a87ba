"""Kimi Delta Attention: the linear attention of three layers in four (K3 technical report, section 2.1.1)."""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.kda_context import kda_prefill, short_conv
from k3jax.layers import project
from k3jax.modules import DeclaredModule
from k3jax.state import Batch, DecodeBatch, DecodeState, PrefillBatch, Snapshots
from k3jax.weights import Source, Weight, linear, norm, normal, stacked, uniform
from pallas_kernels.kda_decode import KdaDecodeOutput, kda_decode
from pallas_kernels.kda_math import decay_gate, gated_rms_norm

# Logical axes of what the ops take beside activations.
_CONV_WEIGHT, _A_LOG, _DT_BIAS = ("qkv", "kda_heads", "key_dim", "taps"), ("kda_heads",), ("kda_heads", "key_dim")
_POOLS, _SNAPSHOTS = DecodeState.axes(), Snapshots.axes()


class KimiDeltaAttention(DeclaredModule):
    """All KDA layers."""

    @classmethod
    def weights(cls, config: K3Config) -> Mapping[str, Weight]:
        hidden, heads, width, taps = (
            config.hidden_size, config.kda_num_heads, config.kda_head_dim, config.short_conv_kernel_size
        )
        channels = heads * width
        qkv = (("q", "k", "v"),)

        def heads_from(name: str, inputs: int, axis: str) -> Weight:
            return linear(name, (heads, width, inputs), ("kda_heads", "key_dim", axis), config, outputs=2)

        if config.use_full_rank_gate:
            gate = {"g_proj": heads_from("self_attn.g_proj.weight", hidden, "embed")}
        else:
            gate = {
                "g_a_proj": linear("self_attn.g_a_proj.weight", (width, hidden), ("rank", "embed"), config, outputs=1),
                "g_b_proj": heads_from("self_attn.g_b_proj.weight", width, "rank"),
            }
        if config.a_log_padding:
            a_log_shape = (math.ceil(heads / config.a_log_padding) * config.a_log_padding,)
        else:
            a_log_shape = (1, 1, heads, 1)
        return stacked(config.layers_of("kda"), {
            "qkv_proj": linear(
                "self_attn.{}_proj.weight", (3, heads, width, hidden), ("qkv", "kda_heads", "key_dim", "embed"), config,
                outputs=2, stack=qkv,
            ),
            "qkv_conv": Weight(
                (3, heads, width, taps), ("qkv", "kda_heads", "key_dim", "taps"),
                Source("self_attn.{}_conv1d.weight", ((channels, 1, taps),), qkv), normal(0.5), jnp.float32,
            ),
            "A_log": Weight(
                (heads,), ("kda_heads",), Source("self_attn.A_log", (a_log_shape, (heads,))), uniform(-0.5, 1.0),
                jnp.float32,
            ),
            "dt_bias": Weight(
                (heads, width), ("kda_heads", "key_dim"), Source("self_attn.dt_bias", ((channels,),)),
                uniform(-6.0, 0.0), jnp.float32,
            ),
            "f_a_proj": linear("self_attn.f_a_proj.weight", (width, hidden), ("rank", "embed"), config, outputs=1),
            "f_b_proj": heads_from("self_attn.f_b_proj.weight", width, "rank"),
            "b_proj": linear("self_attn.b_proj.weight", (heads, hidden), ("kda_heads", "embed"), config, outputs=1),
            **gate,
            "o_norm": norm("self_attn.o_norm.weight", width, "value_dim", jnp.float32),
            "o_proj": linear(
                "self_attn.o_proj.weight", (hidden, channels), ("embed", "kda_channels"), config, outputs=1
            ),
        })

    def __call__(self, x: jax.Array, layer: jax.Array, state: DecodeState, batch: Batch, snapshots: Snapshots,
                 capture: bool = False) -> tuple[jax.Array, DecodeState, Snapshots, dict[str, jax.Array]]:
        """One layer.

        Args:
          x: [T, D] normed input.
          layer: int32 scalar, index among the KDA layers.
          state, batch, snapshots: see `k3jax.state`.
          capture: also return the log decay and beta.

        Returns:
          [T, D] output, the new state, the new snapshots, and captured intermediates.
        """
        qkv_proj, qkv_conv, a_log, dt_bias, f_a, f_b, b_proj, o_norm, o_proj = self.layer_params(
            layer, "qkv_proj", "qkv_conv", "A_log", "dt_bias", "f_a_proj", "f_b_proj", "b_proj", "o_norm", "o_proj"
        )
        qkv = project(x, qkv_proj, parts=True)
        decay = project(project(x, f_a), f_b)
        beta = project(x, b_proj)
        output_gate = self._output_gate(x, layer)
        bound, eps = self.config.gate_lower_bound, self.config.rms_norm_eps

        if isinstance(batch, DecodeBatch):
            heads, conv_tail, kda_state = self._decode(
                qkv, decay, beta, output_gate, qkv_conv, o_norm, a_log, dt_bias, layer, state, batch
            )
        else:
            heads, conv_tail, kda_state, snapshots = self._prefill(
                qkv, decay, beta, qkv_conv, a_log, dt_bias, layer, state, batch, snapshots
            )
            heads = gated_rms_norm(heads, output_gate, o_norm, eps).astype(x.dtype)
        captured = {}
        if capture:
            captured = {
                "kda_decay": decay_gate(decay, a_log, dt_bias, bound),
                "kda_beta": jax.nn.sigmoid(beta.astype(jnp.float32)),
            }
        out = project(heads.reshape(x.shape[0], -1), o_proj)
        return out, state.replace(conv_tail=conv_tail, kda_state=kda_state), snapshots, captured

    def _output_gate(self, x: jax.Array, layer: jax.Array) -> jax.Array:
        """[T, H, V] raw output gate: full rank in K3, rank K in Kimi-Linear."""
        if self.config.use_full_rank_gate:
            return project(x, *self.layer_params(layer, "g_proj"))
        g_a, g_b = self.layer_params(layer, "g_a_proj", "g_b_proj")
        return project(project(x, g_a), g_b)

    def _decode(self, qkv, decay, beta, output_gate, qkv_conv, o_norm, a_log, dt_bias, layer, state: DecodeState,
                batch: DecodeBatch) -> KdaDecodeOutput:
        """One token a row: every device has all of its sequences' heads' states."""
        heads = ("sequences", "kda_heads", "key_dim")
        decode = self.layout.local(
            functools.partial(kda_decode, lower_bound=self.config.gate_lower_bound, norm_eps=self.config.rms_norm_eps),
            (("sequences", "qkv", "kda_heads", "key_dim"), heads, heads[:2], heads, _CONV_WEIGHT, ("value_dim",),
             _A_LOG, _DT_BIAS, _POOLS.conv_tail, _POOLS.kda_state, (), ("sequences",)),
            KdaDecodeOutput(heads, _POOLS.conv_tail, _POOLS.kda_state),
        )
        return decode(
            qkv, decay, beta, output_gate, qkv_conv, o_norm, a_log, dt_bias, state.conv_tail, state.kda_state, layer,
            batch.slots,
        )

    def _prefill(self, qkv, decay, beta, qkv_conv, a_log, dt_bias, layer, state: DecodeState, batch: PrefillBatch,
                 snapshots: Snapshots):
        """Convolution and scan over packed sequences; returns (heads, conv_tail, kda_state, snapshots)."""
        split = self.layout.beyond("tokens", "sequences")

        def local(qkv, decay, beta, qkv_conv, a_log, dt_bias, conv_pool, state_pool, layer, batch):
            has_context = batch.context_lens > 0
            conv = short_conv(
                qkv, qkv_conv, conv_pool, layer, batch.slots, has_context, batch.cu_seqlens,
                snapshot_positions=batch.snapshot_positions, axes=split,
            )
            q, k, v = (conv.out[:, part] for part in range(3))
            scan = kda_prefill(
                q, k, v, decay, beta, a_log, dt_bias, state_pool, layer, batch.slots, has_context, batch.cu_seqlens,
                lower_bound=self.config.gate_lower_bound, snapshot_positions=batch.snapshot_positions, axes=split,
            )
            return scan.out, conv.conv_pool, scan.state_pool, Snapshots(scan.snapshots, conv.snapshots)

        heads = ("tokens", "kda_heads", "key_dim")
        of_a_layer = Snapshots(_SNAPSHOTS.kda_state[1:], _SNAPSHOTS.conv_tail[1:])
        out, conv_tail, kda_state, taken = self.layout.local(
            local,
            (("tokens", "qkv", "kda_heads", "key_dim"), heads, heads[:2], _CONV_WEIGHT, _A_LOG, _DT_BIAS,
             _POOLS.conv_tail, _POOLS.kda_state, (), batch.axes()),
            (heads, _POOLS.conv_tail, _POOLS.kda_state, of_a_layer),
        )(qkv, decay, beta, qkv_conv, a_log, dt_bias, state.conv_tail, state.kda_state, layer, batch)
        snapshots = jax.tree.map(
            lambda stack, new: jax.lax.dynamic_update_index_in_dim(stack, new, layer, 0), snapshots, taken
        )
        return out, conv_tail, kda_state, snapshots
