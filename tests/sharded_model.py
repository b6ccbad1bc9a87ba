"""Run by test_sharded_model with 8 CPU devices: a golden model on a mesh against the same model on one device.

Arguments: cases `model:strategy:data x expert x seq x tensor`, such as `k3-tiny:decode:1x2x2x2`. `model/6` means its
first 6 layers only, which compile in half the time; what the golden vectors say is then left out.

Each part of the mesh that has sequences of its own gets two: one of random tokens, and the golden prompt. Both are
prefilled in one step, the first goes on in a second step, then both are decoded greedily.
"""

import dataclasses
import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

import k3jax
from k3jax.model import K3ForCausalLM, ModelOutput
from k3jax.state import Batch, DecodeBatch, DecodeState, PrefillBatch
from k3jax.weights import leaves, placements
from sharding import MESH_AXES, ONE_DEVICE, STRATEGIES, Layout, make_mesh
from tests import golden
from tests.checkpoints import tiny_checkpoint

ROWS, PAGE, PAGES = 512, 16, 28
DECODED = 4
CAPTURED = ("router_ids", "router_weights", "mlp_output")
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a block.

    Attributes:
      tokens: [rows] int32.
      batch: of the block.
      used: how many of the rows are no padding.
    """

    tokens: np.ndarray
    batch: Batch
    used: int


def prefill_steps(name: str, block: int) -> list[Step]:
    """The two prefill steps of a block."""
    random, known = np.random.default_rng(block), vectors(name)["prompt_ids"]
    first, second = 320, 65 + 7 * block
    table = 1 + np.arange(2 * PAGES, dtype=np.int32).reshape(2, PAGES)

    def step(pieces, slots, context, snapshots) -> Step:
        tokens = np.full(ROWS, 511, np.int32)
        ends = np.cumsum([0, *map(len, pieces)])
        tokens[: ends[-1]] = np.concatenate(pieces)
        arrays = (ends, slots, context, table, snapshots)
        return Step(tokens, PrefillBatch(*(np.array(array, np.int32) for array in arrays)), ends[-1])

    prompt = random.integers(0, 512, first + second)
    return [
        step([prompt[:first], known], [1, 2], [0, 0], [64, first, first + len(known), -1]),
        step([prompt[first:], []], [1, 0], [first, len(known)], [-1, 64, second, -1]),
    ]


def decode_batch(name: str, block: int, number: int) -> DecodeBatch:
    """The batch of a block's decode step."""
    first, second = prefill_steps(name, block)
    lengths = [first.batch.cu_seqlens[1] + second.used, len(vectors(name)["prompt_ids"])]
    return DecodeBatch(np.array([1, 2], np.int32), np.array(lengths, np.int32) + number, first.batch.page_table)


def joined(parts, axis: int = 0):
    """Trees of arrays, one after another."""
    return jax.tree.map(lambda *arrays: np.concatenate([np.asarray(array) for array in arrays], axis), *parts)


def vectors(name: str) -> dict[str, np.ndarray]:
    """The golden ones, of the whole model."""
    return golden.vectors(name.split("/")[0], "decode")


@functools.cache
def model_of(name: str) -> tuple[k3jax.K3Config, dict]:
    """Configuration and parameters, by path, on one device."""
    name, _, layers = name.partition("/")
    lm = k3jax.load(tiny_checkpoint(name), dtype="float32")
    config = lm.config.first_layers(int(layers)) if layers else lm.config
    params = flatten_dict(lm.params)
    return config, {
        path: params[path] if weight.layers is None else params[path][: len(weight.layers)]
        for path, weight in leaves(K3ForCausalLM.weights(config))
    }


def new_state(name: str, blocks: int, layout: Layout) -> DecodeState:
    return DecodeState.create(
        model_of(name)[0], num_slots=3 * blocks, num_pages=(1 + 2 * PAGES) * blocks, dtype=jnp.float32,
        page_size=PAGE, layout=layout,
    )


@functools.cache
def steps_of(name: str, layout: Layout):
    """Compiled once for a layout: the prefill step, which captures, and the decode step."""
    model = K3ForCausalLM(model_of(name)[0], jnp.float32, layout)

    def prefill(params, tokens, state, batch) -> ModelOutput:
        output = model.apply(params, tokens, state, batch, capture=True)
        taken = {key: value for key, value in output.intermediates.items() if key in CAPTURED}
        return output._replace(intermediates=taken)

    return jax.jit(prefill, donate_argnums=2), jax.jit(model.apply, donate_argnums=2)


