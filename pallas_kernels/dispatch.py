"""Chooses the implementation of an op: the first of its platform's list that takes the case."""

import contextlib
import contextvars
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping

import jax

logger = logging.getLogger(__name__)

# ROCm is "gpu" to JAX; Mosaic GPU refuses it by NotImplementedError and XLA serves.
PREFERENCE: Mapping[str, tuple[str, ...]] = {
    "cpu": ("xla",),
    "gpu": ("mosaic_gpu", "xla"),
    "tpu": ("mosaic_tpu", "xla"),
}

_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


@contextlib.contextmanager
def platform(name: str) -> Iterator[None]:
    """Traces for "cpu", "gpu" or "tpu" whatever the default backend is, as compiling for an absent device needs.

    A jitted function that was traced before keeps what it chose then.
    """
    token = _platform.set(name)
    try:
        yield
    finally:
        _platform.reset(token)


def current_platform() -> str:
    """What is traced for."""
    return _platform.get() or jax.default_backend()


@functools.cache
def _log_once(op: str, name: str, platform: str) -> None:
    logger.info("%s: %s on %s", op, name, platform)


def run(op: str, implementations: Mapping[str, Callable], backend: str | None, *args, **kwargs):
    """Calls the first implementation that takes the case.

    Args:
      op: name of the op, for messages.
      implementations: name (`xla`, `reference`, `mosaic_gpu`, `mosaic_tpu`) to function.
      backend: exactly this implementation; None follows `K3JAX_KERNELS`, then the platform's preference.
      *args, **kwargs: what the implementations take.

    Raises:
      ValueError: the named implementation does not exist.
      NotImplementedError: no candidate takes the case; the message has each one's reason.
    """
    platform = current_platform()
    chosen = backend or os.environ.get("K3JAX_KERNELS")
    if chosen and chosen not in implementations:
        raise ValueError(f"{op}: no implementation {chosen!r}; there are {', '.join(sorted(implementations))}")
    names = (chosen,) if chosen else PREFERENCE.get(platform, ("xla",))
    refusals = []
    for name in names:
        if name not in implementations:
            continue
        try:
            result = implementations[name](*args, **kwargs)
        except NotImplementedError as refusal:
            refusals.append(f"{name}: {refusal}")
            continue
        _log_once(op, name, platform)
        return result
    raise NotImplementedError(f"{op} has no implementation for this case on {platform} ({'; '.join(refusals)})")
