"""What goes wrong, as gRPC says it: one line, never a traceback."""

import logging
import math
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from k3jax.errors import UserError
from serving.engine.request import NotServing, QueueFull

_RETRY_AFTER_MS = 1000

log = logging.getLogger(__name__)


class Refusal(Exception):
    """Ends a call with a status.

    Attributes:
      code: the status.
      message: one line.
      retry_after_ms: when another try makes sense; None when that is not known.
    """

    def __init__(self, code: grpc.StatusCode, message: str, retry_after_ms: int | None = None):
        super().__init__(message)
        self.code, self.message, self.retry_after_ms = code, " ".join(message.split()), retry_after_ms


def refusal(error: Exception) -> Refusal:
    """The status of an exception; one that nobody foresaw is logged, and the client learns nothing of it."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, UserError):
        return Refusal(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    if isinstance(error, QueueFull):
        return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), _RETRY_AFTER_MS)
    if isinstance(error, NotServing):
        return Refusal(grpc.StatusCode.UNAVAILABLE, str(error))
    log.error("a call failed", exc_info=error)
    return Refusal(grpc.StatusCode.INTERNAL, "internal error; the server's log says more")


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Gives every call of our service the status of its exception, and malformed messages INVALID_ARGUMENT.

    Args:
      service: full name of the service.
      on_refusal: called with the name of the method and the status, for the metrics.
    """

    def __init__(self, service: str, on_refusal: Callable[[str, Refusal], None] = lambda *_: None):
        self._prefix, self._on_refusal = f"/{service}/", on_refusal

    async def intercept_service(self, continuation, handler_call_details):
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        make, behavior = (
            (grpc.unary_stream_rpc_method_handler, handler.unary_stream) if handler.response_streaming
            else (grpc.unary_unary_rpc_method_handler, handler.unary_unary)
        )
        method = handler_call_details.method.removeprefix(self._prefix)
        return make(self._guard(method, behavior), _lenient(handler.request_deserializer), handler.response_serializer)

    def _guard(self, method, behavior):
        async def guarded(request, context):
            try:
                if request is None:
                    raise UserError("the message is not a valid protobuf of its type; see decoder.proto")
                return await behavior(request, context)
            except Exception as error:
                refused = refusal(error)
                self._on_refusal(method, refused)
                metadata = ()
                if refused.retry_after_ms is not None:
                    metadata = (("grpc-retry-pushback-ms", str(math.ceil(refused.retry_after_ms))),)
                await context.abort(refused.code, refused.message, metadata)

        return guarded


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """None for bytes that are not a message: gRPC would answer them as if the server had failed."""

    def parse(data: bytes):
        try:
            return deserialize(data)
        except DecodeError:
            return None

    return parse
