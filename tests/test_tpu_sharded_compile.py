"""The real TPU compiler takes full models on meshes that are not there, and needs no more memory than a device has."""

import pytest

from k3jax.plan.hardware import GIB, Topology
from k3jax.plan.plan import make_plan
from k3jax.plan.workload import Workload
from k3jax.presets import PRESETS

pytest.importorskip("libtpu", reason="libtpu is not installed: the TPU compiler cannot be asked")


def planned(preset: str, topology: str):
    """The decode step of 64 sequences of 128k tokens, estimated and compiled."""
    plan = make_plan(preset, PRESETS[preset], Topology.parse(topology), Workload(), kinds=("decode",), compiling=True)
    return plan.steps[0]


def check(step, temporaries_gib: float):
    """It fits, arguments are as counted, and what the compiler needs beside them has not grown."""
    assert step.compiled.refusal is None and step.fits
    assert step.compiled.arguments == pytest.approx(step.estimate.arguments, rel=0.05)
    # All pools come out where they went in.
    assert step.compiled.aliased >= 0.99 * sum(step.estimate.state.values())
    assert step.compiled.temporaries < temporaries_gib * GIB
    assert step.collectives["all-reduce"].count > 0


def test_decoding_with_all_of_kimi_k3_fits_64_chips():
    check(planned("kimi-k3", "tpu7x:4x4x4"), 8)


@pytest.mark.slow
def test_decoding_with_all_of_kimi_linear_fits_8_chips():
    check(planned("kimi-linear-48b", "v6e:2x4"), 0.5)
