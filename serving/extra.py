"""The packages that the service needs beside those of the library: the extra `serve` of pyproject.toml."""

import importlib
from collections.abc import Mapping

from k3jax.cli.command import run
from k3jax.errors import UserError

CLIENT = {"grpc": "grpcio", "google.protobuf": "protobuf", "grpc_health": "grpcio-health-checking"}
"""Module -> package."""
SERVER = {**CLIENT, "grpc_reflection": "grpcio-reflection", "prometheus_client": "prometheus-client"}

_INSTALL = 'in the folder of k3jax: pip install ".[serve]"'


def run_with(packages: Mapping[str, str], command: str) -> int:
    """Runs `main` of a module that imports them; returns its exit code."""

    def checked() -> int:
        _require(packages)
        return importlib.import_module(command).main()

    return run(checked, interrupted="interrupted")


def _require(packages: Mapping[str, str]) -> None:
    """Raises `UserError` when one of them is missing, or too old for the stubs in `serving/api/v1`."""
    missing = []
    for module, package in packages.items():
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            missing.append(package)
    if missing:
        raise UserError(f"the service needs {', '.join(missing)}; install what is missing {_INSTALL}")
    try:
        importlib.import_module("serving.api.v1.decoder_pb2_grpc")
    except Exception as error:  # each version of theirs has its own way to say that it is too old
        raise UserError(f"gRPC or protobuf is too old ({error}); install newer ones {_INSTALL}") from None
