"""`python -m serving.simulate`: a trace of requests in, a table and a plot of cache policies out."""

import argparse
import dataclasses
import importlib.util
import json
import math
import pathlib
from collections.abc import Sequence

from k3jax.cli.command import OK, Parser, run, say
from k3jax.errors import UserError
from k3jax.presets import preset
from serving.prefix_cache import CostModel
from serving.simulator import plot
from serving.simulator.experiment import GIB, compare
from serving.simulator.policies import PEERS, policies
from serving.simulator.replay import Policy
from serving.simulator.table import table
from serving.simulator.trace import BLOCK_TOKENS, read_trace

_EPILOG = f"""\
example:
  python -m serving.simulate --trace conversation.jsonl.gz --plot hits.png

Every prompt is looked up and then published at once, in blocks of {BLOCK_TOKENS} tokens. A budget covers snapshots and
MLA pages together. Parameters of a policy are chosen on the first half of the trace; the table counts the second half,
which starts with the cache that the first half left. The table goes to standard output, progress to standard error.

exit codes:
  0    done
  1    internal error
  2    a mistake in the input; one line on standard error says which
  130  interrupted by Ctrl-C
"""

_MOST_GIB = 65536
"""Beyond that, the lists of free pages fill the memory of this machine."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m serving.simulate",
        description="Replays a trace of requests against prefix-cache policies: the one of the server, those of other "
        "engines, and two bounds.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--trace", required=True, metavar="FILE",
        help="requests as JSON lines, maybe through gzip: timestamp (ms), input_length, output_length, hash_ids",
    )
    parser.add_argument("--policy", nargs="+", metavar="NAME", help=f"{', '.join(policies())} (default: all)")
    parser.add_argument(
        "--budget-gib", nargs="+", type=_gib, default=[64, 256, 1024], metavar="N", help="default: 64 256 1024"
    )
    parser.add_argument("--preset", default="kimi-k3", metavar="NAME", help="the model whose sizes count (kimi-k3)")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="write hit rate against budget as a picture")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all numbers")
    return parser


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _MOST_GIB:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB above 0 and up to {_MOST_GIB}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (see `--help`)."""
    return run(lambda: _run(_parser().parse_args(argv)), interrupted="interrupted")


def _run(args: argparse.Namespace) -> int:
    cost = CostModel.for_model(preset(args.preset))
    chosen = _choose(args.policy)
    smallest = cost.snapshot_bytes + BLOCK_TOKENS * cost.token_bytes
    for gib in args.budget_gib:
        if gib * GIB < smallest:
            raise UserError(
                f"--budget-gib {gib:g} is too small: {args.preset} needs {smallest / GIB:.3f} for one snapshot and one "
                f"block of {BLOCK_TOKENS} tokens"
            )
    for option, path in (("--plot", args.plot), ("--json", args.json)):
        if path and not path.absolute().parent.is_dir():
            raise UserError(f"{option} {path}: there is no folder {path.parent}")
    if args.plot:
        _check_plot(args.plot)
    requests = read_trace(args.trace)
    report = compare(requests, chosen, sorted(set(args.budget_gib)), cost, progress=say)
    print(table(report))
    if args.plot:
        plot.save(args.plot, report, f"Second half of {pathlib.Path(args.trace).name}, sizes of {args.preset}")
    if args.json:
        values = {"trace": args.trace, "preset": args.preset, **dataclasses.asdict(report)}
        args.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return OK


def _choose(names: Sequence[str] | None) -> list[Policy]:
    """The policies of these names, or all, in the order of the table."""
    known = policies()
    missing = f"; the others need {PEERS}: run it in a checkout of k3jax" if len(known) == 1 else ""
    if names is None:
        if missing:
            say(f"only {', '.join(known)} runs{missing}")
        return list(known.values())
    for name in names:
        if name not in known:
            raise UserError(f"no policy {name!r}; there are {', '.join(known)}{missing}")
    return [policy for name, policy in known.items() if name in names]


def _check_plot(path: pathlib.Path) -> None:
    if path.suffix not in plot.SUFFIXES:
        raise UserError(f"--plot {path} does not end in {', '.join(plot.SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError('--plot needs matplotlib; install it with pip install "k3jax[notebooks]"')
