"""The model on meshes of 8 CPU devices, which a process must ask for before it imports JAX: children run the checks."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.checkpoints import TINY

ROOT = pathlib.Path(__file__).parents[1]
# Programs that run once: compiling them well would take longer than running them.
FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)

# With the golden ones eight meshes and more of each family. The tiny K3 has two groups of MXFP4 columns to split.
K3_MESHES = (
    "decode:8x1x1x1", "decode:1x8x1x1", "decode:1x4x1x2", "decode:2x2x1x2", "decode:1x2x4x1", "decode:1x1x4x1",
    "prefill:1x1x8x1", "prefill:2x1x4x1", "train:2x2x1x2",
)
KIMI_LINEAR_MESHES = (
    "decode:1x8x1x1", "decode:2x2x1x2", "decode:1x2x1x4", "decode:1x1x4x1", "prefill:1x1x8x1", "prefill:2x1x4x1",
)


def run(script: str, *arguments: str) -> str:
    environment = os.environ | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / script, *arguments], env=environment, capture_output=True, text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(*cases: str) -> None:
    assert run("sharded_model.py", *cases).count(" ok, ") == len(cases)


def test_three_meshes():
    check("k3-tiny/5:decode:1x2x2x2", "k3-tiny/5:prefill:1x1x4x2", "kimi-linear-tiny/4:decode:2x1x2x2")


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_golden_models(name):
    check(f"{name}:decode:1x2x2x2", f"{name}:prefill:1x1x4x2")


@pytest.mark.slow
def test_meshes_of_k3():
    check(*(f"k3-tiny/5:{mesh}" for mesh in K3_MESHES))


@pytest.mark.slow
def test_meshes_of_kimi_linear():
    check(*(f"kimi-linear-tiny/5:{mesh}" for mesh in KIMI_LINEAR_MESHES))


def test_expert_parallelism():
    assert run("sharded_experts.py").endswith("ok\n")


@pytest.mark.slow
def test_generation():
    assert run("sharded_generation.py") == "ok\n"
