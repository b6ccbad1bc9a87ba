"""The table from logical axes to mesh axes."""

from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS_RULES: Mapping[str, str] = {
    # Heads of either attention, and the widths of MLPs.
    "kda_heads": "tensor",
    "mla_heads": "tensor",
    # Heads and their values merged, as the output projections read them.
    "kda_channels": "tensor",
    "mla_channels": "tensor",
    "mlp": "tensor",
    "shared_mlp": "tensor",
    # Routed experts: whole experts over `expert`, the width of each over `tensor`.
    "experts": "expert",
    "expert_mlp": "tensor",
    "vocab": "tensor",
}
"""Logical axis to mesh axis; an axis that is absent here or whose mesh axis the mesh lacks is replicated."""


def placement(axes: Sequence[str], shape: Sequence[int], mesh: Mesh, rules: Mapping[str, str] = AXIS_RULES,
              name: str = "array") -> NamedSharding:
    """Where an array with these logical axes lies.

    Args:
      axes: logical name of each axis.
      shape: sizes, for the check that the mesh divides them.
      mesh: the devices.
      rules: logical axis to mesh axis.
      name: of the array, for the message.

    Raises:
      ValueError: a mesh axis does not divide an array axis, or would be used twice.
    """
    spec: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        mesh_axis = rules.get(axis)
        if mesh_axis not in mesh.shape:
            spec.append(None)
            continue
        if mesh_axis in spec:
            raise ValueError(f"{name}: axes {axes} use mesh axis {mesh_axis!r} twice")
        if size % mesh.shape[mesh_axis]:
            raise ValueError(
                f"{name}: axis {axis!r} of size {size} does not split over the {mesh.shape[mesh_axis]} devices of mesh "
                f"axis {mesh_axis!r}; take a divisor of {size}"
            )
        spec.append(mesh_axis)
    return NamedSharding(mesh, PartitionSpec(*spec))
