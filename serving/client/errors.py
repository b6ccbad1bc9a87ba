"""What can go wrong between a client and a server."""

import grpc


class RequestError(Exception):
    """The server refused a request or did not finish it, or cannot be reached.

    Attributes:
      code: gRPC's status; UNAVAILABLE also when there is no server.
      message: one line.
      retry_after: seconds after which another try makes sense; None when the server does not say.
    """

    def __init__(self, code: grpc.StatusCode, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.code, self.message, self.retry_after = code, message, retry_after

    @classmethod
    def of(cls, error: grpc.RpcError, address: str) -> "RequestError":
        """From gRPC's own exception."""
        message = " ".join((error.details() or error.code().name).split())
        if error.code() is grpc.StatusCode.UNAVAILABLE and ("failed to connect" in message or "resol" in message):
            message = f"cannot reach a server at {address}: {message.rpartition(': ')[2]}"
        metadata = dict(error.trailing_metadata() or ())
        pushback = metadata.get("grpc-retry-pushback-ms")
        return cls(error.code(), message, None if pushback is None else int(pushback) / 1000)
