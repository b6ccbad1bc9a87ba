"""The policies there are: ours, and the peers' where the checkout of k3jax is at hand."""

import importlib

from serving.simulator.ours import OURS
from serving.simulator.replay import Policy

PEERS = "benchmarks.peers"
"""Holds `POLICIES`. Nothing here imports it: an installed k3jax does not have it."""


def policies() -> dict[str, Policy]:
    """By name, ours first."""
    try:
        peers = importlib.import_module(PEERS).POLICIES
    except ModuleNotFoundError as error:
        if error.name not in (PEERS, PEERS.split(".")[0]):
            raise
        peers = ()
    return {policy.name: policy for policy in (OURS, *peers)}
