"""`python -m k3jax.generate`: a prompt in, text and statistics out."""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence

from k3jax.catalog import Description, describe
from k3jax.cli.command import INTERRUPTED, OK, Parser, run, say, whole
from k3jax.cli.compilation_cache import enable_compilation_cache
from k3jax.cli.logits_file import LogitsFile
from k3jax.cli.prompt import read_prompt
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


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


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

    group = parser.add_argument_group("prompt", "one of these, or standard input when it is a pipe or a file")
    add = group.add_mutually_exclusive_group().add_argument
    add("--prompt", metavar="TEXT", help="the prompt itself")
    add("--prompt-file", metavar="FILE", help="a UTF-8 file")
    add("--prompt-ids", type=_ids, metavar="1,2,3", help="token ids; works for a checkpoint without tokenizer files")
    group.add_argument("--markup", action="store_true",
                       help="names of special tokens in the text, such as <|open|>, stand for these tokens")

    add = parser.add_argument_group("generation").add_argument
    add("--max-new-tokens", type=whole(1), default=128, metavar="N", help="stop after N tokens (default: 128)")
    add("--ignore-eos", action="store_true", help="go on after the model's own stop tokens")
    add("--stop", action="append", metavar="TEXT", help="stop where this text comes, and leave it out; may be repeated")
    add("--stop-ids", dest="stop_token_ids", type=_ids, metavar="1,2,3", help="stop after these tokens, too")
    add("--chunk", type=whole(1), default=512, metavar="N", help="prompt tokens in one prefill step (default: 512)")

    add = parser.add_argument_group(
        "sampling", "how a token is chosen; the default is what the checkpoint's generation_config.json says, else the "
        "value given here"
    ).add_argument
    add("--temperature", type=_number, metavar="T", help="0 takes the most likely token each time (default: 1.0)")
    add("--top-k", type=whole(0), metavar="K", help="draw from the K most likely tokens; 0 = off (default: 0)")
    add("--top-p", type=_number, metavar="P",
        help="draw from the most likely tokens that together have probability P; 1 = off (default: 0.95)")
    add("--min-p", type=_number, metavar="P",
        help="draw from tokens at least P times as likely as the most likely one; 0 = off (default: 0)")
    add("--repetition-penalty", type=_number, metavar="R",
        help="make tokens of the prompt and of the new text less likely, above 1; 1 = off (default: 1.0)")
    add("--presence-penalty", type=_number, metavar="R",
        help="lower the logits of tokens of the new text by R, from -2 to 2; 0 = off (default: 0)")
    add("--seed", type=whole(0), metavar="N",
        help="draw the same tokens again (default: a fresh one, which the statistics name)")

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
    ids = prompt_ids(description, read_prompt(args), args.max_new_tokens, args.markup)
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
            on_text=None if args.json else _print_text,
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
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    sampling = dataclasses.replace(description.defaults.sampling, **given)
    check_sampling(description, sampling)
    return sampling


def _print_text(text: str) -> None:
    if sys.stdout.isatty():
        text = text.translate(_VISIBLE_CONTROLS)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)


# Model output must not steer the user's terminal: control characters become their pictures, C1 ones U+FFFD.
_VISIBLE_CONTROLS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x7F, 0xA0), 0xFFFD),
}


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
