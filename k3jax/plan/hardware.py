"""Devices by name: how many a topology has, how much memory each, and how fast that is. Knows no JAX."""

import dataclasses
import math
import os
import re
from collections.abc import Iterator

from k3jax.errors import UserError

GIB = 2**30
USABLE = 0.92
"""Share of a device's memory that a plan may fill: runtimes keep some, and allocators leave gaps."""

MOST_DEVICES = 8192
"""More are not planned for."""


@dataclasses.dataclass(frozen=True)
class Device:
    """What JAX calls a device: a TPU core, a GPU.

    Attributes:
      platform: "tpu", "gpu" or "cpu", as JAX says.
      form: of a topology after its name, for messages.
      memory_gib: of one device, in GiB.
      per_chip: devices on a chip.
      bandwidth: of that memory, bytes/s; None where it is not known, as the two below.
      flops: bfloat16 operations a second.
      link: bytes/s that one device can send to others of the topology.
    """

    platform: str
    form: str
    memory_gib: float
    per_chip: int = 1
    bandwidth: float | None = None
    flops: float | None = None
    link: float | None = None


# Vendors' figures. TPU7x shows the two halves of a chip as two devices.
DEVICES = {
    "tpu7x": Device("tpu", "AxBxC", 96, 2, bandwidth=3.69e12, flops=1.153e15, link=300e9),
    "v5p": Device("tpu", "AxBxC", 95, bandwidth=2.765e12, flops=459e12, link=600e9),
    "v6e": Device("tpu", "AxB", 32, bandwidth=1.64e12, flops=918e12, link=400e9),
    "v5e": Device("tpu", "AxB", 16, bandwidth=0.819e12, flops=197e12, link=200e9),
    "h200": Device("gpu", "N", 139.8, bandwidth=4.8e12, flops=989e12, link=450e9),
    "cpu": Device("cpu", "N", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices that are wired to each other.

    Attributes:
      name: as it was given, "tpu7x:4x4x4".
      device: one of them.
      num_devices: how many.
    """

    name: str
    device: Device
    num_devices: int

    @classmethod
    def parse(cls, name: str) -> "Topology":
        """Reads `tpu7x:4x4x4` (chips of a TPU slice), `h200:16` or `cpu:8`.

        Raises:
          UserError: there is no such topology; lists the known ones.
        """
        kind, _, shape = name.partition(":")
        device = DEVICES.get(kind)
        dims = [int(size) for size in shape.split("x")] if re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4})*", shape) else []
        if device is None or len(dims) != device.form.count("x") + 1:
            known = ", ".join(f"{kind}:{device.form}" for kind, device in DEVICES.items())
            raise UserError(f"topology is {name!r}, expected one of {known}, with numbers for the capitals")
        count = math.prod(dims) * device.per_chip
        if count > MOST_DEVICES:
            raise UserError(f"topology {name!r} has {count:,} devices, expected at most {MOST_DEVICES:,}")
        if device.platform == "cpu":
            # All fake devices share one machine.
            device = dataclasses.replace(device, memory_gib=device.memory_gib / dims[0])
        return cls(name, device, count)

    @property
    def platform(self) -> str:
        return self.device.platform

    @property
    def memory_bytes(self) -> int:
        """Of one device."""
        return int(self.device.memory_gib * GIB)

    @property
    def usable_bytes(self) -> int:
        """What a plan may fill."""
        return int(USABLE * self.memory_bytes)

    def larger(self) -> Iterator["Topology"]:
        """The same with two, four, ... times the chips, the shortest side doubled each time."""
        kind, _, shape = self.name.partition(":")
        dims, count = sorted(int(size) for size in shape.split("x")), self.num_devices
        while 2 * count <= MOST_DEVICES:
            dims, count = sorted((2 * dims[0], *dims[1:])), 2 * count
            yield Topology.parse(f"{kind}:{'x'.join(map(str, dims))}")
