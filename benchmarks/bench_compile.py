"""Trace and compile time of the decode step against depth, at toy width.

    python benchmarks/bench_compile.py [--repeats 5]
"""

import argparse
import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp

from k3jax.model import K3ForCausalLM
from k3jax.presets import DEMO, KIMI_K3
from k3jax.state import DecodeBatch, DecodeState


def seconds(layers: int) -> tuple[float, float]:
    """(trace and lower, compile) of the decode step of a K3 with this many layers, in seconds."""
    types = KIMI_K3.layer_types[:layers - 1] + ("mla",)
    config = dataclasses.replace(DEMO, layer_types=types, attn_res_block_size=12)
    model = K3ForCausalLM(config, jnp.bfloat16)
    state = jax.eval_shape(functools.partial(
        DecodeState.create, config, num_slots=5, num_pages=33, dtype=jnp.bfloat16
    ))
    ids = jax.ShapeDtypeStruct((4,), jnp.int32)
    batch = DecodeBatch(slots=ids, context_lens=ids, page_table=jax.ShapeDtypeStruct((4, 8), jnp.int32))
    jax.clear_caches()
    start = time.perf_counter()
    lowered = jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs), donate_argnums=2).lower(
        K3ForCausalLM.abstract_params(config, jnp.bfloat16), ids, state, batch
    )
    traced = time.perf_counter()
    lowered.compile()
    return traced - start, time.perf_counter() - traced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, nargs="+", default=[13, 93])
    arguments = parser.parse_args()
    seconds(arguments.layers[0])  # the first trace imports and initialises
    times = {layers: [] for layers in arguments.layers}
    for _ in range(arguments.repeats):
        for layers in arguments.layers:
            times[layers].append(seconds(layers))
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, median of {arguments.repeats}")
    totals = []
    for layers, taken in times.items():
        trace, compile_ = (statistics.median(column) for column in zip(*taken))
        totals.append(statistics.median(map(sum, taken)))
        print(f"{layers:3d} layers: trace {trace:.2f} s, compile {compile_:.2f} s, both {totals[-1]:.2f} s")
    print(f"both, {arguments.layers[-1]} over {arguments.layers[0]} layers: {totals[-1] / totals[0]:.2f}")


if __name__ == "__main__":
    main()
