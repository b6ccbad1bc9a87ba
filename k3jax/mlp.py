"""Dense gated MLPs: the first layer's, and the shared experts'."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.layers import project
from k3jax.modules import DeclaredModule
from k3jax.weights import Weight, linear, stacked
from pallas_kernels.activations import Silu, Situ


def activation(config: K3Config) -> Silu | Situ:
    """The GLU that every MLP and expert of the model uses."""
    if config.hidden_act == "silu":
        return Silu()
    return Situ(config.activation_situ_beta, config.activation_situ_linear_beta)


def mlp_weights(prefix: str, width: int, axis: str, config: K3Config, name: str = "") -> dict[str, Weight]:
    """Gate and up projections in one stack, and the down projection, of an MLP of this width."""
    hidden = config.hidden_size
    return {
        f"{name}gate_up": linear(
            prefix + ".{}_proj.weight", (2, width, hidden), ("gate_up", axis, "embed"), config, outputs=1,
            stack=(("gate", "up"),),
        ),
        f"{name}down": linear(prefix + ".down_proj.weight", (hidden, width), ("embed", axis), config, outputs=1),
    }


def gated_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array, act: Silu | Situ) -> jax.Array:
    """`down(act(gate x, up x))`.

    Args:
      x: [T, D].
      gate_up: [2, I, D].
      down: [D, I].
      act: evaluated in float32.

    Returns:
      [T, D] in x's dtype.
    """
    both = project(x, gate_up, parts=True, dtype=jnp.float32)
    return project(act(both[:, 0], both[:, 1]).astype(x.dtype), down)


class DenseMlp(DeclaredModule):
    """The MLPs of all layers that have no experts."""

    @classmethod
    def weights(cls, config: K3Config) -> Mapping[str, Weight]:
        return stacked(config.layers_of("dense"), mlp_weights("mlp", config.intermediate_size, "mlp", config))

    def __call__(self, x: jax.Array, layer: jax.Array) -> jax.Array:
        """One layer: [T, D] -> [T, D]; `layer` counts the dense layers."""
        return gated_mlp(x, *self.layer_params(layer, "gate_up", "down"), activation(self.config))

