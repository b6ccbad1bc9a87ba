"""The base of the model's modules: parameters come from a declaration."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

from k3jax.config import K3Config
from k3jax.weights import Weight
from pallas_kernels import stacks
from sharding import ONE_DEVICE, Layout


class DeclaredModule(nn.Module):
    """A module whose parameters are exactly `self.weights(config)`.

    The parameters of all layers of a kind are stacked on axis 0, and `__call__` takes the index of the layer: a scan
    over layers reads the stacks in place instead of copying slices.

    Attributes:
      config: the architecture.
      dtype: dtype of activations, and of the parameters that have no dtype of their own.
      layout: how parameters, state and activations lie on devices.
    """

    config: K3Config
    dtype: Any
    layout: Layout = ONE_DEVICE

    @classmethod
    def weights(cls, config: K3Config) -> Mapping[str, Weight]:
        """The declaration, by parameter name."""
        raise NotImplementedError(f"{cls.__name__} declares no weights")

    def setup(self):
        self.params = {
            name: self.param(name, weight.init, weight.shape, weight.dtype or self.dtype)
            for name, weight in self.weights(self.config).items()
        }

    def layer_params(self, layer: jax.Array, *names: str) -> list[jax.Array]:
        """The slices of one layer."""
        return [stacks.read(self.params[name], layer) for name in names]
