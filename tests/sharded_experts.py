"""Run by test_sharded_model with 8 CPU devices: both ways of expert parallelism against a loop in double precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.expert_parallel import capacity, exchange_pays, routed_experts
from pallas_kernels.mxfp4 import MxFp4, decode
from sharding import DECODE, PREFILL, Layout, make_mesh
from tests.ops.moe_oracle import SITU, oracle

LAYERS, EXPERTS, WIDTH, INNER, TOP_K, LAYER = 2, 32, 64, 64, 2, 1
TOLERANCE = 1e-6


@functools.cache
def banks(kind: str):
    """(gate_up, down) for the op, and in float64."""
    random = np.random.default_rng(1)
    shapes = (LAYERS, EXPERTS, 2, INNER, WIDTH), (LAYERS, EXPERTS, WIDTH, INNER)
    if kind == "mxfp4":
        arrays = [
            MxFp4(
                jnp.asarray(random.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)),
                jnp.asarray(random.integers(122, 126, (*shape[:-1], shape[-1] // 32), dtype=np.uint8)),
            )
            for shape in shapes
        ]
        return arrays, [np.asarray(decode(*array, jnp.float32), np.float64)[LAYER] for array in arrays]
    arrays = [jnp.asarray(random.standard_normal(shape) * 0.3, kind) for shape in shapes]
    return arrays, [np.asarray(array, np.float64)[LAYER] for array in arrays]


def inputs(rows: int, most: int):
    """Rows with ids -1 .. most - 1, some of a row equal."""
    random = np.random.default_rng(rows)
    x = random.standard_normal((rows, WIDTH)).astype(np.float32)
    ids = random.integers(-1, most, (rows, TOP_K)).astype(np.int32)
    return x, ids, random.random((rows, TOP_K)).astype(np.float32)


def check(sizes: dict[str, int], strategy, kind: str, rows: str, exchange: bool, *, columns: str = "latent_embed",
          most: int = EXPERTS, num_rows: int = 512) -> str:
    """Compares with the oracle; returns the compiled program."""
    layout = Layout(make_mesh(sizes), strategy)
    (gate_up, down), (gate_up64, down64) = banks(kind)
    x, ids, weights = inputs(num_rows, most)
    run = jax.jit(functools.partial(
        routed_experts, activation=SITU, layout=layout, rows=rows, columns=columns, exchange=exchange
    ))
    arguments = (x, ids, weights, gate_up, down, jnp.int32(LAYER))
    out = np.asarray(run(*arguments))
    expected = oracle(x, ids, weights, gate_up64, down64)
    error = np.abs(out - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE, (sizes, strategy.name, kind, exchange, error)
    print(sizes, strategy.name, kind, rows, "exchange" if exchange else "share", f"{error:.1e}")
    return run.lower(*arguments).compile().as_text()


def main() -> None:
    eight = {"expert": 4, "seq": 2}
    assert "all-to-all" in check(eight, PREFILL, "float32", "tokens", True)
    assert "all-to-all" not in check(eight, PREFILL, "float32", "tokens", False)
    check({"data": 2, "expert": 2, "tensor": 2}, PREFILL, "mxfp4", "tokens", True)
    check({"data": 2, "expert": 2, "tensor": 2}, DECODE, "mxfp4", "tokens", False, columns="width")
    # Rows are split over `expert` alone, experts over `seq` too: every device of `seq` sends the same rows on.
    check(eight, DECODE, "float32", "sequences", True)
    check({"expert": 2, "seq": 2, "tensor": 2}, DECODE, "mxfp4", "sequences", False)
    # All rows want the first two experts, for which there is no room: nothing may be lost.
    layout = Layout(make_mesh(eight), PREFILL)
    assert capacity(512 // 8, TOP_K, layout) == 32 < 64 and exchange_pays(64, TOP_K, layout)
    check(eight, PREFILL, "float32", "tokens", True, most=2)


if __name__ == "__main__":
    main()
    print("ok")
