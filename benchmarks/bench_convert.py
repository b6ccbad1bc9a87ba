"""How fast a checkpoint is converted to Orbax, how much memory that takes, and how fast both kinds load.

    python benchmarks/bench_convert.py [--gigabytes 3] [--shards 8] [--dtype bfloat16] [--directory DIR]

Writes a checkpoint of random bytes in the layout of Kimi-Linear to a temporary folder. Each step runs in a fresh
process, after its input was dropped from the page cache; on the CPU unless JAX_PLATFORMS says otherwise. A conversion
should grow by at most one layer of the model plus 1 GiB of host memory.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
from bench_load_memory import write_checkpoint
from random_kimi_linear import configuration

import k3jax
from k3jax.checkpoint.orbax.conversion import convert
from k3jax.checkpoint.orbax.request import check_request
from k3jax.config import K3Config
from k3jax.memory import human_bytes, peak_rss_bytes

LAYER_BYTES = 237e6


def architecture(gigabytes: float) -> dict:
    """A `config.json` with layers of about LAYER_BYTES each."""
    layers = max(2, round(gigabytes * 1e9 / LAYER_BYTES))
    return configuration(layers, hidden_size=1024) | {"num_experts": 64, "moe_intermediate_size": 576}


def drop_from_page_cache(directory: pathlib.Path) -> None:
    for path in filter(pathlib.Path.is_file, directory.rglob("*")):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(step: str, source: pathlib.Path, destination: pathlib.Path, dtype: str) -> dict[str, float]:
    """Runs one step in this process."""
    jax.block_until_ready(jnp.zeros(8) + 1)
    before = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    start = time.perf_counter()
    if step in ("convert", "convert --verify"):
        convert(check_request(source, destination), verify=step != "convert")
    else:
        lm = k3jax.load(source if step == "load Hugging Face" else destination, dtype=dtype)
        jax.block_until_ready(lm.params)
    return {"seconds": time.perf_counter() - start, "growth": peak_rss_bytes() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=3.0, help="size of the checkpoint")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="dtype in memory")
    parser.add_argument("--directory", type=pathlib.Path, help="where the temporary folder is made")
    parser.add_argument("--step", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        step, source, destination = options.step
        print(json.dumps(measure(step, pathlib.Path(source), pathlib.Path(destination), options.dtype)))
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        source = pathlib.Path(folder) / "source"
        source.mkdir()
        config_json = architecture(options.gigabytes)
        config = K3Config.from_dict(config_json)
        write_checkpoint(source, config, options.shards)
        (source / "config.json").write_text(json.dumps(config_json))
        size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        print(f"checkpoint: {human_bytes(size)} in {options.shards} shards, {config.num_hidden_layers} layers of about "
              f"{human_bytes(size / config.num_hidden_layers)}")
        for step in ("convert --verify", "convert", "load Hugging Face", "load converted"):
            destination = pathlib.Path(folder) / ("verified" if step == "convert --verify" else "converted")
            for directory in pathlib.Path(folder).iterdir():
                drop_from_page_cache(directory)
            done = subprocess.run(
                [sys.executable, __file__, "--dtype", options.dtype, "--step", step, source, destination],
                stdout=subprocess.PIPE, text=True, check=True, env={"JAX_PLATFORMS": "cpu", **os.environ},
            )
            result = json.loads(done.stdout)
            seconds, growth = result["seconds"], result["growth"]
            print(f"{step:18} {seconds:6.1f} s, {human_bytes(size / seconds)}/s, host memory + {human_bytes(growth)}")


if __name__ == "__main__":
    main()
