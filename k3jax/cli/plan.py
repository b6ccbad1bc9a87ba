"""`python -m k3jax.plan`: will it fit?"""

import argparse
import dataclasses
import json
from collections.abc import Sequence

from k3jax.catalog import describe
from k3jax.checkpoint.orbax.manifest import is_converted
from k3jax.cli.command import OK, Parser, number, run, say, whole
from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.plan.hardware import Topology
from k3jax.plan.workload import KINDS, Workload, check_mesh, parse_mesh
from k3jax.presets import PRESETS, preset

_EPILOG = """\
topologies:
  tpu7x:4x4x4 (chips of a slice, two devices each), v5p:4x8x8, v6e:16x16, v5e:4x4, h200:16, cpu:8

examples:
  python -m k3jax.plan --preset kimi-k3 --topology tpu7x:4x4x4
  python -m k3jax.plan --preset kimi-k3 --topology tpu7x:4x4x4 --compile
  python -m k3jax.plan --preset kimi-k3 --topology v6e:16x16 --mesh expert=8,seq=8,tensor=4 --step decode
  python -m k3jax.plan --checkpoint Kimi-Linear-48B-A3B --topology h200:2 --context 1000000 --cache-gib 30
  python -m k3jax.plan --preset demo --topology cpu:8 --context 4096 --compile --json

No device and no weight is needed. Sizes are those of the real parameters, pools and placements. --compile asks XLA's
compiler for the topology (for TPUs: pip install libtpu) and believes its memory analysis; a full Kimi K3 takes minutes.

exit codes:
  0    the plan is made, whether the model fits or not (--json says: "fits")
  1    internal error
  2    a mistake in the input; one line on standard error says which
  130  interrupted by Ctrl-C
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m k3jax.plan",
        description="Says whether a model fits on devices, on which mesh, and what would make it fit.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("model").add_argument
    add("--preset", metavar="NAME", help=f"an architecture: {', '.join(PRESETS)}")
    add("--checkpoint", metavar="NAME",
        help="a checkpoint directory (Hugging Face or converted), demo, or random:PRESET[:layers]; with --preset it "
        "must be of that architecture")
    add = parser.add_argument_group("devices").add_argument
    add("--topology", required=True, metavar="NAME", help="see below")
    add("--mesh", metavar="SIZES",
        help="sizes of the mesh axes data, expert, seq and tensor, such as expert=4,seq=8,tensor=4 (default: search)")
    add = parser.add_argument_group("load").add_argument
    usual = Workload()
    room = parser.add_mutually_exclusive_group().add_argument
    room("--sequences", type=whole(1), default=usual.sequences, metavar="N",
         help=f"with state and cache at the same time (default: {usual.sequences})")
    room("--cache-gib", type=number, metavar="GIB",
         help="instead: as many sequences as have state and cache in so much memory of each device")
    add("--context", type=whole(1), metavar="TOKENS",
        help=f"of each sequence (default: {usual.context}, or less if the model takes less)")
    add("--chunk", type=whole(1), metavar="TOKENS",
        help=f"of a prefill step, over all devices (default: {usual.chunk}, or less if the sequences are shorter)")
    add("--step", choices=(*KINDS, "both"), default="both", help="what to plan (default: both)")
    add = parser.add_argument_group("output").add_argument
    add("--compile", action="store_true", help="ask the compiler too, for TPU and cpu topologies, unless what goes "
        "into the step is too much already")
    add("--json", action="store_true", help="print one JSON object, with a boolean `fits`")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (see `--help`)."""
    return run(lambda: _run(_parser().parse_args(argv)), interrupted="interrupted")


def _run(args: argparse.Namespace) -> int:
    topology = Topology.parse(args.topology)
    mesh = None
    if args.mesh is not None:
        mesh = parse_mesh(args.mesh)
        check_mesh(mesh, topology)
    if args.cache_gib is not None and not args.cache_gib > 0:
        raise UserError(f"--cache-gib is {args.cache_gib:g}, expected a positive number")
    config = _config(args)
    context = args.context or min(Workload().context, config.max_position_embeddings)
    chunk = args.chunk or min(Workload().chunk, args.sequences * context)
    workload = Workload(args.sequences, context, chunk)
    workload.check(config)
    # Importing JAX takes seconds, which a mistake above need not wait for.
    import jax

    from k3jax.plan.plan import make_plan
    from k3jax.plan.report import to_json, to_text
    from k3jax.progress import waiting

    # Accelerators stay free for others: shapes need none.
    jax.config.update("jax_platforms", "cpu")
    config = _as_stored(args, config)
    if args.compile and topology.platform == "gpu":
        say(f"there is no compiler for absent GPUs: what follows for {topology.name} is the estimate")
    plan = make_plan(
        args.checkpoint or args.preset, config, topology, workload,
        kinds=KINDS if args.step == "both" else (args.step,), mesh=mesh, cache_gib=args.cache_gib,
        compiling=args.compile, report=lambda label: waiting(True, label),
    )
    print(json.dumps(to_json(plan)) if args.json else to_text(plan), flush=True)
    return OK


def _config(args: argparse.Namespace) -> K3Config:
    """The architecture, of the checkpoint if both are given, which then must agree.

    Raises:
      UserError: they do not, or there is neither.
    """
    if args.preset is None and args.checkpoint is None:
        raise UserError("expected --preset or --checkpoint (see --help)")
    expected = preset(args.preset) if args.preset else None
    if args.checkpoint is None:
        return expected
    config = describe(args.checkpoint).config
    if expected is None:
        return config
    for field in dataclasses.fields(config):
        found, wanted = getattr(config, field.name), getattr(expected, field.name)
        # How experts are stored is seen in the tensors alone.
        if field.name != "expert_format" and found != wanted:
            raise UserError(f"{args.checkpoint} is not {args.preset}: {_differing(field.name, found, wanted)}")
    return config


def _differing(name: str, found, wanted) -> str:
    if name == "layer_types":
        name, found, wanted = "the pattern of its layers, in number", len(found), len(wanted)
    return f"{name} is {found!r}, expected {wanted!r}"


def _as_stored(args: argparse.Namespace, config: K3Config) -> K3Config:
    """The architecture with its experts as the checkpoint has them, if there are tensors to look at.

    Raises:
      UserError: the tensors are of another architecture than the checkpoint's config.json.
    """
    from k3jax.checkpoint import Repository, detect_expert_format, plan_loading
    from k3jax.model import K3ForCausalLM

    directory = None if args.checkpoint is None else describe(args.checkpoint).directory
    if directory is None or is_converted(directory) or not any(directory.glob("*.safetensors*")):
        return config
    repository = Repository.open(directory)
    config = dataclasses.replace(config, expert_format=detect_expert_format(repository))
    plan_loading(K3ForCausalLM.weights(config), config, repository)
    return config
