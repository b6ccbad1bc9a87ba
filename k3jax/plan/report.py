"""A plan as text for people, and as JSON."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from k3jax.memory import human_bytes
from k3jax.plan.hardware import GIB, USABLE
from k3jax.plan.plan import Plan, StepPlan
from k3jax.plan.workload import mesh_name

BAR = 40
"""Width of a bar as long as a device's memory."""


def to_text(plan: Plan) -> str:
    """Some lines for each step."""
    topology, workload = plan.topology, plan.workload
    head = (
        f"{plan.model} on {topology.name}: {topology.num_devices:,} devices of {topology.device.memory_gib:.4g} GiB, "
        f"of which {USABLE:.0%} may be used\n{workload.sequences:,} sequences of {workload.context:,} tokens\n"
    )
    return "\n".join([head, *("\n".join(_step_lines(plan, step)) + "\n" for step in plan.steps)])


def _step_lines(plan: Plan, step: StepPlan) -> Iterator[str]:
    counted, table = step.estimate, _Table(plan.topology.memory_bytes, step.limit)
    yield (
        f"{step.kind} step of {step.tokens:,} tokens: mesh {mesh_name(step.mesh)}, {step.strategy} table: "
        f"{'FITS' if step.fits else 'DOES NOT FIT'}"
    )
    yield table.head("estimate")
    parts = {**counted.weights, **counted.state, "inputs": counted.inputs, "outputs": counted.outputs,
             "temporaries": counted.temporaries}
    for name, count in parts.items():
        yield table.row(name, count)
    yield table.row("sum", counted.peak)
    if step.compiled is not None:
        yield from _compiled_lines(step, table)
    yield table.limit_row(1 if step.compiled is None else 2)
    if step.collectives is not None:
        yield "  collectives, counted in the same step for CPUs: " + _collectives(step.collectives)
    if step.experts is not None:
        ways = {"shared with all": step.experts.shared, "sent to their experts": step.experts.exchanged}
        listed = ", ".join(f"{human_bytes(count)} if {way}" for way, count in ways.items())
        yield f"  rows in an MoE layer are {list(ways)[step.experts.exchanges]}: a device receives {listed}"
    yield from _floor_lines(step)
    if step.remedies:
        yield "  it would fit with " + ", or ".join(step.remedies)
    elif not step.fits:
        yield "  nothing that was tried would make it fit: fewer sequences, a shorter context, more chips"


def _compiled_lines(step: StepPlan, table: "_Table") -> Iterator[str]:
    compiled, counted = step.compiled, step.estimate
    took = f"in {compiled.seconds:.0f} s with {compiled.host_bytes / GIB:.1f} GiB of this machine's memory"
    if compiled.refusal:
        yield f"  the compiler refused {took}: {compiled.refusal}"
        return
    yield f"  compiled {took}"
    yield table.head("estimate", "compiler")
    yield table.row("arguments", counted.arguments, compiled.arguments)
    yield table.row("outputs not in arguments", counted.outputs, compiled.outputs - compiled.aliased)
    yield table.row("temporaries", counted.temporaries, compiled.temporaries)
    yield table.row("code", 0, compiled.code)
    yield table.row("peak", counted.peak, compiled.peak)


@dataclasses.dataclass(frozen=True)
class _Table:
    """Rows of bytes and a bar that is `BAR` long for a device's memory, with a mark at the limit."""

    memory: int
    limit: int

    @property
    def unit(self) -> tuple[str, int]:
        return ("GiB", GIB) if self.limit >= GIB else ("MiB", GIB // 1024)

    def head(self, *columns: str) -> str:
        return f"  {f'{self.unit[0]} on a device':34}" + "".join(f"{name:>10}" for name in columns)

    def row(self, name: str, *counts: int) -> str:
        numbers = "".join(f"{count / self.unit[1]:10.2f}" for count in counts)
        eighths = round(8 * BAR * min(counts[-1] / self.memory, 1))
        bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
        if name not in ("sum", "peak"):
            return f"  {name:34}{numbers}  {bar}".rstrip()
        mark = round(BAR * self.limit / self.memory)
        return f"  {name:34}{numbers}  " + (bar.ljust(mark) + "|" if len(bar) <= mark else f"{bar} over the limit")

    def limit_row(self, columns: int = 1) -> str:
        return f"  {'limit':34}{self.limit / self.unit[1]:{10 * columns}.2f}"


def _collectives(collectives: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{counted.count} {kind} {human_bytes(counted.bytes)}" for kind, counted in collectives.items()
    ) or "none"


def _floor_lines(step: StepPlan) -> Iterator[str]:
    known = {name: seconds for name, seconds in dataclasses.asdict(step.floors).items() if seconds is not None}
    if known:
        listed = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in known.items())
        yield f"  floors: {listed}; at most {step.tokens / step.floors.step:,.0f} tokens/s"


def to_json(plan: Plan) -> dict[str, Any]:
    """Everything, in bytes and seconds; `fits` is a boolean, of the plan and of each step."""
    return {
        "model": plan.model,
        "topology": plan.topology.name,
        "devices": plan.topology.num_devices,
        "memory_bytes": plan.topology.memory_bytes,
        "limit_bytes": plan.topology.usable_bytes,
        **dataclasses.asdict(plan.workload),
        "fits": plan.fits,
        "steps": [_step_json(step) for step in plan.steps],
    }


def _step_json(step: StepPlan) -> dict[str, Any]:
    values = dataclasses.asdict(step)
    values["estimate"]["peak"] = step.estimate.peak
    if step.compiled is not None:
        del values["compiled"]["collectives"]
        values["compiled"]["peak"] = None if step.compiled.refusal else step.compiled.peak
    return {**values, "peak": step.peak, "fits": step.fits}
