"""The KDA kernels on the GPU against float64 NumPy and the XLA form; exits with 1 when a check fails.

    python benchmarks/check_kda_gpu.py [--only WORDS]

From the repository's root, with the development requirements installed.
"""

import argparse
import functools
import itertools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda_decode import kda_decode, validate
from pallas_kernels.rounding import round_to
from tests.ops import kda_oracle as oracle

WIDTH, TAPS, EPS = 128, 4, 1e-5
# Rows of a batch that the oracle computes too; the XLA form is compared with on all of them.
ORACLE_ROWS = 4


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def random_case(heads, batch, dtype, pool_dtype, layers, slots, key):
    """(tokens, weights, pools): NaN in unused rows and in slot 0."""
    keys = map(functools.partial(jax.random.fold_in, key), itertools.count())

    def normal(*shape, scale=1.0):
        return scale * jax.random.normal(next(keys), shape)

    def token(x):
        return jnp.where((slots == 0).reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x).astype(dtype)

    tokens = {
        "qkv": token(normal(batch, 3, heads, WIDTH)), "gate": token(normal(batch, heads, WIDTH, scale=3.0)),
        "beta": token(normal(batch, heads, scale=2.0)), "output_gate": token(normal(batch, heads, WIDTH, scale=2.0)),
    }
    weights = {
        "conv_weight": normal(3, heads, WIDTH, TAPS), "norm_weight": normal(WIDTH),
        "A_log": jax.random.uniform(next(keys), (heads,), minval=-0.5, maxval=1.0), "dt_bias": normal(heads, WIDTH),
    }
    pools = {
        "conv_pool": round_to(normal(layers, batch + 3, 3, heads, WIDTH, TAPS - 1), dtype).astype(pool_dtype),
        "state_pool": normal(layers, batch + 3, heads, WIDTH, WIDTH),
    }
    return tokens, weights, {name: pool.at[:, 0].set(jnp.nan) for name, pool in pools.items()}


@functools.partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def step(pools, arguments, layer, backend, lower_bound):
    """(out, pools)."""
    result = kda_decode(**arguments, **pools, layer=layer, lower_bound=lower_bound, norm_eps=EPS, backend=backend)
    return result.out, {"conv_pool": result.conv_pool, "state_pool": result.state_pool}


