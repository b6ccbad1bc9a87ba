"""Run by test_checkpoint_loading with 8 CPU devices: loads a checkpoint on several meshes.

A process of several is played by gathering the boxes of some devices only.
"""

import functools
import math
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.checkpoint import Repository, load_params, loading, plan_loading, reading
from k3jax.checkpoint.boxes import extents
from k3jax.checkpoint.gathering import Gatherer
from k3jax.checkpoint.loading import local_boxes
from k3jax.checkpoint.reading import ShardReader, empty
from k3jax.config import K3Config
from k3jax.model import K3ForCausalLM
from k3jax.weights import placements
from sharding import Layout, make_mesh


def layout_of(experts: int, tensors: int) -> Layout:
    return Layout(make_mesh({"expert": experts, "tensor": tensors}))


def main(directory: str) -> None:
    config, repository = K3Config.from_file(f"{directory}/config.json"), Repository.open(directory)
    whole = load_params(config, repository, jnp.bfloat16)
    plan = plan_loading(K3ForCausalLM.weights(config), config, repository)

    for shape in ((2, 2), (4, 1), (1, 2)):
        shardings = list(placements(K3ForCausalLM.weights(config), layout_of(*shape)).values())
        for whole_stack_bytes in (2**26, 0) if shape == (2, 2) else (2**26,):
            loading.WHOLE_STACK_BYTES = whole_stack_bytes
            with ShardReader() as reader:
                params = loading.read_params(plan, shardings, jnp.bfloat16, reader)
                # Devices together hold everything, so everything is read, and once although some is replicated.
                assert reader.bytes_read == plan.total_bytes, (reader.bytes_read, plan.total_bytes)
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), params, whole)
            for planned, sharding in zip(plan.weights, shardings):
                array = functools.reduce(lambda tree, name: tree[name], planned.path, params)
                assert array.sharding.is_equivalent_to(sharding, array.ndim), planned.name
        name = "experts_down_packed" if "experts_down_packed" in params["moe"] else "experts_down"
        shard = params["moe"][name].addressable_shards[0].data.shape
        assert shard[1] == 16 // shape[0] and shard[3] == whole["moe"][name].shape[3] // shape[1]
        print(f"{shape[0]}x{shape[1]}: ok")

    reading.SCRATCH_BYTES = 3000
    check_subset(plan, config, layout_of(2, 2), whole, [[0], [3], [0, 1], [0, 3], [1, 3]])
    if config.expert_format == "dense":  # Two groups of scales do not divide by four.
        check_subset(plan, config, layout_of(1, 4), whole, [[2], [0, 2], [1, 2], [0, 1, 3]])
    print("subset: ok")


def check_subset(plan, config: K3Config, layout: Layout, whole, subsets: list[list[int]]) -> None:
    """A process with some of the mesh's devices reads their shards' bytes alone, and each once."""
    shardings = placements(K3ForCausalLM.weights(config), layout)
    for mine in subsets:
        devices = {layout.mesh.devices.flat[number] for number in mine}
        for planned in plan.weights:
            weight, tensors = planned.weight, [tensor for layer in planned.layers for tensor in layer]
            of_devices = local_boxes(weight.shape, shardings[planned.path])
            boxes = {box for device, box in of_devices.items() if device in devices}
            stacked_axes = len(weight.source.stack) + (weight.layers is not None)
            with ShardReader() as reader, ThreadPoolExecutor(2) as threads:
                parts = {box: empty(extents(box), weight.dtype or jnp.bfloat16) for box in boxes}
                Gatherer(reader, threads).fill(parts, tensors, weight.shape, stacked_axes)
            values = functools.reduce(lambda tree, name: tree[name], planned.path, whole)
            for box, part in parts.items():
                np.testing.assert_array_equal(part, np.asarray(values)[tuple(slice(*ends) for ends in box)])
            if planned.path[-1] != "A_log":  # Its padding is read by every process.
                share = sum(part.size for part in parts.values()) / math.prod(weight.shape)
                wanted = share * sum(tensor.nbytes for tensor in tensors)
                assert reader.bytes_read == wanted, (planned.name, mine, reader.bytes_read, wanted)


if __name__ == "__main__":
    main(sys.argv[1])
