"""The client for asyncio."""

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.api.v1 import decoder_pb2 as pb
from serving.api.v1 import decoder_pb2_grpc
from serving.client.errors import RequestError
from serving.client.events import CacheStats, Event, ModelInfo, cache_stats_of, event_of, model_info_of
from serving.client.request import Options, channel_options, check_address, generate_request


class AsyncClient:
    """`Client` for asyncio: the same calls. Make it inside a running event loop."""

    def __init__(self, address: str):
        check_address(address)
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=channel_options(address))
        self._stub = decoder_pb2_grpc.DecoderStub(self._channel)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    async def close(self) -> None:
        """See `Client.close`."""
        await self._channel.close()

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """See `Client.wait_until_ready`."""
        with self._errors():
            health = health_pb2_grpc.HealthStub(self._channel)
            call = health.Watch(health_pb2.HealthCheckRequest(), timeout=timeout, wait_for_ready=True)
            async for response in call:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    call.cancel()
                    return

    async def generate(self, prompt: str | Sequence[int], *, timeout: float | None = None,
                       **options: Unpack[Options]) -> AsyncIterator[Event]:
        """See `Client.generate`; cancelling the task that iterates cancels the request."""
        call = self._stub.Generate(generate_request(prompt, **options), timeout=timeout)
        try:
            with self._errors():
                async for message in call:
                    yield event_of(message)
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> None:
        """See `Client.abort`."""
        await self._call("Abort", pb.AbortRequest(request_id=request_id))

    async def tokenize(self, text: str, markup: bool = False) -> tuple[int, ...]:
        """See `Client.tokenize`."""
        return tuple((await self._call("Tokenize", pb.TokenizeRequest(text=text, markup=markup))).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """See `Client.detokenize`."""
        return (await self._call("Detokenize", pb.DetokenizeRequest(token_ids=token_ids))).text

    async def model_info(self) -> ModelInfo:
        """See `Client.model_info`."""
        return model_info_of(await self._call("GetModelInfo", pb.GetModelInfoRequest()))

    async def cache_stats(self) -> CacheStats:
        """See `Client.cache_stats`."""
        return cache_stats_of(await self._call("GetCacheStats", pb.GetCacheStatsRequest()))

    async def reset_cache(self) -> None:
        """See `Client.reset_cache`."""
        await self._call("ResetCache", pb.ResetCacheRequest())

    async def _call(self, method: str, message):
        with self._errors():
            return await getattr(self._stub, method)(message)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise RequestError.of(error, self.address) from None
