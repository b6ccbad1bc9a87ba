"""How long `python -m k3jax.generate` takes from the shell until it is done, cold and warm.

    python benchmarks/bench_start.py [--repeats 5] [-- --checkpoint demo --max-new-tokens 32]

Cold: an empty compilation cache, as after installing. Warm: the cache that the cold run left. The files of Python and
its packages are in the page cache in both. What follows `--` is handed to the command.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

PARTS = ("total", "load_s", "compile_s", "prefill_s", "decode_s")


def run(arguments: list[str], cache: str) -> dict[str, float]:
    """Seconds of one run, whole and in parts."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "k3jax.generate", "--json", *arguments], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, check=True, env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache},
    )
    timings = json.loads(done.stdout)["timings"]
    return {"total": time.perf_counter() - start, **timings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("arguments", nargs="*", default=["--max-new-tokens", "32"])
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for kind in runs:
                runs[kind].append(run(options.arguments, cache))
    print(f"python -m k3jax.generate {' '.join(options.arguments)}, median of {options.repeats}")
    for kind, times in runs.items():
        median = {part: statistics.median(single[part] for single in times) for part in PARTS}
        rest = median["total"] - sum(median[part] for part in PARTS[1:])
        print(f"{kind}: {median['total']:.2f} s = start {rest:.2f} + load {median['load_s']:.2f} + compile "
              f"{median['compile_s']:.2f} + prefill {median['prefill_s']:.2f} + decode {median['decode_s']:.2f}")


if __name__ == "__main__":
    main()
