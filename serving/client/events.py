"""What a client gets to see; `serving/api/v1/decoder.proto` says more about each field."""

import dataclasses

from serving.api.v1 import decoder_pb2 as pb
from serving.client.request import Sampling


@dataclasses.dataclass(frozen=True)
class Accepted:
    """The request has left the queue.

    Attributes:
      request_id: its name, for `abort`.
      prompt_tokens: of the prompt.
      cached_tokens: of these, taken from the cache.
      seed: of the draws; None when nothing is drawn.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    seed: int | None


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one new token.

    Attributes:
      logprob: of the token.
      top: (id, log-probability) of the most likely tokens, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Delta:
    """More of the answer.

    Attributes:
      token_ids: new tokens.
      text: what is certain of their text; may lag behind them.
      logprobs: one for each token; empty unless asked for.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens; the cached ones are among those of the prompt."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds in the queue, from there to the first new token, and from there to the end."""

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclasses.dataclass(frozen=True)
class Done:
    """The end of an answer.

    Attributes:
      finish_reason: "stop" (stop token or string), "length" (as many tokens as asked for) or "abort".
      stop_reason: the stop token or string; None for another finish.
      usage: tokens.
      timings: seconds, as the server measured them.
    """

    finish_reason: str
    stop_reason: int | str | None
    usage: Usage
    timings: Timings


Event = Accepted | Delta | Done


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What the server serves."""

    checkpoint: str
    vocab_size: int
    context: int
    num_layers: int
    dtype: str
    has_tokenizer: bool
    stop_token_ids: tuple[int, ...]
    default_sampling: Sampling
    deterministic: bool
    match_unit: int
    version: str


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """Where the cache stands: what it holds now, then totals since the start."""

    enabled: bool
    running: int
    waiting: int
    slots: int
    pages: int
    free_pages: int
    cached_pages: int
    snapshots: int
    used_bytes: int
    budget_bytes: int
    page_bytes: int
    snapshot_bytes: int
    admitted: int
    prompt_tokens: int
    hit_tokens: int
    almost_hit_tokens: int
    junctions: int
    published: int
    evicted: int


def event_of(message: pb.GenerateEvent) -> Event:
    """The event in a message of a stream."""
    match message.WhichOneof("event"):
        case "delta":
            delta = message.delta
            return Delta(tuple(delta.token_ids), delta.text, tuple(map(_logprobs, delta.logprobs)))
        case "accepted":
            accepted = message.accepted
            return Accepted(
                accepted.request_id, accepted.prompt_tokens, accepted.cached_tokens,
                accepted.seed if accepted.HasField("seed") else None,
            )
        case _:
            done = message.done
            stop = done.WhichOneof("stop_reason")
            return Done(
                finish_reason=pb.FinishReason.Name(done.finish_reason).removeprefix("FINISH_REASON_").lower(),
                stop_reason=None if stop is None else getattr(done, stop),
                usage=Usage(done.usage.prompt_tokens, done.usage.cached_tokens, done.usage.completion_tokens),
                timings=Timings(done.timings.queue_s, done.timings.prefill_s, done.timings.decode_s),
            )


def model_info_of(message: pb.ModelInfo) -> ModelInfo:
    """From the protocol's message."""
    values = {field.name: getattr(message, field.name) for field in dataclasses.fields(ModelInfo)}
    return ModelInfo(**{
        **values, "stop_token_ids": tuple(message.stop_token_ids),
        "default_sampling": Sampling.of(message.default_sampling),
    })


def cache_stats_of(message: pb.CacheStats) -> CacheStats:
    """From the protocol's message."""
    return CacheStats(**{field.name: getattr(message, field.name) for field in dataclasses.fields(CacheStats)})


def _logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple(zip(message.top_ids, message.top_logprobs)))
