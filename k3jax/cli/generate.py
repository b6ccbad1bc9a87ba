"""`python -m k3jax.generate`: a prompt in, greedy text and statistics out."""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import sys
import warnings
from collections.abc import Sequence

from k3jax.catalog import describe
from k3jax.cli.compilation_cache import enable_compilation_cache
from k3jax.cli.logits_file import LogitsFile
from k3jax.cli.prompt import read_prompt
from k3jax.errors import UserError
from k3jax.prompt import prompt_ids

OK, USER_MISTAKE, INTERRUPTED, BROKEN_PIPE = 0, 2, 130, 141

_EPILOG = """\
examples:
  python -m k3jax.generate                                    the built-in demo: random weights, so noise
  python -m k3jax.generate --checkpoint DIR --prompt "Once upon a time"
  python -m k3jax.generate --checkpoint DIR --prompt-file book.txt --max-new-tokens 500
  python -m k3jax.generate --checkpoint DIR --prompt-ids 19180,2695 --json
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


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as every other one: in one line."""

    def error(self, message: str):
        raise UserError(f"{message} (see --help)")


def _whole(least: int):
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return parse


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if value != 0:
        raise argparse.ArgumentTypeError(f"{text} asks for sampling, which is not there yet; only 0 (greedy) works")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m k3jax.generate",
        description="Continues a prompt with Kimi K3 or Kimi-Linear, taking the most likely token each time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("model").add_argument
    add("--checkpoint", default="demo", metavar="NAME",
        help="a Hugging Face checkpoint directory, demo, or random:PRESET[:layers] with PRESET kimi-k3, "
        "kimi-linear-48b or demo (default: demo)")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of activations (default: bfloat16)")
    add("--seed", type=_whole(0), default=0, metavar="N", help="of random weights (default: 0)")

    group = parser.add_argument_group("prompt", "one of these, or standard input when it is a pipe or a file")
    add = group.add_mutually_exclusive_group().add_argument
    add("--prompt", metavar="TEXT", help="the prompt itself")
    add("--prompt-file", metavar="FILE", help="a UTF-8 file")
    add("--prompt-ids", type=_ids, metavar="1,2,3", help="token ids; works for a checkpoint without tokenizer files")

    add = parser.add_argument_group("generation").add_argument
    add("--max-new-tokens", type=_whole(1), default=128, metavar="N", help="stop after N tokens (default: 128)")
    add("--ignore-eos", action="store_true", help="go on after the model's stop token")
    add("--temperature", type=_temperature, default=0.0, metavar="T", help="only 0, greedy, for now (default: 0)")
    add("--chunk", type=_whole(1), default=512, metavar="N", help="prompt tokens in one prefill step (default: 512)")

    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true",
        help="print one JSON object at the end: token_ids, text, finish_reason, usage, timings")
    add("--logits-out", metavar="FILE.npz", help="write float32 `logits` [prompt tokens, vocabulary]")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (see `--help`)."""
    try:
        with warnings.catch_warnings():
            # The configuration is read twice, by the checks of the prompt and by the loader.
            say_once = functools.cache(_say)
            warnings.showwarning = lambda message, *_: say_once(f"warning: {message}")
            return _run(_parser().parse_args(argv))
    except UserError as error:
        _say("error: " + " ".join(str(error).split()))
        return USER_MISTAKE
    except KeyboardInterrupt:
        _say("interrupted before the first token")
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _run(args: argparse.Namespace) -> int:
    # Before any weights are read: those can take many minutes.
    ids = prompt_ids(describe(args.checkpoint), read_prompt(args), args.max_new_tokens)
    with contextlib.ExitStack() as stack:
        logits = None
        if args.logits_out is not None:
            logits = stack.enter_context(LogitsFile(args.logits_out, len(ids)))
        # Importing JAX takes seconds, which a mistake above need not wait for.
        import k3jax

        enable_compilation_cache()
        lm = k3jax.load(args.checkpoint, dtype=args.dtype, seed=args.seed, progress=True)
        if args.checkpoint == "demo":
            _say("the demo model has random weights: what follows is noise, not language")
        result = k3jax.generate(
            lm,
            ids,
            max_new_tokens=args.max_new_tokens,
            ignore_eos=args.ignore_eos,
            chunk=args.chunk,
            on_text=None if args.json else _print_text,
            on_logits=logits.write if logits else None,
        )
        _print_end(result, args.json)
        if logits and not logits.complete:
            _say(f"interrupted inside the prompt: {args.logits_out} is not written")
    return INTERRUPTED if result.finish_reason == "interrupted" else OK


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
    _say(
        f"load {timings['load_s']:.2f} s, compile {timings['compile_s']:.2f} s, "
        f"prefill {usage['prompt_tokens']} tokens at {timings['prefill_tokens_per_s']:.1f} tok/s, "
        f"decode {usage['completion_tokens']} tokens at {timings['decode_tokens_per_s']:.1f} tok/s, "
        f"peak memory {f'{peak / 2**30:.2f} GiB' if peak else 'unknown'}, finished by {result.finish_reason}"
    )


def _say(message: str) -> None:
    print(f"k3jax: {message}", file=sys.stderr, flush=True)
