"""`python -m k3jax.convert`: a Hugging Face checkpoint in, an Orbax checkpoint out."""

import argparse
import shlex
from collections.abc import Sequence

from k3jax.checkpoint.orbax.request import check_request
from k3jax.cli.command import OK, Parser, run, say, whole

_EPILOG = """\
examples:
  python -m k3jax.convert Kimi-Linear-48B-A3B kimi-linear-orbax
  python -m k3jax.convert Kimi-K3 kimi-k3-orbax --verify
  python -m k3jax.convert Kimi-K3 kimi-k3-4-layers --layers 4

Every value stays as it is, bit for bit; no accelerator is used, and about one layer of the model is in memory at a
time. DST appears when everything is written, or not at all. It is read by --checkpoint DST and k3jax.load, and each
folder in it by Orbax itself.

exit codes:
  0    done
  1    internal error
  2    a mistake in the input or a full disk; one line on standard error says which
  130  interrupted by Ctrl-C; nothing is left behind
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m k3jax.convert",
        description="Turns a Hugging Face checkpoint of Kimi K3 or Kimi-Linear into an Orbax checkpoint of "
        "few, large arrays.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SRC", help="a Hugging Face checkpoint directory")
    parser.add_argument("destination", metavar="DST", help="the directory to make; it must not exist or be empty")
    parser.add_argument("--layers", type=whole(1), metavar="N", help="only the first N layers (default: all)")
    parser.add_argument("--verify", action="store_true", help="read everything back and compare it with SRC")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (see `--help`)."""
    return run(lambda: _run(_parser().parse_args(argv)), interrupted="interrupted; nothing is left behind")


def _run(args: argparse.Namespace) -> int:
    request = check_request(args.source, args.destination, args.layers)
    # Importing JAX takes seconds, which a mistake above need not wait for.
    import jax

    from k3jax.checkpoint.orbax.conversion import convert
    from k3jax.memory import human_bytes

    # Accelerators stay free for others.
    jax.config.update("jax_platforms", "cpu")
    done = convert(request, verify=args.verify, progress=True)
    say(
        f"{done.arrays} arrays of {done.layers} layers, {human_bytes(done.nbytes)} in {done.seconds:.1f} s, "
        f"{human_bytes(done.nbytes / done.seconds)}/s{', verified' if args.verify else ''}: {args.destination}"
    )
    prompt = "--prompt 'Once upon a time'" if request.has_tokenizer else "--prompt-ids 1,2,3"
    say(f"next: python -m k3jax.generate --checkpoint {shlex.quote(args.destination)} {prompt}")
    return OK
