"""Compiles full models for the TPU slices that they are meant for, and prints what that needs, as a Markdown table.

    python benchmarks/prove_fit.py            all of it, for half an hour
    python benchmarks/prove_fit.py v6e        the rows whose topology begins so

Nothing is run and no TPU is needed. Exit code 1 if a step does not fit, or takes the compiler longer than allowed.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

from k3jax.plan.hardware import GIB, Topology
from k3jax.plan.plan import Plan, StepPlan, make_plan
from k3jax.plan.workload import Workload, mesh_name, parse_mesh
from k3jax.presets import preset
from k3jax.progress import waiting

# Model, topology, steps that share weights and state, mesh (None: the planner's).
ROWS = (
    ("kimi-k3", "tpu7x:4x4x4", ("decode", "prefill"), None),
    ("kimi-k3", "tpu7x:4x4x4", ("decode",), "expert=4,seq=8,tensor=4"),
    ("kimi-k3", "v5p:4x8x8", ("decode",), None),
    ("kimi-k3", "v6e:16x16", ("decode",), None),
    ("kimi-k3", "tpu7x:2x2x4", ("decode",), None),
    ("kimi-linear-48b", "v6e:2x4", ("decode",), None),
)
COLUMNS = (
    "step", "topology (devices)", "mesh", "weights", "arguments, estimate", "arguments", "temporaries", "peak", "limit",
    "compile s", "host GiB", "collectives, in the same program for CPUs", "holds",
)
DECODE_SECONDS, HOST_GIB = 180, 16


def holds(step: StepPlan) -> bool:
    """Whether it fits, and the compiler was quick and small enough."""
    quick = step.kind != "decode" or step.compiled.seconds <= DECODE_SECONDS
    return step.fits and quick and step.compiled.host_bytes <= HOST_GIB * GIB


def print_row(plan: Plan, step: StepPlan) -> None:
    compiled = step.compiled
    moved = {kind: f"{each.count} {kind} {each.bytes / 1e6:.0f} MB" for kind, each in step.collectives.items()}
    cells = (
        f"{plan.model} {step.kind}, {step.tokens:,} tokens", f"{plan.topology.name} ({plan.topology.num_devices})",
        mesh_name(step.mesh), f"{sum(step.estimate.weights.values()) / GIB:.2f}",
        f"{step.estimate.arguments / GIB:.2f}", f"{compiled.arguments / GIB:.2f}", f"{compiled.temporaries / GIB:.2f}",
        f"**{compiled.peak / GIB:.2f}**" if compiled.refusal is None else compiled.refusal, f"{step.limit / GIB:.2f}",
        f"{compiled.seconds:.0f}", f"{compiled.host_bytes / GIB:.1f}", ", ".join(moved.values()),
        "yes" if holds(step) else "NO",
    )
    print("| " + " | ".join(cells) + " |", flush=True)


def main(prefix: str) -> int:
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    good = True
    for model, topology, kinds, mesh in ROWS:
        if not topology.startswith(prefix):
            continue
        plan = make_plan(
            model, preset(model), Topology.parse(topology), Workload(), kinds=kinds, mesh=mesh and parse_mesh(mesh),
            compiling=True, report=lambda label: waiting(True, label),
        )
        for step in plan.steps:
            print_row(plan, step)
            good &= holds(step)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
