"""Meshes of devices with the axes that the tables know."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from sharding.rules import MESH_AXES


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the first devices.

    >>> make_mesh({"expert": 4, "tensor": 2})

    Args:
      sizes: of mesh axes, in any order; those left out have size 1.
      devices: to choose from; None = all there are.

    Returns:
      A mesh with the axes `MESH_AXES`. Devices that are neighbours in the list are neighbours on its last axes.

    Raises:
      ValueError: an unknown axis, a size below 1, or more devices than there are.
    """
    devices = jax.devices() if devices is None else devices
    for axis, size in sizes.items():
        if axis not in MESH_AXES:
            raise ValueError(f"mesh axis is {axis!r}, expected one of {', '.join(MESH_AXES)}")
        if size < 1:
            raise ValueError(f"mesh axis {axis!r} has size {size}, expected at least 1")
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    count = math.prod(shape)
    if count > len(devices):
        named = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(
            f"mesh {named} needs {count} devices, {len(devices)} are present; take sizes whose product is at most "
            f"{len(devices)}"
        )
    return Mesh(np.array(devices[:count]).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))
