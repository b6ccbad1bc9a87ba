"""Prefill and decode speed of one sequence, beside the time that reading the weights in use would take.

    python benchmarks/bench_generate.py --checkpoint random:kimi-linear-48b --gigabytes-per-second 4300
"""

import argparse
import math
import statistics

import jax
import jax.numpy as jnp

import k3jax
from k3jax.model import K3ForCausalLM
from k3jax.weights import leaves


def bytes_per_token(config, dtype) -> float:
    """Bytes of weights that one decode step of one sequence must read: of the experts, only the chosen ones."""
    total = 0.0
    for path, weight in leaves(K3ForCausalLM.weights(config)):
        size = math.prod(weight.shape) * jnp.dtype(weight.dtype or dtype).itemsize
        if path[-1] == "embed_tokens":
            size /= config.vocab_size
        elif path[-1].startswith("experts"):
            size *= config.num_experts_per_token / config.num_experts
        total += size
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gigabytes-per-second", type=float, required=True, help="copy bandwidth of the device")
    arguments = parser.parse_args()
    lm = k3jax.load(arguments.checkpoint, dtype=arguments.dtype, progress=True)
    prompt = [1 + number % (lm.config.vocab_size - 1) for number in range(arguments.prompt_tokens)]
    runs = [
        k3jax.generate(
            lm, prompt, k3jax.SamplingParams(temperature=0), max_new_tokens=arguments.new_tokens, ignore_eos=True,
            chunk=arguments.chunk,
        ).timings
        for _ in range(arguments.repeats + 1)
    ]
    median = {name: statistics.median(run[name] for run in runs[1:]) for name in runs[0]}
    step_bytes = bytes_per_token(lm.config, lm.dtype)
    floor = step_bytes / (arguments.gigabytes_per_second * 1e9)
    step = 1 / median["decode_tokens_per_s"]
    print(
        f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {arguments.checkpoint} in {arguments.dtype}, "
        f"{arguments.prompt_tokens} prompt tokens, {arguments.new_tokens} new ones, median of {arguments.repeats}"
    )
    print(f"load {lm.load_seconds:.1f} s, first compile {runs[0]['compile_s']:.1f} s, "
          f"peak {median['peak_memory_bytes'] / 2**30:.1f} GiB")
    print(f"prefill {median['prefill_s'] * 1e3:.0f} ms, {median['prefill_tokens_per_s']:.0f} tokens/s")
    print(f"decode {step * 1e3:.2f} ms a token; the floor of reading {step_bytes / 1e9:.3f} GB is {floor * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
