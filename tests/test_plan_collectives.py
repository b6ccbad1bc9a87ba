"""What devices send each other in chosen programs does not grow.

`python -m tests.test_plan_collectives` writes the numbers of now to the file that the tests compare with.
"""

import json
import pathlib

import pytest

from k3jax.plan.compile import Request, compile_apart
from k3jax.plan.workload import Workload
from k3jax.presets import KIMI_K3, KIMI_LINEAR_48B

FILE = pathlib.Path(__file__).parent / "data" / "collectives.json"
MESH = {"data": 1, "expert": 2, "seq": 2, "tensor": 2}
LOAD = Workload(sequences=16, context=4096, chunk=1024)
# Layers 0 to 4 at full width: a dense MLP, four MoE, an MLA layer.
PROGRAMS = {
    "k3 decode": Request("decode", "decode", KIMI_K3.first_layers(5), MESH, LOAD, "cpu:8"),
    "k3 prefill": Request("prefill", "decode", KIMI_K3.first_layers(5), MESH, LOAD, "cpu:8"),
    "k3 prefill, positions split": Request("prefill", "prefill", KIMI_K3.first_layers(5), MESH, LOAD, "cpu:8"),
    "kimi-linear decode": Request("decode", "decode", KIMI_LINEAR_48B.first_layers(5), MESH, LOAD, "cpu:8"),
}
QUICK = "k3 decode"


def counted(name: str) -> dict[str, dict[str, int]]:
    """Count and bytes of each kind, now."""
    collectives = compile_apart(PROGRAMS[name]).collectives
    return {kind: {"count": each.count, "bytes": each.bytes} for kind, each in collectives.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in PROGRAMS]
)
def test_nothing_grows(name):
    kept, now = json.loads(FILE.read_text())[name], counted(name)
    grown = {
        f"{kind} {what}: {kept.get(kind, {}).get(what, 0)} -> {number}"
        for kind, numbers in now.items() for what, number in numbers.items()
        if number > kept.get(kind, {}).get(what, 0)
    }
    assert not grown


def test_no_program_is_forgotten():
    assert set(json.loads(FILE.read_text())) == set(PROGRAMS)


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: counted(name) for name in PROGRAMS}, indent=1) + "\n")
