"""Random operations against the naive oracle: 100,000 by default, K3JAX_CACHE_OPERATIONS of them if set."""

import os

from tests.serving.cache_machine import run_machine

OPERATIONS = int(os.environ.get("K3JAX_CACHE_OPERATIONS", 100_000))


def test_every_invariant_holds_after_every_operation():
    assert run_machine(OPERATIONS) >= OPERATIONS
