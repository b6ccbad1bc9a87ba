"""Which weights of the model lie in which Orbax item of a converted checkpoint."""

import dataclasses
from collections.abc import Mapping

from k3jax.checkpoint.orbax.manifest import LAYERS
from k3jax.weights import Weight, WeightTree, leaves

MODEL = "model"

COUNTED_AXES = ("experts", "gate_up", "qkv", "kda_heads", "mla_heads")
"""Axes of whole things, which a mesh deals out one by one."""

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of an item: a layer of a weight, or a weight without layers.

    Attributes:
      weight: its declaration.
      index: of the layer in the weight's stack; None for a weight without layers.
    """

    weight: Weight
    index: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's, without the axis of layers."""
        return self.weight.shape[self._first_axis:]

    @property
    def counted_axes(self) -> tuple[int, ...]:
        """The axes that count whole things."""
        axes = self.weight.axes[self._first_axis:]
        return tuple(number for number, axis in enumerate(axes) if axis in COUNTED_AXES)

    @property
    def _first_axis(self) -> int:
        return 0 if self.index is None else 1


@dataclasses.dataclass(frozen=True)
class Item:
    """One Orbax item: a layer of the model, or what belongs to no layer.

    Attributes:
      name: its folder, such as `layers/00003`.
      parts: its arrays, by path in the parameter tree.
    """

    name: str
    parts: Mapping[Path, Part]


def items_of(tree: WeightTree) -> list[Item]:
    """All items, the layers in order."""
    model: dict[Path, Part] = {}
    layers: dict[int, dict[Path, Part]] = {}
    for path, weight in leaves(tree):
        if weight.layers is None:
            model[path] = Part(weight, None)
        else:
            for index, layer in enumerate(weight.layers):
                layers.setdefault(layer, {})[path] = Part(weight, index)
    return [Item(MODEL, model), *(Item(f"{LAYERS}/{layer:05}", layers[layer]) for layer in sorted(layers))]
