"""A plan: the steps of a model on a topology, counted, compiled if wanted, and judged."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.plan.collectives import Collectives
from k3jax.plan.compile import Compiled, Request, compile_apart
from k3jax.plan.estimate import Estimate, Floors, estimate, floors
from k3jax.plan.experts import ExpertTraffic, expert_traffic
from k3jax.plan.hardware import GIB, Topology
from k3jax.plan.search import Candidate, Question, candidates, remedies, sequences_within
from k3jax.plan.workload import Kind, Workload, mesh_name


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step.

    Attributes:
      kind: "decode" or "prefill".
      mesh: sizes of the axes.
      strategy: the table, by name.
      blocks, sequences, tokens: what the mesh makes of the workload, see `Program`.
      estimate: from shapes.
      compiled: what the compiler says; None if it was not asked.
      collectives: by kind, counted in the same step for as many CPUs; None if that was not compiled. CPUs compute in
        float32 some of what is bfloat16 elsewhere, so that bytes are at most these.
      experts: what an MoE layer moves; None if nothing.
      floors: of the time it takes.
      limit: bytes of a device that may be used.
      remedies: what would make it fit.
    """

    kind: Kind
    mesh: Mapping[str, int]
    strategy: str
    blocks: int
    sequences: int
    tokens: int
    estimate: Estimate
    compiled: Compiled | None
    collectives: Mapping[str, Collectives] | None
    experts: ExpertTraffic | None
    floors: Floors
    limit: int
    remedies: Sequence[str] = ()

    @property
    def peak(self) -> int | None:
        """Bytes of a device: the compiler's number, if there is one; None if it refused for want of memory."""
        if self.compiled is None:
            return self.estimate.peak
        return None if self.compiled.refusal else self.compiled.peak

    @property
    def fits(self) -> bool:
        return self.peak is not None and self.peak <= self.limit


@dataclasses.dataclass(frozen=True)
class Plan:
    """All steps.

    Attributes:
      model: its name.
      topology: the devices.
      workload: as asked for, or as many sequences as the budget allows.
      steps: that were planned.
    """

    model: str
    topology: Topology
    workload: Workload
    steps: Sequence[StepPlan]

    @property
    def fits(self) -> bool:
        """Whether every step does."""
        return all(step.fits for step in self.steps)


def make_plan(model: str, config: K3Config, topology: Topology, workload: Workload, *, kinds: Sequence[Kind],
              mesh: Mapping[str, int] | None = None, cache_gib: float | None = None, compiling: bool = False,
              report: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext) -> Plan:
    """Plans.

    Args:
      model: its name, for the report.
      config: the architecture.
      topology: the devices.
      workload: sequences, context and chunk.
      kinds: the steps, which share weights and state; the first one decides how these lie.
      mesh: sizes of its axes; None searches.
      cache_gib: state and cache of a device; replaces the workload's sequences by as many as have room there.
      compiling: ask the compiler too.
      report: a context manager around what takes long, given a label.

    Raises:
      UserError: the mesh does not divide the model, the budget has no room for a sequence, or see `compile_apart`.
    """
    workload.check(config)
    if cache_gib is not None:
        workload = _filled(Question(kinds[0], config, topology, workload), mesh, cache_gib)
    questions = [Question(kind, config, topology, workload) for kind in kinds]
    # The first step's choice is everybody's: the weights lie on the devices once.
    best = candidates(questions[0], mesh)[0]
    steps = [_plan_step(question, best, mesh is not None, compiling, report) for question in questions]
    return Plan(model, topology, workload, steps)


def _filled(question: Question, mesh: Mapping[str, int] | None, cache_gib: float) -> Workload:
    """The workload with as many sequences as the budget has room for."""
    if cache_gib * GIB > question.topology.usable_bytes:
        raise UserError(
            f"--cache-gib is {cache_gib:g}, and {question.topology.usable_bytes / GIB:.1f} GiB of a device may be used"
        )
    best = candidates(question, mesh)[0]
    count = sequences_within(int(cache_gib * GIB), question, best)
    if not count:
        raise UserError(
            f"--cache-gib is {cache_gib:g}, too little for one sequence of {question.workload.context:,} tokens "
            f"in each block of mesh {mesh_name(best.sizes)}"
        )
    return dataclasses.replace(question.workload, sequences=count)


def _plan_step(question: Question, best: Candidate, given: bool, compiling: bool, report: Callable) -> StepPlan:
    """Plans a step on this mesh, which was given by the user or found."""
    program = question.program(best.sizes, best.strategy)
    kind, topology = question.kind, question.topology
    counted, compiled, collectives = estimate(program, trace=False), None, None
    # What does not even get into a device needs no trace, which numbers out of any bounds might make impossible.
    possible = counted.peak <= topology.usable_bytes
    if possible:
        with report(f"tracing the {kind} step"):
            counted = estimate(program)
    if possible and compiling and topology.platform in ("tpu", "cpu"):
        request = Request(kind, best.strategy, question.config, best.sizes, question.workload, topology.name)
        with report(f"compiling the {kind} step for {topology.name}"):
            compiled = compile_apart(request)
        twin = compiled
        if topology.platform == "tpu":
            with report(f"counting collectives of the {kind} step"):
                twin = compile_apart(dataclasses.replace(request, topology=f"cpu:{topology.num_devices}"))
        collectives = twin.collectives
    received = None if collectives is None else sum(counted.bytes for counted in collectives.values())
    step = StepPlan(
        kind, best.sizes, best.strategy, program.blocks, program.sequences, program.tokens, counted, compiled,
        collectives, expert_traffic(program), floors(program, counted, topology.device, received),
        topology.usable_bytes,
    )
    if step.fits:
        return step
    beside = counted.temporaries + counted.outputs
    if step.peak is not None:
        beside += step.peak - counted.peak
    return dataclasses.replace(step, remedies=remedies(question, best.sizes if given else None, beside))
