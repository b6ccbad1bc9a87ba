"""The calls of `k3jax.v1.Decoder`."""

import asyncio
import itertools
import uuid

import grpc
import numpy as np

import k3jax
from k3jax.errors import UserError
from k3jax.text_stream import TextStream
from k3jax.tokenizer import Tokenizer
from serving.api.backend import Backend
from serving.api.inbox import Inboxes
from serving.api.messages import cache_stats_message, engine_request, sampling_message
from serving.api.metrics import Metrics
from serving.api.record import Record
from serving.api.reply import Reply
from serving.api.status import Refusal, refusal
from serving.api.v1 import decoder_pb2 as pb
from serving.api.v1 import decoder_pb2_grpc
from serving.engine.engine import Engine

SERVICE = pb.DESCRIPTOR.services_by_name["Decoder"].full_name

_MAX_ID_LENGTH = 128
_LONG_TEXT = 4096
"""Characters from which on a text is tokenized beside the event loop."""
_MAX_UNREAD_TOKENS = 8192


class DecoderServicer(decoder_pb2_grpc.DecoderServicer):
    """Serves requests with what the backend has; exceptions become statuses in `StatusInterceptor`.

    Args:
      backend: model and engine.
      metrics: of the requests.
      max_seconds: most time of a request, for clients that set no deadline.
      stall_seconds: how long a client may leave its answer unread.
    """

    def __init__(self, backend: Backend, metrics: Metrics, *, max_seconds: float, stall_seconds: float):
        self._backend, self._metrics = backend, metrics
        self._max_seconds, self._stall_seconds = max_seconds, stall_seconds
        self._inboxes = Inboxes(_MAX_UNREAD_TOKENS)
        self._numbers = itertools.count()
        # The client's name of each request under way -> the engine's. They differ because the engine may still be busy
        # with a request whose client has gone and sends it again.
        self._engine_ids: dict[str, str] = {}

    @property
    def active(self) -> int:
        """Requests whose stream is open."""
        return len(self._engine_ids)

    async def Generate(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        request_id = message.request_id or uuid.uuid4().hex
        record = Record(self._metrics, request_id[:_MAX_ID_LENGTH])
        try:
            await self._answer(message, context, request_id, record)
        except asyncio.CancelledError:
            if context.time_remaining() == 0:  # gRPC ends a call that is late, if the engine was not faster
                late = Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed")
                record.refused(late)
                self._metrics.refused("Generate", late)
            raise
        except Exception as error:
            refused = refusal(error)
            record.refused(refused)
            raise refused from None
        finally:
            record.end()

    async def _answer(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext, request_id: str,
                      record: Record) -> None:
        engine = self._backend.require_engine()
        if len(request_id) > _MAX_ID_LENGTH:
            raise UserError(f"request_id has {len(request_id)} characters, expected at most {_MAX_ID_LENGTH}")
        description = self._backend.description
        token_ids = await self._prompt(message)
        remaining = context.time_remaining()
        request = engine_request(
            message, token_ids, description, engine_id=f"{request_id}#{next(self._numbers)}",
            seconds=self._max_seconds if remaining is None else min(remaining, self._max_seconds),
        )
        if request_id in self._engine_ids:
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, f"a request with the id {request_id!r} is under way")
        tokenizer = description.tokenizer
        reply = Reply(request, request_id, TextStream(tokenizer, request.sampling.stop) if tokenizer else None)
        inbox = self._inboxes.open(on_overflow=lambda: engine.abort(request.id))
        engine.submit(request, inbox.put)
        self._engine_ids[request_id] = request.id
        record.reply = reply
        try:
            while not reply.done:
                events = await inbox.take()
                record.received(events)
                for response in reply.push(events):
                    await self._write(context, response)
                if inbox.overflowed:
                    raise _unread()
                if reply.stop_string is not None:
                    engine.abort(request.id)
            final = self._final(reply, request.max_new_tokens)
            await self._write(context, final)
            record.answered(final.done)
        finally:
            del self._engine_ids[request_id]
            if not reply.done:
                engine.abort(request.id)

    async def _prompt(self, message: pb.GenerateRequest) -> np.ndarray:
        """[n] int32 token ids of the prompt."""
        match message.WhichOneof("prompt"):
            case "text":
                token_ids = await self._encode(message.text.text, message.text.markup)
            case "token_ids":
                token_ids = message.token_ids.ids
            case _:
                raise UserError("there is no prompt; give token_ids or text")
        return np.array(token_ids, np.int32)

    async def _encode(self, text: str, markup: bool) -> list[int]:
        encode = self._tokenizer().encode
        return encode(text, markup) if len(text) < _LONG_TEXT else await asyncio.to_thread(encode, text, markup)

    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._backend.description.tokenizer
        if tokenizer is None:
            raise UserError("this checkpoint has no tokenizer files (tiktoken.model); give token ids")
        return tokenizer

    async def _write(self, context: grpc.aio.ServicerContext, message: pb.GenerateEvent) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await context.write(message)
        except TimeoutError:
            raise _unread() from None
        except grpc.aio.InternalError:
            raise Refusal(grpc.StatusCode.CANCELLED, "the client went away") from None

    def _final(self, reply: Reply, max_new_tokens: int) -> pb.GenerateEvent:
        """The last message; of an answer that has no end, its status."""
        done = reply.done
        if reply.stop_string is None:
            if done.finish_reason == "error":
                raise Refusal(grpc.StatusCode.INTERNAL, done.message or "the engine failed")
            if done.finish_reason == "deadline":
                where = f"after {reply.delivered} of {max_new_tokens} tokens" if reply.accepted else "in the queue"
                raise Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, f"the deadline passed {where}")
            if done.finish_reason == "abort" and self._backend.draining:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, "the server shut down before the answer was complete")
        return reply.finish()

    async def Abort(self, message: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        engine_id = self._engine_ids.get(message.request_id)
        if engine_id is not None:
            self._engine().abort(engine_id)
        return pb.AbortResponse()

    async def Tokenize(self, message: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=await self._encode(message.text, message.markup))

    async def Detokenize(self, message: pb.DetokenizeRequest,
                         context: grpc.aio.ServicerContext) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text=self._tokenizer().decode(message.token_ids))

    async def GetModelInfo(self, message: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext) -> pb.ModelInfo:
        engine, description = self._engine(), self._backend.description
        stats = engine.stats()
        return pb.ModelInfo(
            checkpoint=self._backend.checkpoint,
            vocab_size=description.config.vocab_size,
            context=stats.context,
            num_layers=len(description.config.layer_types),
            dtype=self._backend.dtype,
            has_tokenizer=description.tokenizer is not None,
            stop_token_ids=description.defaults.stop_token_ids,
            default_sampling=sampling_message(description.defaults.sampling),
            deterministic=engine.config.deterministic,
            match_unit=stats.match_unit,
            version=k3jax.__version__,
        )

    async def GetCacheStats(self, message: pb.GetCacheStatsRequest,
                            context: grpc.aio.ServicerContext) -> pb.CacheStats:
        engine = self._engine()
        return cache_stats_message(engine.stats(), engine.config)

    async def ResetCache(self, message: pb.ResetCacheRequest,
                         context: grpc.aio.ServicerContext) -> pb.ResetCacheResponse:
        await asyncio.wrap_future(self._engine().reset_cache())
        return pb.ResetCacheResponse()

    def _engine(self) -> Engine:
        """The engine, whether or not it takes requests now."""
        return self._backend.engine or self._backend.require_engine()


def _unread() -> Refusal:
    return Refusal(grpc.StatusCode.ABORTED, "the client did not read its answer; it must read as fast as tokens come")