class Case:
    """Arguments of `kda_decode` on the device; some rows are unused, some slots have no row."""

    def __init__(self, heads, batch, dtype=jnp.bfloat16, lower_bound=-5.0, pool_dtype=None, layers=2):
        self.lower_bound, self.layers, self.dtype, self.slot_count = lower_bound, layers, dtype, batch + 3
        rng = np.random.default_rng(batch)
        self.slots = rng.permutation(np.arange(1, self.slot_count))[:batch].astype(np.int32)
        if batch > 1:
            self.slots[rng.choice(batch, max(1, batch // 5), replace=False)] = 0
        self.tokens, self.weights, self.pools = random_case(
            heads, batch, dtype, pool_dtype or dtype, layers, self.slots, jax.random.key(heads)
        )
        self.arguments = {**self.tokens, **self.weights, "slots": jnp.asarray(self.slots)}

    def run(self, backend, layer):
        return step(jax.tree.map(jnp.copy, self.pools), self.arguments, layer, backend, self.lower_bound)

    def oracle(self, row, layer, steps=1):
        """(outputs, tail, state) of `steps` times the row's token, in float64."""
        def float64(x):
            return np.asarray(x, np.float64)

        return oracle.layer(
            {name: np.repeat(float64(x[row:row + 1]), steps, 0) for name, x in self.tokens.items()},
            {name: float64(x) for name, x in self.weights.items()},
            *(float64(self.pools[name][layer, self.slots[row]]) for name in ("conv_pool", "state_pool")),
            self.lower_bound, EPS, self.dtype,
        )


def bits(x):
    return jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype == jnp.bfloat16 else jnp.uint32)


def relative(actual, expected):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return np.sqrt(((actual - expected) ** 2).sum() / (expected**2).sum())


def bound(name, value, limit):
    if not value <= limit:
        raise AssertionError(f"{name} is {value:.2e}, expected at most {limit:.0e}")
    return f"{name} {value:.1e}"


def same_bits(name, actual, expected):
    if not jnp.array_equal(bits(actual), bits(expected)):
        raise AssertionError(f"{name} differs")


def check_decode_values(case, layer=1):
    """Outputs, tails and states; unused rows, slot 0 and everybody else's slots keep their bits."""
    out, pools = case.run("mosaic_gpu", layer)
    xla_out, xla_pools = case.run("xla", layer)
    rows = np.flatnonzero(case.slots)
    taken = case.slots[rows]
    # In bfloat16 two orders of the convolution's sum may round to neighbours, which moves a channel of the state.
    out_limit, state_limit = (1e-6, 1e-6) if case.dtype == jnp.float32 else (4e-3, 1e-4)
    if out[case.slots == 0].any():
        raise AssertionError("an unused row has an output")
    new, xla_new = (x["state_pool"][layer, taken] for x in (pools, xla_pools))
    report = [
        bound("out-xla", relative(out[rows], xla_out[rows]), out_limit),
        bound("state-xla", float(jnp.linalg.norm(new - xla_new) / jnp.linalg.norm(xla_new)), state_limit),
    ]
    same_bits("a conv tail", pools["conv_pool"][layer, taken], xla_pools["conv_pool"][layer, taken])
    untouched = np.setdiff1d(np.arange(case.slot_count), taken)
    for name, before in case.pools.items():
        same_bits(f"{name} of an unused slot", pools[name][layer, untouched], before[layer, untouched])
        for other in set(range(case.layers)) - {layer}:
            same_bits(f"{name} of another layer", pools[name][other], before[other])

    errors = []
    for row in rows[:ORACLE_ROWS]:
        expected, tail, state = case.oracle(row, layer)
        errors.append((relative(out[row], expected[0]), relative(pools["state_pool"][layer, case.slots[row]], state)))
        if not np.array_equal(np.asarray(pools["conv_pool"][layer, case.slots[row]], np.float64), tail):
            raise AssertionError("a tail is not exact")
    worst = np.max(errors, axis=0)
    report += [bound("out", worst[0], out_limit), bound("state", worst[1], state_limit)]
    again, pools_again = case.run("mosaic_gpu", layer)
    same_bits("a second run", again, out)
    same_bits("a second run's states", pools_again["state_pool"][layer, taken], new)
    return report


def check_decode_in_place(case):
    """A loop over layers writes the donated buffers and copies no pool."""
    def run(pools, arguments):
        def one(layer, pools):
            return step(pools, arguments, layer, "mosaic_gpu", case.lower_bound)[1]

        return jax.lax.fori_loop(0, case.layers, one, pools)

    pools = jax.tree.map(jnp.copy, case.pools)
    places = {name: pool.unsafe_buffer_pointer() for name, pool in pools.items()}
    size = sum(pool.nbytes for pool in pools.values())
    program = jax.jit(run, donate_argnums=0).lower(pools, case.arguments).compile()
    memory = program.memory_analysis()
    if memory.alias_size_in_bytes < size or memory.temp_size_in_bytes > size / 100:
        raise AssertionError(f"pools of {size} bytes, but {memory}")
    result = program(pools, case.arguments)
    if {name: pool.unsafe_buffer_pointer() for name, pool in result.items()} != places:
        raise AssertionError("a pool moved")
    for layer in range(case.layers):
        _, expected = case.run("mosaic_gpu", layer)
        same_bits(f"layer {layer}", result["state_pool"][layer], expected["state_pool"][layer])
        same_bits(f"layer {layer}", result["conv_pool"][layer], expected["conv_pool"][layer])
    return [f"temporaries {memory.temp_size_in_bytes} bytes beside pools of {size / 1e6:.0f} MB"]


def check_decode_steps(case, steps=64):
    """Many steps in a row stay with the oracle."""
    row = int(np.flatnonzero(case.slots)[0])
    pools, outs = jax.tree.map(jnp.copy, case.pools), []
    for _ in range(steps):
        out, pools = step(pools, case.arguments, 0, "mosaic_gpu", case.lower_bound)
        outs.append(np.asarray(out[row], np.float64))
    expected, _, state = case.oracle(row, 0, steps)
    out_limit, state_limit = (1e-5, 1e-5) if case.dtype == jnp.float32 else (5e-3, 1e-4)
    return [
        bound("out", relative(np.array(outs), expected), out_limit),
        bound("state", relative(pools["state_pool"][0, case.slots[row]], state), state_limit),
    ]


def check_decode_refuses(case):
    """Two rows with one slot are found before the kernel, and a slot beyond the pool harms nobody in it."""
    arguments = {**case.arguments, **case.pools, "layer": jnp.int32(0), "lower_bound": -5.0, "norm_eps": EPS}
    slots = case.slots.copy()
    slots[:2] = 1
    try:
        validate(**arguments | {"slots": jnp.asarray(slots)})
    except ValueError as error:
        message = str(error)
    else:
        raise AssertionError("a slot in two rows was accepted")
    slots[:] = case.slot_count
    result = kda_decode(**arguments | {"slots": jnp.asarray(slots)}, backend="mosaic_gpu")
    for name, pool in case.pools.items():
        same_bits(name, getattr(result, name), pool)
    return [message]


def checks():
    """(name, function without arguments) of every check, in order."""
    bfloat16, float32 = jnp.bfloat16, jnp.float32
    for heads, batch, dtype, lower_bound, pool_dtype in (
        (12, 1, bfloat16, -5.0, None), (12, 7, bfloat16, None, float32), (12, 32, float32, -5.0, None),
        (12, 128, bfloat16, -5.0, None), (32, 5, float32, None, None), (96, 1, bfloat16, -5.0, None),
        (96, 16, float32, -5.0, None), (96, 128, bfloat16, -5.0, None),
    ):
        name = f"decode values: {heads} heads, batch {batch}, {jnp.dtype(dtype)}, bound {lower_bound}"
        yield name, lambda args=(heads, batch, dtype, lower_bound, pool_dtype): check_decode_values(Case(*args))
    yield "decode in place: 12 heads, batch 32", lambda: check_decode_in_place(Case(12, 32, layers=4))
    for dtype in (bfloat16, float32):
        yield f"decode steps: {jnp.dtype(dtype)}", lambda dtype=dtype: check_decode_steps(Case(12, 3, dtype))
    yield "decode refuses", lambda: check_decode_refuses(Case(12, 4))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run the checks whose names contain this")
    only = parser.parse_args().only
    print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}")
    failed = 0
    for name, check in checks():
        if only not in name:
            continue
        start = time.perf_counter()
        try:
            report = check()
        except AssertionError as error:
            failed += 1
            report = [f"FAILED: {error}"]
        print(f"{name}: {', '.join(report)} ({time.perf_counter() - start:.1f} s)", flush=True)
    print("all checks passed" if not failed else f"{failed} checks failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
