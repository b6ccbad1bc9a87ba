"""The two ways in which tokens meet routed experts on other devices, in bytes (see `k3jax/expert_parallel.py`)."""

import dataclasses

import jax.numpy as jnp

from k3jax.expert_parallel import capacity, exchange_pays
from k3jax.plan.program import Program


@dataclasses.dataclass(frozen=True)
class ExpertTraffic:
    """What a device receives in one MoE layer because tokens lie elsewhere than their experts.

    Attributes:
      shared: bytes if all rows are shared and all results summed.
      exchanged: bytes if each row is sent where its experts are.
      exchanges: whether the step does the latter.
    """

    shared: int
    exchanged: int
    exchanges: bool


def expert_traffic(program: Program) -> ExpertTraffic | None:
    """Of a step; None where rows are not split over the devices that share out the experts."""
    layout, config = program.layout, program.config
    rows_axis = program.inputs[1].row_axis
    shared = set(layout.over("experts")) & set(layout.over(rows_axis))
    if not shared or not config.num_experts:
        return None
    rows = program.tokens // layout.parts(rows_axis)
    # A row comes in the activations' dtype, and its result in float32.
    width = config.expert_hidden_size * (jnp.dtype(program.dtype).itemsize + 4)
    devices = layout.size(shared)
    return ExpertTraffic(
        devices * rows * width, devices * capacity(rows, config.num_experts_per_token, layout) * width,
        exchange_pays(rows, config.num_experts_per_token, layout, rows_axis),
    )
