"""Settings of the server: each field is a flag of the command."""

import argparse
import dataclasses
import types
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

from k3jax.cli.command import number
from k3jax.errors import UserError
from serving.engine.config import EngineConfig


def _flag(default: Any, metavar: str, text: str, choices: Sequence[str] | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"metavar": metavar, "help": text, "choices": choices})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the server serves, where, and with what means; see the fields' texts.

    Raises:
      UserError: a value is outside its range.
    """

    checkpoint: str = _flag(
        "demo", "NAME", "a checkpoint directory (Hugging Face or converted), demo, or random:PRESET[:layers]"
    )
    dtype: str = _flag("bfloat16", "TYPE", "of activations, float32 or bfloat16", ("float32", "bfloat16"))
    host: str = _flag("127.0.0.1", "ADDRESS", "where to listen; 0.0.0.0 lets other machines in, without any password")
    port: int = _flag(50051, "N", "0 takes a free one")
    metrics_port: int | None = _flag(None, "N", "serve Prometheus metrics here, under /metrics; 0 takes a free one")
    grace: float = _flag(30.0, "SECONDS", "how long requests may go on after SIGTERM or Ctrl-C")
    max_seconds: float = _flag(3600.0, "SECONDS", "most time of a request, whatever deadline its client sets")
    stall_seconds: float = _flag(30.0, "SECONDS", "end a request whose client does not read for this long")

    max_batch: int = _flag(EngineConfig.max_batch, "N", "most requests that run at once")
    max_waiting: int = _flag(EngineConfig.max_waiting, "N", "most requests that wait for their turn")
    prefill_tokens: int = _flag(EngineConfig.prefill_tokens, "N", "most prompt tokens in one step, a multiple of 128")
    context: int | None = _flag(EngineConfig.context, "N", "most tokens of a request (default: the model's)")
    num_pages: int | None = _flag(EngineConfig.num_pages, "N", "MLA pages of 128 tokens (default: what memory holds)")
    cache: bool = _flag(EngineConfig.cache, "", "reuse what prompts share")
    cache_bytes: int | None = _flag(
        EngineConfig.cache_bytes, "BYTES", "memory for snapshots and idle pages (default: a share of what is free)"
    )
    deterministic: bool = _flag(
        EngineConfig.deterministic, "",
        "give the same answer, bit for bit, with the cache and without, alone and in any batch; slower",
    )
    num_logprobs: int = _flag(EngineConfig.num_logprobs, "N", "most likely tokens that a request may ask for")

    def __post_init__(self):
        self._check("host", self.host != "", "an address such as 127.0.0.1")
        self._check("port", 0 <= self.port < 65536, "0 to 65535")
        self._check("metrics_port", self.metrics_port is None or 0 <= self.metrics_port < 65536, "0 to 65535")
        self._check("grace", 0 <= self.grace < float("inf"), "seconds, 0 or more")
        self._check("max_seconds", 0 < self.max_seconds < float("inf"), "seconds above 0")
        self._check("stall_seconds", 0 < self.stall_seconds < float("inf"), "seconds above 0")
        self.engine()

    def engine(self) -> EngineConfig:
        """The engine's part of it."""
        return EngineConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(EngineConfig)})

    def _check(self, field: str, holds: bool, expected: str) -> None:
        if not holds:
            raise UserError(f"{field} is {getattr(self, field)!r}, expected {expected}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of `ServerConfig`; `--no-x` turns a switch off that is on by default."""
    types_of = get_type_hints(ServerConfig)
    for field in dataclasses.fields(ServerConfig):
        name, text = "--" + field.name.replace("_", "-"), field.metadata["help"]
        if types_of[field.name] is bool:
            parser.add_argument(name, default=field.default, action=argparse.BooleanOptionalAction, help=text)
            continue
        if field.default is not None:
            text += f" (default: {field.default})"
        parser.add_argument(
            name, default=field.default, type=_READERS[_plain(types_of[field.name])], choices=field.metadata["choices"],
            metavar=field.metadata["metavar"], help=text,
        )


def from_arguments(args: argparse.Namespace) -> ServerConfig:
    """The settings of a command line."""
    return ServerConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(ServerConfig)})


def _plain(hint: Any) -> type:
    """`int` of `int | None`."""
    if isinstance(hint, types.UnionType):
        return next(part for part in get_args(hint) if part is not type(None))
    return hint


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


_READERS = {str: str, int: _whole, float: number}
