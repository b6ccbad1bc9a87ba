"""What a client asks for."""

import dataclasses
from collections.abc import Sequence
from typing import TypedDict, Unpack

from k3jax.errors import UserError
from serving.api.limits import MAX_MESSAGE_BYTES
from serving.api.v1 import decoder_pb2 as pb


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """`k3jax.SamplingParams` that may leave open what the checkpoint recommends: None is open, a zero is a value."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    @classmethod
    def of(cls, message: pb.Sampling) -> "Sampling":
        """From the protocol's message."""
        values = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
        return cls(**values, stop=tuple(message.stop), stop_token_ids=tuple(message.stop_token_ids))


_SCALARS = tuple(field.name for field in dataclasses.fields(Sampling) if field.default is None)


class Options(TypedDict, total=False):
    """Of a request.

    Attributes:
      markup: names of special tokens in the prompt's text stand for these tokens.
      sampling: how tokens are chosen and where to stop.
      max_new_tokens: most tokens to generate; the server's default is 128.
      ignore_eos: go on after the model's own stop tokens.
      priority: higher goes first.
      cache_breakpoints: positions in the prompt, in tokens, up to which other prompts will be the same.
      cache_salt: share cached prefixes with requests of the same salt only.
      request_id: a name for `abort`; the server makes one otherwise.
    """

    markup: bool
    sampling: Sampling
    max_new_tokens: int
    ignore_eos: bool
    priority: int
    cache_breakpoints: Sequence[int]
    cache_salt: str
    request_id: str


def generate_request(prompt: str | Sequence[int], **options: Unpack[Options]) -> pb.GenerateRequest:
    """The message of a request.

    Raises:
      UserError: a value has no place in the message: of another type, or out of its integers' range.
    """
    markup, sampling = options.pop("markup", False), options.pop("sampling", Sampling())
    try:
        if isinstance(prompt, str):
            prompt = {"text": pb.Text(text=prompt, markup=markup)}
        else:
            prompt = {"token_ids": pb.TokenIds(ids=prompt)}
        return pb.GenerateRequest(**prompt, sampling=pb.Sampling(**dataclasses.asdict(sampling)), **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"the request cannot be sent: {error}") from None


def check_address(address: str) -> None:
    """Refuses what gRPC would look up as something else.

    Raises:
      UserError: not HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or bare_ipv6 or "/" in host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(f"address is {address!r}, expected HOST:PORT, e.g. 127.0.0.1:50051 or [::1]:50051")


def channel_options(address: str) -> list[tuple[str, int]]:
    """Of a gRPC channel to this address."""
    host = address.rpartition(":")[0]
    loopback = host in ("localhost", "[::1]") or host.startswith("127.")
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # A proxy for the web leads nowhere from here.
        ("grpc.enable_http_proxy", 0 if loopback else 1),
    ]
