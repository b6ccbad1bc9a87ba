"""`python -m k3jax.generate`: a prompt in, text and statistics out."""

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Sequence

from k3jax.catalog import Description, describe
from k3jax.cli.command import INTERRUPTED, OK, Parser, print_text, run, say, whole
from k3jax.cli.compilation_cache import enable_compilation_cache
from k3jax.cli.logits_file import LogitsFile
from k3jax.cli.prompt import DEMO_PROMPT, read_prompt
from k3jax.cli.request import add_generation, add_prompt, add_sampling, given_sampling
from k3jax.errors import UserError
from k3jax.prompt import check_sampling, prompt_ids
from k3jax.sampling import SamplingParams

_EPILOG = """\
examples:
  python -m k3jax.generate                                    the built-in demo: random weights, so noise
  python -m k3jax.generate --checkpoint DIR --prompt "Once upon a time"
  python -m k3jax.generate --checkpoint DIR --prompt-file book.txt --max-new-tokens 500
  python -m k3jax.generate --checkpoint DIR --prompt-file code.py --temperature 0
  python -m k3jax.generate --checkpoint DIR --prompt-ids 19180,2695 --json --logprobs 5
  python -m k3jax.generate --checkpoint DIR --logits-out logits.npz --max-new-tokens 1 < text.txt
  python -m k3jax.generate --checkpoint random:kimi-k3:4 --prompt-ids 1,2,3

Text goes to standard output as it comes; progress and statistics go to standard error. A prompt is taken exactly as
it is, a final line break included. Compiled programs are kept in the user's cache folder; JAX_COMPILATION_CACHE_DIR
names another.

exit codes:
  0    done
  1    internal error
  2    a mistake in the input; one line on standard error says which
  130  interrupted by Ctrl-C; what was made until then has been printed
  141  whoever read standard output closed it
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m k3jax.generate",
        description="Continues a prompt with Kimi K3 or Kimi-Linear.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("model").add_argument
    add("--checkpoint", default="demo", metavar="NAME",
        help="a checkpoint directory (Hugging Face or converted), demo, or random:PRESET[:layers] with PRESET kimi-k3, "
        "kimi-linear-48b or demo (default: demo)")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of activations (default: bfloat16)")

    add_prompt(parser)
    add = add_generation(parser).add_argument
    add("--chunk", type=whole(1), default=512, metavar="N", help="prompt tokens in one prefill step (default: 512)")
    add_sampling(parser)

    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true",
        help="print one JSON object at the end: token_ids, text, logprobs, finish_reason, stop_reason, seed, usage, "
        "timings")
    add("--logprobs", type=whole(0), metavar="N",
        help="with --json: log-probabilities of the new tokens, and of the N most likely ones, under the model itself")
    add("--logits-out", metavar="FILE.npz", help="write float32 `logits` [prompt tokens, vocabulary]")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (see `--help`)."""
    return run(lambda: _run(_parser().parse_args(argv)), interrupted="interrupted before the first token")


def _run(args: argparse.Namespace) -> int:
    # Before any weights are read: those can take many minutes.
    description = describe(args.checkpoint)
    sampling = _sampling(args, description)
    prompt = read_prompt(args, default=DEMO_PROMPT if args.checkpoint == "demo" else None)
    ids = prompt_ids(description, prompt, args.max_new_tokens, args.markup)
    with contextlib.ExitStack() as stack:
        logits = None
        if args.logits_out is not None:
            logits = stack.enter_context(LogitsFile(args.logits_out, len(ids)))
        # Importing JAX takes seconds, which a mistake above need not wait for.
        import k3jax

        enable_compilation_cache()
        lm = k3jax.load(args.checkpoint, dtype=args.dtype, progress=True)
        if args.checkpoint == "demo":
            say("the demo model has random weights: what follows is noise, not language")
        result = k3jax.generate(
            lm,
            ids,
            sampling,
            max_new_tokens=args.max_new_tokens,
            ignore_eos=args.ignore_eos,
            chunk=args.chunk,
            on_text=None if args.json else print_text,
            on_logits=logits.write if logits else None,
            progress=True,
        )
        _print_end(result, args.json)
        if logits and not logits.complete:
            say(f"interrupted inside the prompt: {args.logits_out} is not written")
    return INTERRUPTED if result.finish_reason == "interrupted" else OK


def _sampling(args: argparse.Namespace, description: Description) -> SamplingParams:
    """The checkpoint's settings with those of the command line in place.

    Raises:
      UserError: a value is out of range, or the checkpoint cannot follow it.
    """
    if args.logprobs is not None and not args.json:
        raise UserError("--logprobs are printed with --json only; give both")
    sampling = dataclasses.replace(description.defaults.sampling, **given_sampling(args))
    check_sampling(description, sampling)
    return sampling


def _print_end(result, as_json: bool) -> None:
    """What is left to print on standard output, then the statistics on standard error."""
    if as_json:
        print(json.dumps(dataclasses.asdict(result)), flush=True)
    else:
        print("" if result.text is not None else ",".join(map(str, result.token_ids)), flush=True)
    usage, timings = result.usage, result.timings
    peak = timings["peak_memory_bytes"]
    say(
        f"load {timings['load_s']:.2f} s, compile {timings['compile_s']:.2f} s, "
        f"prefill {usage['prompt_tokens']} tokens at {timings['prefill_tokens_per_s']:.1f} tok/s, "
        f"decode {usage['completion_tokens']} tokens at {timings['decode_tokens_per_s']:.1f} tok/s, "
        f"peak memory {f'{peak / 2**30:.2f} GiB' if peak else 'unknown'}, "
        f"{'' if result.seed is None else f'seed {result.seed}, '}finished by {result.finish_reason}"
    )
