"""Declaration of weights: one `Weight` drives initialisation, loading, counting and sharding."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from k3jax.config import K3Config
from k3jax.errors import users_mistake
from sharding import Layout

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a weight lies in a Hugging Face checkpoint.

    One tensor per layer, or several stacked: `stack` lists the labels of each stacked axis, which `name` takes as
    `{}` fields. The tensors are reshaped row-major to the rest of the weight's shape.

    Attributes:
      name: tensor name after `model.layers.{layer}.`, or the whole name of a weight that belongs to no layer.
      shapes: shapes on disk that are accepted. One with more elements than needed is read from its start and must be
        zero beyond (A_log).
      stack: labels of the stacked axes, outermost first.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    stack: tuple[tuple[str, ...], ...] = ()

    def tensors(self) -> Iterator[str]:
        """Names in row-major order of the stacked axes."""
        return (self.name.format(*labels) for labels in itertools.product(*self.stack))


@dataclasses.dataclass(frozen=True)
class Weight:
    """One leaf of the parameter tree.

    Attributes:
      shape: shape in memory. Weights of layers are stacked: axis 0 counts the layers in `layers`.
      axes: logical name of each axis, for `sharding`.
      source: where a checkpoint keeps it.
      init: random initialiser.
      dtype: None follows the model's dtype; otherwise the one dtype it always has.
      layers: 0-based layers on axis 0; None for a weight that belongs to no layer.
      parameters_per_element: how many of the model's parameters an element holds: 2 for packed MXFP4 codes, 0 for
        their scales.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    source: Source
    init: Initializer
    dtype: Any = None
    layers: tuple[int, ...] | None = None
    parameters_per_element: int = 1

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{self.source.name}: shape {self.shape} but axes {self.axes}")

    def abstract(self, dtype: Any, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
        """Shape and dtype in a model of this dtype, and where it lies."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype or dtype, sharding=sharding)

    def tensor_names(self, config: K3Config, layer: int | None = None) -> Iterator[str]:
        """Full names of the tensors behind one layer (a 0-based model layer), or behind a weight without layers."""
        scope = config.tensor_prefix if layer is None else f"{config.tensor_prefix}model.layers.{layer}."
        return (scope + name for name in self.source.tensors())


WeightTree = Mapping[str, "Weight | WeightTree"]


def stacked(layers: tuple[int, ...], weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The weights of one layer, stacked over layers; none when there are no layers."""
    if not layers:
        return {}
    return {
        name: dataclasses.replace(
            weight, shape=(len(layers), *weight.shape), axes=("layers", *weight.axes), layers=tuple(layers)
        )
        for name, weight in weights.items()
    }


def linear(name: str, shape: tuple[int, ...], axes: tuple[str, ...], config: K3Config, *, outputs: int,
           stack: tuple[tuple[str, ...], ...] = ()) -> Weight:
    """A projection `[out, in]` whose outputs and inputs may be split into named axes.

    Args:
      name: tensor name, `.weight` included.
      shape, axes: in memory, stacked axes first.
      config: for the standard deviation of random weights.
      outputs: how many of the axes after the stacked ones belong to the outputs.
      stack: see `Source`.
    """
    rest = shape[len(stack):]
    on_disk = (math.prod(rest[:outputs]), math.prod(rest[outputs:]))
    return Weight(shape, axes, Source(name, (on_disk,), stack), normal(config.initializer_range))


def norm(name: str, size: int, axis: str, dtype: Any = None) -> Weight:
    """The weight of an RMSNorm, `[size]`."""
    return Weight((size,), (axis,), Source(name, ((size,),)), ones, dtype)


def normal(stddev: float) -> Initializer:
    """Gaussian with mean 0."""
    return lambda key, shape, dtype: (stddev * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def uniform(low: float, high: float) -> Initializer:
    """Uniform between two bounds."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, jnp.float32, low, high).astype(dtype)


def ones(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """All ones."""
    del key
    return jnp.ones(shape, dtype)


def mxfp4_codes(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Random bytes: two E2M1 codes each, all sixteen equally likely."""
    return jax.random.bits(key, shape, dtype)


def mxfp4_scales(stddev: float) -> Initializer:
    """One E8M0 byte for all groups, such that uniformly random codes get about this standard deviation."""
    uniform_codes_stddev = 2.93  # of {0, .5, 1, 1.5, 2, 3, 4, 6} with both signs
    byte = 127 + round(math.log2(stddev / uniform_codes_stddev))
    return lambda key, shape, dtype: jnp.full(shape, byte, dtype)


def leaves(tree: WeightTree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Weight]]:
    """(path, weight) of each leaf, in insertion order."""
    for name, item in tree.items():
        if isinstance(item, Weight):
            yield (*path, name), item
        else:
            yield from leaves(item, (*path, name))


def count_parameters(tree: WeightTree) -> int:
    """Parameters of the model, however they are stored."""
    return sum(math.prod(weight.shape) * weight.parameters_per_element for _, weight in leaves(tree))


def placements(tree: WeightTree, layout: Layout) -> dict[tuple[str, ...], NamedSharding | None]:
    """Where each leaf lies, by path; None without a mesh.

    Raises:
      UserError: the mesh does not divide an axis.
    """
    declared = dict(leaves(tree))
    arrays = {"/".join(path): (weight.axes, weight.shape) for path, weight in declared.items()}
    with users_mistake():
        return dict(zip(declared, layout.placements(arrays).values()))