def run(name: str, layout: Layout, blocks: list[int]) -> list[ModelOutput]:
    """Outputs of all steps, in NumPy; the blocks' arrays one after another."""
    prefill, decode = steps_of(name, layout)
    config, params = model_of(name)
    params = unflatten_dict(jax.device_put(params, placements(K3ForCausalLM.weights(config), layout)))
    state, outputs, tokens = new_state(name, len(blocks), layout), [], None

    def keep(output: ModelOutput) -> DecodeState:
        outputs.append(jax.tree.map(np.asarray, output))
        return output.state

    for steps in zip(*(prefill_steps(name, block) for block in blocks)):
        batch = place(joined([step.batch for step in steps]), layout)
        state = keep(prefill({"params": params}, joined([step.tokens for step in steps]), state, batch))
    # The golden prompt ended in the first step, the other in the second.
    tokens = np.where(np.arange(2 * len(blocks)) % 2, *(out.logits.argmax(-1) for out in outputs)).astype(np.int32)
    for number in range(DECODED):
        batch = place(joined([decode_batch(name, block, number) for block in blocks]), layout)
        state = keep(decode({"params": params}, tokens, state, batch))
        tokens = outputs[-1].logits.argmax(-1).astype(np.int32)
    return outputs


def place(batch: Batch, layout: Layout) -> Batch:
    if layout.mesh is None:
        return batch
    return jax.tree.map(lambda array, axes: jax.device_put(array, layout.sharding(axes)), batch, batch.axes())


@functools.cache
def expected(name: str, block: int) -> list[ModelOutput]:
    """One block alone on one device."""
    return run(name, ONE_DEVICE, [block])


def close(what: str, actual, wanted, tolerance=TOLERANCE) -> float:
    """Raises unless equal within the tolerance; returns the largest difference."""
    assert actual.shape == wanted.shape, (what, actual.shape, wanted.shape)
    error = np.abs(actual.astype(np.float64) - wanted).max(initial=0)
    assert error <= tolerance, f"{what} differs by {error}"
    return error


def check(name: str, layout: Layout) -> float:
    """Compares a mesh with single devices and with the golden vectors; returns the largest difference."""
    blocks = list(range(layout.parts("sequences")))
    actual = run(name, layout, blocks)
    wanted = [expected(name, block) for block in blocks]
    used = [[step.used for step in prefill_steps(name, block)] for block in blocks]
    errors = []
    for number, output in enumerate(actual):
        logits = np.concatenate([outputs[number].logits for outputs in wanted])
        errors.append(close(f"logits of step {number}", output.logits, logits))
        np.testing.assert_array_equal(output.logits.argmax(-1), logits.argmax(-1))
        for field in dataclasses.fields(DecodeState):
            pool = joined([getattr(outputs[number].state, field.name) for outputs in wanted], 1)
            errors.append(close(f"{field.name} after step {number}", getattr(output.state, field.name), pool))
        if number < 2:
            snapshots = joined([outputs[number].snapshots for outputs in wanted], 1)
            errors.append(close("kda snapshots", output.snapshots.kda_state, snapshots.kda_state))
            errors.append(close("conv snapshots", output.snapshots.conv_tail, snapshots.conv_tail))
            for block in blocks:
                rows = slice(block * ROWS, block * ROWS + used[block][number])
                for key, value in wanted[block][number].intermediates.items():
                    mine, one = output.intermediates[key][:, rows], value[:, : used[block][number]]
                    if key == "router_ids":
                        np.testing.assert_array_equal(mine, one)
                    else:
                        errors.append(close(key, mine, one))
    if "/" not in name:
        check_golden(name, actual)
    return max(errors)


def check_golden(name: str, outputs: list[ModelOutput]) -> None:
    """The second sequence of every block is the golden prompt."""
    known = vectors(name)
    for number, output in enumerate([outputs[0], *outputs[2:]]):
        logits = output.logits[1::2]
        close("golden logits", logits, np.broadcast_to(known["step_logits_fp64"][number], logits.shape))
        assert (logits.argmax(-1) == known["tokens"][number]).all()


def main(cases: list[str]) -> None:
    for case in cases:
        start = time.process_time()
        name, strategy, sizes = case.split(":")
        mesh = make_mesh(dict(zip(MESH_AXES, map(int, sizes.split("x")))))
        error = check(name, Layout(mesh, STRATEGIES[strategy]))
        print(f"{case} ok, largest difference {error:.1e}, {time.process_time() - start:.0f} s of CPU", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
