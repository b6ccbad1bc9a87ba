"""Host memory that loading a checkpoint takes beyond its weights, and how fast it is.

    python benchmarks/bench_load_memory.py [--gigabytes 3] [--shards 8] [--dtype bfloat16] [--directory DIR]

Writes a checkpoint of random bytes in the layout of Kimi-Linear to a temporary folder, drops it from the page cache,
and loads it in a fresh process on the CPU, where the weights themselves lie in host memory. The excess should be at
most one layer's experts plus 256 MiB.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.checkpoint import Repository, load_params
from k3jax.config import K3Config
from k3jax.memory import human_bytes, peak_rss_bytes, required_bytes
from k3jax.model import K3ForCausalLM
from k3jax.presets import preset
from k3jax.weights import leaves

LAYER_BYTES = 220e6


def architecture(layers: int) -> K3Config:
    """Kimi-Linear with narrower layers, of about LAYER_BYTES each."""
    return dataclasses.replace(
        preset("kimi-linear-48b").first_layers(layers), vocab_size=32768, hidden_size=1024, intermediate_size=4096,
        num_attention_heads=8, kda_num_heads=8, num_experts=64, moe_intermediate_size=512,
    )


def write_checkpoint(directory: pathlib.Path, config: K3Config, shards: int) -> None:
    """Shards of about equal size, and their index."""
    tensors = []
    for _, weight in leaves(K3ForCausalLM.weights(config)):
        dtype, item_size = ("F32", 4) if weight.dtype else ("BF16", 2)
        for layer in weight.layers or [None]:
            shape = weight.source.shapes[0]
            tensors += [
                (name, dtype, shape, math.prod(shape) * item_size) for name in weight.tensor_names(config, layer)
            ]
    # By layer, as published checkpoints are.
    tensors.sort(key=lambda tensor: [int(part) if part.isdigit() else -1 for part in tensor[0].split(".")[:3]])
    limit = sum(nbytes for *_, nbytes in tensors) / shards
    groups, written = [[] for _ in range(shards)], 0
    for tensor in tensors:
        groups[min(int(written / limit), shards - 1)].append(tensor)
        written += tensor[-1]
    noise, weight_map = np.random.default_rng(0).bytes(2**26), {}
    for number, group in enumerate(groups, 1):
        file, header, offset = f"model-{number:05}-of-{shards:05}.safetensors", {}, 0
        for name, dtype, shape, nbytes in group:
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
            weight_map[name], offset = file, offset + nbytes
        text = json.dumps(header).encode()
        with open(directory / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for start in range(0, offset, len(noise)):
                out.write(noise[: offset - start])
            out.flush()
            os.fsync(out.fileno())
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text("{}")


def load(directory: pathlib.Path, config: K3Config, dtype: str) -> None:
    """Loads the checkpoint and prints the measurements as JSON."""
    jax.block_until_ready(jnp.zeros(8) + 1)
    before = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    start = time.perf_counter()
    params = jax.block_until_ready(load_params(config, Repository.open(directory), jnp.dtype(dtype)))
    seconds = time.perf_counter() - start
    print(json.dumps({
        "weights": required_bytes(params), "growth": peak_rss_bytes() - before, "seconds": seconds,
        "bank": sum(required_bytes(params["moe"][name]) for name in ("experts_gate_up", "experts_down"))
        // len(config.layers_of("moe")),
    }))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=3.0, help="size of the checkpoint")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="dtype in memory")
    parser.add_argument("--directory", type=pathlib.Path, help="where the temporary folder is made")
    parser.add_argument("--load", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    config = architecture(max(2, min(27, round(options.gigabytes * 1e9 / LAYER_BYTES))))
    if options.load:
        load(options.load, config, options.dtype)
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        write_checkpoint(pathlib.Path(folder), config, options.shards)
        size = sum(path.stat().st_size for path in pathlib.Path(folder).glob("*.safetensors"))
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--load", folder], stdout=subprocess.PIPE, text=True, check=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
    result = json.loads(done.stdout)
    excess = result["growth"] - result["weights"]
    print(f"checkpoint            {human_bytes(size)} in {options.shards} shards, {config.num_hidden_layers} layers")
    print(f"weights in memory     {human_bytes(result['weights'])} ({options.dtype})")
    print(f"peak RSS growth       {human_bytes(result['growth'])}")
    print(f"beyond the weights    {human_bytes(excess)}; allowed {human_bytes(result['bank'] + 2**28)}, of which one "
          f"layer's experts {human_bytes(result['bank'])}")
    print(f"load                  {result['seconds']:.1f} s, {human_bytes(size / result['seconds'])}/s")


if __name__ == "__main__":
    main()
