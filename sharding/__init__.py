"""From logical axis names to placements on a mesh; knows no model mathematics."""

from sharding.layout import ONE_DEVICE, Axes, Layout
from sharding.mesh import make_mesh
from sharding.rules import DECODE, MESH_AXES, PREFILL, STRATEGIES, TRAIN, Strategy

__all__ = [
    "DECODE", "MESH_AXES", "ONE_DEVICE", "PREFILL", "STRATEGIES", "TRAIN", "Axes", "Layout", "Strategy", "make_mesh"
]
