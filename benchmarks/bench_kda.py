"""Device time of the KDA kernels beside the floor of their bytes and the XLA form.

    python benchmarks/bench_kda.py [--heads 96 12] [--batch 128 32 8 1] [--gigabytes-per-second 4300]

Times are CUPTI's, medians over calls in one program, each on another layer of pools larger than the cache.
"""

import argparse
import collections
import functools
import itertools
import math
import statistics

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.kda_decode import kda_decode

WIDTH, TAPS = 128, 4
CALLS, REPEATS = 8, 5
POOL_BYTES = 300e6


@functools.partial(jax.jit, static_argnums=(0, 1))
def decode_arguments(heads, batch, key):
    """(tokens and weights, pools) in the model's dtypes; the pools have at least `CALLS` layers."""
    keys = iter(jax.random.split(key, 10))

    def normal(*shape, dtype=jnp.bfloat16):
        return jax.random.normal(next(keys), shape, dtype)

    slot_bytes = heads * WIDTH * WIDTH * 4
    layers = max(CALLS, math.ceil(POOL_BYTES / (slot_bytes * (batch + 1))))
    arguments = {
        "qkv": normal(batch, 3, heads, WIDTH), "gate": normal(batch, heads, WIDTH), "beta": normal(batch, heads),
        "output_gate": normal(batch, heads, WIDTH), "conv_weight": normal(3, heads, WIDTH, TAPS),
        "norm_weight": normal(WIDTH, dtype=jnp.float32), "A_log": normal(heads, dtype=jnp.float32),
        "dt_bias": normal(heads, WIDTH, dtype=jnp.float32), "slots": jnp.arange(1, batch + 1, dtype=jnp.int32),
    }
    pools = {
        "conv_pool": normal(layers, batch + 1, 3, heads, WIDTH, TAPS - 1),
        "state_pool": normal(layers, batch + 1, heads, WIDTH, WIDTH, dtype=jnp.float32),
    }
    return arguments, pools


def decode_bytes(heads, batch):
    """Fewest bytes: states and tails read and written, activations once, weights once."""
    channels = batch * heads * WIDTH
    return channels * (2 * 4 * WIDTH + 2 * 2 * 3 * (TAPS - 1) + 2 * 6) + heads * WIDTH * (2 * 3 * TAPS + 4)


def kernel_microseconds(backend, arguments, pools):
    """Median device time of a call, summed over the kernels that it launches; those around the loop do not count."""
    def one(layer, carry):
        _, pools = carry
        result = kda_decode(**arguments, **pools, layer=layer, lower_bound=-5.0, norm_eps=1e-5, backend=backend)
        return result.out, {"conv_pool": result.conv_pool, "state_pool": result.state_pool}

    def run(pools):
        return jax.lax.fori_loop(0, CALLS, one, (jnp.zeros_like(arguments["gate"]), pools))

    _, launches = profiler.measure(run, aggregate=False, iterations=REPEATS)(pools)
    times = collections.defaultdict(list)
    for name, milliseconds in itertools.chain(*launches):
        times[name].append(1e3 * milliseconds)
    return sum(statistics.median(values) * (len(values) // (CALLS * REPEATS)) for values in times.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[96, 12])
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 32, 8, 1])
    parser.add_argument("--gigabytes-per-second", type=float, default=4300, help="of a device-to-device copy")
    options = parser.parse_args()
    print(f"KDA decode, {jax.devices()[0].device_kind}, JAX {jax.__version__}; microseconds")
    print(f"{'heads':>5} {'batch':>5} {'floor':>8} {'mosaic_gpu':>10} {'of floor':>8} {'xla':>9}", flush=True)
    for heads in options.heads:
        for batch in options.batch:
            arguments, pools = decode_arguments(heads, batch, jax.random.key(0))
            floor = decode_bytes(heads, batch) / options.gigabytes_per_second / 1e3
            kernel = kernel_microseconds("mosaic_gpu", arguments, pools)
            xla = kernel_microseconds("xla", arguments, pools)
            print(f"{heads:5} {batch:5} {floor:8.1f} {kernel:10.1f} {floor / kernel:8.0%} {xla:9.1f}", flush=True)


if __name__ == "__main__":
    main()
