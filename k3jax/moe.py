"""Mixture of experts: sigmoid router, latent experts, shared experts (K3 technical report, section 2.3)."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from k3jax.config import MXFP4_GROUP, K3Config
from k3jax.expert_parallel import routed_experts
from k3jax.layers import project, rms_norm
from k3jax.mlp import activation, gated_mlp, mlp_weights
from k3jax.modules import DeclaredModule
from k3jax.router import Routing, route
from k3jax.weights import Source, Weight, linear, mxfp4_codes, mxfp4_scales, norm, stacked, uniform
from pallas_kernels.mxfp4 import MxFp4


def _bank(name: str, experts: int, parts: tuple[str, ...], rows: int, columns: int, axes: tuple[str, ...],
          config: K3Config) -> dict[str, Weight]:
    """One matrix of every expert, in the checkpoint's format.

    Args:
      name: parameter name.
      experts: how many.
      parts: tensors stacked for one matrix, (`w1`, `w3`) or (`w2`,).
      rows, columns: shape of each tensor, `[out, in]`.
      axes: logical names of (experts[, gate_up], rows, columns).
      config: format and standard deviation.
    """
    labels = tuple(map(str, range(experts)))
    if len(parts) == 1:
        stack, prefix, part = (labels,), "block_sparse_moe.experts.{}.", parts[0]
    else:
        stack, prefix, part = (labels, parts), "block_sparse_moe.experts.{}.", "{}"
    lead = tuple(len(axis) for axis in stack)
    if config.expert_format == "dense":
        return {name: linear(f"{prefix}{part}.weight", (*lead, rows, columns), axes, config, outputs=1, stack=stack)}
    packed, groups = (rows, columns // 2), (rows, columns // MXFP4_GROUP)
    return {
        f"{name}_packed": Weight(
            (*lead, *packed), axes, Source(f"{prefix}{part}.weight_packed", (packed,), stack), mxfp4_codes, jnp.uint8,
            parameters_per_element=2,
        ),
        f"{name}_scale": Weight(
            (*lead, *groups), (*axes[:-1], f"{axes[-1]}_groups"),
            Source(f"{prefix}{part}.weight_scale", (groups,), stack), mxfp4_scales(config.initializer_range), jnp.uint8,
            parameters_per_element=0,
        ),
    }


class MixtureOfExperts(DeclaredModule):
    """All MoE layers."""

    @classmethod
    def weights(cls, config: K3Config) -> Mapping[str, Weight]:
        hidden, experts = config.hidden_size, config.num_experts
        inner, width = config.expert_hidden_size, config.moe_intermediate_size
        latent = {}
        if config.routed_expert_hidden_size:
            latent = {
                "latent_down": linear(
                    "block_sparse_moe.routed_expert_down_proj.weight", (inner, hidden), ("latent_embed", "embed"),
                    config, outputs=1,
                ),
                "latent_up": linear(
                    "block_sparse_moe.routed_expert_up_proj.weight", (hidden, inner), ("embed", "latent_embed"), config,
                    outputs=1,
                ),
            }
        if config.latent_moe_use_norm:
            latent["latent_norm"] = norm("block_sparse_moe.routed_expert_norm.weight", inner, "latent_embed")
        shared = {}
        if config.num_shared_experts:
            shared = mlp_weights(
                "block_sparse_moe.shared_experts", config.num_shared_experts * width, "shared_mlp", config, "shared_"
            )
        return stacked(config.layers_of("moe"), {
            "router": linear("block_sparse_moe.gate.weight", (experts, hidden), ("router", "embed"), config, outputs=1),
            "router_bias": Weight(
                (experts,), ("router",), Source("block_sparse_moe.gate.e_score_correction_bias", ((experts,),)),
                uniform(-0.01, 0.01), jnp.float32,
            ),
            **latent,
            **shared,
            **_bank(
                "experts_gate_up", experts, ("w1", "w3"), width, inner,
                ("experts", "gate_up", "expert_mlp", "expert_embed"), config,
            ),
            **_bank("experts_down", experts, ("w2",), inner, width, ("experts", "expert_embed", "expert_mlp"), config),
        })

    def __call__(self, x: jax.Array, layer: jax.Array, used: jax.Array, rows: str = "tokens",
                 capture: bool = False) -> tuple[jax.Array, dict[str, jax.Array]]:
        """One layer.

        Args:
          x: [T, D] normed input.
          layer: int32 scalar, index among the MoE layers.
          used: [T] bool; padding rows visit no expert.
          rows: logical axis of T.
          capture: also return the router's scores and choices.

        Returns:
          [T, D] output and captured intermediates.
        """
        config = self.config
        router, bias = self.layer_params(layer, "router", "router_bias")
        choose = functools.partial(
            route, top_k=config.num_experts_per_token, renormalize=config.moe_renormalize,
            scaling_factor=config.routed_scaling_factor, num_groups=config.num_expert_group,
            topk_groups=config.topk_group,
        )
        # Local, because the compiler would gather all rows' scores for top_k.
        routing = self.layout.local(
            choose, ((rows, "width"), ("router", "width"), ("router",)),
            Routing((rows, "top_k"), (rows, "top_k"), (rows, "router")),
        )(x, router, bias)
        latent, columns = x, "width"
        if config.routed_expert_hidden_size:
            latent, columns = project(x, *self.layer_params(layer, "latent_down")), "latent_embed"
        out = routed_experts(
            latent, jnp.where(used[:, None], routing.ids, -1), routing.weights, self._experts("experts_gate_up"),
            self._experts("experts_down"), layer, activation=activation(config), layout=self.layout, rows=rows,
            columns=columns,
        ).astype(x.dtype)
        if config.latent_moe_use_norm:
            out = rms_norm(out, *self.layer_params(layer, "latent_norm"), config.rms_norm_eps)
        if config.routed_expert_hidden_size:
            out = project(out, *self.layer_params(layer, "latent_up"))
        if config.num_shared_experts:
            shared = self.layer_params(layer, "shared_gate_up", "shared_down")
            out = out + gated_mlp(x, *shared, activation(config))
        captured = {}
        if capture:
            captured = {
                "router_scores": routing.scores, "router_ids": routing.ids, "router_weights": routing.weights
            }
        return out, captured

    def _experts(self, name: str) -> jax.Array | MxFp4:
        """The whole stack of one bank."""
        if self.config.expert_format == "dense":
            return self.params[name]
        return MxFp4(self.params[f"{name}_packed"], self.params[f"{name}_scale"])
