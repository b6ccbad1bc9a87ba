"""The command `python -m serving.client`."""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence

from k3jax.cli.command import OK, Parser, number, print_text, run, say
from k3jax.cli.prompt import read_prompt
from k3jax.cli.request import add_generation, add_prompt, add_sampling, given_sampling
from k3jax.errors import UserError
from serving.client.errors import RequestError
from serving.client.events import Accepted, Delta, Done
from serving.client.request import Options, Sampling
from serving.client.sync import Client

DEFAULT_ADDRESS = "127.0.0.1:50051"

_EPILOG = """\
examples:
  python -m serving.client --prompt "Once upon a time"
  python -m serving.client --address 10.0.0.7:50051 --prompt-file book.txt --max-new-tokens 500 --temperature 0
  python -m serving.client --stats

Text goes to standard output as it comes (token ids, when the server has no tokenizer); statistics go to standard error.

exit codes:
  0    done
  1    internal error
  2    no server, a request that it refused or did not finish, or a mistake in the input; one line says which
  130  interrupted by Ctrl-C; the request is cancelled
  141  whoever read standard output closed it
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m serving.client",
        description="Continues a prompt with a server started by python -m serving.server.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("server").add_argument
    add("--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help=f"default: {DEFAULT_ADDRESS}")
    add("--timeout", type=number, metavar="SECONDS", help="deadline of the request (default: the server's)")
    add = parser.add_argument_group("instead of a prompt").add_mutually_exclusive_group().add_argument
    for flag, action in _ACTIONS.items():
        add(flag, dest="action", action="store_const", const=action, help=action.__doc__)
    add_prompt(parser)
    add = add_generation(parser).add_argument
    add("--priority", type=int, default=0, metavar="N", help="higher goes first (default: 0)")
    add("--salt", default="", metavar="TEXT", help="share cached prefixes with requests of the same salt only")
    add_sampling(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (see `--help`)."""
    return run(lambda: _run(_parser().parse_args(argv)), interrupted="interrupted")


def _run(args: argparse.Namespace) -> int:
    try:
        with Client(args.address) as client:
            if args.action:
                args.action(client)
            else:
                _generate(client, args)
    except RequestError as error:
        hint = f"; try again in {error.retry_after:g} s" if error.retry_after is not None else ""
        raise UserError(f"{error.message} ({error.code.name}){hint}") from None
    return OK


def _info(client: Client) -> None:
    """print what is served, as JSON"""
    _print_json(client.model_info())


def _stats(client: Client) -> None:
    """print where the cache stands, as JSON"""
    _print_json(client.cache_stats())


def _reset_cache(client: Client) -> None:
    """drop every cached prefix"""
    client.reset_cache()


_ACTIONS: dict[str, Callable[[Client], None]] = {"--info": _info, "--stats": _stats, "--reset-cache": _reset_cache}


def _print_json(values) -> None:
    print(json.dumps(dataclasses.asdict(values), indent=2), flush=True)


def _generate(client: Client, args: argparse.Namespace) -> None:
    options = Options(
        sampling=Sampling(**given_sampling(args)), max_new_tokens=args.max_new_tokens, ignore_eos=args.ignore_eos,
        priority=args.priority, cache_salt=args.salt, markup=args.markup,
    )
    prompt = read_prompt(args)
    events = client.generate(prompt, timeout=args.timeout, **options)
    has_tokenizer = isinstance(prompt, str) or client.model_info().has_tokenizer
    start = time.monotonic()
    first = accepted = None
    for event in events:
        match event:
            case Accepted():
                accepted = event
            case Delta():
                first = first or time.monotonic()
                print_text(event.text if has_tokenizer else "".join(f"{token}," for token in event.token_ids))
            case Done():
                print(flush=True)
                _print_end(accepted, event, start, first)


def _print_end(accepted: Accepted, done: Done, start: float, first: float | None) -> None:
    usage, end = done.usage, time.monotonic()
    rate = ""
    if usage.completion_tokens > 1 and end > first:
        rate = f", then {(usage.completion_tokens - 1) / (end - first):.1f} tok/s"
    say(
        f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached; {usage.completion_tokens} new ones"
        f"{'' if first is None else f', the first after {first - start:.3f} s{rate}'}; "
        f"{'' if accepted is None or accepted.seed is None else f'seed {accepted.seed}, '}"
        f"finished by {done.finish_reason}"
    )
