"""The client for ordinary code."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.api.v1 import decoder_pb2 as pb
from serving.api.v1 import decoder_pb2_grpc
from serving.client.errors import RequestError
from serving.client.events import CacheStats, Event, ModelInfo, cache_stats_of, event_of, model_info_of
from serving.client.request import Options, channel_options, check_address, generate_request


class Client:
    """A connection to a server, for any number of threads; every call raises `RequestError` when it fails.

    Args:
      address: HOST:PORT.

    Raises:
      UserError: that is no address.
    """

    def __init__(self, address: str):
        check_address(address)
        self.address = address
        self._channel = grpc.insecure_channel(address, options=channel_options(address))
        self._stub = decoder_pb2_grpc.DecoderStub(self._channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and all calls."""
        self._channel.close()

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Waits until the server takes requests, at most `timeout` seconds."""
        with self._errors():
            health = health_pb2_grpc.HealthStub(self._channel)
            call = health.Watch(health_pb2.HealthCheckRequest(), timeout=timeout, wait_for_ready=True)
            for response in call:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    call.cancel()
                    return

    def generate(self, prompt: str | Sequence[int], *, timeout: float | None = None,
                 **options: Unpack[Options]) -> Iterator[Event]:
        """Continues a prompt, text or token ids: one Accepted, any number of Delta, one Done.

        Leaving the loop early, or closing the iterator, cancels the request. `timeout` is in seconds.

        Raises:
          UserError: the request cannot be put into a message.
        """
        return self._events(generate_request(prompt, **options), timeout)

    def _events(self, request: pb.GenerateRequest, timeout: float | None) -> Iterator[Event]:
        call = self._stub.Generate(request, timeout=timeout)
        try:
            with self._errors():
                for message in call:
                    yield event_of(message)
        finally:
            call.cancel()

    def abort(self, request_id: str) -> None:
        """Ends a request: its stream finishes with what there is."""
        self._call("Abort", pb.AbortRequest(request_id=request_id))

    def tokenize(self, text: str, markup: bool = False) -> tuple[int, ...]:
        """Token ids of a text."""
        return tuple(self._call("Tokenize", pb.TokenizeRequest(text=text, markup=markup)).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones by name."""
        return self._call("Detokenize", pb.DetokenizeRequest(token_ids=token_ids)).text

    def model_info(self) -> ModelInfo:
        """What is served."""
        return model_info_of(self._call("GetModelInfo", pb.GetModelInfoRequest()))

    def cache_stats(self) -> CacheStats:
        """Where the cache stands."""
        return cache_stats_of(self._call("GetCacheStats", pb.GetCacheStatsRequest()))

    def reset_cache(self) -> None:
        """Drops every cached prefix."""
        self._call("ResetCache", pb.ResetCacheRequest())

    def _call(self, method: str, message):
        with self._errors():
            return getattr(self._stub, method)(message)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise RequestError.of(error, self.address) from None
