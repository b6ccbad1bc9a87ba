"""From logical axis names to placements on a mesh; knows no model mathematics."""

from sharding.rules import AXIS_RULES, placement

__all__ = ["AXIS_RULES", "placement"]
