"""Asks the real compiler, in a process whose environment says what devices there are."""

import dataclasses
import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.plan.collectives import Collectives, count_collectives
from k3jax.plan.hardware import Topology
from k3jax.plan.workload import Kind, Workload

# What a child says when it is not a result: exit codes beside 0 (done) and 1 (a traceback).
_USER_MISTAKE = 2


@dataclasses.dataclass(frozen=True)
class Request:
    """A program to compile, in plain values.

    Attributes:
      kind, strategy: "decode" or "prefill"; see `Program`.
      config: the architecture.
      mesh: sizes of the mesh axes.
      workload: see `Program`.
      topology: the devices, of a TPU or "cpu:N".
      dtype: of activations.
    """

    kind: Kind
    strategy: str
    config: K3Config
    mesh: Mapping[str, int]
    workload: Workload
    topology: str
    dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler said; bytes on one device.

    Attributes:
      arguments, outputs, temporaries, aliased, code: its memory analysis. Outputs that are aliased lie in arguments.
      seconds: to trace, lower and compile.
      host_bytes: the most memory that the compiling process had.
      collectives: by kind; none for a TPU, whose programs cannot be printed.
      refusal: why there is no program: it needs more memory than a device has. Everything else is 0 then.
    """

    arguments: int = 0
    outputs: int = 0
    temporaries: int = 0
    aliased: int = 0
    code: int = 0
    seconds: float = 0.0
    host_bytes: int = 0
    collectives: Mapping[str, Collectives] = dataclasses.field(default_factory=dict)
    refusal: str | None = None

    @property
    def peak(self) -> int:
        """Memory of a device that the step needs."""
        return self.arguments + self.outputs + self.temporaries - self.aliased + self.code


def compile_apart(request: Request) -> Compiled:
    """Compiles in a child process; nothing that the compiler prints is seen.

    Raises:
      UserError: the compiler is not installed, knows no such topology, or was killed.
      RuntimeError: it failed; the message ends with what it printed.
    """
    child = subprocess.run(
        [sys.executable, "-m", "k3jax.plan.compile"], input=pickle.dumps(request), env=_environment(request.topology),
        capture_output=True,
    )
    if child.returncode == _USER_MISTAKE:
        raise UserError(child.stdout.decode())
    if child.returncode < 0:
        raise UserError(
            f"the compiler for {request.topology} was killed by signal {-child.returncode}; it may need more memory "
            "than this machine has"
        )
    if child.returncode:
        raise RuntimeError(f"compiling for {request.topology} failed:\n{child.stderr.decode(errors='replace')[-4000:]}")
    values = json.loads(child.stdout)
    collectives = {kind: Collectives(**counted) for kind, counted in values.pop("collectives").items()}
    return Compiled(**values, collectives=collectives)


def _environment(topology: str) -> dict[str, str]:
    """Of the child: no setting of ours for real devices reaches it."""
    inherited = {
        name: value for name, value in os.environ.items()
        if not name.startswith(("TPU_", "LIBTPU_", "JAX_", "XLA_"))
    }
    kind, _, count = topology.partition(":")
    devices = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"} if kind == "cpu" else {}
    return inherited | devices | {
        # Nobody asks the metadata server of a cloud, and several compilers may run at once.
        "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def _devices(name: str) -> Any:
    """The devices of a topology: not real ones.

    Raises:
      UserError: there is no compiler for it, or it refuses the shape.
    """
    import jax
    from jax.experimental import topologies

    if Topology.parse(name).platform == "cpu":
        return jax.devices()
    try:
        import libtpu  # noqa: F401
    except ImportError:
        raise UserError("compiling for a TPU needs its compiler; install it with: pip install libtpu") from None
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"the TPU compiler has no topology {name}: {error}") from None


def _compile(request: Request) -> Compiled:
    import jax

    from k3jax.memory import peak_rss_bytes
    from k3jax.plan.program import Program
    from sharding import make_mesh

    topology = Topology.parse(request.topology)
    mesh = make_mesh(request.mesh, _devices(request.topology))
    start = time.perf_counter()
    program = Program(
        request.kind, request.strategy, request.config, mesh, request.workload, topology.platform,
        getattr(jax.numpy, request.dtype),
    )
    try:
        compiled = program.traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(
            seconds=time.perf_counter() - start, host_bytes=peak_rss_bytes(), refusal=_first_sentence(str(error))
        )
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return Compiled(
        memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes,
        memory.alias_size_in_bytes, memory.generated_code_size_in_bytes, seconds, peak_rss_bytes(),
        count_collectives(compiled.as_text()) if topology.platform == "cpu" else {},
    )


def _first_sentence(message: str) -> str:
    """`Ran out of memory ... available HBM (31.24G)`, without the codes before it and the advice after it."""
    match = re.search(r"Ran out of memory[^\n]*?\)(?=\.)", message)
    return match.group() if match else message.splitlines()[0]


def _child() -> int:
    """Reads a request from standard input and writes the answer to standard output, where nothing else may go."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = pickle.load(sys.stdin.buffer)
    try:
        json.dump(dataclasses.asdict(_compile(request)), answer)
    except UserError as error:
        answer.write(str(error))
        return _USER_MISTAKE
    finally:
        answer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(_child())
