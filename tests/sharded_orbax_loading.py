"""Run by test_orbax_checkpoint with 8 CPU devices: loads a converted checkpoint on several meshes."""

import asyncio
import functools
import sys

import numpy as np

import k3jax
from k3jax.checkpoint import loading
from k3jax.model import K3ForCausalLM
from k3jax.weights import placements


def check(converted: str, whole: k3jax.LanguageModel, experts: int, tensors: int) -> None:
    lm = k3jax.load(converted, mesh={"expert": experts, "tensor": tensors})
    for path, sharding in placements(K3ForCausalLM.weights(lm.config), lm.layout).items():
        array, expected = (functools.reduce(lambda tree, name: tree[name], path, one.params) for one in (lm, whole))
        assert array.dtype == expected.dtype and np.asarray(array).tobytes() == np.asarray(expected).tobytes(), path
        assert array.sharding.is_equivalent_to(sharding, array.ndim), path
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(expected)[shard.index])
    bank = next(lm.params["moe"][name] for name in ("experts_down_packed", "experts_down") if name in lm.params["moe"])
    shape = bank.addressable_shards[0].data.shape
    assert (shape[1], shape[3]) == (16 // experts, bank.shape[3] // tensors)


def main(source: str, converted: str) -> None:
    whole = k3jax.load(source)
    for shape in ((4, 1), (1, 2)):
        check(converted, whole, *shape)

    async def notebook() -> None:
        check(converted, whole, 1, 1)

    asyncio.run(notebook())  # a notebook's cells run in an event loop
    loading.WHOLE_STACK_BYTES = 0  # every stack is filled on its devices
    check(converted, whole, 2, 2)
    print("ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
