"""Finds a mesh, and what would make a model fit."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.plan.estimate import bytes_moved, estimate
from k3jax.plan.experts import expert_traffic
from k3jax.plan.hardware import Topology
from k3jax.plan.program import Program, abstract_mesh
from k3jax.plan.workload import MESH_AXES, Kind, Workload
from k3jax.state import PAGE_SIZE

AS_GOOD = 1.1
"""A mesh within this factor of the lowest cost is as good; of those the one that needs least memory is taken."""

# A prefill step may follow either table: splitting positions moves fewer bytes, splitting heads needs less memory.
STRATEGIES = {"decode": ("decode",), "prefill": ("prefill", "decode")}

_USUAL_RATIO = 10
"""Of the bandwidth of memory to that of links, where they are not known."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A step of a model on a topology; asked again and again with something changed."""

    kind: Kind
    config: K3Config
    topology: Topology
    workload: Workload

    def program(self, sizes: Mapping[str, int], strategy: str) -> Program:
        """The step on one mesh, by shapes alone."""
        return Program(
            self.kind, strategy, self.config, abstract_mesh(sizes), self.workload, self.topology.platform
        )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh and a table that divide the model.

    Attributes:
      sizes: of the mesh's axes.
      strategy: the table, by name.
      peak: bytes of weights, state and inputs on a device.
      cost: what a step moves on a device, in bytes of memory traffic: what comes over links counts for as much as
        memory does in the same time.
    """

    sizes: dict[str, int]
    strategy: str
    peak: int
    cost: float


def candidates(question: Question, sizes: Mapping[str, int] | None = None, beside: int = 0) -> list[Candidate]:
    """All ways that divide the model, the best first: those that fit, by cost, then the others by memory.

    Args:
      question: the step.
      sizes: only this mesh.
      beside: bytes that a device needs beside weights, state and inputs.

    Raises:
      UserError: this mesh does not divide the model.
    """
    found, refusal = [], None
    for mesh in [sizes] if sizes else _splits(question.topology.num_devices):
        for strategy in STRATEGIES[question.kind]:
            program = question.program(mesh, strategy)
            try:
                counted = estimate(program, trace=False)
            except UserError as error:
                refusal = error
                continue
            found.append(Candidate(dict(mesh), strategy, counted.peak, _cost(question, program, counted)))
    if not found:  # only a mesh that was given: all devices on `data` always divide
        raise refusal
    limit = question.topology.usable_bytes - beside
    fitting = sorted((mesh for mesh in found if mesh.peak <= limit), key=lambda mesh: mesh.cost)
    others = sorted((mesh for mesh in found if mesh.peak > limit), key=lambda mesh: mesh.peak)
    good = [mesh for mesh in fitting if mesh.cost <= AS_GOOD * fitting[0].cost]
    return sorted(good, key=lambda mesh: mesh.peak) + fitting[len(good):] + others


def _cost(question: Question, program: Program, counted) -> float:
    device = question.topology.device
    ratio = device.bandwidth / device.link if device.bandwidth and device.link else _USUAL_RATIO
    return bytes_moved(program, counted) + ratio * _received(program)


def _splits(devices: int) -> Iterator[dict[str, int]]:
    """Sizes of all mesh axes whose product is the number of devices."""
    def rest(axes: tuple[str, ...], left: int) -> Iterator[dict[str, int]]:
        if len(axes) == 1:
            yield {axes[0]: left}
            return
        for size in divisors:
            if left % size == 0:
                for others in rest(axes[1:], left // size):
                    yield {axes[0]: size, **others}

    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    yield from rest(MESH_AXES, devices)


def _received(program: Program) -> float:
    """About the bytes that a device receives in a step; only good for comparing meshes."""
    layout, config, width = program.layout, program.config, jnp.dtype(program.dtype).itemsize
    rows = program.tokens / layout.parts(program.inputs[1].row_axis)
    # Heads and widths that are split leave sums over devices: what is added comes in, and so does the result.
    split = (layout.parts("kda_channels") > 1) + (layout.parts("shared_mlp") > 1)
    total = 2 * rows * config.hidden_size * width * split * config.num_hidden_layers
    traffic = expert_traffic(program)
    if traffic is None:
        return total
    return total + len(config.layers_of("moe")) * (traffic.exchanged if traffic.exchanges else traffic.shared)


def most_that_fit(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` with `fits(number)`, which holds up to some number; 0 if not even for 1."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def sequences_within(budget: int, question: Question, best: Candidate) -> int:
    """How many sequences have their state and cache in so many bytes of each device; 0 for not even one a block."""
    blocks = question.program(best.sizes, best.strategy).blocks

    def fits(full: int) -> bool:
        asked = dataclasses.replace(
            question, workload=dataclasses.replace(question.workload, sequences=full * blocks)
        )
        counted = estimate(asked.program(best.sizes, best.strategy), trace=False)
        return sum(counted.state.values()) <= budget

    return blocks * most_that_fit(fits, 1 << 20)


def remedies(question: Question, sizes: Mapping[str, int] | None, beside: int) -> list[str]:
    """Changes of which each would make a step fit, found by trying.

    Args:
      question: the step that does not fit.
      sizes: its mesh, if it must be that one.
      beside: bytes that it needs beside weights, state and inputs.
    """
    def fits(asked: Question) -> bool:
        kept = sizes if sizes and math.prod(sizes.values()) == asked.topology.num_devices else None
        return candidates(asked, kept, beside)[0].peak + beside <= asked.topology.usable_bytes

    def fits_with(**changes: int) -> bool:
        return fits(dataclasses.replace(question, workload=dataclasses.replace(workload, **changes)))

    workload, found = question.workload, []
    if fewer := most_that_fit(lambda count: fits_with(sequences=count), workload.sequences):
        found.append(f"{fewer:,} sequences instead of {workload.sequences:,}")
    pages = -(-workload.context // PAGE_SIZE)
    if shorter := most_that_fit(lambda count: fits_with(context=count * PAGE_SIZE), pages):
        found.append(f"a context of {shorter * PAGE_SIZE:,} tokens instead of {workload.context:,}")
    for larger in question.topology.larger():
        if fits(dataclasses.replace(question, topology=larger)):
            found.append(f"{larger.name}, {larger.num_devices:,} devices of {larger.device.memory_gib:.4g} GiB")
            break
    return found
