"""Talks to a server of this project; needs neither JAX nor a model.

>>> with Client("127.0.0.1:50051") as client:
...     for event in client.generate("Once upon a time", max_new_tokens=32):
...         if isinstance(event, Delta):
...             print(event.text, end="")

`AsyncClient` does the same with `async with` and `async for`.
"""

from serving.client.aio import AsyncClient
from serving.client.errors import RequestError
from serving.client.events import Accepted, CacheStats, Delta, Done, Event, ModelInfo, Timings, TokenLogprobs, Usage
from serving.client.request import Options, Sampling
from serving.client.sync import Client

__all__ = [
    "Accepted", "AsyncClient", "CacheStats", "Client", "Delta", "Done", "Event", "ModelInfo", "Options", "RequestError",
    "Sampling", "Timings", "TokenLogprobs", "Usage",
]
