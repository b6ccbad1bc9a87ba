"""How much memory things need, how much there is, and how much was used."""

import math
import pathlib
import resource
import sys
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.errors import UserError


def required_bytes(tree: Any) -> int:
    """Bytes that a tree of arrays or `jax.ShapeDtypeStruct`s takes on each device.

    A leaf with a sharding counts one device's shard, any other leaf its whole.
    """
    return sum(_device_bytes(leaf) for leaf in jax.tree.leaves(tree))


def available_bytes(device: jax.Device) -> int | None:
    """Bytes that can still be allocated on a device; None where nobody says.

    On CPU it is the free memory of the machine, divided by the number of CPU devices.
    """
    if device.platform == "cpu":
        free = _proc_kilobytes(pathlib.Path("/proc/meminfo"), "MemAvailable")
        return free and free // jax.local_device_count("cpu")
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def check_fits(required: int, what: str, devices: Iterable[jax.Device] | None = None) -> None:
    """Refuses what there is no room for.

    Args:
      required: bytes, over all the devices together.
      what: its name for the message.
      devices: that share it evenly; None is the default device.

    Raises:
      UserError: a device has too little memory; says how much is needed and how much there is.
    """
    devices = [_default_device()] if devices is None else list(devices)
    each = -(-required // len(devices))
    for device in devices:
        if device.process_index != jax.process_index():
            continue
        free = available_bytes(device)
        if free is not None and each > free:
            raise UserError(
                f"not enough memory for {what}: {human_bytes(each)} needed on {device}, {human_bytes(free)} free; "
                "take fewer layers, more devices or a smaller dtype"
            )


def peak_rss_bytes() -> int:
    """The most host memory this process has had resident."""
    # ru_maxrss survives fork and exec on Linux, so that a small program may report its parent's peak.
    peak = _proc_kilobytes(pathlib.Path("/proc/self/status"), "VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_device_bytes() -> int | None:
    """The most memory allocated on any device of this process; None where nobody says."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((peak for peak in peaks if peak is not None), default=None)


def peak_memory_bytes() -> int:
    """The peak of a device where that is known, else of this process on the host."""
    return peak_device_bytes() or peak_rss_bytes()


def human_bytes(count: float) -> str:
    """Bytes in decimal units, such as "1.56 TB"."""
    units = ["B", "kB", "MB", "GB", "TB"]
    power = 0
    while count >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.0f} B" if not power else f"{count:.3g} {units[power]}"


def _default_device() -> jax.Device:
    return next(iter(jnp.zeros(()).devices()))


def _device_bytes(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
    return math.prod(shape) * leaf.dtype.itemsize


def _proc_kilobytes(path: pathlib.Path, field: str) -> int | None:
    """A field of a Linux status file, in bytes."""
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None
