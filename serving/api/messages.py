"""Messages of the protocol, to and from what the engine and k3jax know."""

import dataclasses
import time

import numpy as np

from k3jax.catalog import Description
from k3jax.generation import TokenLogprobs
from k3jax.sampling import SamplingParams, fresh_seed
from serving.api.v1 import decoder_pb2 as pb
from serving.engine.config import EngineConfig
from serving.engine.request import Request
from serving.engine.stats import EngineStats

MAX_NEW_TOKENS = 128
"""Of a request that does not say."""

_SCALARS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "seed", "logprobs")
_LISTS = ("stop", "stop_token_ids")


def engine_request(message: pb.GenerateRequest, token_ids: np.ndarray, description: Description, *, engine_id: str,
                   seconds: float) -> Request:
    """The engine's request of a message.

    Args:
      message: what the client sent.
      token_ids: its prompt.
      description: the model.
      engine_id: names the request in the engine.
      seconds: how long it may take from now on.

    Raises:
      UserError: a value is out of range.
    """
    sampling = sampling_params(message.sampling, description.defaults.sampling)
    if sampling.seed is None:
        sampling = dataclasses.replace(sampling, seed=fresh_seed())
    own_stops = () if message.ignore_eos else description.defaults.stop_token_ids
    return Request(
        id=engine_id,
        token_ids=token_ids,
        sampling=sampling,
        max_new_tokens=message.max_new_tokens if message.HasField("max_new_tokens") else MAX_NEW_TOKENS,
        stop_token_ids=frozenset((*sampling.stop_token_ids, *own_stops)),
        priority=message.priority,
        breakpoints=tuple(message.cache_breakpoints),
        salt=message.cache_salt,
        deadline=time.monotonic() + seconds,
    )


def sampling_params(message: pb.Sampling, defaults: SamplingParams) -> SamplingParams:
    """Settings of a request; what it leaves open is the defaults'.

    Raises:
      UserError: a value is out of range.
    """
    given = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    given |= {name: tuple(values) for name in _LISTS if (values := getattr(message, name))}
    return dataclasses.replace(defaults, **given)


def sampling_message(params: SamplingParams) -> pb.Sampling:
    """All settings of a request."""
    return pb.Sampling(**{name: getattr(params, name) for name in (*_SCALARS, *_LISTS)})


def logprobs_message(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    """Of one new token."""
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top_ids=[token for token, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def cache_stats_message(stats: EngineStats, config: EngineConfig) -> pb.CacheStats:
    """Where the engine's cache stands."""
    cache = stats.cache
    return pb.CacheStats(
        enabled=config.cache,
        running=stats.running,
        waiting=stats.waiting,
        slots=config.max_batch,
        pages=stats.pages,
        free_pages=stats.free_pages,
        cached_pages=stats.cached_pages,
        snapshots=stats.snapshots,
        used_bytes=stats.cache_bytes_used,
        budget_bytes=stats.cache_bytes,
        page_bytes=stats.page_bytes,
        snapshot_bytes=stats.snapshot_bytes,
        admitted=cache.admitted,
        prompt_tokens=cache.prompt_tokens,
        hit_tokens=cache.hit_tokens,
        almost_hit_tokens=cache.almost_hit_tokens,
        junctions=cache.junctions,
        published=cache.published,
        evicted=cache.evicted.total(),
    )
