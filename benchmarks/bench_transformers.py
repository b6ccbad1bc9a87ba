"""A mid-size random Kimi-Linear on the CPU: k3jax beside Hugging Face's transformers on PyTorch.

    pip install -r benchmarks/requirements-transformers.txt
    python benchmarks/bench_transformers.py [--threads 2] [--repeats 3]

Each side runs in processes of its own, in turns, on the same cores: prefill of the prompt at once, then greedy steps of
one token. Prints medians, whether the tokens agree, and the floors: reading the weights that a token uses at the
bandwidth of a large sum, and the prompt's multiplications at the rate of a large matrix product.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version

VOCABULARY_STRIDE = 7919


def prompt(length: int, vocab_size: int) -> list[int]:
    return [number * VOCABULARY_STRIDE % vocab_size for number in range(1, length + 1)]


def run_k3jax(options: argparse.Namespace) -> dict:
    import jax
    import jax.numpy as jnp
    from bench_generate import bytes_per_token

    import k3jax

    lm = k3jax.load(options.checkpoint, dtype=options.dtype)
    ids = prompt(options.prompt_tokens, lm.config.vocab_size)
    greedy = k3jax.SamplingParams(temperature=0)
    runs = [
        k3jax.generate(
            lm, ids, greedy, max_new_tokens=options.new_tokens, ignore_eos=True, chunk=options.prompt_tokens
        )
        for _ in range(options.repeats + 1)
    ][1:]

    def best_seconds(function, *arguments):
        compiled = jax.jit(function)
        times = []
        for _ in range(6):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            times.append(time.perf_counter() - start)
        return min(times)

    numbers, matrix = jnp.ones(2**28, jnp.float32), jnp.ones((2048, 2048), jnp.float32)
    step_bytes = bytes_per_token(lm.config, lm.dtype)
    return {
        "prefill": [run.timings["prefill_s"] for run in runs],
        "step": [1 / run.timings["decode_tokens_per_s"] for run in runs],
        "tokens": runs[0].token_ids,
        "step_floor": step_bytes * best_seconds(jnp.sum, numbers) / numbers.nbytes,
        # Two operations for each weight that a token uses; the head sees the last position only.
        "prefill_floor": (2 * step_bytes / jnp.dtype(lm.dtype).itemsize - 2 * lm.config.vocab_size
                          * lm.config.hidden_size) * len(ids) * best_seconds(jnp.dot, matrix, matrix) / (2 * 2048**3),
    }


def run_transformers(options: argparse.Namespace) -> dict:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=getattr(torch, options.dtype)).eval()
    ids = torch.tensor([prompt(options.prompt_tokens, model.config.vocab_size)])

    @torch.inference_mode()
    def run() -> tuple[float, float, list[int]]:
        start = time.perf_counter()
        output = model(ids, use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        prefilled = time.perf_counter()
        tokens = [int(token)]
        for _ in range(options.new_tokens - 1):
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
            token = output.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(token))
        return prefilled - start, (time.perf_counter() - prefilled) / (options.new_tokens - 1), tokens

    prefill, step, tokens = zip(*[run() for _ in range(options.repeats + 1)][1:])
    return {"prefill": prefill, "step": step, "tokens": tokens[0]}


SIDES = {"k3jax": run_k3jax, "transformers": run_transformers}


def in_turns(options: argparse.Namespace, dtype: str) -> dict[str, dict]:
    """Both sides, twice each in alternation: the results of both processes of a side, joined."""
    results: dict[str, dict] = {}
    for name in [*SIDES] * 2:
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--side", name, "--dtype", dtype, "--checkpoint",
             str(options.checkpoint)],
            stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {
                "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(options.threads), "TRANSFORMERS_VERBOSITY": "error",
            },
        )
        result = json.loads(done.stdout.splitlines()[-1])
        if name in results:
            if result["tokens"] != results[name]["tokens"]:
                raise SystemExit(f"{name} gave other tokens in its second process")
            for key in ("prefill", "step"):
                results[name][key] += result[key]
        else:
            results[name] = result
    return results


def report(dtype: str, results: dict[str, dict]) -> None:
    ours, theirs = results["k3jax"], results["transformers"]
    pairs = list(zip(ours["tokens"], theirs["tokens"]))
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
    print(f"{dtype}: first {same} of {len(pairs)} tokens identical")
    for key, label in (("prefill", "prefill"), ("step", "one greedy step")):
        a, b = statistics.median(ours[key]), statistics.median(theirs[key])
        print(f"  {label:16} k3jax {a * 1e3:8.2f} ms   transformers {b * 1e3:8.2f} ms   {b / a:5.2f}x   "
              f"floor {ours[f'{key}_floor'] * 1e3:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=pathlib.Path, help="a Kimi-Linear; by default a random one is written")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="of each of the two processes of a side")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Before the libraries start their threads: both sides get the same cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    if options.side:
        print(json.dumps(SIDES[options.side](options)))
        return
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "torch", "transformers"))
    print(f"{versions}; {options.threads} threads, {options.prompt_tokens} prompt tokens, "
          f"{options.new_tokens} new ones, medians of {2 * options.repeats}")
    with tempfile.TemporaryDirectory() as folder:
        if options.checkpoint is None:
            options.checkpoint = pathlib.Path(folder)
            subprocess.run(
                [sys.executable, pathlib.Path(__file__).with_name("random_kimi_linear.py"), folder], check=True
            )
        for dtype in options.dtypes:
            report(dtype, in_turns(options, dtype))


if __name__ == "__main__":
    main()
