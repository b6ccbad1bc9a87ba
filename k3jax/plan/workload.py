"""What a plan is asked for. Knows no JAX, so that a mistake is reported at once."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from k3jax.config import K3Config
from k3jax.errors import UserError

Kind = Literal["decode", "prefill"]
KINDS: tuple[Kind, ...] = ("decode", "prefill")
# The order of `sharding.MESH_AXES`, which cannot be imported without JAX; a test compares them.
MESH_AXES = ("data", "expert", "seq", "tensor")


@dataclasses.dataclass(frozen=True)
class Workload:
    """How the model is used.

    Attributes:
      sequences: that have state and cache at the same time; a decode step makes a token for each.
      context: tokens that each may have.
      chunk: tokens of a prefill step, over all devices.
    """

    sequences: int = 64
    context: int = 131_072
    chunk: int = 8192

    def check(self, config: K3Config) -> None:
        """Refuses what the model cannot do.

        Raises:
          UserError: the context is longer than the model's, or the chunk than all sequences.
        """
        if self.chunk > self.sequences * self.context:
            raise UserError(
                f"chunk is {self.chunk} tokens, and {self.sequences} sequences of {self.context} have fewer; "
                "take a smaller --chunk"
            )
        if self.context > config.max_position_embeddings:
            raise UserError(
                f"context is {self.context} tokens, and this model takes {config.max_position_embeddings} at most"
            )


def parse_mesh(text: str) -> dict[str, int]:
    """Reads `expert=4,seq=8,tensor=4` into sizes of all axes; those left out are 1.

    Raises:
      UserError: it reads otherwise.
    """
    sizes = dict.fromkeys(MESH_AXES, 1)
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in sizes or not size.isdecimal() or int(size) < 1:
            raise UserError(
                f"mesh is {text!r}, expected sizes of the axes {', '.join(MESH_AXES)}, such as expert=4,seq=8,tensor=4"
            )
        sizes[axis] = int(size)
    return sizes


def check_mesh(sizes: Mapping[str, int], topology) -> None:
    """Refuses a mesh of another number of devices than the topology has.

    Raises:
      UserError: says how many there are.
    """
    count = math.prod(sizes.values())
    if count != topology.num_devices:
        raise UserError(
            f"mesh {mesh_name(sizes)} has {count} devices, and {topology.name} has {topology.num_devices}; "
            f"take sizes whose product is {topology.num_devices}"
        )


def mesh_name(sizes: Mapping[str, int]) -> str:
    """`expert=4,seq=8,tensor=4`: what `parse_mesh` reads."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"
