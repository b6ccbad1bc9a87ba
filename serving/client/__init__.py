"""Talks to a server of this project; needs neither JAX nor a model.

>>> with Client("127.0.0.1:50051") as client:
...     for event in client.generate("Once upon a time", max_new_tokens=32):
...         if isinstance(event, Delta):
...             print(event.text, end="")

`AsyncClient` does the same with `async with` and `async for`.
"""

import importlib

# Name -> its module. Imported on first use, so that the commands can say what is missing where gRPC is not installed.
_HOME = {
    "Accepted": "events",
    "AsyncClient": "aio",
    "CacheStats": "events",
    "Client": "sync",
    "Delta": "events",
    "Done": "events",
    "Event": "events",
    "ModelInfo": "events",
    "Options": "request",
    "RequestError": "errors",
    "Sampling": "request",
    "Timings": "events",
    "TokenLogprobs": "events",
    "Usage": "events",
}

__all__ = list(_HOME)  # noqa: PLE0605


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'serving.client' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"serving.client.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
