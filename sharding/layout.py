"""A strategy on a mesh: where arrays lie, and functions that run on each device's part of them."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.rules import DECODE, Strategy

Axes = tuple[str, ...]
"""The logical name of each axis of an array."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model is spread over devices; hashable, so that it can be a static argument.

    `Layout()` is one device: nothing is constrained, split or summed, and programs are what they are without it.

    Attributes:
      mesh: the devices; None = one device.
      strategy: the table.
    """

    mesh: Mesh | None = None
    strategy: Strategy = DECODE

    def over(self, axis: str) -> tuple[str, ...]:
        """Mesh axes, of size above 1, that split a logical axis; outermost first."""
        if self.mesh is None:
            return ()
        return tuple(name for name in self.strategy.table.get(axis, ()) if self.mesh.shape.get(name, 1) > 1)

    def beyond(self, axis: str, other: str) -> tuple[str, ...]:
        """Mesh axes that split a logical axis and not another: those of `tokens` beyond `sequences` split positions."""
        return tuple(name for name in self.over(axis) if name not in self.over(other))

    @property
    def num_devices(self) -> int:
        """Of the mesh."""
        return 1 if self.mesh is None else self.mesh.size

    def size(self, mesh_axes: Sequence[str]) -> int:
        """How many devices some mesh axes have together."""
        return math.prod(self.mesh.shape[name] for name in mesh_axes)

    def parts(self, axis: str) -> int:
        """Into how many parts a logical axis is split."""
        return self.size(self.over(axis))

    def spec(self, axes: Axes) -> PartitionSpec:
        """The placement of an array with these logical axes.

        Raises:
          ValueError: two of them would be split over the same mesh axis.
        """
        used: set[str] = set()
        for axis in axes:
            if clash := used.intersection(self.over(axis)):
                raise ValueError(
                    f"axes {', '.join(axes)}: strategy {self.strategy.name!r} splits two of them over mesh axis "
                    f"{min(clash)!r}"
                )
            used.update(self.over(axis))
        return PartitionSpec(*(self.over(axis) or None for axis in axes))

    def sharding(self, axes: Axes) -> NamedSharding | None:
        """`spec` on the mesh; None without one."""
        return None if self.mesh is None else NamedSharding(self.mesh, self.spec(axes))

    def placements(self, arrays: Mapping[str, tuple[Axes, Sequence[int]]]) -> dict[str, NamedSharding | None]:
        """Where arrays lie; the mesh must divide all of them. None without a mesh.

        Args:
          arrays: logical axes and shape, by a name for messages.

        Raises:
          ValueError: as `spec`, or the mesh does not divide an axis: names the array, the axis, and the sizes that
            would divide all of the arrays.
        """
        sizes = [(name, *pair) for name, (axes, shape) in arrays.items() for pair in zip(axes, shape, strict=True)]
        for name, axis, size in sizes:
            if size % self.parts(axis):
                mesh_axes = self.over(axis)
                common = math.gcd(*(other for _, also, other in sizes if self.over(also) == mesh_axes))
                works = [number for number in range(1, self.mesh.size + 1) if common % number == 0]
                raise ValueError(
                    f"{name}: axis {axis!r} of size {size} does not split over {_sizes(self.mesh, mesh_axes)}; "
                    f"sizes that would work: {', '.join(map(str, works))}"
                )
        return {name: self.sharding(axes) for name, (axes, _) in arrays.items()}

    def placement(self, axes: Axes, shape: Sequence[int], name: str) -> NamedSharding | None:
        """`placements` of one array."""
        return self.placements({name: (axes, shape)})[name]

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Has the compiler lay out an intermediate result so."""
        return x if self.mesh is None else jax.lax.with_sharding_constraint(x, self.sharding(axes))

    def local(self, function: Callable, inputs: tuple, outputs: Any) -> Callable:
        """Runs a function on each device's parts, as `jax.shard_map` over all mesh axes.

        Args:
          function: of local arrays; there `index`, `gather`, `sum`, `max` and `sum_scatter` may be used.
          inputs: for each argument logical axes, or a tree of them.
          outputs: the same for what the function returns.
        """
        if self.mesh is None:
            return function
        specs = [jax.tree.map(self.spec, tree, is_leaf=_is_axes) for tree in (inputs, outputs)]
        # check_vma: Pallas kernels do not say over which axes their results vary.
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)

    def index(self, axis: str) -> jax.Array | int:
        """Inside `local`: the number of this device's part of a logical axis."""
        mesh_axes = self.over(axis)
        return jax.lax.axis_index(mesh_axes) if mesh_axes else 0

    def gather(self, x: jax.Array, mesh_axes: tuple[str, ...], dim: int) -> jax.Array:
        """Inside `local`: the parts of all devices along some mesh axes, joined."""
        return jax.lax.all_gather(x, mesh_axes, axis=dim, tiled=True) if mesh_axes else x

    def sum(self, x: jax.Array, mesh_axes: tuple[str, ...]) -> jax.Array:
        """Inside `local`: the sum over devices."""
        return jax.lax.psum(x, mesh_axes) if mesh_axes else x

    def max(self, x: jax.Array, mesh_axes: tuple[str, ...]) -> jax.Array:
        """Inside `local`: the maximum over devices."""
        return jax.lax.pmax(x, mesh_axes) if mesh_axes else x

    def sum_scatter(self, x: jax.Array, mesh_axes: tuple[str, ...], dim: int) -> jax.Array:
        """Inside `local`: this device's part, along `dim`, of the sum over devices."""
        return jax.lax.psum_scatter(x, mesh_axes, scatter_dimension=dim, tiled=True) if mesh_axes else x


ONE_DEVICE = Layout()


def _is_axes(tree: Any) -> bool:
    """Whether this is an array's axes; a NamedTuple is a tree."""
    return type(tree) is tuple and all(isinstance(axis, str) for axis in tree)


def _sizes(mesh: Mesh, mesh_axes: Sequence[str]) -> str:
    """For messages: `tensor 4 x seq 8 = 32 devices`."""
    named = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in mesh_axes)
    total = math.prod(mesh.shape[axis] for axis in mesh_axes)
    return f"{named} = {total} devices" if len(mesh_axes) > 1 else f"{named} devices"
