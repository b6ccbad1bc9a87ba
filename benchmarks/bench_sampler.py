"""The sampler on one device: time of a step's draws beside an argmax and beside a sampler that sorts the vocabulary.

    python benchmarks/bench_sampler.py [--rows 1 64] [--gigabytes-per-second 4300]

Times are of many calls in a row, each on the result of the one before, so that the host's part is hidden.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from k3jax import SamplingParams
from k3jax.sampling.sampler import SamplingBatch, sample

VOCABULARY = 163840
CALLS = 50


def by_sorting(logits, settings, seen, positions):
    """Temperature and top-p with a sort, as most samplers do it."""
    del seen
    scaled = logits / settings.temperature[:, None]
    order = jnp.argsort(-scaled, axis=-1)
    ordered = jnp.take_along_axis(scaled, order, axis=-1)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = jnp.where(before < settings.top_p[:, None], ordered, -jnp.inf)
    draw = jax.vmap(lambda position, row: jax.random.categorical(jax.random.key(position), row))(positions, kept)
    return jnp.take_along_axis(order, draw[:, None], axis=-1)[:, 0]


def ours(logits, settings, seen, positions):
    return sample(logits, settings, seen, positions).token_ids


def milliseconds(choose, params: SamplingParams, rows: int, repeats: int) -> float:
    settings = jax.device_put(SamplingBatch.pack([params] * rows, range(rows)))
    logits = 3 * jax.random.normal(jax.random.key(0), (rows, VOCABULARY))
    seen = jnp.zeros((rows, VOCABULARY), jnp.uint8)

    @jax.jit
    def step(logits, positions):
        tokens = choose(logits, settings, seen, positions)
        # The next call waits for these tokens.
        return logits.at[0, 0].add(1e-9 * tokens[0]), positions + 1

    def run() -> float:
        carry = logits, jnp.arange(rows, dtype=jnp.int32)
        start = time.perf_counter()
        for _ in range(CALLS):
            carry = step(*carry)
        jax.block_until_ready(carry)
        return (time.perf_counter() - start) / CALLS * 1e3

    run()
    return statistics.median(run() for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gigabytes-per-second", type=float, help="copy bandwidth of the device")
    options = parser.parse_args()
    device = jax.devices()[0].device_kind
    print(f"{device}, JAX {jax.__version__}, vocabulary {VOCABULARY}, median of {options.repeats}")
    cases = {
        "greedy": (ours, SamplingParams(temperature=0)),
        "temperature": (ours, SamplingParams(top_p=1)),
        "top-p 0.95": (ours, SamplingParams()),
        "top-k 50, top-p 0.95, min-p, penalties": (
            ours, SamplingParams(top_k=50, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.5)
        ),
        "top-p 0.95 by sorting": (by_sorting, SamplingParams()),
    }
    for rows in options.rows:
        for name, (choose, params) in cases.items():
            print(f"{rows:3} rows, {name:40} {milliseconds(choose, params, rows, options.repeats):8.3f} ms")
        if options.gigabytes_per_second:
            floor = rows * VOCABULARY * 4 / options.gigabytes_per_second / 1e6
            print(f"{rows:3} rows, reading the logits once is {floor:.4f} ms")


if __name__ == "__main__":
    main()
